"""Hugging Face models with PyTorch FSDP2, each rank reading and writing only its own bytes.

Public names: the main functions, tuning modes, and errors. Option types are in ``shardwise.options``, reports in
``shardwise.report``, readers and writers in ``shardwise.storage``.
"""

from shardwise.core.lazy_exports import lazy_exports

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_exports(
    __name__, __file__, elsewhere=("shardwise.options", "shardwise.report")
)
