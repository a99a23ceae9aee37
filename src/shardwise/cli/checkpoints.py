"""Commands on checkpoints: ``inspect``, ``verify``, ``merge-adapter``, ``merge-weights``."""

import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from shardwise.cli.launch import print_report, require_one_process, to_json
from shardwise.cli.progress import importing, signs_of_life
from shardwise.core.errors import FormatError
from shardwise.core.formatting import collapse, in_bytes, table_lines
from shardwise.files.checkpoint_index import CheckpointIndex, StoredTensor
from shardwise.files.open_checkpoint import open_checkpoint
from shardwise.files.peft_adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from shardwise.files.remote import resolve
from shardwise.files.urls import HubOptions, is_url, shown


@click.command("verify")
@click.argument("model")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def verify_command(model: str, as_json: bool) -> None:  # noqa: FBT001 - click's signature
    """Check the structure and coverage of MODEL, and the checksums recorded when it was saved.

    MODEL is the folder of a model, an adapter, a checkpoint of a training, or several of these, of which the newest
    is read. Exits with 1 when something differs, with 2 when MODEL cannot be opened.
    """
    with importing("torch and transformers"):
        from shardwise.checkpoints.step_folders import verify
    with signs_of_life("verify"):
        report = verify(model)
    print_report(report, as_json=as_json)
    sys.exit(0 if report.is_sound else 1)


@click.command("merge-adapter")
@click.argument("base")
@click.argument("adapter")
@click.argument("out", type=click.Path(file_okay=False))
@click.option(
    "--dtype", default="auto", show_default=True, help="Dtype of the output: auto, float32, bfloat16, ..."
)
@click.option(
    "--max-shard-size", default="50GB", show_default=True, help="Maximum size of the tensors of one file."
)
@click.option(
    "--adapter-name", default="default", show_default=True, help="Name of the adapter, if ADAPTER has several."
)
@click.option("--trust-remote-code", is_flag=True, help="Run model code of the base.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def merge_adapter_command(base: str, adapter: str, out: str, *, as_json: bool, **options: Any) -> None:
    """Fold the LoRA ADAPTER into BASE and write the model to OUT.

    BASE and ADAPTER are folders, or repositories in the cache of the Hugging Face hub. One process, no
    accelerator, memory that does not grow with the model. Exits with 2, and leaves OUT as it was, when the adapter
    does not fit the base or would change nothing.
    """
    require_one_process()
    with importing("torch and transformers"):
        from shardwise.saving.merge_adapter import merge_adapter
    with signs_of_life("merge-adapter"):
        report = merge_adapter(base, adapter, out, **options)
    print_report(report, as_json=as_json)


@click.command("merge-weights")
@click.argument("checkpoint", type=click.Path())
@click.argument("out", type=click.Path(file_okay=False))
@click.option("--base", help="A folder, or repository in the hub's cache, with the model's config.json.")
@click.option("--dtype", help="Dtype of the output: float32, bfloat16, ...  [default: as stored]")
@click.option(
    "--key-mapping",
    nargs=2,
    multiple=True,
    metavar="REGEX REPLACEMENT",
    help="Rename keys of CHECKPOINT before the model's own renames. May be repeated.",
)
@click.option(
    "--max-shard-size", default="50GB", show_default=True, help="Maximum size of the tensors of one file."
)
@click.option(
    "--format",
    "file_format",
    type=click.Choice(["safetensors", "bin"]),
    default="safetensors",
    show_default=True,
    help="bin: one file of torch.save.",
)
@click.option("--remove-source", is_flag=True, help="Remove CHECKPOINT after OUT has been read back and compared.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def merge_weights_command(
    checkpoint: str, out: str, *, key_mapping: tuple[tuple[str, str], ...], as_json: bool, **options: Any
) -> None:
    """Write CHECKPOINT to OUT as safetensors files under the names of the hub.

    CHECKPOINT is a folder of torch.distributed.checkpoint, the folder above one (accelerate's, a trainer's
    checkpoint-N), or whatever else `shardwise inspect` reads. The folder of an optimizer's state becomes
    optimizer.bin. One process, memory that does not grow with the model. Exits with 2, and leaves OUT as it was,
    when it cannot be done.
    """
    require_one_process()
    with importing("torch and transformers"):
        from shardwise.saving.merge_weights import merge_weights
    with signs_of_life("merge-weights"):
        report = merge_weights(checkpoint, out, key_mapping=dict(key_mapping), **options)
    print_report(report, as_json=as_json)


_CONFIG_FACTS = ("architectures", "model_type", "dtype", "tie_word_embeddings", "transformers_weights")
_ADAPTER_FACTS = ("base_model_name_or_path", "peft_type", "r", "lora_alpha", "target_modules")
_MAX_CONFIG_BYTES = 10_000_000
_SHOWN_IGNORED = 10
_DIGITS = re.compile(r"([0-9]+)")


@click.command("inspect")
@click.argument("path")
@click.option("--json", "as_json", is_flag=True, help="Print everything as one JSON object.")
@click.option("--tensors", "with_tensors", is_flag=True, help="List the tensors, equal layers in one line.")
@click.option("--revision", help="Branch, tag or commit of a hub repository.")
def inspect_command(path: str, *, as_json: bool, with_tensors: bool, revision: str | None) -> None:
    """Show the content of the checkpoint at PATH.

    PATH is a folder (of a model or an adapter), a safetensors, .bin or index file, a URL of one of these, or the
    name of a repository that is in the cache of the Hugging Face hub. Only headers are read, and nothing in them is
    run.
    """
    if is_url(path):
        index, config = open_checkpoint(path), dict[str, object]()
    else:
        local = resolve(path, HubOptions(revision=revision, local_files_only=True), download=False)
        config = read_config_summary(local if local.is_dir() else local.parent)
        # A file is opened as it is. In a folder, the file that its config names, or that of an adapter.
        weights: object = None
        if local.is_dir():
            weights = config.get("transformers_weights") or _find_adapter(local)
        index = open_checkpoint(local, weights_name=weights if isinstance(weights, str) else None)
    if as_json:
        click.echo(to_json(as_json_object(index, config)))
        return
    _print_summary(index, config)
    if with_tensors:
        _print_groups(index.tensors())


def _find_adapter(folder: Path) -> str | None:
    """Return the file of an adapter if the folder has no model."""
    if not (folder / ADAPTER_CONFIG).is_file() or (folder / "config.json").is_file():
        return None
    return next((name for name in ADAPTER_WEIGHTS if (folder / name).is_file()), None)


# Facts


def read_config_summary(folder: Path) -> dict[str, object]:
    """Read facts from the top level of ``config.json`` and ``adapter_config.json``. Empty without them.

    Raises:
        FormatError: a file is not a JSON object.
    """
    summary: dict[str, object] = {}
    for file, names in (("config.json", _CONFIG_FACTS), (ADAPTER_CONFIG, _ADAPTER_FACTS)):
        if (folder / file).is_file():
            config = _read_config(folder / file)
            summary |= {name: value for name, value in config.items() if name in names}
    return summary


def _read_config(file: Path) -> dict[str, object]:
    try:
        if file.stat().st_size > _MAX_CONFIG_BYTES:
            raise ValueError(f"it has more than {_MAX_CONFIG_BYTES} bytes")
        # json accepts Infinity, which transformers writes into the configurations of state space models.
        config = json.loads(file.read_text("utf-8"))
        if not isinstance(config, dict):
            raise ValueError(f"it is a JSON {type(config).__name__}, not an object")
    except (OSError, ValueError, RecursionError) as error:
        raise FormatError(f"{shown(str(file))}: cannot be read ({error}). Download or write it again") from error
    if "torch_dtype" in config:  # its name before transformers 5
        config.setdefault("dtype", config["torch_dtype"])
    return config


def bytes_per_dtype(tensors: Iterable[StoredTensor]) -> dict[str, int]:
    """Return the bytes of all tensors of each dtype, in descending order."""
    totals: Counter[str] = Counter()
    for tensor in tensors:
        totals[tensor.dtype.label] += tensor.nbytes
    return dict(totals.most_common())


def as_json_object(index: CheckpointIndex, config: dict[str, object]) -> dict[str, object]:
    """Return all facts of a checkpoint as one JSON object.

    A contiguous tensor has a file, a start and a stop. Any other has parts that do.
    """
    tensors = index.tensors()
    entries: list[dict[str, object]] = []
    for tensor in tensors:
        entry = {
            "key": tensor.key,
            "dtype": tensor.dtype.label,
            "shape": list(tensor.shape),
            "bytes": tensor.nbytes,
        }
        entries.append({**entry, **_locate(index, tensor)})
    return {
        "root": index.root,
        "layout": index.layout,
        "wrapper": index.wrapper,
        "not_loaded": list(index.ignored),
        "files": [{"name": name, "bytes": nbytes} for name, nbytes in index.files.items()],
        "tensor_count": len(tensors),
        "parameter_count": _count_parameters(tensors),
        "bytes": index.nbytes,
        "bytes_per_dtype": bytes_per_dtype(tensors),
        "config": config,
        "metadata": dict(index.metadata),
        "tensors": entries,
    }


def _locate(index: CheckpointIndex, tensor: StoredTensor) -> dict[str, object]:
    # One for each stored entry. Only a composed tensor may have several.
    ranges = [{"file": entry.file, "start": entry.start, "stop": entry.stop} for entry in tensor.entries]
    if tensor.key not in index.composed:
        return {**ranges[0]}
    entries = zip(tensor.entries, ranges, strict=True)
    return {"parts": [{"key": entry.key, **file_range} for entry, file_range in entries]}


def _count_parameters(tensors: Iterable[StoredTensor]) -> int:
    return sum(tensor.numel for tensor in tensors)


def _natural_sort_key(key: str) -> list[tuple[str, int]]:
    """Return a sort key by which layer 2 comes before layer 10."""
    # "layers.10.bias" is split into "layers.", "10" and ".bias", and sorted by [("layers.", 10), (".bias", 0)].
    words = _DIGITS.split(shown(key))
    return [(word, int(number)) for word, number in zip(words[::2], [*words[1::2], "0"], strict=True)]


# Rendering


def _print_summary(index: CheckpointIndex, config: dict[str, object]) -> None:
    tensors = index.tensors()
    facts = [
        ("checkpoint", shown(index.root)),
        ("layout", index.layout),
        ("tensors", f"{len(tensors):,}"),
        ("parameters", f"{_count_parameters(tensors):,}"),
        ("bytes", in_bytes(index.nbytes)),
    ]
    per_dtype = bytes_per_dtype(tensors)
    facts += [(f"  {dtype}", in_bytes(nbytes)) for dtype, nbytes in per_dtype.items()]
    facts += [(name, shown(json.dumps(value))) for name, value in config.items()]
    if index.wrapper:
        facts.append(("taken from", shown(index.wrapper)))
    facts += [("not loaded", shown(name)) for name in index.ignored[:_SHOWN_IGNORED]]
    if len(index.ignored) > _SHOWN_IGNORED:
        facts.append(("not loaded", f"... and {len(index.ignored) - _SHOWN_IGNORED} more"))
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        click.echo(f"{name:<{width}}  {value}")
    click.echo()
    files = [(shown(name), in_bytes(nbytes)) for name, nbytes in index.files.items()]
    click.echo("\n".join(table_lines(("file", "bytes"), files, ("bytes",))))


def _print_groups(tensors: Iterable[StoredTensor]) -> None:
    """Print a line for tensors that differ only in numbers in their keys, such as those of equal layers."""
    # By shape and dtype first, so that a pattern of keys stands for tensors that are alike.
    groups: dict[tuple[tuple[int, ...], str], list[StoredTensor]] = defaultdict(list)
    for tensor in sorted(tensors, key=lambda tensor: _natural_sort_key(tensor.key)):
        groups[tensor.shape, tensor.dtype.label].append(tensor)
    rows: list[tuple[str, ...]] = []
    for (shape, dtype), members in groups.items():
        for pattern, count in collapse(shown(tensor.key) for tensor in members):
            repeats = f"x{count}" if count > 1 else ""
            rows.append((pattern, str(shape), dtype, repeats, in_bytes(count * members[0].nbytes)))
    rows.sort(key=lambda row: _natural_sort_key(row[0]))
    click.echo()
    click.echo("\n".join(table_lines(("key", "shape", "dtype", "count", "bytes"), rows, ("count", "bytes"))))
