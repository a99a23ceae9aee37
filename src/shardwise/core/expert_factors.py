"""The matrices of a LoRA on a parameter of stacked experts, in the layouts of several versions of PEFT.

[Note: Swapped factors] A parameter of stacked experts is (experts, out, in), or (experts, in, out) in modules
with ``is_transposed``. Since PEFT 0.19.1, ``lora_A`` is (experts * r, in), expert by expert, and ``lora_B`` is
(out, r * experts), rank by rank. PEFT 0.17 and 0.18 took the second dimension of the parameter for the input in
either case, and 0.19.0 the wrong one in both. PEFT reads their files as if it had written them. Configs have
``peft_version`` since 0.18.0, and keep it when a later version saves them again. So the shapes decide, and the
version only if all parameters of an adapter are square.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from shardwise.core.errors import ConfigError
from shardwise.core.expression import Expression, Shape, permute, reshape

CURRENT_LAYOUT_VERSION: Final = "0.19.1"
"""The first version of PEFT with the current layout of the factors."""

_Shapes: TypeAlias = tuple[Shape, Shape]


@dataclass(frozen=True, slots=True)
class ExpertFactors:
    """Shapes of (lora_A, lora_B) of a parameter of stacked experts.

    Attributes:
        stored: the shapes in a file.
        expected: the shapes in the current layout.
        experts: number of experts.
        is_transposed: whether the parameter is (experts, in, out).
    """

    stored: _Shapes
    expected: _Shapes
    experts: int
    is_transposed: bool

    @property
    def fits(self) -> bool:
        """Whether the stored shapes are those of the current layout."""
        return self.stored == self.expected

    @property
    def fits_swapped(self) -> bool:
        """Whether the stored shapes are those of the layout with input and output swapped."""
        (stacked, size_in), (size_out, _) = self.expected
        return self.stored == ((stacked, size_out), (size_in, stacked))

    def swap(self, lora_A: Expression, lora_B: Expression) -> tuple[Expression, Expression]:
        """Return stored (lora_A, lora_B), whose input and output are swapped, in the current layout.

        With 4 experts, rank 2, input 16 and output 24, ``lora_A`` is (8, 24) and becomes lora_B (24, 8), and
        ``lora_B`` is (16, 8) and becomes lora_A (8, 16).
        """
        (stacked, size_in), (size_out, _) = self.expected  # stacked = experts * rank
        rank = stacked // self.experts
        # lora_B is stored rank by rank, and becomes expert by expert: (in, r, experts) to (experts, r, in).
        input_factor = permute(reshape(lora_B, (size_in, rank, self.experts)), (2, 1, 0))
        # lora_A is stored expert by expert, and becomes rank by rank: (experts, r, out) to (out, r, experts).
        output_factor = permute(reshape(lora_A, (self.experts, rank, size_out)), (2, 1, 0))
        return reshape(input_factor, (stacked, size_in)), reshape(output_factor, (size_out, stacked))


def are_swapped(factors: Sequence[ExpertFactors], peft_version: str | None, what: str) -> bool:
    """Return whether the matrices of an adapter have input and output swapped. See [Note: Swapped factors].

    ``peft_version`` is that of the adapter's config, None if it has none. ``what`` names the adapter in the error.

    Raises:
        ConfigError: neither the shapes nor the version tell.
    """
    # Parameters that are not square fit one layout only.
    by_shape = {item.fits_swapped for item in factors if item.fits != item.fits_swapped}
    if len(by_shape) == 1:
        return by_shape.pop()
    # Here every parameter fits both layouts or none, or parameters contradict each other.
    if not any(item.fits_swapped for item in factors):
        return False
    # Configs have their version since PEFT 0.18.0, so those without one are of 0.17.
    numbers = re.match(r"(\d{1,9})\.(\d{1,9})(?:\.(\d{1,9}))?", peft_version or "0.17")
    version = tuple(int(number or 0) for number in numbers.groups()) if numbers else None
    is_transposed = any(item.is_transposed for item in factors)
    if version is None or (is_transposed and version == (0, 19, 0)):
        raise ConfigError(
            f"{what}: its matrices for stacked experts are square, and PEFT {peft_version!r}, which saved it, does "
            "not tell which dimension is the input. Merge it with the versions of PEFT and transformers that "
            "trained it"
        )
    return version < (0, 19, 1) and not is_transposed
