"""Integrations of sharded models with other libraries. Imported on first use."""

from shardwise.integrations.accelerate_patches import AccelerateSwitch as AccelerateSwitch
from shardwise.integrations.accelerate_patches import accelerate as accelerate
from shardwise.integrations.trainer import ShardwiseTrainer as ShardwiseTrainer
from shardwise.integrations.trainer_marks import for_trainer as for_trainer

__all__: list[str]
