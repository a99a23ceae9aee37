"""The loop of a chat template that writes the messages, and the same template with a door into that loop.

The door is two calls: one where the loop begins, which may hand it other messages to go through, and one where each
round does, which may pass over it. What is done there, and what that is good for, is not known here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from jinja2 import nodes

from shardwise.models.templates_compat import attributes, is_macro, is_undefined, set_round

__all__ = ["BEGUN", "ENTERED", "MainLoop", "attributes", "is_macro", "is_undefined", "set_round"]

ENTERED, BEGUN = "shardwise_loop_entered", "shardwise_round_begun"
"""What is called where the loop begins, with what it goes through; and where a round does, with ``loop``."""

_PROMPT = "add_generation_prompt"
_STATEFUL = frozenset({"cycler", "joiner", "lipsum", "self"})
_STATEFUL_FILTERS = frozenset({"random"})
_CLOSER = frozenset({"integer", "float", "number", "sameas"})
_ELSEWHERE = (nodes.Block, nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport)


class MainLoop:
    """The largest of the loops of a template that everything it writes is written in, or before, or behind.

    Args:
        template: parsed; it is changed, and then has the door.
    """

    def __init__(self, template: nodes.Template, loop: nodes.For) -> None:
        self.template = template
        inside = [loop, *template.find_all((nodes.Macro, nodes.CallBlock))]
        self.asks = any(_PROMPT in _loaded(node) for node in inside)
        """Whether what is written in the loop may depend on whether an answer is asked for."""
        self.looks_closer = any(test.name in _CLOSER for test in template.find_all(nodes.Test))
        """Whether a number that is not Python's own would be noticed."""
        loop.iter = _call(ENTERED, loop.iter)
        passed_over = nodes.Not(_call(BEGUN, nodes.Name("loop", "load")))
        loop.body = [nodes.If(passed_over, [nodes.Continue()], [], []), *loop.body]

    @classmethod
    def of(cls, template: nodes.Template, text: str) -> MainLoop | None:
        """None where there is no such loop, or where rounds may know of each other in a way that cannot be seen."""
        macros = Counter(macro.name for macro in template.find_all(nodes.Macro))
        if (
            ENTERED in text
            or BEGUN in text
            or any(True for _ in template.find_all(_ELSEWHERE))
            or not _STATEFUL.isdisjoint(_loaded(template))
            or any(found.name in _STATEFUL_FILTERS for found in template.find_all(nodes.Filter))
            or any(found.attr == "changed" for found in template.find_all(nodes.Getattr))
            or any(found.value == "changed" for found in template.find_all(nodes.Const))
            or any(name.name == "loop" and name.ctx != "load" for name in template.find_all(nodes.Name))
            or any(count > 1 for count in macros.values())
        ):
            return None
        loops = [loop for loop in _outer_loops(template.body) if not (loop.recursive or loop.else_ or loop.test)]
        return cls(template, max(loops, key=_size)) if loops else None


def _outer_loops(body: list[nodes.Node]) -> Iterator[nodes.For]:
    for node in body:
        if isinstance(node, nodes.For):
            yield node
        elif isinstance(node, nodes.If):
            for branch in (node, *node.elif_):
                yield from _outer_loops(branch.body)
            yield from _outer_loops(node.else_)


def _size(node: nodes.Node) -> int:
    return sum(1 for _ in node.find_all(nodes.Node))


def _call(name: str, given: nodes.Node) -> nodes.Call:
    return nodes.Call(nodes.Name(name, "load"), [given], [], None, None)


def _loaded(node: nodes.Node) -> set[str]:
    return {name.name for name in node.find_all(nodes.Name) if name.ctx == "load"}
