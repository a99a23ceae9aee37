"""What one rank holds of a model, as data. No torch."""

from shardwise.layout.model_layout import Kind, LocalBox, ModelLayout, Origin, TensorLayout

__all__ = ["Kind", "LocalBox", "ModelLayout", "Origin", "TensorLayout"]
