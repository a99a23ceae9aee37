"""What a chat template writes, taken up in the middle of a chat.

[Note: Taken up] A template is asked for many beginnings of one chat, and writes most of each as it has written the
whole. What it knows when it begins a round of its loop over the messages is: what it has set before, which messages
it has looked at since the loop began, and what its namespaces say by now; it has nothing else to remember by. (What
they have may itself change, or belong to one text, as another namespace does; from then on nothing is noted.) So
the whole chat is written once, and noted for each round: how much is written, what namespaces say, how far has been
looked, and what has been asked of the numbers that were set before ([Note: What a template has asked of a number]
in ``watched``). Of a beginning the template then runs up to its loop. If it has written and set the same as
for the whole, but for numbers of which all that was asked has the same answer, the rounds up to the one that first
looked behind the common messages would write what they have written; so it goes on from there. If not, it goes
through all of them. Either way what comes out is what the template writes of these messages.

What it runs before its loop it runs each time, and a template that looks at all messages in each round is taken up
nowhere: so is the time of its own one text, the square of the messages.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from shardwise.models.chat_templates import TemplateDoor
from shardwise.models.template_loops import attributes, is_macro, is_undefined, set_round
from shardwise.training.texts.watched import Message, Observer, WatchedMessages, WatchedNumber, first_of

_PLAIN = (str, int, float, bool, type(None))


@dataclass(frozen=True, slots=True)
class _SpaceValues:
    """What a namespace says."""

    values: Mapping[str, Any]


@dataclass(slots=True)
class Length:
    """How many characters have been written."""

    characters: int = 0


@dataclass(slots=True)
class Rounds:
    """A chat as it was written once, round by round.

    Attributes:
        messages: of the chat.
        text, marks: what was written, and what of it is marked.
        start: the message of the first round.
        entry: what had been set when the loop began; None while it has not, or if that is not understood.
        lengths, marked: of each round, how much had been written when it began, and how many marks there were.
        spoken: of each round, what namespaces said when it began, by name.
        seen: of each place of the chat, the rounds that had begun when the loop first looked at it.
        asked: of each number, by namespace and name, its bounds when each round began: least, most.
    """

    messages: Sequence[Message]
    text: str = ""
    marks: list[tuple[int, int]] = field(default_factory=list)
    start: int = 0
    entry: Mapping[str, Any] | None = None
    lengths: list[int] = field(default_factory=list)
    marked: list[int] = field(default_factory=list)
    spoken: list[dict[str, dict[str, Any]]] = field(default_factory=list)
    seen: list[int | None] = field(default_factory=list)
    asked: dict[tuple[str, str], list[tuple[int, int]]] = field(default_factory=dict)

    def common_rounds(self, common: int, found: Mapping[str, Any]) -> int:
        """How many rounds are the same for messages of which the first ``common`` are these, but for the last.

        Args:
            common: messages that are the same.
            found: what the template has set of the others before its loop, which is alike.
        """
        seen = self.seen[common]
        count = min(len(self.lengths) if seen is None else seen, len(self.lengths)) - 1
        for (space, name), bounds in self.asked.items():
            value = found[space][name]
            count = min(
                count,
                bisect_right(
                    bounds,
                    0,
                    key=lambda bound, value=value: not bound[0] <= value <= bound[1],  # type: ignore[misc]
                )
                - 1,
            )
        return max(count, 0)


class _LoopObserver(Observer):
    """Also notes of each place how many rounds had begun when the loop first looked at it."""

    def __init__(self, count: int, rounds: Rounds, written: Any) -> None:
        super().__init__(count, written)
        self._rounds = rounds

    def see(self, place: int) -> None:
        super().see(place)
        rounds = self._rounds
        if rounds.entry is not None:
            for other in range(min(place, len(rounds.seen) - 1), -1, -1):
                if rounds.seen[other] is not None:
                    break
                rounds.seen[other] = len(rounds.lengths)


def recorded(
    door: TemplateDoor, variables: Mapping[str, Any], messages: Sequence[Message]
) -> tuple[Rounds, Observer] | None:
    """All messages written once, and noted; None where the template has more to remember by than is understood.

    Raises:
        Exception: whatever the template's code may raise.
    """
    rounds = Rounds(messages)
    written: list[str] = []
    size = 0
    numbers: dict[tuple[str, str], WatchedNumber] = {}
    observer = _LoopObserver(len(messages), rounds, lambda: size)
    spaces: dict[str, dict[str, Any]] = {}

    def entered(found: Mapping[str, Any], iterable: Any) -> Any:
        spaces.update({name: said for name, value in found.items() if (said := attributes(value)) is not None})
        if not isinstance(iterable, WatchedMessages) or len(set(map(id, spaces.values()))) < len(spaces):
            return iterable
        rounds.start = first_of(iterable)
        rounds.seen = [None] * (len(messages) + 1)
        rounds.entry = {
            name: _SpaceValues(dict(spaces[name])) if name in spaces else value for name, value in found.items()
        }
        if not door.looks_closer:
            for space, said in spaces.items():
                for name, value in said.items():
                    if type(value) is int:
                        said[name] = numbers[space, name] = WatchedNumber(value)
                        rounds.asked[space, name] = []
        return iterable

    is_noted = True

    def begun(_: Any) -> bool:
        nonlocal is_noted
        spoken = {space: _said(space, said, numbers) for space, said in spaces.items()} if is_noted else {}
        is_noted = is_noted and all(_is_settled(said) for said in spoken.values())
        if rounds.entry is not None and is_noted:
            rounds.spoken.append(spoken)
            rounds.lengths.append(size)
            rounds.marked.append(len(rounds.marks))
            for key, number in numbers.items():
                rounds.asked[key].append((number.least, number.most))
        return True

    given = {**variables, "messages": WatchedMessages(messages, observer)}
    for piece in door.pieces(given, entered, begun, written, rounds.marks):
        written.append(piece)
        size += len(piece)
    rounds.text = "".join(written)
    return (rounds, observer) if rounds.entry is not None and rounds.lengths else None


def _said(space: str, said: Mapping[str, Any], numbers: Mapping[tuple[str, str], WatchedNumber]) -> dict[str, Any]:
    """What a namespace says now; a number is left out where it is what was set before the loop."""
    found = {}
    for name, value in said.items():
        if isinstance(value, WatchedNumber):
            if value is numbers.get((space, name)):
                continue
            value = value.value
        found[name] = value
    return found


def _is_settled(value: Any) -> bool:
    """Whether a value is all there is to it: it will not change, and is not what only this chat's text has.

    So are no namespace within another one, no loop, no macro, nothing that can be gone through once, and no
    messages or numbers that notice what is asked of them.
    """
    match value:
        case list() | tuple():
            return all(map(_is_settled, value))
        case dict():
            return all(map(_is_settled, value)) and all(map(_is_settled, value.values()))
        case _:
            return isinstance(value, _PLAIN) or is_undefined(value)


def taken_up(
    rounds: Rounds,
    door: TemplateDoor,
    variables: Mapping[str, Any],
    messages: Sequence[Message],
    common: int,
    length: Length,
) -> tuple[str, list[tuple[int, int]]]:
    """What the template writes of messages of which the first ``common`` are those of ``rounds``, and its marks.

    Args:
        rounds: the chat as it was written.
        door: of the template.
        variables: what it is given beside messages.
        messages: what is written.
        common: so many of them are the chat's.
        length: is told how much is written by now.

    Raises:
        Exception: whatever the template's code may raise.
    """
    written: list[str] = []
    marks: list[tuple[int, int]] = []
    passed = 0
    passing = False

    def entered(found: Mapping[str, Any], iterable: Any) -> Any:
        nonlocal passed, passing
        if not _is_alike(rounds, found, iterable, messages, "".join(written)):
            return iterable
        spaces = {name: said for name, value in found.items() if (said := attributes(value)) is not None}
        passed = rounds.common_rounds(common, spaces)
        if not passed:
            return iterable
        passing = True
        length.characters = rounds.lengths[passed]
        written[:] = [rounds.text[: length.characters]]
        marks[:] = rounds.marks[: rounds.marked[passed]]
        for space, said in spaces.items():
            said.update(rounds.spoken[passed][space])  # what is not there is a number, which stays
        return _From(iterable, passed - 1)

    def begun(loop: Any) -> bool:
        nonlocal passing
        if passing:  # the round before the first that is written, which the template may ask for
            set_round(loop, passed - 1)
            passing = False
            return False
        return True

    for piece in door.pieces({**variables, "messages": messages}, entered, begun, written, marks):
        written.append(piece)
        length.characters += len(piece)
    return "".join(written), marks


@dataclass(frozen=True, slots=True)
class _From:
    """Messages that are gone through from one on, though there are more."""

    messages: Sequence[Message]
    start: int

    def __iter__(self) -> Iterator[Message]:
        if isinstance(self.messages, WatchedMessages):
            return iter(self.messages[self.start :])
        return islice(self.messages, self.start, None)

    def __len__(self) -> int:
        return len(self.messages)


# What is alike


def _is_alike(
    rounds: Rounds, found: Mapping[str, Any], iterable: Any, messages: Sequence[Message], written: str
) -> bool:
    """Whether a template has written and set the same before its loop, but for numbers."""
    return (
        rounds.entry is not None
        and rounds.entry.keys() == found.keys()
        and rounds.text[: rounds.lengths[0]] == written
        and _is_rest(iterable, messages, rounds.start)
        and all(_is_same(value, found[name], messages, rounds, name) for name, value in rounds.entry.items())
    )


def _is_rest(value: Any, messages: Sequence[Message], start: int) -> bool:
    """Whether a value is the messages from one on."""
    if isinstance(value, WatchedMessages):
        return first_of(value) == start
    return (
        isinstance(value, list)
        and len(value) == len(messages) - start
        and all(one is other for one, other in zip(value, islice(messages, start, None), strict=True))
    )


def _is_same(before: Any, now: Any, messages: Sequence[Message], rounds: Rounds, space: str) -> bool:
    """Whether a value is what it was; also whether it is one that cannot have changed since."""
    if isinstance(before, WatchedMessages):
        return _is_rest(now, messages, first_of(before))
    said = attributes(now)
    if said is not None:
        return (
            isinstance(before, _SpaceValues)
            and before.values.keys() == said.keys()
            and all(
                type(said[name]) is int if (space, name) in rounds.asked else _is_equal(value, said[name])
                for name, value in before.values.items()
            )
        )
    return _is_equal(before, now)


def _is_equal(before: Any, now: Any) -> bool:
    if before is now and isinstance(now, dict):
        return True  # a message
    if is_macro(before):  # no two macros of a template have one name
        return is_macro(now) and before.name == now.name
    if is_undefined(before):
        return type(before) is type(now)
    if type(before) is not type(now):
        return False
    if isinstance(before, _PLAIN):
        return bool(before == now)
    if isinstance(before, list | tuple):
        return len(before) == len(now) and all(map(_is_equal, before, now))
    if isinstance(before, dict):
        return list(before) == list(now) and all(_is_equal(value, now[name]) for name, value in before.items())
    return False
