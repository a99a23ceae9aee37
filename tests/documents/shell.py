"""Commands of pages, read as the programs would read them: by their own options, without running them."""

import importlib.util
import re
import shlex
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

import click
from tests.documents.blocks import ROOT

from shardwise.cli import main
from shardwise.training.arguments import METHODS
from shardwise.training.keys import get_keys
from shardwise.training.run_config import read_run_config


def check(line: str) -> None:
    """Fail where a command would be refused for how it is written."""
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        del words[0]  # the environment
    program, arguments = words[0], words[1:]
    if program not in _PROGRAMS:
        raise AssertionError(f"nobody knows how {program} reads its arguments: {line}")
    _PROGRAMS[program](arguments)


def _shardwise(arguments: Sequence[str]) -> None:
    with click.Context(main) as context:
        command = main.get_command(context, arguments[0])
        assert command is not None, f"shardwise has no command {arguments[0]}"
        try:
            made = command.make_context(arguments[0], list(arguments[1:]), parent=context)
        except click.exceptions.Exit:
            return  # --help, --keys
    if arguments[0] == "train":
        known = {key for method in METHODS for key in get_keys(method)}
        for key in (argument.partition("=")[0] for argument in made.params["arguments"]):
            assert not key.startswith("--") or key.removeprefix("--") in known, f"no such key: {key}"
        if any(Path(argument).is_file() for argument in made.params["arguments"]):  # as the page has it
            read_run_config(made.params["arguments"])


def _torchrun(arguments: Sequence[str]) -> None:
    from torch.distributed.run import get_args_parser

    read = get_args_parser().parse_args(arguments)
    _script(read.training_script, read.training_script_args)


def _accelerate(arguments: Sequence[str]) -> None:
    from accelerate.commands.launch import launch_command_parser

    assert arguments[0] == "launch"
    read = launch_command_parser().parse_args(arguments[1:])
    _script(read.training_script, read.training_script_args)


def _script(name: str, arguments: Sequence[str]) -> None:
    if name == "shardwise":
        _shardwise(arguments)
    elif not name.endswith(".py"):
        assert importlib.util.find_spec(name), f"no module {name}"


def _python(arguments: Sequence[str]) -> None:
    if arguments[0] == "-m":
        _script(arguments[1], arguments[2:])
    else:
        assert arguments[0].endswith(".py")


def _make(arguments: Sequence[str]) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert arguments[0] in targets, f"no target {arguments[0]}"


def _pip(arguments: Sequence[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert arguments[0] == "install"
    for wanted in arguments[1:]:
        name, _, chosen = wanted.rstrip("]").partition("[")
        assert name in ("shardwise", ".")
        assert {each for each in chosen.split(",") if each} <= extras.keys()


_PROGRAMS: dict[str, Callable[[Sequence[str]], None]] = {
    "shardwise": _shardwise,
    "torchrun": _torchrun,
    "accelerate": _accelerate,
    "python": _python,
    "make": _make,
    "pip": _pip,
}

_IN_SCRIPTS = re.compile(r"\b(?:(?<=srun )torchrun|(?<=exec )shardwise) .*?(?=\s*(?:\|\||'|$))")


def commands_in(line: str) -> list[str]:
    """Of a line of a longer script: the commands in it that are known here, variables set to 8."""
    return [re.sub(r"\$\w+", "8", found) for found in _IN_SCRIPTS.findall(line)]
