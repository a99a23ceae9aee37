"""Models that are sharded here, in other libraries' ways of training and serving. Loaded when used."""

from shardwise.integrations.accelerate_patches import AccelerateSwitch as AccelerateSwitch
from shardwise.integrations.accelerate_patches import accelerate as accelerate
from shardwise.integrations.trainer import ShardwiseTrainer as ShardwiseTrainer
from shardwise.integrations.trainer_marks import for_trainer as for_trainer

__all__: list[str]
