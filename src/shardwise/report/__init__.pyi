"""What happened or will happen, as plain data, and how names and sizes are put into words."""

from shardwise.report.estimate import Estimate as Estimate
from shardwise.report.names import collapse as collapse
from shardwise.report.names import format_ranks as format_ranks
from shardwise.report.reports import LoadReport as LoadReport
from shardwise.report.reports import ShardReport as ShardReport
from shardwise.report.reports import StateReport as StateReport
from shardwise.report.save_reports import CheckpointReport as CheckpointReport
from shardwise.report.save_reports import FilesReport as FilesReport
from shardwise.report.save_reports import ReopenReport as ReopenReport
from shardwise.report.save_reports import RestoreReport as RestoreReport
from shardwise.report.save_reports import SaveReport as SaveReport
from shardwise.report.save_reports import TrainerReport as TrainerReport

__all__: list[str]
