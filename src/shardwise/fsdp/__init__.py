"""FSDP2: wrapping, the tensors and boxes of a sharded model, gradients, optimizers, and torch's private names."""

from shardwise.core.errors import require_versions

require_versions()
