"""Reports and estimates as plain data, and formatting of names and sizes."""

from shardwise.core.estimate_report import Estimate as Estimate
from shardwise.core.formatting import collapse as collapse
from shardwise.core.formatting import format_ranks as format_ranks
from shardwise.core.reports import LoadReport as LoadReport
from shardwise.core.reports import ShardReport as ShardReport
from shardwise.core.reports import StateReport as StateReport
from shardwise.core.save_reports import CheckpointReport as CheckpointReport
from shardwise.core.save_reports import FilesReport as FilesReport
from shardwise.core.save_reports import ReopenReport as ReopenReport
from shardwise.core.save_reports import RestoreReport as RestoreReport
from shardwise.core.save_reports import SaveReport as SaveReport
from shardwise.core.save_reports import TrainerReport as TrainerReport

__all__: list[str]
