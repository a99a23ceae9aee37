"""``shardwise merge-weights``."""

from __future__ import annotations

import json

import click

from shardwise.errors import ShardwiseError


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
    from shardwise.cli.launch import fail
    from shardwise.interchange.merging_weights import KeepSource, RemoveSource, Safetensors, TorchFile
    from shardwise.verbs.merge_weights import merge_weights

    try:
        report = merge_weights(
            checkpoint,
            out,
            base=base,
            dtype=dtype,
            max_shard_size=max_shard_size,
            file_format=TorchFile() if file_format == "bin" else Safetensors(),
            afterwards=RemoveSource() if remove_source else KeepSource(),
        )
    except ShardwiseError as error:
        fail(error)
    click.echo(json.dumps(report.to_dict(), indent=2) if as_json else str(report))
