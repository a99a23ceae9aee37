"""Selection of trained parameters, decided on meta before the model is sharded.

``modes`` are the types that say what is wanted, ``tune`` carries them out on a model on meta, and
``peft_compat`` is the one file that knows PEFT's unexported names.
"""

from shardwise.errors import require_versions

require_versions()
