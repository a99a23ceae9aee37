"""Numbers of elements that are stored in few bits, as float32, into memory that is given.

[Note: Decoding] Floats of 8 bits become halves by a shift: both have the sign first, and E5M2 is the upper byte
of a half; E4M3, shifted to where a half has exponent and mantissa, is 2 ** -8 of its number, also where it is
subnormal. Halves become float32 by an instruction of the processor. That is several times quicker than a look-up,
or than torch's casts of such floats. Two numbers of 4 bits at a time are looked up by the byte that they share.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.tensors import Code

_E4M3_UNIT = 256.0
_E4M3_NAN = 0x7F
"""But for the sign."""

_HALF_BUT_ONE_BIT = 0xBF80 - 0x10000
"""Sign, four bits of the exponent and three of the mantissa; the sign has been spread to the bit between."""

BYTES_AN_ELEMENT = 4
"""Of memory that decoding takes beside the numbers: a half, and two bytes to find out what is not a number."""


class Decoder:
    """Decodes up to ``most`` elements at once, in memory of its own.

    Attributes:
        unit: numbers come out divided by this, which is a power of 2.

    Args:
        code: what bytes stand for.
        like: any tensor of where the numbers are to be.
        most: elements.
    """

    def __init__(self, code: Code, like: Any, most: int) -> None:
        self._code = code
        none = like.new_empty(0)
        self._signed = none.char().dtype
        self.unit = _E4M3_UNIT if code is Code.F8_E4M3 else 1.0
        if code in (Code.F8_E4M3, Code.F8_E5M2):
            self._bits = none.short().new_empty(most)
            self._halves = self._bits.view(none.half().dtype)

    def decode(self, stored: Any, numbers: Any) -> None:
        """``stored`` are contiguous bytes, ``numbers`` contiguous float32, as many as these stand for."""
        stored, numbers = stored.view(-1), numbers.view(-1)
        match self._code:
            case Code.F8_E4M3:
                bits = self._bits[: stored.numel()]
                bits.copy_(stored.view(self._signed)).mul_(1 << 7).bitwise_and_(_HALF_BUT_ONE_BIT)
                numbers.copy_(self._halves[: stored.numel()])
                without_sign = stored + stored  # modulo 256
                if int(without_sign.max()) == 2 * _E4M3_NAN:
                    numbers.masked_fill_(without_sign == 2 * _E4M3_NAN, float("nan"))
            case Code.F8_E5M2:
                self._bits[: stored.numel()].copy_(stored.view(self._signed)).mul_(1 << 8)
                numbers.copy_(self._halves[: stored.numel()])
            case Code.INT8:
                numbers.copy_(stored.view(self._signed))
            case Code.OFFSET8:
                numbers.copy_(stored).sub_(128)
            case Code.E2M1 | Code.OFFSET4:
                pairs = numbers.numpy().view(np.uint64)
                # Within the table whatever is asked for, so that "clip" changes nothing but the time.
                np.take(_pairs_of(self._code), stored.numpy(), out=pairs, mode="clip")


@lru_cache
def _pairs_of(code: Code) -> NDArray[np.uint64]:
    """Two float32 in a row, by the byte that stands for them; the first is its lower half."""
    numbers = np.array(code.numbers, dtype=np.float32)
    count = len(numbers)
    first, second = np.tile(numbers, count), np.repeat(numbers, count)
    return np.stack([first, second], axis=1).view(np.uint64).reshape(-1)
