"""Commands on checkpoints: ``shardwise verify``, ``merge-adapter``, ``merge-weights``."""

from __future__ import annotations

import sys

import click

from shardwise.cli.launch import fail, print_report
from shardwise.errors import ShardwiseError


@click.command("verify")
@click.argument("model")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
def verify_command(model: str, as_json: bool) -> None:  # noqa: FBT001 - click's signature
    """Open MODEL, a directory, again: structure, coverage, and the checksums recorded when it was saved.

    MODEL may be a model, an adapter, or checkpoints of a training, of which the newest is read (or one of them).
    Exits with 1 when something differs, with 2 when the model cannot be opened.
    """
    from shardwise.checkpoints.folder import verify

    try:
        found = verify(model)
    except ShardwiseError as error:
        fail(error)
    print_report(found, as_json=as_json)
    sys.exit(0 if found.is_sound else 1)


@click.command("merge-adapter")
@click.argument("base")
@click.argument("adapter")
@click.argument("out", type=click.Path(file_okay=False))
@click.option("--dtype", default="auto", show_default=True, help="Of the outcome: auto, float32, bfloat16, ...")
@click.option("--max-shard-size", default="50GB", show_default=True, help="Of one file's tensors.")
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
    adapter_name: str,
    trust_remote_code: bool,
    as_json: bool,
) -> None:
    """Fold the LoRA ADAPTER into BASE and write the model to OUT.

    BASE and ADAPTER are folders, or repositories in the cache of the Hugging Face hub. One process, no
    accelerator, memory that does not grow with the model. Exits with 2, and leaves OUT as it was, when the adapter
    does not fit the base or would change nothing.
    """
    from shardwise.engines.merging_adapter import merge_adapter

    try:
        report = merge_adapter(
            base,
            adapter,
            out,
            adapter_name=adapter_name,
            max_shard_size=max_shard_size,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
        )
    except ShardwiseError as error:
        fail(error)
    print_report(report, as_json=as_json)


@click.command("merge-weights")
@click.argument("checkpoint", type=click.Path())
@click.argument("out", type=click.Path(file_okay=False))
@click.option("--base", help="A folder, or repository in the hub's cache, with the model's config.json.")
@click.option("--dtype", help="Of the outcome: float32, bfloat16, ...  [default: as stored]")
@click.option("--max-shard-size", default="50GB", show_default=True, help="Of one file's tensors.")
@click.option(
    "--format",
    "file_format",
    type=click.Choice(["safetensors", "bin"]),
    default="safetensors",
    show_default=True,
    help="bin: one file of torch.save.",
)
@click.option("--remove-source", is_flag=True, help="Remove CHECKPOINT once OUT has been read back and compared.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
def merge_weights_command(
    checkpoint: str,
    out: str,
    *,
    base: str | None,
    dtype: str | None,
    max_shard_size: str,
    file_format: str,
    remove_source: bool,
    as_json: bool,
) -> None:
    """Write CHECKPOINT to OUT as safetensors files under the names of the hub.

    CHECKPOINT is a folder of torch.distributed.checkpoint, the folder above one (accelerate's, a trainer's
    checkpoint-N), or whatever else `shardwise inspect` reads. The folder of an optimizer's state becomes
    optimizer.bin. One process, memory that does not grow with the model. Exits with 2, and leaves OUT as it was,
    when it cannot be done.
    """
    from shardwise.interchange.merging_weights import merge_weights

    try:
        report = merge_weights(
            checkpoint,
            out,
            base=base,
            dtype=dtype,
            max_shard_size=max_shard_size,
            file_format="bin" if file_format == "bin" else "safetensors",
            remove_source=remove_source,
        )
    except ShardwiseError as error:
        fail(error)
    print_report(report, as_json=as_json)
