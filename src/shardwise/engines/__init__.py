"""Execution of the public functions.

Comparing calls between ranks, opening checkpoints, building models, loading and saving.
"""

from shardwise.errors import require_versions

require_versions()
