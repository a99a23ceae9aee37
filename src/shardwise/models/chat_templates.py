"""Chat templates, compiled: what they write of messages, piece by piece, and what can be said of them beforehand.

They are run in transformers' own sandbox and by nothing else: they come with checkpoints, from strangers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jinja2 import TemplateError, meta, nodes

from shardwise.errors import ConfigError
from shardwise.models import templates_compat as compat
from shardwise.models.template_loops import BEGUN, ENTERED, MainLoop

_PROMPT = "add_generation_prompt"
_MESSAGES = "messages"
_GENERATION_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class CompiledTemplate:
    """A chat template that is ready to be run.

    Args:
        text: of the template.

    Raises:
        ConfigError: it is no template.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            self._template: Any = compat.compile_template(text)
        except (TemplateError, RecursionError) as error:
            raise ConfigError(f"the chat template cannot be compiled ({error})") from error

    @cached_property
    def has_marks(self) -> bool:
        """Whether it marks what the assistant says (``{% generation %}``)."""
        return _GENERATION_MARK.search(self.text) is not None

    @cached_property
    def variables(self) -> frozenset[str]:
        """The names that it takes from whoever runs it."""
        return frozenset(meta.find_undeclared_variables(self._parsed))

    @cached_property
    def has_one_prompt(self) -> bool:
        """Whether the prompt for an answer is the same after whatever messages.

        It is where the prompt is asked for outside of loops and macros only, and neither that nor what is written
        upon it looks at messages, or at anything that the template itself has set.
        """
        given = self.variables - {"messages"}
        given -= {name.name for name in self._parsed.find_all(nodes.Name) if name.ctx != "load"}
        return _asks_alike(self._parsed, given | {_PROMPT})

    @cached_property
    def only_reads(self) -> bool:
        """Whether messages are nothing to it but what is gone through, counted, or looked up by number.

        Then whatever can be read so does in place of a list.
        """
        return _only_reads(self._parsed)

    @cached_property
    def door(self) -> TemplateDoor | None:
        """The same with a door into the loop that writes the messages; None where it has no such loop."""
        environment = self._template.environment
        loop = MainLoop.of(environment.parse(self.text), self.text)
        if loop is None:
            return None
        return TemplateDoor(environment.from_string(loop.template), loop.asks, loop.looks_closer)

    @cached_property
    def _parsed(self) -> nodes.Template:
        parsed: nodes.Template = self._template.environment.parse(self.text)
        return parsed

    def pieces(self, variables: Mapping[str, Any]) -> Iterator[str]:
        """What it writes, one piece after the other, as it is written.

        Raises:
            Exception: whatever its code may raise.
        """
        yield from self._template.generate(variables)

    def marked_pieces(self, variables: Mapping[str, Any], marks: list[tuple[int, int]]) -> Iterator[str]:
        """As ``pieces``; the places of what is marked, start and stop in characters, are added to ``marks``.

        Raises:
            Exception: whatever its code may raise.
        """
        written: list[str] = []
        with compat.follow_marks(self._template, written, marks):
            for piece in self._template.generate(variables):
                written.append(piece)
                if len(written) > _JOINED_PIECES:  # all are joined for each mark
                    written[:] = ["".join(written)]
                yield piece


_JOINED_PIECES = 64


@dataclass(frozen=True, slots=True)
class TemplateDoor:
    """A template that calls whoever runs it where its loop over the messages begins, and where each round does.

    Attributes:
        asks: whether what the loop writes may depend on whether an answer is asked for.
        looks_closer: whether it would notice a number that is not Python's own.
    """

    template: Any
    asks: bool
    looks_closer: bool

    def pieces(
        self,
        variables: Mapping[str, Any],
        entered: Callable[[Mapping[str, Any], Any], Any],
        begun: Callable[[Any], bool],
        written: list[str],
        marks: list[tuple[int, int]],
    ) -> Iterator[str]:
        """What it writes, piece by piece.

        Args:
            variables: what it is given.
            entered: is told where the loop begins: all that the template has set, by name, and what it goes
                through; gives back what it goes through instead.
            begun: is told where a round begins, with the template's ``loop``; whether the round is to be.
            written: each piece is to be added to it, by whoever takes it.
            marks: what is marked is added to it, as places in what ``written`` says.

        Raises:
            Exception: whatever its code may raise.
        """
        doors = {ENTERED: compat.told_what_is_set(entered), BEGUN: begun}
        with compat.follow_marks(self.template, written, marks):
            yield from self.template.generate({**variables, **doors})


def _asks_alike(node: nodes.Node, given: frozenset[str]) -> bool:
    """Whether nothing below a node asks for the prompt but by names that are ``given``."""
    if isinstance(node, nodes.If | nodes.CondExpr):
        return _PROMPT not in _loaded(node) or _loaded(node) <= given
    if isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock):
        return _PROMPT not in _loaded(node)
    if isinstance(node, nodes.Name):
        return node.name != _PROMPT
    return all(_asks_alike(child, given) for child in node.iter_child_nodes())


def _only_reads(node: nodes.Node) -> bool:
    """Whether nothing below a node has messages but to read them."""
    if isinstance(node, nodes.Name):
        return node.name != _MESSAGES
    if isinstance(node, nodes.Getitem) and _is_messages(node.node):
        return _is_number(node.arg)
    if isinstance(node, nodes.Filter) and node.name in ("length", "count") and _is_messages(node.node):
        return True
    if isinstance(node, nodes.Test) and node.name == "defined" and _is_messages(node.node):
        return True
    gone_through = node.iter if isinstance(node, nodes.For) and _is_messages(node.iter) else None
    return all(_only_reads(child) for child in node.iter_child_nodes() if child is not gone_through)


def _is_messages(node: nodes.Node | None) -> bool:
    return isinstance(node, nodes.Name) and node.name == _MESSAGES and node.ctx == "load"


def _is_number(node: nodes.Node) -> bool:
    """Whether this is a number, whatever there is in a chat: a name could be that of a method."""
    if isinstance(node, nodes.Const):
        return type(node.value) is int
    if isinstance(node, nodes.Neg):
        return _is_number(node.node)
    if isinstance(node, nodes.Add | nodes.Sub):  # of a number with anything else it is one as well, or an error
        return _is_number(node.left) or _is_number(node.right)
    return False


def _loaded(node: nodes.Node) -> set[str]:
    names = {name.name for name in node.find_all(nodes.Name) if name.ctx == "load"}
    return names | ({node.name} if isinstance(node, nodes.Name) else set())
