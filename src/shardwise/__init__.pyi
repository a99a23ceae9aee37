"""What users of shardwise see first, stated once: ``__init__.py`` reads this file, and type checkers do."""

from shardwise import integrations as integrations
from shardwise import options as options
from shardwise import report as report
from shardwise import storage as storage
from shardwise.bank.adapter_bank import AdapterBank as AdapterBank
from shardwise.checkpoints.checkpointer import Checkpointer as Checkpointer
from shardwise.checkpoints.folder import verify as verify
from shardwise.checkpoints.state import TrainState as TrainState
from shardwise.engines.estimating import plan as plan
from shardwise.engines.loading import load as load
from shardwise.engines.merging_adapter import merge_adapter as merge_adapter
from shardwise.engines.model_states import get_model_state_dict as get_model_state_dict
from shardwise.engines.model_states import set_model_state_dict as set_model_state_dict
from shardwise.engines.optimizer_states import get_optimizer_state_dict as get_optimizer_state_dict
from shardwise.engines.optimizer_states import set_optimizer_state_dict as set_optimizer_state_dict
from shardwise.engines.pretrained_loading import from_pretrained as from_pretrained
from shardwise.engines.saving import save as save
from shardwise.engines.saving import save_adapter as save_adapter
from shardwise.engines.sharding import shard as shard
from shardwise.engines.streaming import iter_hf_tensors as iter_hf_tensors
from shardwise.errors import CheckpointError as CheckpointError
from shardwise.errors import ConfigError as ConfigError
from shardwise.errors import FormatError as FormatError
from shardwise.errors import KeyMismatchError as KeyMismatchError
from shardwise.errors import RankLostError as RankLostError
from shardwise.errors import RankMismatchError as RankMismatchError
from shardwise.errors import ShardingError as ShardingError
from shardwise.errors import ShardwiseError as ShardwiseError
from shardwise.errors import StorageError as StorageError
from shardwise.interchange.accelerate_reading import load_accelerate_model as load_accelerate_model
from shardwise.interchange.accelerate_reading import load_accelerate_optimizer as load_accelerate_optimizer
from shardwise.interchange.accelerate_writing import save_accelerate_model as save_accelerate_model
from shardwise.interchange.accelerate_writing import save_accelerate_optimizer as save_accelerate_optimizer
from shardwise.interchange.merging_weights import merge_weights as merge_weights
from shardwise.interchange.trainer_restoring import load_trainer_checkpoint as load_trainer_checkpoint
from shardwise.models.wrap import Sharding as Sharding
from shardwise.tuning.tunings import ExistingLora as ExistingLora
from shardwise.tuning.tunings import Freeze as Freeze
from shardwise.tuning.tunings import Full as Full
from shardwise.tuning.tunings import Lora as Lora

__version__: str
__all__: list[str]
