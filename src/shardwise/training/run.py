"""A training of ``shardwise train`` on one rank: a sharded model in one of TRL's trainers."""

from __future__ import annotations

import json
import logging
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState

from shardwise.errors import ConfigError
from shardwise.execution.locked_folder import locked_by_first_rank
from shardwise.execution.processes import acknowledge_stop
from shardwise.execution.world import World
from shardwise.formats.contract import parse_object
from shardwise.integrations.trainer_runs import FolderKind, checkpoints_in
from shardwise.models import torch_api
from shardwise.report.names import table_lines
from shardwise.storage.names import without_secrets
from shardwise.training import setup as trl_setup
from shardwise.training.run_config import RunConfig

RUN_FOLDER: Final = ".shardwise-run"
"""A folder in ``output_dir`` with the record of its training, locked while the training runs."""

_RUN_FILE: Final = "run.json"

_log = logging.getLogger(__name__)

_IDENTITY: Final = (
    *("model_name_or_path", "model_revision", "dataset_name", "dataset_config", "datasets"),
    *("use_peft", "lora_r", "lora_alpha", "lora_target_modules", "load_in_4bit", "bnb_4bit_quant_type"),
)
"""Keys that may not change when a training resumes."""


@dataclass(frozen=True, slots=True)
class TrlOutcome:
    """Outcome of a training on one rank.

    Attributes:
        output_dir: folder of the model, or of the checkpoints of a training that was stopped.
        steps: optimizer steps.
        has_stopped: whether a signal ended it before its last step.
        metrics: metrics returned by TRL's ``train``.
        history: entries logged by the trainer.
        summary: lines to print.
    """

    output_dir: str
    steps: int
    has_stopped: bool
    metrics: Mapping[str, Any]
    history: tuple[Mapping[str, Any], ...]
    summary: tuple[str, ...]


def train_on_rank(config: RunConfig, local_rank: int) -> TrlOutcome:
    """Train from a configuration. Collective: yes, over the default process group.

    Raises:
        ShardwiseError: the same on every rank, if the configuration, the data or the model cannot be used.
    """
    with World.current(call="train") as world:
        arguments = world.run_all(trl_setup.parse, config)
    output = Path(arguments.training.output_dir)
    with stopping_on_signals() as request, locked_output(output, get_identity(config, config.method)):
        with World.current(call="train") as world:
            processor = world.run_all(trl_setup.processing_class, arguments, config.method)
        data = trl_setup.load_data(arguments, config.method, processor, local_rank)
        model = trl_setup.load_model(arguments, config.method)
        require_pad_token(model, processor)
        reference = trl_setup.load_reference(arguments, config.method)
        trainer = trl_setup.make_trainer(arguments, config.method, model, reference, processor, data, local_rank)
        trainer.add_callback(StopOnSignal(request))
        guard_trackers(trainer)
        done = trainer.train(resume_from_checkpoint=_resume_from(arguments.training, output))
        state = trainer.state
        with World.current(call="train") as world:  # early stopping leaves steps, too
            is_signaled = world.all_reduce_object(request.is_made, any)
        has_stopped = is_signaled and state.global_step < state.max_steps
        if not has_stopped:
            trainer.save_model(str(output))
            if arguments.training.push_to_hub:
                trainer.push_to_hub(dataset_name=without_secrets(arguments.script.dataset_name or ""))
        peak = peak_line(_estimated_bytes(config, world.size))
        summary = summary_lines(state, done.metrics["train_runtime"], trl_setup.tokens_seen(trainer), peak)
        if hasattr(trainer, "end"):  # since transformers 5.18
            trainer.end()
    return TrlOutcome(
        str(output),
        int(state.global_step),
        has_stopped,
        dict(done.metrics),
        tuple(state.log_history),
        tuple(summary),
    )


def require_pad_token(model: PreTrainedModel, processor: Any) -> None:
    """Check that the embeddings have a row for the padding token.

    Raises:
        ConfigError: they do not.
    """
    tokenizer = getattr(processor, "tokenizer", processor)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    embeddings: Any = model.get_input_embeddings()
    rows = int(embeddings.weight.shape[0])
    if pad is not None and pad >= rows:
        raise ConfigError(
            f"pad_token: has the id {pad}, and the model has embeddings for 0 to {rows - 1}. Set pad_token to a "
            "token of the model"
        )


def get_identity(config: RunConfig, method: str, keys: Sequence[str] = _IDENTITY) -> dict[str, Any]:
    """Return the keys that a resumed training must have in common, as recorded, without credentials in URLs."""
    return {"method": method, **{key: _masked(config.values.get(key)) for key in keys}}


def _masked(value: Any) -> Any:
    """Return a value of a configuration without credentials in URLs."""
    if isinstance(value, str):
        return without_secrets(value) if "://" in value else value
    if isinstance(value, dict):
        return {key: _masked(one) for key, one in value.items()}
    return [_masked(one) for one in value] if isinstance(value, list) else value


@contextmanager
def locked_output(
    output: Path, identity: Mapping[str, Any], weights: Sequence[str] = ("*.safetensors",)
) -> Iterator[None]:
    """Lock an output folder within the block. Collective: yes.

    Args:
        output: the folder.
        identity: keys that must be equal to those of a training whose weights are in the folder.
        weights: patterns of files in the folder that are weights of a training.

    Raises:
        StorageError: another training runs there.
        ConfigError: the folder has another training. The message has the key that differs.
    """
    folder = output / RUN_FOLDER
    with World.current(call="train") as world:
        world.broadcast(folder.mkdir, parents=True, exist_ok=True)
        with locked_by_first_rank(world, folder) as saving:
            world.broadcast(_record, output, identity, weights)
            try:
                yield
            finally:
                if world.rank == 0:
                    saving.locked.release()


def _record(output: Path, identity: Mapping[str, Any], weights: Sequence[str]) -> None:
    """Write the record of a training, unless the folder has another training."""
    file = output / RUN_FOLDER / _RUN_FILE
    has_weights = bool(checkpoints_in(output)) or any(any(output.glob(one)) for one in weights)
    if has_weights and not file.is_file():
        raise ConfigError(
            f"output_dir: {output} has a model that this training would overwrite. Set another output_dir"
        )
    found = parse_object(file.read_bytes(), what=str(file)) if has_weights else identity
    of_run = [key for key in identity if key in found or "." not in key]  # tenants (NAME.KEY) may be added
    if differing := [key for key in of_run if found.get(key) != identity[key]]:
        key = differing[0]
        raise ConfigError(
            f"output_dir: {output} has a training with {key}={found.get(key)!r}, not {identity[key]!r}. Set "
            "another output_dir, or remove that one"
        )
    written = file.with_suffix(".new")
    written.write_text(json.dumps({**found, **identity}, indent=2), "utf-8")
    written.replace(file)  # atomically


def _resume_from(training: Any, output: Path) -> Any:
    """Return the requested checkpoint, otherwise the newest in the output folder, or None."""
    if training.resume_from_checkpoint is not None:
        return training.resume_from_checkpoint
    with World.current(call="train") as world:
        kinds = world.broadcast(lambda: list(checkpoints_in(output).values()))
    return True if FolderKind.COMPLETE in kinds else None


_MEASURABLE_BYTES: Final = 10 << 20
"""The smallest difference of two peaks that is shown."""


def peak_bytes() -> int:
    """Return the peak memory of this rank: of its accelerator, otherwise of the process."""
    if (kind := torch_api.accelerator()) is not None:
        return int(torch_api.accelerator_module(kind).max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class StopOnSignal(TrainerCallback):
    """Saves a checkpoint and ends the training after the step in which a signal arrived.

    The trainer makes ranks agree on ``control`` after each step, so a signal to one rank stops all.
    """

    def __init__(self, request: StopRequest) -> None:
        self._request = request

    def on_step_end(self, *positional: Any, **_: Any) -> TrainerControl:
        """Request a checkpoint and the end."""
        control: TrainerControl = positional[2]
        if self._request.is_made:
            control.should_save = True
            control.should_training_stop = True
        return control


def guard_trackers(trainer: Any) -> None:
    """Have an experiment tracker (``WandbCallback``, ...) that fails end nothing: it is not called again."""
    for tracker in trainer.callback_handler.callbacks:
        if type(tracker).__module__.startswith("transformers.integrations"):
            events = [name for name in dir(tracker) if name.startswith("on_")]
            vars(tracker).update({name: _guarded(tracker, getattr(tracker, name), events) for name in events})


def _guarded(tracker: TrainerCallback, call: Callable[..., Any], events: Sequence[str]) -> Callable[..., Any]:
    def guarded(*positional: Any, **keywords: Any) -> Any:
        try:
            return call(*positional, **keywords)
        except Exception as error:
            _log.warning("%s: failed, %s. The training continues without it.", type(tracker).__name__, error)
            vars(tracker).update(dict.fromkeys(events, lambda *_, **__: None))
            return None

    return guarded


def peak_line(estimate: int | None = None) -> str:
    """Format the peak memory of this rank, and its estimate in bytes if there is one that differs."""
    line = f"peak memory of a rank: {peak_bytes() / 2**30:.2f} GiB"
    if estimate is None or abs(estimate - peak_bytes()) < _MEASURABLE_BYTES:
        return line
    return f"{line}, estimated {estimate / 2**30:.2f} GiB"


def _estimated_bytes(config: RunConfig, ranks: int) -> int | None:
    """Return the estimated peak of a rank on its accelerator, or None. Collective: yes, with replicas.

    There is none on the CPU, where the peak of a process includes its libraries, and none of methods that generate
    or have a reference model.
    """
    kind = torch_api.accelerator()
    if kind is None or config.method not in ("sft", "reward"):
        return None
    try:
        made = trl_setup.plan_run(config, ranks, {"device": kind.type})
    except Exception as error:  # the training has succeeded
        _log.warning("no estimate: %s", error)
        return None
    has_activations = made.training is not None and made.training.batch_size > 0
    return made.peak_bytes if has_activations else None


def summary_lines(state: TrainerState, seconds: float, tokens: int, peak: str) -> Sequence[str]:
    """Return the lines that summarize a training.

    Args:
        state: state at the end.
        seconds: duration.
        tokens: tokens of all ranks, 0 if unknown.
        peak: the line on memory.
    """
    losses = [float(entry["loss"]) for entry in state.log_history if "loss" in entry]
    evaluated = [float(entry["eval_loss"]) for entry in state.log_history if "eval_loss" in entry]
    lines = [f"trained {state.global_step} steps in {seconds:.1f} s"]
    if losses:
        lines.append(f"loss: {losses[0]:.4f} -> {losses[-1]:.4f}, best {min(losses):.4f}")
    if evaluated:
        lines.append(f"best evaluation loss: {min(evaluated):.4f}")
    if tokens:
        lines.append(f"{tokens:,} tokens, {tokens / max(seconds, 1e-9):,.0f} tokens/s")
    return [*lines, peak]


def tenant_sort_key(metrics: Mapping[str, Any]) -> tuple[bool, bool, float]:
    """Return a sort key: tenants by evaluation loss, then those without one by loss, then failures."""
    eval_loss: float | None = metrics.get("eval_loss")
    return "failure" in metrics, eval_loss is None, metrics.get("loss", 0.0) if eval_loss is None else eval_loss


def tenant_summary_lines(ranked: Mapping[str, Mapping[str, Any]], begun: float) -> list[str]:
    """Format the closing table of tenants."""
    rows: list[tuple[str, ...]] = []
    for place, (name, one) in enumerate(ranked.items(), 1):
        losses = (f"{one[key]:.4f}" if key in one else "-" for key in ("loss", "eval_loss"))
        rows.append((str(place), name, f"{one['steps']}/{one['max_steps']}", *losses))
    lines = table_lines(("", "tenant", "steps", "loss", "evaluation loss"), rows)
    lines += [f"{name}: failed in {one['failure']}" for name, one in ranked.items() if "failure" in one]
    return [*lines, f"{len(ranked)} tenants in {time.monotonic() - begun:.1f} s, {peak_line()}"]


STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopRequest:
    """Request of a signal to this rank to stop. The ranks agree on it after each step."""

    def __init__(self) -> None:
        self.number: int | None = None
        """The signal, once it has been handled."""

    @property
    def is_made(self) -> bool:
        return self.number is not None


@contextmanager
def stopping_on_signals() -> Iterator[StopRequest]:
    """Have SIGTERM, SIGUSR1 and SIGINT request a stop within the block. A second one ends this process.

    Slurm can send SIGUSR1 before the end of a job (``--signal=USR1@120``). On another thread than the main thread,
    which does not get signals, this does nothing.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def request_stop(number: int, _frame: FrameType | None) -> None:
        if not request.is_made:
            request.number = number
            if number == signal.SIGINT:  # started ranks get SIGTERM from a process that has acknowledged it
                acknowledge_stop()
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            sys.exit(128 + number)

    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:  # else the parent process passes Ctrl-C on
            signal.signal(number, request_stop)
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
