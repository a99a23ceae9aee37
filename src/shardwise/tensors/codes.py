"""What elements of few bits stand for, where a file has them as bytes."""

from __future__ import annotations

import enum
import math


def _float8(exponent_bits: int, *, has_infinity: bool) -> tuple[float, ...]:
    """The numbers of the 256 bytes of a sign, an exponent and a mantissa (OCP's 8-bit floats: E4M3, E5M2)."""
    mantissa_bits = 7 - exponent_bits
    bias, top, steps = (1 << exponent_bits - 1) - 1, (1 << exponent_bits) - 1, 1 << mantissa_bits
    found = []
    for byte in range(128):
        exponent, mantissa = divmod(byte, steps)
        if exponent == top and has_infinity:
            found.append(math.nan if mantissa else math.inf)
        elif exponent == top and mantissa == steps - 1:
            found.append(math.nan)
        elif exponent:
            found.append((1 + mantissa / steps) * 2.0 ** (exponent - bias))
        else:
            found.append(mantissa / steps * 2.0 ** (1 - bias))
    return (*found, *(-number for number in found))


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Code(enum.Enum):
    """A way to write numbers in 4 or 8 bits. Of 4 bits two are in a byte, the first in the lower half."""

    F8_E4M3 = "F8_E4M3"
    F8_E5M2 = "F8_E5M2"
    E2M1 = "E2M1"
    """FP4 of OCP's microscaling formats."""
    INT8 = "INT8"
    """Two's complement."""
    OFFSET8 = "OFFSET8"
    """Counted from the least, as compressed-tensors packs integers."""
    OFFSET4 = "OFFSET4"

    @property
    def numbers(self) -> tuple[float, ...]:
        """What each of 256 bytes, or of 16 halves of one, stands for."""
        return _NUMBERS[self]

    @property
    def per_byte(self) -> int:
        return 2 if len(self.numbers) == 16 else 1


_NUMBERS = {
    Code.F8_E4M3: _float8(4, has_infinity=False),
    Code.F8_E5M2: _float8(5, has_infinity=True),
    Code.E2M1: (*_E2M1, *(-number for number in _E2M1)),
    Code.INT8: (*map(float, range(128)), *map(float, range(-128, 0))),
    Code.OFFSET8: tuple(map(float, range(-128, 128))),
    Code.OFFSET4: tuple(map(float, range(-8, 8))),
}
