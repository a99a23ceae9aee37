"""Option types of the public functions. Imported on first use."""

from shardwise.bank.rows import Request as Request
from shardwise.bank.sampling import Sample as Sample
from shardwise.core.consents import Ignore as Ignore
from shardwise.core.consents import Initialize as Initialize
from shardwise.files.urls import HubOptions as HubOptions
from shardwise.fsdp.policies import Classes as Classes
from shardwise.fsdp.policies import Matching as Matching
from shardwise.fsdp.policies import MinSize as MinSize
from shardwise.loading.prepare import LoadOptions as LoadOptions
from shardwise.models.four_bit.config import Fp4 as Fp4
from shardwise.models.four_bit.config import Nf4 as Nf4
from shardwise.models.selection import AdapterOnly as AdapterOnly
from shardwise.models.selection import MergedAdapter as MergedAdapter
from shardwise.ranks.timeouts import Timeouts as Timeouts
from shardwise.saving.prepare import SaveOptions as SaveOptions
from shardwise.saving.stream import StreamOptions as StreamOptions
from shardwise.state.state_values import StateOptions as StateOptions

__all__: list[str]
