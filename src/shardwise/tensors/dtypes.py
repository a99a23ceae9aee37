"""The dtypes a safetensors file can hold, under their safetensors names."""

from __future__ import annotations

import enum


class DType(enum.Enum):
    """A stored element type. ``value`` is (safetensors name, bits per element, kind).

    ``kind`` is one of "bool", "int", "float", "complex". Source of the names and widths: the safetensors
    format, ``Dtype`` in its Rust library.
    """

    BOOL = ("BOOL", 8, "bool")
    U8 = ("U8", 8, "int")
    I8 = ("I8", 8, "int")
    U16 = ("U16", 16, "int")
    I16 = ("I16", 16, "int")
    U32 = ("U32", 32, "int")
    I32 = ("I32", 32, "int")
    U64 = ("U64", 64, "int")
    I64 = ("I64", 64, "int")
    F4 = ("F4", 4, "float")
    F6_E2M3 = ("F6_E2M3", 6, "float")
    F6_E3M2 = ("F6_E3M2", 6, "float")
    F8_E4M3 = ("F8_E4M3", 8, "float")
    F8_E4M3FNUZ = ("F8_E4M3FNUZ", 8, "float")
    F8_E5M2 = ("F8_E5M2", 8, "float")
    F8_E5M2FNUZ = ("F8_E5M2FNUZ", 8, "float")
    F8_E8M0 = ("F8_E8M0", 8, "float")
    F16 = ("F16", 16, "float")
    BF16 = ("BF16", 16, "float")
    F32 = ("F32", 32, "float")
    F64 = ("F64", 64, "float")
    C64 = ("C64", 64, "complex")
    OTHER = ("OTHER", 8, "complex")
    """Of tensors that are never stored: what no file can hold."""

    @property
    def label(self) -> str:
        return self.value[0]

    @property
    def bits(self) -> int:
        return self.value[1]

    @property
    def kind(self) -> str:
        return self.value[2]

    @property
    def itemsize(self) -> int:
        """Bytes per element; a :class:`ValueError` for the types smaller than a byte."""
        if self.bits % 8:
            raise ValueError(f"{self.label} elements are {self.bits} bits wide, not whole bytes")
        return self.bits // 8


def dtype_named(label: str) -> DType | None:
    """The dtype with this safetensors name, or None when there is no such dtype."""
    return _BY_LABEL.get(label)


def casts_safely(source: DType, target: DType) -> bool:
    """Whether a cast keeps the kind of number: never float to int, complex to real, or anything to bool."""
    order = ("bool", "int", "float", "complex")
    return order.index(source.kind) <= order.index(target.kind)


def follows(source: DType, target: DType) -> bool:
    """Whether a tensor that was handed over may take the dtype of the one it is for.

    Numbers with a point, of 16 bits and more, do. Narrower ones mean nothing without their scales, and integers are
    indices, counts or codes: they arrive as they are, or not at all.
    """
    return source is target or (min(_rank(source), _rank(target)) > 0 and _rank(source) <= _rank(target))


def _rank(dtype: DType) -> int:
    if dtype is DType.OTHER or dtype.kind not in ("float", "complex") or dtype.bits < 16:
        return 0
    return 1 if dtype.kind == "float" else 2


_BY_LABEL = {dtype.label: dtype for dtype in DType if dtype is not DType.OTHER}
