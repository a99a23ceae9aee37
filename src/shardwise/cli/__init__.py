"""``shardwise COMMAND``. The module of a command is imported when the command is called."""

import importlib
import sys
from typing import Any

import click

from shardwise.core.console import surviving_console
from shardwise.core.errors import ShardwiseError

_COMMANDS = {
    "inspect": "show the tensors and sizes of a checkpoint",
    "merge-adapter": "merge a LoRA into its base, in bounded memory",
    "merge-weights": "convert a sharded checkpoint to safetensors",
    "plan": "estimate memory and reads of each rank",
    "serve": "let many users train LoRAs on one base, by the tinker client",
    "train": "fine-tune a model with TRL",
    "verify": "check a save against its checksums",
}

_MODULES = {
    **dict.fromkeys(("inspect", "verify", "merge_adapter", "merge_weights"), "checkpoints"),
    "plan": "train",
}
"""Modules of commands that have another name."""


class _LazyGroup(click.Group):
    """A group that imports the module of a command when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in _COMMANDS:
            return None
        name = cmd_name.replace("-", "_")
        module = importlib.import_module(f"shardwise.cli.{_MODULES.get(name, name)}")
        command: click.Command = getattr(module, f"{name}_command")
        return command

    def invoke(self, ctx: click.Context) -> Any:
        with surviving_console():
            try:
                return super().invoke(ctx)
            except ShardwiseError as error:
                click.echo("\n".join([f"error: {error}", *getattr(error, "__notes__", ())]), err=True)
                sys.exit(2)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl(sorted(_COMMANDS.items()))


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="shardwise")
def main() -> None:
    """Load, fine-tune and save Hugging Face models with PyTorch FSDP2."""
