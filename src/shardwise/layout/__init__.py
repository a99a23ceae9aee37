"""What one rank, or every rank, holds of a model, as data. No torch."""

from shardwise.layout.model_layout import Kind, LocalBox, ModelLayout, Origin, TensorLayout
from shardwise.layout.world_layout import GroupLayout, MeshShape, Spread, WorldLayout

__all__ = [
    "GroupLayout",
    "Kind",
    "LocalBox",
    "MeshShape",
    "ModelLayout",
    "Origin",
    "Spread",
    "TensorLayout",
    "WorldLayout",
]
