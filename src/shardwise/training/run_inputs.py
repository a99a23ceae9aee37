"""Inputs of a training run of one model or of many LoRAs: arguments, the locked folder, the tokenizer, rows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
import transformers

from shardwise.core.errors import ConfigError, StorageError
from shardwise.core.formatting import folder_name
from shardwise.files.checkpoint_index import parse_object
from shardwise.files.local_writer import LocalWriter
from shardwise.fsdp import torch_private
from shardwise.integrations.trainer_checkpoints import checkpoints_in
from shardwise.ranks.call_arguments import comparing_arguments
from shardwise.ranks.stop_signals import StopRequest, stopping_on_signals
from shardwise.ranks.world import World
from shardwise.saving.locked_folder import lock_on_first_rank
from shardwise.training import trl_objects
from shardwise.training.adapter_rows import tokenize
from shardwise.training.adapters_config import describe_row_settings, read_adapters
from shardwise.training.dataset_loading import AnyDataset
from shardwise.training.rank_comparison import (
    effective_settings,
    mask_secrets,
    require_same_rows,
)
from shardwise.training.run_config import RunConfig

SINGLE: Final = ""
"""The name under which a single model has its arguments and rows."""

RUN_FOLDER: Final = ".shardwise-run"
"""A folder in ``output_dir`` with the record of its training, locked while the training runs."""

_RUN_FILE: Final = "run.json"

# After a change of one of these, the weights in the folder are of another run. Learning rates and steps may change.
_IDENTITY_OF_BASE: Final = ("model_name_or_path", "model_revision", "load_in_4bit", "bnb_4bit_quant_type")
"""Keys of the base of many LoRAs that may not change when a run resumes."""

_IDENTITY: Final = (
    *_IDENTITY_OF_BASE,
    *("dataset_name", "dataset_config", "datasets", "use_peft", "lora_r", "lora_alpha", "lora_target_modules"),
)
"""Keys of a single model, and of each adapter, that may not change when a run resumes."""

_IDENTITY_OF_ADAPTER: Final = (
    *_IDENTITY,
    *("lora_dropout", "lora_target_parameters", "use_rslora", "disable_dropout", "seed"),
)
"""Keys of each adapter, which resumes with the LoRA and the seed of its checkpoint."""

_DEFAULTS: Final = {
    key.name: key.default
    for kind in (trl_objects.trl.ModelConfig, transformers.TrainingArguments)
    for key in fields(kind)
}
"""Values of keys that are not set. Records have None for them."""

_OWN_IDENTITY: Final = (
    "dataset_mixer",
    "dataset_splits",
    "dataset_mixture",
    "system_prompt",
    "dataset_prompt_column",
)
"""Keys of shardwise that may not change either, once they are set."""


@dataclass(frozen=True, slots=True)
class RunInputs:
    """Inputs of a training run, equal on every rank.

    Attributes:
        arguments: configurations of the adapters by name, as parsed by TRL. The name of a single model is SINGLE.
        processor: the tokenizer, or the processor of a vision-language model.
        data: rows to train on and to evaluate on, by the same names. The rows of adapters are tokenized.
        output: the folder of the run, which has a folder for each adapter.
        record: the record of the training there.
        request: of a signal to stop.
    """

    arguments: Mapping[str, trl_objects.TrlArguments]
    processor: Any
    data: Mapping[str, tuple[AnyDataset, AnyDataset | None]]
    output: Path
    record: TrainingRecord
    request: StopRequest


@contextmanager
def open_inputs(config: RunConfig, local_rank: int) -> Iterator[RunInputs]:
    """Parse a configuration, lock its folder within the block, and load the tokenizer and rows. Collective: yes.

    Raises:
        ShardwiseError: the same on every rank, if the configuration, the folder or the data cannot be used.
    """
    configs = read_adapters(config) if config.own.has_adapters else {SINGLE: config}
    with World.current(call="train") as world:
        with world.collective("parse the configuration"):
            parsed = {name: trl_objects.parse(adapter_config) for name, adapter_config in configs.items()}
        # Ranks of a launcher read files and environments of their own.
        with comparing_arguments(world, "the configuration") as exchange:
            settings: dict[str, str] = {}
            for name, arguments in parsed.items():
                for key, value in effective_settings(arguments).items():
                    settings[f"{name}.{key}" if name else key] = value
            exchange.local = settings
    # Any of them has the keys of the base. Keys of the tokenizer are keys of SFT, so one of SFT is preferred.
    shared = next(iter(parsed.values()))
    for arguments in parsed.values():
        if arguments.own.method == "sft":
            shared = arguments
            break
    output = Path(shared.training.output_dir)
    # The keys that a training run keeps when it resumes. Those of an adapter are NAME.KEY.
    identity = get_identity(config, config.method)
    weights = ["*.safetensors"]
    if config.own.has_adapters:
        output = output.parent  # each adapter has a folder in it
        weights = ["*/*.safetensors", "*/checkpoint-*/*.safetensors"]
        identity = get_identity(config, "adapters", _IDENTITY_OF_BASE)
        for name, adapter_config in configs.items():
            adapter = get_identity(adapter_config, adapter_config.method, _IDENTITY_OF_ADAPTER)
            identity |= {f"{name}.{key}": value for key, value in adapter.items()}
    # Locked before rows are tokenized, which may take long: a second training in the folder is refused at once.
    with stopping_on_signals() as request, lock_output(output, identity, weights) as record:
        honor_timeout(config, shared)
        with World.current(call="train") as world, world.collective("load the tokenizer"):
            processor = trl_objects.load_processor(shared)
        data: dict[str, tuple[AnyDataset, AnyDataset | None]] = {}
        # The adapters of a sweep of learning rates share their rows.
        by_settings: dict[str, tuple[AnyDataset, AnyDataset | None]] = {}
        for name, arguments in parsed.items():
            settings_of_rows = describe_row_settings(configs[name])
            if settings_of_rows in by_settings:
                data[name] = by_settings[settings_of_rows]
                continue
            with name_adapter(name):
                data[name] = trl_objects.load_data(arguments, processor, local_rank)
                if config.own.has_adapters:  # TRL's trainers tokenize rows themselves
                    data[name] = tokenize(data[name], arguments, processor, local_rank)
            for split, dataset in zip(("train", "test"), data[name], strict=True):
                require_same_rows(f"{name}.{split}" if name else split, dataset)
            by_settings[settings_of_rows] = data[name]
        yield RunInputs(parsed, processor, data, output, record, request)


@contextmanager
def name_adapter(name: str) -> Iterator[None]:
    """Add the name of an adapter to errors of the block. The name of a single model is SINGLE."""
    try:
        yield
    except ConfigError as error:
        if not name:
            raise
        raise ConfigError(f"adapters.{name}: {error}") from error


def honor_timeout(config: RunConfig, arguments: trl_objects.TrlArguments) -> None:
    """Have ranks wait for each other as long as ``ddp_timeout`` says, if it is set."""
    if "ddp_timeout" in config.values and dist.is_initialized():
        torch_private.set_timeout(arguments.training.ddp_timeout)


def get_identity(config: RunConfig, method: str, keys: Sequence[str] = _IDENTITY) -> dict[str, Any]:
    """Return the keys that must be equal when a training run resumes, as recorded, without credentials in URLs."""
    values = {key: config.values.get(key) for key in keys}
    values |= {key: value for key in _OWN_IDENTITY if (value := getattr(config.own, key)) is not None}
    return {"method": method, **{key: mask_secrets(value) for key, value in values.items()}}


@contextmanager
def lock_output(output: Path, identity: Mapping[str, Any], weights: Sequence[str]) -> Iterator[TrainingRecord]:
    """Lock an output folder within the block, and record its training there. Collective: yes.

    Args:
        output: the folder.
        identity: keys that must be equal to those of a training run whose weights are in the folder.
        weights: patterns of files in the folder that are weights of a training run.

    Raises:
        StorageError: another training runs there, or the folder cannot be created, or a rank does not see it.
        ConfigError: the folder has another training. The message has the key that differs.
    """
    # The output folder itself is not locked: each save of a checkpoint locks it.
    folder = output / RUN_FOLDER
    with World.current(call="train") as world:
        with world.broadcast("create the folder"):
            if world.rank == 0:
                try:
                    folder.mkdir(parents=True, exist_ok=True)
                except OSError as error:
                    raise StorageError(
                        f"output_dir: {output} cannot be created, {error.strerror}. Set one that can be written"
                    ) from error
        with lock_on_first_rank(world, folder) as saving:
            with world.collective("check the folder"):  # now, and not at the first checkpoint
                saving.require()
            with world.broadcast("record the run"):
                if world.rank == 0:
                    _check_and_record(output, identity, weights)
            yield TrainingRecord(folder / _RUN_FILE)
            # lock_on_first_rank() releases the lock only if the block raises.
            if world.rank == 0:
                saving.locked.release()


@dataclass(frozen=True, slots=True)
class TrainingRecord:
    """The record of a run in its output folder, without which its checkpoints do not resume."""

    file: Path

    def require_on_first_rank(self, world: World) -> None:
        """Require that the record is still there, before something is saved next to it. Collective: yes.

        Raises:
            StorageError: it was removed during the training.
        """
        with world.broadcast("check the run's record"):
            if world.rank == 0:
                self.require()

    def require(self) -> None:
        """As ``require_on_first_rank``, on this rank alone. Collective: no."""
        if not self.file.is_file():
            raise StorageError(
                f"{self.file}: was removed during the training, maybe with its folder, and nothing more is saved "
                "there. Start the training again, in a folder that stays"
            )


def _check_and_record(output: Path, identity: Mapping[str, Any], weights: Sequence[str]) -> None:
    """Write the record of a training run, unless the folder has another training."""
    file = output / RUN_FOLDER / _RUN_FILE
    # Without weights a record may be replaced: its training has saved nothing that could be mixed up.
    # What has been saved: files of a single model, or folders of adapters.
    saved: set[str] = set()
    for pattern in weights:
        for path in output.glob(pattern):
            saved.add(path.relative_to(output).parts[0])
    has_weights = bool(checkpoints_in(output) or saved)
    if has_weights and not file.is_file():
        raise ConfigError(
            f"output_dir: {output} has a model that this training would overwrite, and no record of its own "
            f"training, {RUN_FOLDER}/{_RUN_FILE}. If it is a copy, copy that folder, too (cp -r out/. copy). Or "
            "set another output_dir, and resume_from_checkpoint to a checkpoint of this one"
        )
    recorded = dict(identity)
    if has_weights:
        recorded = dict(parse_object(file.read_bytes(), what=str(file)))
    # Also keys that were set, and are not set any more.
    for key in (*identity, *(key for key in _OWN_IDENTITY if key in recorded)):
        # NAME.KEY: adapters may be added to a run, and those that have saved nothing may change.
        name, _, own_key = key.rpartition(".")
        is_new_adapter = name and (key not in recorded or folder_name(name) not in saved)
        default = _DEFAULTS.get(own_key)
        before, now = (default if one is None else one for one in (recorded.get(key), identity.get(key)))
        if not is_new_adapter and before != now:
            raise ConfigError(
                f"output_dir: {output} has a training with {key}={before!r}, not {now!r}. Set another "
                "output_dir, or remove that one"
            )
    with LocalWriter(file.parent, folders=()) as writer:  # without a record, checkpoints do not resume
        writer.replace(file.name, json.dumps({**recorded, **identity}, indent=2).encode())
