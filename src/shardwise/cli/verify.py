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
    default=None,
    help="Load it, on so many processes, and compare every element with another path.",
    type=click.IntRange(1),
)
@click.option("--dtype", default="auto", show_default=True, help="auto, float32, bfloat16, ...")
@click.option("--revision", default=None, help="Of a hub repository.")
@click.option("--trust-remote-code", is_flag=True, help="Run model code that the checkpoint brings along.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
def verify_command(
    model: str,
    ranks: int | None,
    dtype: str,
    revision: str | None,
    trust_remote_code: bool,  # noqa: FBT001 - click's signature
    as_json: bool,  # noqa: FBT001
) -> None:
    """Open MODEL, a directory, again: structure, coverage, and the fingerprints recorded when it was saved.

    MODEL may be a model, an adapter, or checkpoints of a training, of which the newest is read (or one of them).

    With --ranks, load MODEL (a directory or a hub id) on N ranks, and compare every element with whole tensors,
    read by the safetensors library and converted by transformers. Exits with 1 when something differs, with 2 when
    the model cannot be opened or loaded.
    """
    from shardwise.cli.launch import fail, run_ranks

    if ranks is None:
        from shardwise.checkpoints.verify import verify

        try:
            found = verify(model)
        except ShardwiseError as error:
            fail(error)
        click.echo(json.dumps(found.to_dict(), indent=2) if as_json else str(found))
        sys.exit(0 if found.is_sound else 1)
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
    from shardwise.storage.names import HubOptions
    from shardwise.verbs.verify_load import verify_load

    return verify_load(model, dtype=dtype, hub=HubOptions(revision=revision), trust_remote_code=trust)
