"""What happened or will happen, as plain data, and how names and sizes are put into words."""

from shardwise.report.checkpoint_report import CheckpointReport, RestoreReport
from shardwise.report.files_report import FilesReport
from shardwise.report.forecast import Forecast
from shardwise.report.load_report import LoadReport
from shardwise.report.names import collapse, shown_ranks
from shardwise.report.reopen_report import ReopenReport
from shardwise.report.save_report import SaveReport
from shardwise.report.shard_report import ShardReport
from shardwise.report.state_report import StateReport
from shardwise.report.trainer_report import TrainerReport
from shardwise.report.verify_report import VerifyReport

__all__ = [
    "CheckpointReport",
    "FilesReport",
    "Forecast",
    "LoadReport",
    "ReopenReport",
    "RestoreReport",
    "SaveReport",
    "ShardReport",
    "StateReport",
    "TrainerReport",
    "VerifyReport",
    "collapse",
    "shown_ranks",
]
