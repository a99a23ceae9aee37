"""``make mutate``: the faults that it puts into functions which are there are those that it would import."""

from __future__ import annotations

from types import CodeType, FunctionType

from tests.mutants import SOURCES, Mutant, compiled, functions_changed, mutants_in

from shardwise.tensors import boxes

FILE = SOURCES / "tensors" / "boxes.py"
EVERY = list(mutants_in(FILE))


def outcome(numel: object, sizes: tuple[int, ...]) -> object:
    assert callable(numel)
    try:
        return numel(sizes)
    except Exception as error:
        return type(error)


def imported(mutant: Mutant) -> dict[str, object]:
    names: dict[str, object] = {"__name__": boxes.__name__}
    exec(compiled(mutant), names)
    return names


def test_every_mutant_has_a_name_and_lines_of_its_own() -> None:
    assert len({mutant.key for mutant in EVERY}) == len(EVERY) > 40
    source = FILE.read_text().splitlines()
    assert all(mutant.line in mutant.lines for mutant in EVERY)
    assert all(0 < line <= len(source) for mutant in EVERY for line in mutant.lines)
    assert not any("strict" in mutant.change for mutant in EVERY)


def test_a_function_that_is_there_gets_the_fault_that_would_be_imported() -> None:
    sound: dict[str, object] = {"__name__": boxes.__name__}
    exec(compile(FILE.read_text(), str(FILE), "exec", dont_inherit=True), sound)
    is_other = 0
    for mutant in EVERY:
        changed = functions_changed(mutant)
        if ("contiguous_strides", code_of(sound["contiguous_strides"]).co_firstlineno) not in changed:
            continue
        (code,) = changed.values()
        patched = FunctionType(code, sound)
        for sizes in ((), (3,), (2, 0, 4), (2, 3, 4, 5)):
            found = outcome(imported(mutant)["contiguous_strides"], sizes)
            assert outcome(patched, sizes) == found, mutant.label
            is_other += found != outcome(sound["contiguous_strides"], sizes)
    assert is_other > 20


def test_what_runs_on_import_is_no_function() -> None:
    (default,) = (item for item in EVERY if item.place == "Strided.contiguous" and item.change == "0  →  1")
    assert functions_changed(default) == {}


def code_of(function: object) -> CodeType:
    assert isinstance(function, FunctionType)
    return function.__code__
