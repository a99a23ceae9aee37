"""Selection of trained parameters, decided on meta before the model is sharded.

``modes`` has the types of tunings, ``tune`` applies them to a model on meta, and ``peft_compat`` has all uses of
PEFT's unexported names.
"""

from shardwise.errors import require_versions

require_versions()
