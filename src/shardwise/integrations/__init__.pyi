from shardwise.integrations.accelerate_prepare import prepare as prepare
from shardwise.integrations.accelerate_switch import AccelerateSwitch as AccelerateSwitch
from shardwise.integrations.accelerate_switch import accelerate as accelerate
from shardwise.integrations.ram_efficient import (
    disable_fsdp_ram_efficient_loading as disable_fsdp_ram_efficient_loading,
)
from shardwise.integrations.ram_efficient import (
    enable_fsdp_ram_efficient_loading as enable_fsdp_ram_efficient_loading,
)
from shardwise.integrations.ram_efficient import fsdp_ram_efficient_loading as fsdp_ram_efficient_loading

__all__: list[str]
