"""Messages that notice what a template looks at, and when.

[Note: What a template has not seen] A template is a program. As long as it has not looked at message k, nor at
whether there is one, it cannot know that there is: what it has written up to then is what it would have written of
the first k messages alone. So the messages are handed over in a list that notes, for each place, how much had been
written when something about that place was first looked at: the message itself, the end of the list, or its length.
One pass over a chat of any length then shows, of each of its beginnings, how much of the whole is written alike
when nothing follows. What is held back in a macro or a block counts as not written yet, so that the note can only
say too little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, overload

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
