"""Numbers that notice what is asked of them.

[Note: What a template has asked of a number] Many templates first go through all messages to find a place among
them, such as that of the last question, and then ask of each message whether it is behind that place. Whatever is
written after such questions is the same for every number that answers them alike. So a number is handed over in an
object that notes, of each comparison, between which bounds the answer would have been the same. Anything else that
is done with it takes the number itself, and leaves no other between the bounds.
"""

from __future__ import annotations

from typing import Any, Final

_FURTHEST: Final = 1 << 62


class WatchedNumber:
    """An integer. It is no ``int``: of a subclass of that, much is read without asking it.

    Attributes:
        least, most: whatever is between has been answered alike, both included.
    """

    __slots__ = ("_value", "least", "most")

    def __init__(self, value: int) -> None:
        self._value = value
        self.least = -_FURTHEST
        self.most = _FURTHEST

    @property
    def value(self) -> int:
        """The number itself, after which nothing else is alike."""
        self.least = self.most = self._value
        return self._value

    def _is_above(self, other: int) -> bool:
        if self._value > other:
            self.least = max(self.least, other + 1)
            return True
        self.most = min(self.most, other)
        return False

    def __gt__(self, other: Any) -> bool:
        return self._is_above(other) if type(other) is int else self.value > plain(other)

    def __ge__(self, other: Any) -> bool:
        return self._is_above(other - 1) if type(other) is int else self.value >= plain(other)

    def __lt__(self, other: Any) -> bool:
        return not self._is_above(other - 1) if type(other) is int else self.value < plain(other)

    def __le__(self, other: Any) -> bool:
        return not self._is_above(other) if type(other) is int else self.value <= plain(other)

    def __eq__(self, other: object) -> bool:
        if type(other) is not int:
            return bool(self.value == plain(other))
        return not self._is_above(other) and self._is_above(other - 1)

    def __hash__(self) -> int:
        return hash(self.value)

    def __bool__(self) -> bool:
        return bool(self.value)

    def __index__(self) -> int:
        return self.value

    __int__ = __index__

    def __float__(self) -> float:
        return float(self.value)

    def __str__(self) -> str:
        return str(self.value)

    __repr__ = __str__

    def __format__(self, spec: str) -> str:
        return format(self.value, spec)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python looks for to know what this is
            raise AttributeError(name)
        return getattr(self.value, name)

    def __neg__(self) -> int:
        return -self.value

    def __pos__(self) -> int:
        return self.value

    def __abs__(self) -> int:
        return abs(self.value)

    def __add__(self, other: Any) -> Any:
        return self.value + plain(other)

    def __radd__(self, other: Any) -> Any:
        return other + self.value

    def __sub__(self, other: Any) -> Any:
        return self.value - plain(other)

    def __rsub__(self, other: Any) -> Any:
        return other - self.value

    def __mul__(self, other: Any) -> Any:
        return self.value * plain(other)

    def __rmul__(self, other: Any) -> Any:
        return other * self.value

    def __truediv__(self, other: Any) -> Any:
        return self.value / plain(other)

    def __rtruediv__(self, other: Any) -> Any:
        return other / self.value

    def __floordiv__(self, other: Any) -> Any:
        return self.value // plain(other)

    def __rfloordiv__(self, other: Any) -> Any:
        return other // self.value

    def __mod__(self, other: Any) -> Any:
        return self.value % plain(other)

    def __rmod__(self, other: Any) -> Any:
        return other % self.value

    def __pow__(self, other: Any) -> Any:
        return self.value ** plain(other)

    def __rpow__(self, other: Any) -> Any:
        return other**self.value


def plain(value: Any) -> Any:
    """A value as it is, with the number itself in place of one that is watched."""
    return value.value if isinstance(value, WatchedNumber) else value
