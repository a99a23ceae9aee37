"""Files of other programs.

Reading and writing those of accelerate and the Trainer, and merging sharded checkpoints.
"""

from shardwise.errors import require_versions

require_versions()
