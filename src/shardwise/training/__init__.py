"""Fine-tuning in a plain loop, on data that is masked exactly."""

from shardwise.errors import require_versions

require_versions()
