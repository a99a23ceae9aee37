"""Files of other programs: accelerate's, the Trainer's, checkpoints in parts; written, read, made the hub's."""

from shardwise.errors import require_versions

require_versions()
