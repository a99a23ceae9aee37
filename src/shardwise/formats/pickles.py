"""Pickles written by strangers, read without running anything.

A pickle is a program for a small machine. Python's own machine imports what the program names and calls it. This
one has a closed :class:`Vocabulary`: every global is one of those listed there and stands for a plain value, a
record class of ours, or a pure function of ours. All else is refused by name. There is no option to widen it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NoReturn, TypeAlias

from shardwise.errors import FormatError
from shardwise.storage.names import shown

Global: TypeAlias = tuple[str, str]
"""(module, name)."""

_PYTHON_2 = {"__builtin__": "builtins", "copy_reg": "copyreg"}


@dataclass(frozen=True, slots=True, eq=False)
class Other:
    """A value that is nobody's affair here, by the name of its type."""

    kind: str


@dataclass(slots=True, eq=False)
class Record:
    """An object of a class of others: its name, and the state the pickle gives it."""

    name: str
    state: object = None


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """All globals that a pickle may name.

    Attributes:
        values: what stands for itself.
        functions: what may be called: each takes the tuple of arguments, checks it, and raises a ValueError (whose
            text is shown) for those it does not like.
        records: classes of which objects may be made; they become :class:`Record`.
        persistent: what a persistent id stands for, checked likewise.
    """

    values: Mapping[Global, object] = field(default_factory=dict)
    functions: Mapping[Global, Callable[[tuple[object, ...]], object]] = field(default_factory=dict)
    records: frozenset[Global] = frozenset()
    persistent: Callable[[object], object] | None = None


def read_pickle(content: bytes, vocabulary: Vocabulary, *, what: str) -> object:
    """The object that a pickle describes; ``what`` names it in messages (file and part of it).

    Dicts, lists, tuples, strings and numbers are themselves; dict keys that are neither are replaced by an
    :class:`Other`. What is returned may refer to itself, and be nested as deeply as the pickle is long.

    Raises :class:`FormatError` for all that is not sound or not in the vocabulary, never another exception.
    """
    return _Machine(content, vocabulary, what).run()


class _StackMark:
    """Where on the stack a sequence of items begins."""


_MARK = _StackMark()


@dataclass(frozen=True, slots=True, eq=False)
class Function:
    """A function of the vocabulary, on the stack of the machine."""

    name: str
    call: Callable[[tuple[object, ...]], object]


@dataclass(frozen=True, slots=True, eq=False)
class _Class:
    name: str


class _Machine:
    def __init__(self, content: bytes, vocabulary: Vocabulary, what: str) -> None:
        self.content = content
        self.vocabulary = vocabulary
        self.what = what
        self.position = 0
        self.stack: list[object] = []
        self.memo: dict[int, object] = {}

    def run(self) -> object:
        content, operations, stop, end = self.content, _OPERATIONS, _STOP, len(self.content)
        while True:  # each operation puts one object on the stack at most, so the content bounds it
            if self.position >= end:
                self.refuse("it ends in the middle")
            code = content[self.position]
            self.position += 1
            if code == stop:
                break
            operation = operations.get(code)
            if operation is None:
                self.refuse(f"it has the operation {bytes([code])!r}, which torch does not write")
            operation(self)
        if len(self.stack) != 1 or self.stack[0] is _MARK:
            self.refuse(f"it leaves {len(self.stack)} objects, not one")
        return self.stack[0]

    def refuse(self, cause: str) -> NoReturn:
        raise FormatError(
            f"{self.what}, at byte {self.position}: {cause}; the file is damaged or of another format: download or "
            "write it again"
        )

    # Arguments of operations

    def take(self, nbytes: int) -> bytes:
        start, self.position = self.position, self.position + nbytes
        if self.position > len(self.content):
            self.refuse(f"{nbytes} bytes are announced, and it ends before")
        return self.content[start : self.position]

    def number(self, nbytes: int) -> int:
        return int.from_bytes(self.take(nbytes), "little")

    def text(self, nbytes: int) -> str:
        try:
            return self.take(nbytes).decode("utf-8")
        except UnicodeDecodeError:
            self.refuse("a text is not UTF-8")

    def line(self) -> str:
        end = self.content.find(b"\n", self.position)
        if end < 0:
            self.refuse("a line does not end")
        text = self.text(end - self.position)
        self.position += 1
        return text

    # The stack

    def push(self, value: object) -> None:
        self.stack.append(value)

    def pop(self) -> object:
        if not self.stack or self.stack[-1] is _MARK:
            self.refuse("it takes more from the stack than there is")
        return self.stack.pop()

    def top(self) -> object:
        if not self.stack or self.stack[-1] is _MARK:
            self.refuse("it takes more from the stack than there is")
        return self.stack[-1]

    def pop_to_mark(self) -> list[object]:
        stack = self.stack
        place = len(stack) - 1
        while place >= 0 and stack[place] is not _MARK:
            place -= 1
        if place < 0:
            self.refuse("it takes more from the stack than there is")
        items = stack[place + 1 :]
        del stack[place:]
        return items

    def pop_tuple(self) -> tuple[object, ...]:
        arguments = self.pop()
        if not isinstance(arguments, tuple):
            self.refuse("a call has no tuple of arguments")
        return arguments

    # Operations

    def protocol(self) -> None:
        version = self.number(1)
        if not 2 <= version <= 5:
            self.refuse(f"it is of protocol {version}; 2 to 5 are known")

    def frame(self) -> None:
        self.take(8)  # a hint of how much to read at once

    def remember(self, number: int) -> None:
        self.memo[number] = self.top()

    def recall(self, number: int) -> None:
        if number not in self.memo:
            self.refuse(f"it refers to object {number}, which it has not made")
        self.push(self.memo[number])

    def append(self, items: list[object]) -> None:
        target = self.top()
        if not isinstance(target, list):
            self.refuse("it appends to what is no list")
        target.extend(items)

    def set_items(self, items: list[object]) -> None:
        target = self.top()
        if not isinstance(target, dict) or len(items) % 2:
            self.refuse("it sets items of what is no dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Exact types: only their hashes are known to be cheap.
            if type(key) is Record:
                target[key] = value
                continue
            if type(key) is not str and type(key) is not int:
                key = Other(type(key).__name__)
            if key in target:
                self.refuse(f"a dict has the key {shown(key) if isinstance(key, str) else key} twice")
            target[key] = value

    def find(self, module: object, name: object) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            self.refuse("a global's name is no text")
        found = (_PYTHON_2.get(module, module), name)
        label = f"{found[0]}.{name}"
        vocabulary = self.vocabulary
        if found in vocabulary.values:
            self.push(vocabulary.values[found])
        elif found in vocabulary.functions:
            self.push(Function(label, vocabulary.functions[found]))
        elif found in vocabulary.records:
            self.push(_Class(label))
        else:
            raise FormatError(
                f"{self.what}: it refers to {shown(label)}, which does not belong to a file of tensors and is "
                "never run; save the state dict alone (torch.save(model.state_dict(), ...)), or as safetensors"
            )

    def stack_global(self) -> None:
        name, module = self.pop(), self.pop()
        self.find(module, name)

    def reduce(self) -> None:
        arguments, function = self.pop_tuple(), self.pop()
        if not isinstance(function, Function):
            self.refuse("it calls what cannot be called")
        try:
            self.push(function.call(arguments))
        except ValueError as error:
            self.refuse(f"{function.name}: {error}")

    def new_object(self) -> None:
        arguments, made = self.pop_tuple(), self.pop()
        if not isinstance(made, _Class) or arguments:
            self.refuse("it makes an object of what is no class")
        self.push(Record(made.name))

    def build(self) -> None:
        state, target = self.pop(), self.top()
        if isinstance(target, Record):
            if target.state is not None:
                self.refuse("an object is given its state twice")
            target.state = state
        elif not isinstance(target, dict):  # of an OrderedDict: attributes, such as a state dict's versions
            self.refuse("it gives a state to what has none")

    def persistent(self) -> None:
        if self.vocabulary.persistent is None:
            self.refuse("it has persistent ids")
        try:
            self.push(self.vocabulary.persistent(self.pop()))
        except ValueError as error:
            self.refuse(str(error))


def _mark(machine: _Machine) -> None:
    machine.push(_MARK)


def _signed(machine: _Machine) -> None:
    machine.push(int.from_bytes(machine.take(4), "little", signed=True))


def _long(machine: _Machine) -> None:
    machine.push(int.from_bytes(machine.take(machine.number(1)), "little", signed=True))


def _float(machine: _Machine) -> None:
    machine.push(struct.unpack(">d", machine.take(8))[0])


def _tuple_of(count: int) -> Callable[[_Machine], None]:
    def operation(machine: _Machine) -> None:
        machine.push(tuple(reversed([machine.pop() for _ in range(count)])))

    return operation


def _text_of(width: int) -> Callable[[_Machine], None]:
    return lambda machine: machine.push(machine.text(machine.number(width)))


def _bytes_of(width: int) -> Callable[[_Machine], None]:
    def operation(machine: _Machine) -> None:
        machine.take(machine.number(width))
        machine.push(Other("bytes"))

    return operation


def _global(machine: _Machine) -> None:
    module = machine.line()
    machine.find(module, machine.line())


def _items_of_set(machine: _Machine) -> None:
    machine.pop_to_mark()
    machine.top()


def _frozen_set(machine: _Machine) -> None:
    machine.pop_to_mark()
    machine.push(Other("frozenset"))


def _set_item(machine: _Machine) -> None:
    value, key = machine.pop(), machine.pop()
    machine.set_items([key, value])


_STOP = ord(".")
_OPERATIONS: dict[int, Callable[[_Machine], object]] = {
    ord(code): operation
    for code, operation in (
        ("\x80", _Machine.protocol),
        ("\x95", _Machine.frame),
        ("(", _mark),
        ("0", lambda machine: machine.pop()),
        ("N", lambda machine: machine.push(None)),
        ("\x88", lambda machine: machine.push(True)),
        ("\x89", lambda machine: machine.push(False)),
        ("J", _signed),
        ("K", lambda machine: machine.push(machine.number(1))),
        ("M", lambda machine: machine.push(machine.number(2))),
        ("\x8a", _long),
        ("G", _float),
        ("X", _text_of(4)),
        ("\x8c", _text_of(1)),
        ("\x8d", _text_of(8)),
        ("B", _bytes_of(4)),
        ("C", _bytes_of(1)),
        ("\x8e", _bytes_of(8)),
        ("\x96", _bytes_of(8)),
        ("]", lambda machine: machine.push([])),
        (")", lambda machine: machine.push(())),
        ("}", lambda machine: machine.push({})),
        ("\x8f", lambda machine: machine.push(Other("set"))),
        ("\x90", _items_of_set),
        ("\x91", _frozen_set),
        ("t", lambda machine: machine.push(tuple(machine.pop_to_mark()))),
        ("\x85", _tuple_of(1)),
        ("\x86", _tuple_of(2)),
        ("\x87", _tuple_of(3)),
        ("a", lambda machine: machine.append([machine.pop()])),
        ("e", lambda machine: machine.append(machine.pop_to_mark())),
        ("s", _set_item),
        ("u", lambda machine: machine.set_items(machine.pop_to_mark())),
        ("q", lambda machine: machine.remember(machine.number(1))),
        ("r", lambda machine: machine.remember(machine.number(4))),
        ("\x94", lambda machine: machine.remember(len(machine.memo))),
        ("h", lambda machine: machine.recall(machine.number(1))),
        ("j", lambda machine: machine.recall(machine.number(4))),
        ("c", _global),
        ("\x93", _Machine.stack_global),
        ("R", _Machine.reduce),
        ("\x81", _Machine.new_object),
        ("b", _Machine.build),
        ("Q", _Machine.persistent),
    )
}
