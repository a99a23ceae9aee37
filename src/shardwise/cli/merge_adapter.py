"""``shardwise merge-adapter``."""

from __future__ import annotations

import json

import click

from shardwise.errors import ShardwiseError


@click.command("merge-adapter")
@click.argument("base")
@click.argument("adapter")
@click.argument("out", type=click.Path(file_okay=False))
@click.option("--dtype", default="auto", show_default=True, help="Of the outcome: auto, float32, bfloat16, ...")
@click.option("--max-shard-size", default="50GB", show_default=True, help="Of one file's tensors.")
@click.option("--quantization", type=click.Choice(["nf4", "fp4"]), help="Linear layers in four bits; else numbers.")
@click.option("--adapter-name", default="default", show_default=True, help="Where ADAPTER holds several.")
@click.option("--trust-remote-code", is_flag=True, help="Run model code that the base brings along.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
def merge_adapter_command(
    base: str,
    adapter: str,
    out: str,
    *,
    dtype: str,
    max_shard_size: str,
    quantization: str | None,
    adapter_name: str,
    trust_remote_code: bool,
    as_json: bool,
) -> None:
    """Fold the LoRA ADAPTER into BASE and write the model to OUT.

    BASE and ADAPTER are folders, or repositories in the cache of the Hugging Face hub. One process, no
    accelerator, memory that does not grow with the model. Exits with 2, and leaves OUT as it was, when the adapter
    does not fit the base or would change nothing.
    """
    from shardwise.cli.launch import fail
    from shardwise.verbs.merge_adapter import merge_adapter

    try:
        report = merge_adapter(
            base,
            adapter,
            out,
            adapter_name=adapter_name,
            max_shard_size=max_shard_size,
            quantization=quantization,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
        )
    except ShardwiseError as error:
        fail(error)
    click.echo(json.dumps(report.to_dict(), indent=2) if as_json else str(report))
