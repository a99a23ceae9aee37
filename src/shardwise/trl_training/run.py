"""One training of ``shardwise train`` on every rank: a model of ours in one of TRL's trainers."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from shardwise.errors import ConfigError
from shardwise.execution.ranks.world import World
from shardwise.execution.writing.marked_folder import Marked, marked_by_first
from shardwise.integrations.trainer_runs import FolderKind, checkpoints_in
from shardwise.training.stopping import stopping_on_signals
from shardwise.trl_training import setup as trl_setup
from shardwise.trl_training.callbacks import RecordProgress, StopOnSignal, guard_trackers, summary_lines
from shardwise.trl_training.run_config import RunConfig

RUN_FOLDER: Final = ".shardwise-run"
"""A folder in ``output_dir`` that is locked while a training runs, and says which one."""

_RUN_FILE: Final = "run.json"

_IDENTITY: Final = (
    *("model_name_or_path", "model_revision", "dataset_name", "dataset_config", "datasets"),
    *("use_peft", "lora_r", "lora_alpha", "lora_target_modules", "load_in_4bit", "bnb_4bit_quant_type"),
)
"""Keys that may not change when a training is resumed."""


@dataclass(frozen=True, slots=True)
class TrlOutcome:
    """The end of a training, on one rank.

    Attributes:
        output_dir: the folder that has the model, or the checkpoints of a training that was stopped.
        steps: optimizer steps done.
        has_stopped: whether a signal ended it before its last step.
        metrics: what TRL's ``train`` returned.
        history: entries that the trainer logged.
        summary: lines to print.
    """

    output_dir: str
    steps: int
    has_stopped: bool
    metrics: Mapping[str, Any]
    history: tuple[Mapping[str, Any], ...]
    summary: tuple[str, ...]


def train_on_rank(config: RunConfig, local_rank: int) -> TrlOutcome:
    """Train as a configuration says. Collective: yes, over the default process group.

    Raises:
        ShardwiseError: the same on every rank, if the configuration, the data or the model cannot be used.
    """
    with World.current(call="train") as world:
        arguments = world.together(lambda: trl_setup.parse(config))
    output = Path(arguments.training.output_dir)
    with stopping_on_signals() as request, _held(output, _identity(config)):
        with World.current(call="train") as world:
            processor = world.together(lambda: trl_setup.processing_class(arguments, config.method))
        data = trl_setup.load_data(arguments, config.method, processor, local_rank)
        model = trl_setup.bring_up(arguments, config.method)
        trl_setup.require_pad_token(model, processor)
        reference = trl_setup.bring_up_reference(arguments, config.method)
        trainer = trl_setup.make_trainer(arguments, config.method, model, reference, processor, data)
        guard_trackers(trainer)
        stop, record = StopOnSignal(request), RecordProgress()
        trainer.add_callback(stop)
        trainer.add_callback(record)
        done = trainer.train(resume_from_checkpoint=_resume_from(arguments.training, output))
        if not stop.has_stopped:
            trainer.save_model(str(output))
            if arguments.training.push_to_hub:
                trainer.push_to_hub(dataset_name=arguments.script.dataset_name)
        state = trainer.state
        tokens = int(state.num_input_tokens_seen) or None
        summary = summary_lines(
            record.progress, steps=int(state.global_step), tokens=tokens, peak_bytes=_peak_bytes()
        )
        if hasattr(trainer, "end"):  # since transformers 5.18
            trainer.end()
    return TrlOutcome(
        str(output),
        int(state.global_step),
        stop.has_stopped,
        dict(done.metrics),
        tuple(state.log_history),
        tuple(summary),
    )


def _identity(config: RunConfig) -> dict[str, Any]:
    return {"method": config.method, **{key: config.values.get(key) for key in _IDENTITY}}


@contextmanager
def _held(output: Path, identity: Mapping[str, Any]) -> Iterator[None]:
    """Hold an output folder for the time of a training. Collective: yes.

    Raises:
        StorageError: another training runs there.
        ConfigError: the folder has another training, naming the key that differs.
    """
    folder = output / RUN_FOLDER

    def check(_marked: Marked) -> None:
        file = folder / _RUN_FILE
        has_weights = bool(checkpoints_in(output)) or any(output.glob("*.safetensors"))
        if has_weights and not file.is_file():
            raise ConfigError(
                f"output_dir: {output} has a model that this training would overwrite. Set another output_dir."
            )
        found = _recorded(file) if has_weights else identity
        differing = [key for key in identity if found.get(key) != identity[key]]
        if differing:
            key = differing[0]
            raise ConfigError(
                f"output_dir: {output} has a training with {key}={found.get(key)!r}, not {identity[key]!r}. "
                "Set another output_dir, or remove that one."
            )
        written = file.with_suffix(".new")
        written.write_text(json.dumps(dict(identity), indent=2), "utf-8")
        written.replace(file)  # a kill leaves the older record or this one

    with World.current(call="train") as world:
        world.from_first(lambda: folder.mkdir(parents=True, exist_ok=True))
        with marked_by_first(world, folder, check, lambda _marked: None) as held:
            try:
                yield
            finally:
                if world.rank == 0:
                    held.marked.release()


def _recorded(file: Path) -> Mapping[str, Any]:
    """Read the keys of the training that a folder has.

    Raises:
        ConfigError: the record is damaged.
    """
    try:
        found = json.loads(file.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: is damaged, {error}. Set another output_dir.") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file}: is not a record of a training. Set another output_dir.")
    return found


def _resume_from(training: Any, output: Path) -> Any:
    """The checkpoint to resume from: the one asked for, else the newest in the output folder, if there is one."""
    if training.resume_from_checkpoint is not None:
        return training.resume_from_checkpoint
    with World.current(call="train") as world:
        kinds = world.from_first(lambda: list(checkpoints_in(output).values()))
    return True if FolderKind.COMPLETE in kinds else None


def _peak_bytes() -> int:
    """The peak memory of this rank: of its accelerator, or else of the process."""
    if torch.accelerator.is_available():
        return int(torch.accelerator.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
