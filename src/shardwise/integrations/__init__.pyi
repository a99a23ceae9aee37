"""Other libraries' ways of training and serving. Stated here, loaded when used."""

from shardwise.integrations.trainer import ShardwiseTrainer as ShardwiseTrainer
from shardwise.integrations.trainer_doors import for_trainer as for_trainer
from shardwise.integrations.trainer_doors import undo_for_trainer as undo_for_trainer

__all__: list[str]
