"""In which dtype what is trained is kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch

from shardwise.errors import ConfigError


@dataclass(frozen=True, slots=True)
class AsItIs:
    """Every parameter in the dtype it has."""

    def dtype_of(self, dtype: torch.dtype, requires_grad: bool) -> torch.dtype:  # noqa: ARG002, FBT001
        return dtype


@dataclass(frozen=True, slots=True)
class Upcast:
    """Trained parameters in a wider dtype, so that small steps are not lost; frozen ones as they are.

    8-bit floats and integers stay, and so does what is as wide already.
    """

    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if not self.dtype.is_floating_point or self.dtype.itemsize < 2:
            raise ConfigError(
                f"{self.dtype} is nothing to train in; Upcast takes a floating dtype of 16 bits or more"
            )

    def dtype_of(self, dtype: torch.dtype, requires_grad: bool) -> torch.dtype:  # noqa: FBT001
        if not requires_grad or not dtype.is_floating_point or dtype.itemsize < 2:
            return dtype
        return self.dtype if torch.promote_types(dtype, self.dtype) == self.dtype else dtype


TrainedDtype: TypeAlias = AsItIs | Upcast
