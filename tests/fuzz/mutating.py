"""Small changes to sound files, from random numbers: what a fuzzer does, without looking where they lead."""

import random
import struct
from collections.abc import Sequence

TOKENS = (
    b"{", b"}", b"[", b"]", b'"', b",", b":", b"null", b"true", b"-1", b"1e999", b"\\ud800", b"NaN", b"..", b"../",
    b"/", b"\x00", b'"shape"', b'"dtype"', b'"data_offsets"', b'"__metadata__"', b'"weight_map"', b'"F32"', b'"F4"',
    b"PK\3\4", b"PK\1\2", b"PK\5\6", b"PK\6\6", b"PK\6\7", b"data.pkl", b"data/0", b"byteorder", b".distcp",
    b"\x80\x02", b"\x80\x04", b"}", b")", b"(", b"t", b"R", b"b", b"Q", b"q\x00", b"h\x00", b"u", b"s", b"0", b".",
    b"K\xff", b"J\xff\xff\xff\x7f", b"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f", b"X\xff\xff\xff\x7f", b"[[[[",
    b"\x85", b"\x86", b"cos\nsystem\n", b"ctorch\nSize\n", b"ctorch._utils\n_rebuild_tensor_v2\n",
)  # fmt: skip
"""What files are made of."""

NUMBERS = (0, 1, 2, 7, 8, 16, 127, 128, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**32 - 1, 2**48, 2**63 - 1, 2**64 - 1)


def mutate(content: bytes, seeds: Sequence[bytes], draw: random.Random) -> bytes:
    """The content after one to four changes."""
    changed = bytearray(content)
    for _ in range(draw.choice((1, 1, 1, 2, 2, 3, 4))):
        place = draw.randrange(len(changed) + 1)
        length = min(draw.choice((1, 1, 2, 4, 8, 32, 200)), len(changed) - place)
        match draw.randrange(10):
            case 0 if length:
                changed[place] ^= 1 << draw.randrange(8)
            case 1 if length:
                changed[place] = draw.randrange(256)
            case 2:
                del changed[place : place + length]
            case 3:
                changed[place:place] = draw.choice(TOKENS)
            case 4:
                token = draw.choice(TOKENS)
                changed[place : place + len(token)] = token
            case 5:
                number = struct.pack("<Q", draw.choice(NUMBERS))[: draw.choice((1, 2, 4, 8))]
                changed[place : place + len(number)] = number
            case 6:
                changed[place : place + length] = changed[place : place + length] * 2
            case 7:
                other = draw.choice(seeds)
                start = draw.randrange(len(other) + 1)
                changed[place : place + length] = other[start : start + length]
            case 8:
                digits = [i for i, code in enumerate(changed) if 48 <= code <= 57]
                if digits:
                    changed[draw.choice(digits)] = draw.choice(b"0123456789-.e")
            case _:
                del changed[place:]
    return bytes(changed)
