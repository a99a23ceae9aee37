"""``make mutate``: are the tests of a room able to fail? Small faults are put into it, one at a time.

For each room some mutants are drawn (``--seed``), and its own tests are run on each until one fails. What survives
is listed. A room passes with nine of ten killed, those in ``tests/equivalent_mutants.txt`` not counted: faults that
change nothing anybody can see, each with the reason.

The process that is forked for each mutant has imported torch and the tests' libraries, but nothing of shardwise: so
a mutant costs what its tests cost. ::

    make mutate ARGS="--room tensors --mutants 20 --seed 3"
    make mutate ARGS="--room formats --file zip_archive.py"
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import importlib.abc
import importlib.machinery
import importlib.util
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType

ROOT = Path(__file__).parent.parent
SOURCES = ROOT / "src" / "shardwise"
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.txt")

ROOMS = {
    "tensors": ("tests/tensors",),
    "conversion": ("tests/conversion",),
    "layout": ("tests/layout",),
    "formats": ("tests/formats",),
    "planning": ("tests/planning",),
}
NEEDED = 0.9

_QUIET = ("-W", "ignore::pytest.PytestAssertRewriteWarning")
"""A library that comes with a plugin for pytest has been imported already."""

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
    before: str
    after: str

    @property
    def label(self) -> str:
        return f"{self.file.relative_to(SOURCES)}:{self.line}: {self.before}  →  {self.after}"

    @property
    def key(self) -> str:
        """Without the line, which moves."""
        return f"{self.file.relative_to(SOURCES)}: {self.before}  →  {self.after}"


def mutants_in(file: Path) -> Iterator[Mutant]:
    """Every fault that there is for a file. Messages, annotations and docstrings are left alone."""
    tree = ast.parse(file.read_text())
    left_alone = _left_alone(tree)
    for number, node in enumerate(ast.walk(tree)):
        if id(node) in left_alone:
            continue
        for kind in _kinds(node):
            changed = _changed(node, kind)
            before, after = ast.unparse(node), ast.unparse(changed)
            yield Mutant(file, number, kind, node.lineno, _short(before), _short(after))  # type: ignore[attr-defined]


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
        case ast.Return(value=value) if value is not None and not _is_none(value):
            return ["return None"]
        case ast.If():
            return ["always", "never"]
        case ast.Continue() | ast.Break():
            return ["other way out"]
    return []


def _is_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


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

    return compile(ast.fix_missing_locations(Put().visit(tree)), str(mutant.file), "exec")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from its mutant."""

    def __init__(self, mutant: Mutant) -> None:
        parts = mutant.file.relative_to(SOURCES.parent).with_suffix("").parts
        self.name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        self.is_package = parts[-1] == "__init__"
        self.file = mutant.file
        self.code = compiled(mutant)

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name != self.name:
            return None
        places = [str(self.file.parent)] if self.is_package else None
        return importlib.util.spec_from_file_location(
            name, self.file, loader=self, submodule_search_locations=places
        )

    def exec_module(self, module: ModuleType) -> None:
        exec(self.code, module.__dict__)


def tests_of(room: str, mutant: Mutant | None) -> list[str]:
    """The room's files of tests, in the order in which they are to be run."""
    files = sorted(file for folder in ROOMS[room] for file in (ROOT / folder).glob("test_*.py"))
    if mutant is not None:
        files.sort(key=lambda file: mutant.file.stem not in file.read_text())
    return [str(file) for file in files]


def run_tests(room: str, mutant: Mutant | None, limit_s: float) -> tuple[str, float]:
    """("killed", "survived" or "too slow", seconds): the room's tests in a forked process, until the first fails.

    Those that name the mutant's file come first.
    """
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        os.setsid()
        quiet = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(quiet, stream)
        status = 2
        with contextlib.suppress(BaseException):
            if mutant is not None:
                sys.meta_path.insert(0, _Finder(mutant))
            import pytest

            status = int(
                pytest.main(
                    ["-x", "-q", "-p", "no:cacheprovider", *_QUIET, "-m", "not slow", *tests_of(room, mutant)]
                )
            )
        os._exit(status)
    while time.monotonic() - start < limit_s:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            seconds = time.monotonic() - start
            return "survived" if os.waitstatus_to_exitcode(status) == 0 else "killed", seconds
        time.sleep(0.01)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "too slow", time.monotonic() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--room", action="append", choices=ROOMS, default=[])
    parser.add_argument("--file", help="only mutants of files of this name")
    parser.add_argument("--mutants", type=int, default=200, help="for each room")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no more after this time")
    given = parser.parse_args()
    equivalent = {line.split("  #")[0].strip() for line in EQUIVALENT.read_text().splitlines() if "→" in line}
    begin, is_good = time.monotonic(), True
    os.chdir(ROOT)
    os.environ["HYPOTHESIS_PROFILE"] = "mutation"
    # What tests need and takes seconds to import; nothing of shardwise, which mutants replace.
    import torch
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import transformers
    import transformers.conversion_mapping
    import transformers.modeling_utils

    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    assert "shardwise" not in sys.modules
    for room in given.room or list(ROOMS):
        files = [file for file in sorted((SOURCES / room).glob("*.py")) if given.file in (None, file.name)]
        every = [mutant for file in files for mutant in mutants_in(file)]
        draw = random.Random(f"{room} {given.seed}")
        chosen = draw.sample(every, min(given.mutants, len(every)))
        outcome, seconds = run_tests(room, None, 600)
        if outcome != "survived":
            print(f"{room}: its tests fail as it is")
            return 1
        print(f"{room}: {len(chosen)} of {len(every)} mutants, seed {given.seed}; its tests take {seconds:.0f} s")
        killed, alive, excused, looked_at = 0, [], 0, 0
        for mutant in chosen:
            if time.monotonic() - begin > given.seconds:
                break
            looked_at += 1
            if mutant.key in equivalent:
                excused += 1
                continue
            outcome, _ = run_tests(room, mutant, 5 * seconds + 10)
            killed += outcome != "survived"
            if outcome == "survived":
                alive.append(mutant)
                print(f"  survives  {mutant.label}", flush=True)
        counted = looked_at - excused
        share = killed / counted if counted else 1.0
        is_good &= share >= NEEDED
        print(f"{room}: {killed} of {counted} killed, {share:.0%}; {excused} equivalent", flush=True)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
