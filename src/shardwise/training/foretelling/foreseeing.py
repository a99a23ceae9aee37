"""What a whole training will take: found by shapes alone, for any number of ranks, without starting one."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed.fsdp import CPUOffloadPolicy

from shardwise.engines.forecasting import foreseen_of
from shardwise.engines.plan_options import PlanOptions
from shardwise.engines.read_rate import measured_read_rate
from shardwise.execution.memory.garbage import collected_later
from shardwise.models.wrapping.blocks import Off, PerBlock
from shardwise.models.wrapping.wrap import Sharding
from shardwise.report.training_plan import PhaseMemory, Room, TrainingPlan
from shardwise.storage.names import HubOptions
from shardwise.training.configuration.config import config_of, read_config
from shardwise.training.configuration.config_sections import TrainConfig
from shardwise.training.configuration.config_values import decided, quantization_of, sharding_on, tuning_of
from shardwise.training.configured_model import tokenizer_of
from shardwise.training.foretelling.step_memory import Machines, Measured, StepMemory
from shardwise.tuning.modes import AnyTuning, Full

_MOST_ROWS = 1 << 16
_TRIES = 12


def plan_training(
    config: TrainConfig | str | os.PathLike[str],
    *,
    ranks: int,
    nodes: int = 1,
    device: str = "cuda",
    memory_bytes: int | None = None,
    flops_per_s: float | None = None,
    read_bytes_per_s: float | Measured | None = None,
) -> TrainingPlan:
    """What a training by this configuration takes on each rank: memory by phase, time to load, time of a step.

    Configs and headers of files are read; no process is started. Rows are taken to be as long as
    ``data.max_length``.

    Collective: no.
    Memory: as of :func:`~shardwise.verbs.plan.plan`.

    Args:
        config: or the path of its YAML file.
        ranks: processes.
        nodes: machines they run on, in order.
        device: "cpu", or the kind of accelerator.
        memory_bytes: of each rank's accelerator, or of the host for each rank; None: not asked.
        flops_per_s: of each rank, as measured in such trainings; None: unknown.
        read_bytes_per_s: of each machine's storage; ``Measured()``: as it is read here, by reading a part;
            None: what is usual for the checkpoint's.

    Raises:
        ConfigError: the configuration cannot be read or honoured, or the model cannot be run without data.
        ShardwiseError: as of :func:`~shardwise.verbs.plan.plan`.
    """
    machines = Machines(
        ranks=ranks,
        nodes=nodes,
        device=device,
        memory_bytes=memory_bytes,
        flops_per_s=flops_per_s,
        read_bytes_per_s=read_bytes_per_s,
    )
    found = config if isinstance(config, TrainConfig) else read_config(os.fspath(config))
    return foresee_training(found, machines)


@collected_later()
def foresee_training(config: TrainConfig, machines: Machines) -> TrainingPlan:
    """The same of a configuration that has been read."""
    config = _decided(config, machines)
    sharding = sharding_on(config.sharding, config.options(), None)
    tuning = tuning_of(config.tuning)
    foreseen = foreseen_of(config.model.name, machines.ranks, _options_of(config, sharding, tuning, machines))
    return _plan(StepMemory(config, machines, sharding, tuning, foreseen))


@dataclass(frozen=True, slots=True)
class StepAsked:
    """A step of a training of which nothing else is said."""

    rows: int
    row_tokens: int


def foresee_step(model: str, step: StepAsked, options: PlanOptions, machines: Machines) -> TrainingPlan:
    """The plan of a training that the options of a load describe, and else is as ``shardwise train`` has it.

    The compute dtype is that of ``sharding.mp_policy``; where it has none, as the device likes.

    Raises:
        ConfigError: it cannot be honoured.
        ShardwiseError: as of :func:`~shardwise.verbs.plan.plan`.
    """
    given = options.get("sharding", Sharding())
    dtype = given.mp_policy.param_dtype
    offload = "cpu" if isinstance(given.offload_policy, CPUOffloadPolicy) else "none"
    values: dict[str, Any] = {
        "model": {"name": model},
        "data": {"train": "-", "max_length": step.row_tokens},
        "output": {"directory": "-"},
        "training": {"batch_size": step.rows, "max_steps": 1},
        "sharding": {
            "precision": "auto" if dtype is None else str(dtype).removeprefix("torch."),
            "offload": offload,
        },
    }
    config = _decided(config_of(values, "the options"), machines)
    sharding = replace(sharding_on(config.sharding, config.options(), None), wrap=given.wrap)
    tuning = options.get("tuning", Full())
    own: PlanOptions = {**options, "sharding": sharding, "tuning": tuning}
    if machines.ranks == 1 and config.options().dtype == "float32":
        own["dtype"] = "float32"
    return _plan(StepMemory(config, machines, sharding, tuning, foreseen_of(model, machines.ranks, own)))


def _decided(config: TrainConfig, machines: Machines) -> TrainConfig:
    """What is left to the device, as it is usual there."""
    is_accelerator = machines.device != "cpu"
    return decided(config, "bfloat16" if is_accelerator else "float32", is_accelerator=is_accelerator)


def _options_of(config: TrainConfig, sharding: Sharding, tuning: AnyTuning, machines: Machines) -> PlanOptions:
    section, replicas = config.model, config.sharding.replicas
    is_cast = machines.ranks > 1 or config.options().dtype != "float32"
    options: PlanOptions = {
        "dtype": "auto" if is_cast else "float32",
        "tuning": tuning,
        "sharding": sharding,
        "hub": HubOptions(revision=section.revision),
        "trust_remote_code": section.trust_remote_code,
        "nodes": machines.nodes,
        "device": machines.device,
    }
    if replicas > 1:
        options["mesh"] = {"replicate": replicas, "shard": max(machines.ranks // replicas, 1)}
    if section.resize_vocab is not None:
        size = section.resize_vocab
        options["resize_vocab"] = len(tokenizer_of(section)) if isinstance(size, str) else size
    if (kept := quantization_of(config.quantization)) is not None:
        options["quantization"] = kept
    if section.attn_implementation is not None:
        is_flash = "flash" in section.attn_implementation
        options["attn_implementation"] = "sdpa" if is_flash else section.attn_implementation
    return options


def _plan(memory: StepMemory) -> TrainingPlan:
    options, machines = memory.options, memory.machines
    rows, times = options.batch_size, options.gradient_accumulation_steps
    phases = memory.phases(rows)
    flops = times * sum(stretch.flops for stretch in memory.stretches(rows))
    rate = machines.read_bytes_per_s or memory.policy.bytes_per_s
    if isinstance(rate, Measured):
        rate = measured_read_rate(memory.config.model.name, HubOptions(revision=memory.config.model.revision))
    speed = machines.flops_per_s
    return TrainingPlan(
        load=memory.load,
        rows=rows,
        row_tokens=options.max_length,
        micro_batches=times,
        precision=options.dtype,
        recomputed=_in_words(memory.sharding.activation_checkpointing),
        optimizer=memory.optimizers.names,
        phases=phases,
        peaks=memory.peaks(phases),
        tokens=rows * times * options.max_length,
        flops=flops,
        step_s=None if speed is None else flops / speed,
        load_s=memory.load.read_bytes / machines.nodes / rate,
        read_bytes_per_s=rate,
        room=_room(memory, phases),
        notes=tuple(_remarks(memory)),
    )


def _remarks(memory: StepMemory) -> list[str]:
    """What is worth knowing of how this was found."""
    found = list(memory.notes)
    if not isinstance(memory.sharding.compiling, Off):
        found.append("blocks are compiled: what that saves of activations is not counted")
    if memory.held.between and not memory.is_alone and memory.config.training.accumulate == "auto":
        found.append(
            "whole gradients are kept between micro-batches; training.accumulate=sharded_gradients keeps a rank's "
            "share, which is what auto takes where whole ones do not fit"
        )
    if memory.optimizers.is_guessed:
        names = memory.optimizers.names
        found.append(f"{names}: its state was taken of a small matrix, and counted by elements")
    return found


def _room(memory: StepMemory, phases: tuple[PhaseMemory, ...]) -> Room | None:
    nbytes, on = memory.machines.memory_bytes, memory.machines.device
    if nbytes is None:
        return None
    worst = max(phases, key=lambda phase: phase.bytes_on(on))
    terms = worst.host if on == "cpu" else worst.device
    term = max(terms, key=lambda name: terms[name])
    least = memory.peak(1)
    return Room(
        memory_bytes=nbytes,
        largest_batch=0 if least > nbytes else _largest(memory, nbytes),
        lacking_bytes=max(worst.bytes_on(on) - nbytes, 0),
        lacking_least_bytes=max(least - nbytes, 0),
        term=term,
        term_bytes=terms[term],
    )


def _largest(memory: StepMemory, nbytes: int) -> int:
    """The largest batch that fits: guessed by a line through two, and looked at."""
    fits, fails = 1, _MOST_ROWS + 1
    two, four = memory.passing(2), memory.passing(4)
    slope = max((four - two) / 2, 1)
    guess = int(2 + (nbytes - two) / slope)
    for _ in range(_TRIES):
        if fails - fits <= 1:
            break
        guess = min(max(guess, fits + 1), fails - 1)
        peak = memory.peak(guess)
        if peak <= nbytes:
            fits = guess
        else:
            fails = guess
        guess += int((nbytes - peak) / slope)
    return fits


def _in_words(recomputing: PerBlock | Off) -> str:
    match recomputing:
        case Off():
            return "activations kept"
        case PerBlock(every=1):
            return "blocks computed again"
        case PerBlock():
            return f"every {recomputing.every}th block computed again"
