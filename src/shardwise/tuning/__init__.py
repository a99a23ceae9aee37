"""Selection and preparation of a model's trained parameters, on meta, before the model is sharded."""

from shardwise.errors import require_versions

require_versions()
