"""How each verb does what it does, as values. Stated here, loaded when used."""

from shardwise.engines.load_plan import LoadOptions as LoadOptions
from shardwise.engines.save_plan import SaveOptions as SaveOptions
from shardwise.engines.streaming import StreamOptions as StreamOptions
from shardwise.execution.state_values import StateOptions as StateOptions
from shardwise.execution.timeouts import Timeouts as Timeouts
from shardwise.models.build import ResizeVocab as ResizeVocab
from shardwise.models.policies import Classes as Classes
from shardwise.models.policies import Matching as Matching
from shardwise.models.policies import MinSize as MinSize
from shardwise.models.quantization import Fp4 as Fp4
from shardwise.models.quantization import Nf4 as Nf4
from shardwise.models.selection import AdapterOnly as AdapterOnly
from shardwise.models.selection import MergedAdapter as MergedAdapter
from shardwise.planning.consents import Ignore as Ignore
from shardwise.planning.consents import Initialize as Initialize
from shardwise.storage.names import HubOptions as HubOptions

__all__: list[str]
