"""Pickles written by strangers, read without running anything.

A pickle is a program for a small machine. Python's own machine imports what the program names and calls it. Here
``pickletools`` decodes the program, and a machine with a closed :class:`Vocabulary` carries it out: every global is
one of those listed there and stands for a plain value, a record class of ours, or a pure function of ours. All else
is refused by name. There is no option to widen it. A ``pickle.Unpickler`` that finds nothing else would not do:
nests of tuples as keys crash it, indexes of its memo take all memory, and states change what it has found.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias

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


_StackStep: TypeAlias = "Callable[[_Machine, Any], object]"


class _Machine:
    def __init__(self, content: bytes, vocabulary: Vocabulary, what: str) -> None:
        self.content = content
        self.vocabulary = vocabulary
        self.what = what
        self.position = 0
        self.stack: list[object] = []
        self.memo: dict[int, object] = {}

    def run(self) -> object:
        operations = _OPERATIONS
        try:
            # Each operation puts one object on the stack at most, so the content bounds it.
            for code, argument, position in pickletools.genops(self.content):
                self.position = position or 0
                operation = operations.get(code.name)
                if operation is None:
                    self.refuse(f"it has the operation {code.name}, which torch does not write")
                operation(self, argument)
        except (ValueError, OverflowError) as error:  # of the decoder
            self.refuse(f"it cannot be decoded ({str(error)[:200]!a})")
        if len(self.stack) != 1 or self.stack[0] is _MARK:
            self.refuse(f"it leaves {len(self.stack)} objects, not one")
        return self.stack[0]

    def refuse(self, cause: str) -> NoReturn:
        raise FormatError(
            f"{self.what}, at byte {self.position}: {cause}; the file is damaged or of another format: download or "
            "write it again"
        )

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

    def protocol(self, version: int) -> None:
        if not 2 <= version <= 5:
            self.refuse(f"it is of protocol {version}; 2 to 5 are known")

    def text(self, text: str) -> None:
        if not text.isascii():
            text.encode()  # halves of surrogates raise
        self.push(text)

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


def _tuple_of(count: int) -> _StackStep:
    def operation(machine: _Machine, _: Any) -> None:
        machine.push(tuple(reversed([machine.pop() for _ in range(count)])))

    return operation


def _items_of_set(machine: _Machine, _: Any) -> None:
    machine.pop_to_mark()
    machine.top()


def _frozen_set(machine: _Machine, _: Any) -> None:
    machine.pop_to_mark()
    machine.push(Other("frozenset"))


def _set_item(machine: _Machine, _: Any) -> None:
    value, key = machine.pop(), machine.pop()
    machine.set_items([key, value])


def _without_argument(method: Callable[[_Machine], object]) -> _StackStep:
    return lambda machine, _: method(machine)


_OPERATIONS: dict[str, _StackStep] = {
    "PROTO": _Machine.protocol,
    "FRAME": lambda _machine, _: None,
    "STOP": lambda _machine, _: None,
    "MARK": lambda machine, _: machine.push(_MARK),
    "POP": lambda machine, _: machine.pop(),
    "NONE": lambda machine, _: machine.push(None),
    "NEWTRUE": lambda machine, _: machine.push(True),
    "NEWFALSE": lambda machine, _: machine.push(False),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"), _Machine.push),
    **dict.fromkeys(("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"), _Machine.text),
    **dict.fromkeys(
        ("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"), lambda machine, _: machine.push(Other("bytes"))
    ),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "EMPTY_SET": lambda machine, _: machine.push(Other("set")),
    "ADDITEMS": _items_of_set,
    "FROZENSET": _frozen_set,
    "TUPLE": lambda machine, _: machine.push(tuple(machine.pop_to_mark())),
    "TUPLE1": _tuple_of(1),
    "TUPLE2": _tuple_of(2),
    "TUPLE3": _tuple_of(3),
    "APPEND": lambda machine, _: machine.append([machine.pop()]),
    "APPENDS": lambda machine, _: machine.append(machine.pop_to_mark()),
    "SETITEM": _set_item,
    "SETITEMS": lambda machine, _: machine.set_items(machine.pop_to_mark()),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), _Machine.remember),
    "MEMOIZE": lambda machine, _: machine.remember(len(machine.memo)),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Machine.recall),
    "GLOBAL": lambda machine, names: machine.find(*names.split(" ", 1)),
    "STACK_GLOBAL": _without_argument(_Machine.stack_global),
    "REDUCE": _without_argument(_Machine.reduce),
    "NEWOBJ": _without_argument(_Machine.new_object),
    "BUILD": _without_argument(_Machine.build),
    "BINPERSID": _without_argument(_Machine.persistent),
}
