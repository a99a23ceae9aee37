"""Selection and preparation of a model's trained parameters, on meta, before the model is sharded.

``modes`` contains the types with which users state their choice, and ``tune``, which applies it to a model on meta.
``peft_compat`` is the only file that uses unexported names of PEFT.
"""

from shardwise.errors import require_versions

require_versions()
