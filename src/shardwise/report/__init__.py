"""What happened, as plain data, and how names are put into words."""

from shardwise.report.load_report import LoadReport
from shardwise.report.names import collapse
from shardwise.report.shard_report import ShardReport
from shardwise.report.verify_report import VerifyReport

__all__ = ["LoadReport", "ShardReport", "VerifyReport", "collapse"]
