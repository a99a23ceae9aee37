"""Small faults: what there are for a file, which lines they strike, and the code that has them."""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from inspect import CO_NEWLOCALS, CO_OPTIMIZED
from pathlib import Path
from types import CodeType

SOURCES = Path(__file__).parent.parent / "src" / "shardwise"

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.LShift: ast.RShift,
}


@dataclass(frozen=True)
class Mutant:
    """One fault: in this file, at this node of its tree (by number), of this kind."""

    file: Path
    node: int
    kind: str
    line: int
    lines: range
    """Of the statement that it is in (of its head, where it has a body): none of them runs, no fault."""
    place: str
    """The functions and classes around it, and the statement: without numbers of lines, which move."""
    change: str

    @property
    def label(self) -> str:
        return f"{self.key}  (line {self.line})"

    @property
    def key(self) -> str:
        return f"{self.file.relative_to(SOURCES)}: {self.place}: {self.change}"


def mutants_in(file: Path) -> Iterator[Mutant]:
    """Every fault that there is for a file.

    Messages, annotations and docstrings are left alone, and what only asserts: ``assert``, ``strict=True`` of zip.
    """
    tree = ast.parse(file.read_text())
    left_alone, heads = _left_alone(tree), _heads(tree)
    seen: Counter[str] = Counter()
    for number, node in enumerate(ast.walk(tree)):
        if id(node) in left_alone:
            continue
        for kind in _kinds(node):
            changed = _changed(node, kind)
            lines, place = heads[id(node)]
            change = f"{_short(ast.unparse(node))}  →  {_short(ast.unparse(changed))}"
            times = seen[f"{place} {change}"] = seen[f"{place} {change}"] + 1
            change += f"  [{times}]" if times > 1 else ""
            yield Mutant(file, number, kind, node.lineno, lines, place, change)  # type: ignore[attr-defined]


def _heads(tree: ast.Module) -> dict[int, tuple[range, str]]:
    """For every node the lines of its statement, or of its head, and the place as it is called."""
    found: dict[int, tuple[range, str]] = {}

    def visit(node: ast.AST, lines: range, names: tuple[str, ...], statement: str) -> None:
        if isinstance(node, ast.stmt | ast.match_case):
            lines, statement = _lines_of_head(node), _short(ast.unparse(node).removeprefix("\n"))
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names, statement = (*names, node.name), ""
        found[id(node)] = lines, ": ".join(part for part in (".".join(names), statement) if part)
        for inner in ast.iter_child_nodes(node):
            visit(inner, lines, names, statement)

    visit(tree, range(0), (), "")
    return found


def _lines_of_head(node: ast.stmt | ast.match_case) -> range:
    first = node.pattern.lineno if isinstance(node, ast.match_case) else node.lineno
    body = getattr(node, "body", None)
    if body:
        return range(first, max(first + 1, body[0].lineno))
    assert isinstance(node, ast.stmt)
    if isinstance(node, ast.Match):
        return range(first, node.cases[0].pattern.lineno)
    return range(first, (node.end_lineno or first) + 1)


def _left_alone(tree: ast.AST) -> set[int]:
    found: set[int] = set()
    for node in ast.walk(tree):
        parts: list[ast.AST | None] = []
        match node:
            case ast.Raise() | ast.JoinedStr() | ast.Assert():
                parts = [node]
            case ast.FunctionDef(returns=returns, args=arguments, decorator_list=decorators):
                every = (*arguments.args, *arguments.kwonlyargs, *arguments.posonlyargs)
                parts = [returns, *decorators, *(argument.annotation for argument in every)]
            case ast.ClassDef(decorator_list=decorators):
                parts = [*decorators]
            case ast.AnnAssign(annotation=annotation):
                parts = [annotation]
            case ast.Assign(targets=[ast.Name(id="__all__")]):
                parts = [node]
            case ast.Call(func=ast.Name(id="zip"), keywords=keywords):
                parts = [*keywords]
            case ast.Call(func=func):
                name = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")
                if name in ("dataclass", "field", "TypeVar", "FormatError", "ValueError"):
                    parts = [node]
            case _:
                if getattr(node, "id", "") == "TYPE_CHECKING":
                    parts = [node]
        for part in parts:
            found |= {id(inner) for inner in ast.walk(part)} if part is not None else set()
    return found


def _kinds(node: ast.AST) -> list[str]:
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in _COMPARISONS:
            return ["comparison"]
        case ast.BinOp(op=operator) if type(operator) in _ARITHMETIC:
            return ["arithmetic"]
        case ast.BoolOp():
            return ["boolean"]
        case ast.UnaryOp(op=ast.Not()):
            return ["not"]
        case ast.Constant(value=bool()):
            return ["constant"]
        case ast.Constant(value=int()):
            return ["plus one", "minus one"]
        case ast.Return(value=value) if value is not None and not _is_nothing(value):
            return ["return None"]
        case ast.If():
            return ["always", "never"]
        case ast.Continue() | ast.Break():
            return ["other way out"]
    return []


def _is_nothing(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and (value.value is None or value.value is False)


def _changed(node: ast.AST, kind: str) -> ast.AST:
    """The node as the fault has it."""
    made = copy.deepcopy(node)
    match kind, made:
        case "comparison", ast.Compare():
            made.ops = [_COMPARISONS[type(made.ops[0])]()]
        case "arithmetic", ast.BinOp():
            made.op = _ARITHMETIC[type(made.op)]()
        case "boolean", ast.BoolOp():
            made.op = ast.And() if isinstance(made.op, ast.Or) else ast.Or()
        case "not", ast.UnaryOp():
            return made.operand
        case "constant", ast.Constant():
            made.value = not made.value
        case "plus one" | "minus one", ast.Constant():
            assert isinstance(made.value, int)
            made.value += 1 if kind == "plus one" else -1
        case "return None", ast.Return():
            made.value = ast.Constant(None)
        case "always" | "never", ast.If():
            made.test = ast.Constant(kind == "always")
        case "other way out", _:
            return ast.copy_location(ast.Break() if isinstance(made, ast.Continue) else ast.Continue(), made)
    return made


def _short(text: str) -> str:
    return " ".join(text.split(":\n")[0].split("\n")[0].split())[:100]


def compiled(mutant: Mutant) -> CodeType:
    """The file with the fault in it."""
    tree = ast.parse(mutant.file.read_text())
    wanted = list(ast.walk(tree))[mutant.node]

    class Put(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            if node is wanted:
                return ast.copy_location(_changed(node, mutant.kind), node)
            return self.generic_visit(node)

    made = ast.fix_missing_locations(Put().visit(tree))
    return compile(made, str(mutant.file), "exec", dont_inherit=True)


def functions_changed(mutant: Mutant) -> dict[tuple[str, int], CodeType]:
    """The code of the functions that are other with the fault, by qualified name and first line.

    Functions within functions go with these. None, where the fault is in what runs when the module is imported.
    """
    before_shell, before = _sound(mutant.file)
    after_shell, after = _taken_apart(compiled(mutant))
    if before_shell != after_shell:
        return {}
    return {key: code for key, code in after.items() if code != before[key]}


@cache
def _sound(file: Path) -> tuple[list[object], dict[tuple[str, int], CodeType]]:
    return _taken_apart(compile(file.read_text(), str(file), "exec", dont_inherit=True))


def _taken_apart(module: CodeType) -> tuple[list[object], dict[tuple[str, int], CodeType]]:
    """What runs on import, bodies of classes included; and the functions in it, if known by name and line."""
    shell: list[object] = []
    functions: dict[tuple[str, int], CodeType] = {}

    def walk(code: CodeType) -> None:
        shell.append(code.replace(co_consts=tuple(c for c in code.co_consts if not isinstance(c, CodeType))))
        for inner in (constant for constant in code.co_consts if isinstance(constant, CodeType)):
            key = inner.co_qualname, inner.co_firstlineno
            if not (inner.co_flags & CO_OPTIMIZED and inner.co_flags & CO_NEWLOCALS):
                walk(inner)
            elif key in functions:
                shell.append(inner)
            else:
                functions[key] = inner

    walk(module)
    return shell, functions
