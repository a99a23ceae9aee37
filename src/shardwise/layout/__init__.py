"""What one rank, or every rank, holds of a model, as data. No torch."""

from shardwise.layout.model_layout import LocalBox, ModelLayout, Origin, TensorKind, TensorLayout, place_of
from shardwise.layout.passes import PassPart, Stretch
from shardwise.layout.world_layout import GroupLayout, MeshShape, Spread, WorldLayout

__all__ = [
    "GroupLayout",
    "LocalBox",
    "MeshShape",
    "ModelLayout",
    "Origin",
    "PassPart",
    "Spread",
    "Stretch",
    "TensorKind",
    "TensorLayout",
    "WorldLayout",
    "place_of",
]
