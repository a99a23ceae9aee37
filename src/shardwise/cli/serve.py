"""``shardwise serve``: many users train LoRAs on one base."""

from __future__ import annotations

import math
import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardwise.cli.launch import run_ranks
from shardwise.cli.progress import importing
from shardwise.core.errors import ConfigError

if TYPE_CHECKING:
    from shardwise.serve.run import ServeOptions

_PACKAGES = ("peft", "prometheus_client", "starlette", "tinker", "uvicorn", "yaml", "zstandard")


@click.command("serve")
@click.argument("model", required=False)
@click.option("--nproc-per-node", type=click.IntRange(min=1), default=1, help="Ranks to start on this machine.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address. Others than loopback need --keys.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True)
@click.option("--keys", type=click.Path(path_type=Path), help="YAML file of users. Without one, anyone may call.")
@click.option("--new-key", metavar="NAME", help="Print a new key and its entry for --keys, and end.")
@click.option(
    "--state", type=click.Path(path_type=Path), help="Folder for checkpoints. Without one, nothing is saved."
)
@click.option("--served-model-name", help="Name of the base for clients.  [default: MODEL, or its folder's name]")
@click.option("--tokenizer", help="Name of the tokenizer for clients.  [default: the served name]")
@click.option("--dtype", default="auto", show_default=True, help="auto, float32, bfloat16, ...")
@click.option("--load-in-4bit", is_flag=True, help="Pack the base into four bits (NF4).")
@click.option("--max-tokens-per-turn", type=click.IntRange(min=1), default=16384, show_default=True)
@click.option("--max-tokens-per-pass", type=click.IntRange(min=16), default=8192, show_default=True)
@click.option("--fuse-wait", type=click.FloatRange(min=0), help="Seconds.  [default: half of a turn, at most 0.1]")
@click.option("--session-timeout", type=click.FloatRange(120), default=600.0, show_default=True, help="Seconds.")
@click.option("--vllm", metavar="URL", help="Have a vLLM server sample, from adapters in --state.")
@click.option("--log-requests/--no-log-requests", default=True, show_default=True, help="JSON, to stderr.")
@click.option("--demo", is_flag=True, help="Train three LoRAs of a generated base at once, and end.")
def serve_command(
    model: str | None,
    *,
    nproc_per_node: int,
    new_key: str | None,
    demo: bool,
    served_model_name: str | None,
    tokenizer: str | None,
    max_tokens_per_turn: int,
    fuse_wait: float | None,
    session_timeout: float,
    **options: Any,
) -> None:
    """Serve MODEL to clients of the tinker package: each trains LoRAs, and all share the base's passes.

    Exit codes: 0 stopped by a signal, with all models saved as "shutdown" if there is --state; 2 an error.
    """
    # Before the imports below, which would name one package at a time.
    if missing := [name for name in _PACKAGES if find_spec(name) is None]:
        raise ConfigError(f"{', '.join(missing)}: not installed. Run pip install 'shardwise[serve]'")
    from shardwise.serve.keys import make_key

    # Two other commands, without a model: a key, and a demonstration.
    if new_key is not None:
        click.echo(make_key(new_key))
        return
    if demo:
        os.environ["TINKER_TELEMETRY"] = "0"  # read by the client
        from shardwise.serve.demo import run_demo

        run_demo(nproc_per_node)
        return
    for option, seconds in (("--session-timeout", session_timeout), ("--fuse-wait", fuse_wait)):
        if seconds is not None and math.isnan(seconds):  # which is in any range
            raise ConfigError(f"{option} nan: is not a number of seconds. Pass one")
    if model is None:
        raise ConfigError("MODEL: is missing. Pass a folder, or a name on the hub")
    with importing("torch and transformers"):
        from shardwise.serve.records import Settings
        from shardwise.serve.run import ServeOptions

    # A path on this machine tells clients nothing, so they see the name of the folder.
    name = served_model_name or (os.path.basename(os.path.abspath(model)) if Path(model).exists() else model)
    settings = Settings(name, tokenizer or name, max_tokens_per_turn, fuse_wait, session_timeout)
    run_ranks(nproc_per_node, serve_on_rank, ServeOptions(model, settings, **options), libraries=None)


def serve_on_rank(options: ServeOptions) -> None:
    """Serve on one rank. Collective: yes."""
    from shardwise.ranks.processes import keep_freed_blocks
    from shardwise.serve.run import serve

    # First, because it applies to blocks that are allocated afterwards.
    keep_freed_blocks(os.environ)
    serve(options)
