"""What happened or will happen, as plain data, and how names and sizes are put into words."""

from shardwise.report.checkpoint_report import CheckpointReport as CheckpointReport
from shardwise.report.checkpoint_report import RestoreReport as RestoreReport
from shardwise.report.checkpoint_report import TrainerReport as TrainerReport
from shardwise.report.forecast import Forecast as Forecast
from shardwise.report.load_report import LoadReport as LoadReport
from shardwise.report.names import collapse as collapse
from shardwise.report.names import shown_ranks as shown_ranks
from shardwise.report.save_report import FilesReport as FilesReport
from shardwise.report.save_report import SaveReport as SaveReport
from shardwise.report.state_report import ShardReport as ShardReport
from shardwise.report.state_report import StateReport as StateReport
from shardwise.report.verify_report import ReopenReport as ReopenReport
from shardwise.report.verify_report import VerifyReport as VerifyReport

__all__: list[str]
