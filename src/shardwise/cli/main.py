"""``shardwise COMMAND``: commands are imported when they are called, so that each starts quickly."""

from __future__ import annotations

import difflib
import importlib
from typing import Any

import click

from shardwise.cli.launch import fail
from shardwise.errors import ShardwiseError

_COMMANDS = {
    "bench": "how a model comes up here, by this library and by others: memory and seconds",
    "demo": "bring up, prove and train a small model that it makes itself",
    "docs": "the documentation, as it was installed",
    "inspect": "what a checkpoint holds, from its headers",
    "merge-adapter": "fold a LoRA into its base, in bounded memory",
    "merge-weights": "a sharded checkpoint as safetensors files of the hub",
    "plan": "what a load takes on every rank, before it",
    "report": "a page and pictures of a run: memory, phases, curves",
    "top": "what the ranks of a run do, live, from its files",
    "train": "fine-tune a model on chat data",
    "verify": "open a checkpoint again and compare; or load it on N ranks and compare",
}


class _LazyGroup(click.Group):
    """A group that imports ``shardwise.cli.NAME`` for the command NAME, with underscores."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in _COMMANDS:
            return None
        name = cmd_name.replace("-", "_")
        module = importlib.import_module(f"shardwise.cli.{name}")
        command: click.Command = getattr(module, f"{name}_command")
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ShardwiseError as error:  # of what a command imports: a library that is too old
            fail(error)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        near = [] if args[0] in _COMMANDS else difflib.get_close_matches(args[0], _COMMANDS, 1)
        if near:
            ctx.fail(f"No such command {args[0]!r}. Did you mean {near[0]!r}?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl(sorted(_COMMANDS.items()))


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="shardwise")
def main() -> None:
    """Hugging Face models under PyTorch FSDP2, each rank touching only its own bytes."""
