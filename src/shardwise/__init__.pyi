"""The public names: ``__init__.py`` reads this file, and type checkers do."""

from shardwise import integrations as integrations
from shardwise import options as options
from shardwise import report as report
from shardwise import storage as storage
from shardwise.bank.adapter_bank import AdapterBank as AdapterBank
from shardwise.checkpoints.checkpointer import Checkpointer as Checkpointer
from shardwise.checkpoints.step_folders import verify as verify
from shardwise.checkpoints.train_state import TrainState as TrainState
from shardwise.core.errors import CheckpointError as CheckpointError
from shardwise.core.errors import ConfigError as ConfigError
from shardwise.core.errors import FormatError as FormatError
from shardwise.core.errors import KeyMismatchError as KeyMismatchError
from shardwise.core.errors import RankLostError as RankLostError
from shardwise.core.errors import RankMismatchError as RankMismatchError
from shardwise.core.errors import ShardingError as ShardingError
from shardwise.core.errors import ShardwiseError as ShardwiseError
from shardwise.core.errors import StorageError as StorageError
from shardwise.core.errors import TrainingError as TrainingError
from shardwise.fsdp.wrap import Sharding as Sharding
from shardwise.integrations.accelerate_reading import load_accelerate_model as load_accelerate_model
from shardwise.integrations.accelerate_reading import load_accelerate_optimizer as load_accelerate_optimizer
from shardwise.integrations.accelerate_writing import save_accelerate_model as save_accelerate_model
from shardwise.integrations.accelerate_writing import save_accelerate_optimizer as save_accelerate_optimizer
from shardwise.integrations.trainer_restoring import load_trainer_checkpoint as load_trainer_checkpoint
from shardwise.loading.estimate import plan as plan
from shardwise.loading.from_pretrained import from_pretrained as from_pretrained
from shardwise.loading.load import load as load
from shardwise.models.tunings import ExistingLora as ExistingLora
from shardwise.models.tunings import Freeze as Freeze
from shardwise.models.tunings import Full as Full
from shardwise.models.tunings import Lora as Lora
from shardwise.saving.merge_adapter import merge_adapter as merge_adapter
from shardwise.saving.merge_weights import merge_weights as merge_weights
from shardwise.saving.save import save as save
from shardwise.saving.save import save_adapter as save_adapter
from shardwise.saving.stream import iter_hf_tensors as iter_hf_tensors
from shardwise.state.model_states import get_model_state_dict as get_model_state_dict
from shardwise.state.model_states import set_model_state_dict as set_model_state_dict
from shardwise.state.optimizer_states import get_optimizer_state_dict as get_optimizer_state_dict
from shardwise.state.optimizer_states import set_optimizer_state_dict as set_optimizer_state_dict
from shardwise.state.shard import shard as shard

__version__: str
__all__: list[str]
