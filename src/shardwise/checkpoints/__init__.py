"""Training state that survives: checkpoints in the format of ``torch.distributed.checkpoint``, on any ranks."""

from shardwise.core.errors import require_versions

require_versions()
