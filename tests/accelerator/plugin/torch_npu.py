"""The module that accelerate and transformers look for before they use ``torch.npu``."""

__version__ = "1"

npu_fusion_attention = None
"""Imported by transformers; there is no such kernel."""
