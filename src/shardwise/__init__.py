"""Hugging Face models under PyTorch FSDP2, each rank touching only its own bytes.

What every user meets is here: the verbs, what is trained, errors. How a verb does what it does is in
``shardwise.options``, what it returns in ``shardwise.report``, where bytes come from and go to in
``shardwise.storage``.
"""

from shardwise._face import face_of

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = face_of(__name__, __file__, elsewhere=("shardwise.options", "shardwise.report"))
