"""A rank's shares of a model with a LoRA merged in, computed as they are given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from shardwise.execution.assemble import Giver
from shardwise.models.lora import Factors
from shardwise.models.view import Held
from shardwise.planning.giving import Boxes


class MergingGiver(Giver):
    """Shares of the base's tensors, with what the adapter adds to them.

    Args:
        held: by name in the base.
        shares: by name in the base.
        rank: this rank.
        factors: by name in the base, of the weights that the adapter changes.
        matrices: all matrices of the adapter, whole, by FQN.

    Memory: beside ``matrices`` twice the largest share, and that in float32 where the adapter is.
    """

    def __init__(
        self,
        held: Mapping[str, Held],
        shares: Mapping[str, Sequence[Boxes]],
        rank: int,
        factors: Mapping[str, Factors],
        matrices: Mapping[str, torch.Tensor],
    ) -> None:
        super().__init__(held, shares, rank)
        self._factors = factors
        self._matrices = matrices
        self._last: tuple[tuple[str, int], torch.Tensor] | None = None

    def share(self, name: str, number: int) -> torch.Tensor:
        """As of :class:`Giver`. The last one that was computed is kept: blocks ask for parts of it in turn."""
        values = super().share(name, number)
        if name not in self._factors:
            return values
        if self._last is None or self._last[0] != (name, number):
            self._last = None
            self._last = (name, number), self._merged(name, number, values)
        return self._last[1]

    def _merged(self, name: str, number: int, values: torch.Tensor) -> torch.Tensor:
        box, factors = self.box(name, number), self._factors[name]
        lora_A, lora_B = self._matrices[factors.lora_A], self._matrices[factors.lora_B]
        rows, columns = (slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))
        delta = factors.delta(lora_A[:, columns], lora_B[rows])
        return values.add(delta.to(values.device)).to(values.dtype)
