"""Messages, and numbers, that notice what a template looks at and asks, and when.

[Note: What a template has not seen] A template is a program. As long as it has not looked at message k, nor at
whether there is one, it cannot know that there is: what it has written up to then is what it would have written of
the first k messages alone. So the messages are handed over in a list that notes, for each place, how much had been
written when something about that place was first looked at: the message itself, the end of the list, or its length.
One pass over a chat of any length then shows, of each of its beginnings, how much of the whole is written alike
when nothing follows. What is held back in a macro or a block counts as not written yet, so that the note can only
say too little.

[Note: What a template has asked of a number] Many templates first go through all messages to find a place among
them, such as that of the last question, and then ask of each message whether it is behind that place. Whatever is
written after such questions is the same for every number that answers them alike. So a number is handed over in an
object that notes, of each comparison, between which bounds the answer would have been the same. Anything else that
is done with it takes the number itself, and leaves no other between the bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, overload

Message = Mapping[str, Any]


class Observer:
    """How much had been written when each place of a list was first looked at.

    Args:
        count: places of the list; the one behind them is its end.
        written: how much has been written by now.
    """

    def __init__(self, count: int, written: Callable[[], int]) -> None:
        self.first: list[int | None] = [None] * (count + 1)
        """For each place; None while nobody has looked."""
        self.loop_end: int | None = None
        """How much had been written when a loop last came to the end."""
        self._written = written
        self._seen = 0

    def see(self, place: int) -> None:
        """Somebody looks at a place, and so learns that all before it are there."""
        if place >= self._seen:
            stop = min(place + 1, len(self.first))
            self.first[self._seen : stop] = [self._written()] * (stop - self._seen)
            self._seen = stop

    def see_all(self) -> None:
        self.see(len(self.first) - 1)

    def end_loop(self) -> None:
        self.see_all()
        self.loop_end = self._written()


class WatchedMessages(Sequence[Message]):
    """Messages that tell an observer what is looked at. What is not known to look at less looks at everything."""

    def __init__(self, messages: Sequence[Message], observer: Observer, start: int = 0) -> None:
        self._messages = messages
        self._observer = observer
        self._start = start

    def __iter__(self) -> Iterator[Message]:
        return _WatchedIterator(self._messages, self._observer, self._start)

    @overload
    def __getitem__(self, index: int) -> Message: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Message]: ...

    def __getitem__(self, index: int | slice) -> Message | Sequence[Message]:
        if isinstance(index, int) and index >= 0:
            self._observer.see(self._start + index)
            return self._messages[self._start + index]
        if isinstance(index, slice) and index.stop is None and index.step in (None, 1) and (index.start or 0) >= 0:
            return WatchedMessages(self._messages, self._observer, self._start + (index.start or 0))
        return self._all()[index]

    def __len__(self) -> int:
        return len(self._all())

    def __bool__(self) -> bool:
        self._observer.see(self._start)
        return self._start < len(self._messages)

    def __eq__(self, other: object) -> bool:
        return self._all() == other

    def __hash__(self) -> int:
        raise TypeError("unhashable type: 'list'")

    def __add__(self, other: Any) -> Any:
        return self._all() + other

    def __radd__(self, other: Any) -> Any:
        return other + self._all()

    def __repr__(self) -> str:
        return repr(self._all())

    def _all(self) -> list[Message]:
        self._observer.see_all()
        return list(self._messages[self._start :])


def first_of(messages: WatchedMessages) -> int:
    """The place of the first of them. It is no attribute, which a template could read."""
    return messages._start


class _WatchedIterator(Iterator[Message]):
    def __init__(self, messages: Sequence[Message], observer: Observer, start: int) -> None:
        self._messages = messages
        self._observer = observer
        self._place = start

    def __next__(self) -> Message:
        place, self._place = self._place, self._place + 1
        if place >= len(self._messages):
            self._observer.end_loop()
            raise StopIteration
        self._observer.see(place)
        return self._messages[place]


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
