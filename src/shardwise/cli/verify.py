"""``shardwise verify``."""

from __future__ import annotations

import json
import sys

import click

from shardwise.errors import ShardwiseError


@click.command("verify")
@click.argument("model")
@click.option(
    "--ranks",
    default=2,
    show_default=True,
    help="Processes to start and load on.",
    type=click.IntRange(1),
)
@click.option("--dtype", default="auto", show_default=True, help="auto, float32, bfloat16, ...")
@click.option("--revision", default=None, help="Of a hub repository.")
@click.option("--trust-remote-code", is_flag=True, help="Run model code that the checkpoint brings along.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
def verify_command(
    model: str,
    ranks: int,
    dtype: str,
    revision: str | None,
    trust_remote_code: bool,  # noqa: FBT001 - click's signature
    as_json: bool,  # noqa: FBT001
) -> None:
    """Load MODEL (a directory or a hub id) on N ranks, and compare every element.

    The comparison is with whole tensors, read by the safetensors library and converted by transformers. Exits with
    1 when something differs, with 2 when the model cannot be loaded.
    """
    from shardwise.cli.launch import fail, run_ranks

    try:
        reports = run_ranks(ranks, _verify, model, dtype, revision, trust_remote_code)
    except ShardwiseError as error:
        fail(error)
    if not reports:
        return  # one rank of a launcher shows the result
    report = reports[0]
    click.echo(json.dumps(report.to_dict(), indent=2) if as_json else str(report))
    sys.exit(0 if report.is_equal else 1)


def _verify(model: str, dtype: str, revision: str | None, trust: bool) -> object:  # noqa: FBT001 - runs on a rank
    from shardwise.storage import HubOptions
    from shardwise.verbs.verify import verify_load

    return verify_load(model, dtype=dtype, hub=HubOptions(revision=revision), trust_remote_code=trust)
