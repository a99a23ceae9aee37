"""What a whole training will take: found by shapes alone, for any number of ranks, without starting one."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy

from shardwise.checkpoints.modes import CheckpointerOptions
from shardwise.engines.forecasting import Foreseen, PlanOptions, foreseen_of
from shardwise.errors import ConfigError
from shardwise.layout import Spread, Stretch, TensorKind
from shardwise.models.blocks import Off, PerBlock
from shardwise.models.dtypes import from_torch, to_torch
from shardwise.models.policies import repeated_blocks
from shardwise.models.selection import Everything
from shardwise.models.traced_activations import TracedModel
from shardwise.models.wrap import Sharding, prepare_blocks
from shardwise.planning.forecasts.training_memory import (
    COPY,
    STAGING,
    WEIGHTS,
    Alone,
    Arrangement,
    Held,
    InGroups,
    Moment,
    greatest,
    group_memories,
    moments,
    resting,
    stepping,
    trained_bytes,
)
from shardwise.report.training_plan import PhaseMemory, RankPeak, Room, TrainingPlan
from shardwise.storage.hub import HubOptions
from shardwise.training.batches import Batch
from shardwise.training.config import config_of, read_config
from shardwise.training.config_sections import TrainConfig
from shardwise.training.config_values import decided, loss_of, sharding_on, tuning_of
from shardwise.training.losses import WholeLogits, untried_loss
from shardwise.training.optimizer_memory import OptimizerBytes, OptimizerTrial
from shardwise.training.optimizers import optimizers_of, parameters_by_part
from shardwise.training.prepare import load_tokenizer
from shardwise.tuning.modes import AnyTuning, Full

_REUSED_BYTES = 256 << 20
_WINDOW_HALF_BYTES = 16 << 20
"""Of ``execution.moving.group_gather``, by which ranks of one machine gather on its processors."""

_MOST_ROWS = 1 << 16
_TRIES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """On what a training is to run; the attributes are arguments of :func:`plan_training`.

    Raises:
        ConfigError: naming what is not to be.
    """

    ranks: int
    nodes: int = 1
    device: str = "cuda"
    memory_bytes: int | None = None
    flops_per_s: float | None = None
    read_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "flops_per_s", "read_bytes_per_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"{name}={value}: it must be greater than 0; leave it out where it is not known")


def plan_training(
    config: TrainConfig | str | os.PathLike[str],
    *,
    ranks: int,
    nodes: int = 1,
    device: str = "cuda",
    memory_bytes: int | None = None,
    flops_per_s: float | None = None,
    read_bytes_per_s: float | None = None,
) -> TrainingPlan:
    """What a training by this configuration takes on each rank: memory by phase, time to load, time of a step.

    Configs and headers of files are read, and nothing else; no process is started. Rows are taken to be as long as
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
        read_bytes_per_s: of each machine's storage; None: what is usual for the checkpoint's.

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


def foresee_training(config: TrainConfig, machines: Machines) -> TrainingPlan:
    """The same of a configuration that has been read."""
    config = _decided(config, machines)
    sharding = sharding_on(config.sharding, config.options(), None)
    tuning = tuning_of(config.tuning)
    foreseen = foreseen_of(config.model.name, machines.ranks, _options_of(config, sharding, tuning, machines))
    return _Training(config, machines, sharding, tuning, foreseen).plan()


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
    return _Training(config, machines, sharding, tuning, foreseen_of(model, machines.ranks, own)).plan()


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
        options["resize_vocab"] = (
            len(load_tokenizer(section.tokenizer or section.name)) if isinstance(size, str) else size
        )
    if section.attn_implementation is not None:
        is_flash = "flash" in section.attn_implementation
        options["attn_implementation"] = "sdpa" if is_flash else section.attn_implementation
    return options


class _Training:
    """A training on the way to its plan."""

    def __init__(
        self,
        config: TrainConfig,
        machines: Machines,
        sharding: Sharding,
        tuning: AnyTuning,
        foreseen: Foreseen,
    ) -> None:
        self.config = config
        self.tuning = tuning
        self.machines = machines
        self.sharding = sharding
        self.options = config.options()
        self.load = foreseen.forecast
        self.tuned = foreseen.tuned
        self.world = foreseen.world
        self.policy = foreseen.policy
        self.notes: list[str] = []
        self.on_cpu = machines.device == "cpu"
        self.is_alone = machines.ranks == 1
        gathered_as, summed_in = sharding.mp_policy.param_dtype, sharding.mp_policy.reduce_dtype
        self.gathered_as = None if gathered_as is None else from_torch(gathered_as, "param_dtype")
        self.summed_in = None if summed_in is None else from_torch(summed_in, "reduce_dtype")
        self.offloads = isinstance(sharding.offload_policy, CPUOffloadPolicy)
        if self.offloads and self.is_alone:
            raise ConfigError(
                "sharding.offload='cpu': one process without a process group is not sharded, so there is no "
                "offload; plan it with two ranks or more"
            )
        self.optimizers = _Optimizers(self)
        self._traced: dict[int, tuple[Stretch, ...]] = {}

    # ── memory ────────────────────────────────────────────────────────────────────────────────────

    @cached_property
    def how(self) -> Arrangement:
        if self.is_alone:
            return Alone()
        groups = group_memories(self.world, self.gathered_as, self.summed_in, crosses=self.offloads)
        return InGroups(
            groups,
            reshards=self.sharding.reshard_after_forward is not False,
            copies_to_sum=self.on_cpu,
            reused=_REUSED_BYTES if self._gathers_in_windows else 0,
        )

    @property
    def _gathers_in_windows(self) -> bool:
        return self.on_cpu and self.machines.nodes == 1 and not self.is_alone

    @cached_property
    def held(self) -> Held:
        own, whole, all_whole = trained_bytes(self.world, None if self.is_alone else self.summed_in)
        weights = sum(
            self.world.spreads[tensor.fqn].padded_numel * tensor.dtype.bits // 8
            for tensor in self.world.first.tensors
        )
        between = 0
        if self.options.gradient_accumulation_steps > 1:
            is_sharded = self.config.training.accumulate == "sharded_gradients"
            between = own if is_sharded or self.is_alone else all_whole
        gathering = 0
        if isinstance(self.how, InGroups) and self._gathers_in_windows:
            part = max(group.gathered for group in self.how.groups) // self.world.mesh.shard_size
            gathering = self.how.kept + 2 * self.machines.ranks * min(part, _WINDOW_HALF_BYTES)
        return Held(
            weights=weights,
            optimizer=self.optimizers.kept(0),
            gradients=own,
            whole_gradients=whole,
            between=between,
            stepping=self.optimizers.stepping,
            gathering=gathering,
        )

    def phases(self, rows: int) -> tuple[PhaseMemory, ...]:
        """The greatest moment of each phase, on the rank that needs most."""
        load = self.load.ranks[0]
        sharing = load.device_bytes + load.host_bytes - self.held.weights
        found = [
            Moment("load", {WEIGHTS: self.held.weights, STAGING: max(sharing, 0)}),
            *moments(self.stretches(rows), self.how, self.held),
            stepping(self.held),
        ]
        if self.config.checkpoints.every is not None:
            budget = 0 if self.on_cpu or self._copied else CheckpointerOptions().budget_bytes
            found.append(resting("checkpoint", self.held, {STAGING: budget}))
        return tuple(self._placed(moment) for moment in greatest(found).values())

    @cached_property
    def _copied(self) -> int:
        """What a checkpoint that is written while the training goes on has a copy of."""
        section = self.config.checkpoints
        if section.mode == "synchronous" or section.every is None:
            return 0
        is_everything = self.tuning.saves() == Everything()
        return self.held.optimizer + (self.held.weights if is_everything else self.held.gradients)

    def _placed(self, moment: Moment) -> PhaseMemory:
        """What of it is on the device, what on the host."""
        copied = {COPY: self._copied} if self._copied and moment.phase != "load" else {}
        if self.on_cpu:
            return PhaseMemory(moment.phase, {}, {**moment.terms, **copied})
        there = {
            STAGING,
            *(("weights", "optimizer state", "gradients", "optimizer's own") if self.offloads else ()),
        }
        host = {term: nbytes for term, nbytes in moment.terms.items() if term in there}
        device = {term: nbytes for term, nbytes in moment.terms.items() if term not in there}
        return PhaseMemory(moment.phase, device, {**host, **copied})

    def peak(self, rows: int) -> int:
        return max(phase.bytes_on(self.machines.device) for phase in self.phases(rows))

    def peaks(self, phases: tuple[PhaseMemory, ...]) -> tuple[RankPeak, ...]:
        """Of each rank: these differ in what the optimizer keeps, which has no padding."""
        on, most = self.machines.device, self.held.optimizer
        found = []
        for rank in range(self.machines.ranks):
            less = most - self.optimizers.kept(self.world.mesh.position(rank))
            if self.offloads:
                less = 0
            sizes = {p.phase: p.bytes_on(on) - (0 if p.phase == "load" else less) for p in phases}
            phase = max(sizes, key=lambda name: sizes[name])
            found.append(RankPeak(rank, sizes[phase], phase))
        return tuple(found)

    # ── the passes ────────────────────────────────────────────────────────────────────────────────

    @cached_property
    def traced(self) -> TracedModel:
        base = self.tuned.base
        try:
            blocks = repeated_blocks(base)
        except Exception:  # a model without any is run as a whole
            blocks = []
        prepare_blocks(base, replace(self.sharding, compiling=Off()))
        self.tuned.model.train()
        return TracedModel(
            self.tuned.model,
            base,
            [group.modules for group in self.world.groups],
            blocks,
            None if self.is_alone or self.gathered_as is None else to_torch(self.gathered_as),
            frozenset(self.tuned.whole),
        )

    def stretches(self, rows: int) -> tuple[Stretch, ...]:
        if rows not in self._traced:
            self._traced[rows] = self._trace(rows)
        return self._traced[rows]

    def _trace(self, rows: int) -> tuple[Stretch, ...]:
        model = self.tuned.model
        loss = untried_loss(model, loss_of(self.config.training))
        try:
            return self.traced.trace(lambda: self._summed(loss.summed, rows))
        except Exception as error:  # of models of others
            if isinstance(loss, WholeLogits):
                raise self._not_run(error) from error
        note = "its loss cannot be taken in chunks; whole logits are counted"
        if note not in self.notes:
            self.notes.append(note)
        try:
            return self.traced.trace(lambda: self._summed(WholeLogits().summed, rows))
        except Exception as error:
            raise self._not_run(error) from error

    def _not_run(self, error: Exception) -> ConfigError:
        first = str(error).strip().partition("\n")[0]
        return ConfigError(
            f"{self.load.model_class} cannot be run without data, so that nobody knows its activations "
            f"({type(error).__name__}: {first}); plan its load alone, by its name"
        )

    def _summed(self, summed: Callable[..., torch.Tensor], rows: int) -> torch.Tensor:
        batch = self._batch(rows)
        precision = self.options.dtype
        if self.is_alone and precision != "float32":
            with torch.autocast("cpu", getattr(torch, precision)):
                return summed(self.tuned.model, batch)
        return summed(self.tuned.model, batch)

    def _batch(self, rows: int) -> Batch:
        """Rows as long as can be; of several one may be shorter, so that there is a mask."""
        tokens = self.options.max_length
        ids = torch.zeros((rows, tokens), dtype=torch.int64, device="cpu")
        if "flash" in (self.config.model.attn_implementation or ""):
            return Batch(ids, None, ids, rows * tokens)
        if self.config.data.packing:
            return Batch(ids, None, ids, rows * tokens, torch.zeros_like(ids))
        return Batch(ids, torch.ones_like(ids) if rows > 1 else None, ids, rows * tokens)

    # ── all of it ─────────────────────────────────────────────────────────────────────────────────

    def plan(self) -> TrainingPlan:
        rows, times = self.options.batch_size, self.options.gradient_accumulation_steps
        self._remark()
        parts = self.optimizers.names  # before the model is one without memory
        held, phases = self.held, self.phases(rows)
        flops = times * sum(stretch.flops for stretch in self.stretches(rows))
        rate = self.machines.read_bytes_per_s or self.policy.bytes_per_s
        speed = self.machines.flops_per_s
        if self.optimizers.is_guessed:
            self.notes.append(f"{parts}: its state was taken of a small matrix, and counted by elements")
        assert held is self.held
        return TrainingPlan(
            load=self.load,
            rows=rows,
            row_tokens=self.options.max_length,
            micro_batches=times,
            precision=self.options.dtype,
            recomputed=_in_words(self.sharding.activation_checkpointing),
            optimizer=parts,
            phases=phases,
            peaks=self.peaks(phases),
            tokens=rows * times * self.options.max_length,
            flops=flops,
            step_s=None if speed is None else flops / speed,
            load_s=self.load.read_bytes / self.machines.nodes / rate,
            read_bytes_per_s=rate,
            room=self._room(phases),
            notes=tuple(self.notes),
        )

    def _remark(self) -> None:
        if not isinstance(self.sharding.compiling, Off):
            self.notes.append("blocks are compiled: what that saves of activations is not counted")
        if self.held.between and not self.is_alone and self.config.training.accumulate == "auto":
            self.notes.append(
                "whole gradients are kept between micro-batches; training.accumulate=sharded_gradients keeps a "
                "rank's share, which is what auto takes where whole ones do not fit"
            )

    def _room(self, phases: tuple[PhaseMemory, ...]) -> Room | None:
        memory = self.machines.memory_bytes
        if memory is None:
            return None
        on = self.machines.device
        worst = max(phases, key=lambda phase: phase.bytes_on(on))
        terms = worst.host if on == "cpu" else worst.device
        term = max(terms, key=lambda name: terms[name])
        least = self.peak(1)
        return Room(
            memory_bytes=memory,
            largest_batch=0 if least > memory else self._largest(memory),
            lacking_bytes=max(worst.bytes_on(on) - memory, 0),
            lacking_least_bytes=max(least - memory, 0),
            term=term,
            term_bytes=terms[term],
        )

    def _largest(self, memory: int) -> int:
        """The largest batch that fits: guessed by a line through two, and looked at."""
        fits, fails = 1, _MOST_ROWS + 1
        two, four = self.peak(2), self.peak(4)
        slope = max((four - two) / 2, 1)
        guess = int(2 + (memory - two) / slope)
        for _ in range(_TRIES):
            guess = min(max(guess, fits + 1), fails - 1)
            if fails - fits <= 1:
                break
            peak = self.peak(guess)
            if peak <= memory:
                fits = guess
            else:
                fails = guess
            guess += int((memory - peak) / slope)
        return fits


class _Optimizers:
    """What the optimizers of a training keep at each position of the mesh."""

    def __init__(self, training: _Training) -> None:
        parts = optimizers_of(training.options)
        self.names = " and ".join(recipe.kind.__name__ for recipe in parts.values())
        is_together = not training.on_cpu and not training.offloads
        self._trials = {name: OptimizerTrial(recipe, is_together=is_together) for name, recipe in parts.items()}
        self._world = training.world
        by_name = {tensor.fqn: tensor for tensor in training.world.first.tensors}
        self._alike: Counter[tuple[str, Spread, torch.dtype]] = Counter()
        dealt = parameters_by_part(training.tuned.model, parts)
        part_of = {name: part for part, members in dealt.items() for name in members}
        for name, tensor in by_name.items():
            if tensor.kind is TensorKind.PARAMETER and tensor.requires_grad:
                spread = training.world.spreads[name]
                self._alike[part_of[name], spread, to_torch(tensor.dtype)] += 1
        self._kept: dict[int, int] = {}

    @property
    def is_guessed(self) -> bool:
        return any(trial.is_guessed for trial in self._trials.values())

    def kept(self, position: int) -> int:
        """Bytes of their state."""
        if position not in self._kept:
            self._kept[position] = sum(count * found.kept for found, count, _ in self._at(position))
        return self._kept[position]

    @cached_property
    def stepping(self) -> int:
        """The most that a step takes beside it; one part steps after the other."""
        each: dict[str, list[OptimizerBytes]] = {}
        for found, count, part in self._at(0):
            each.setdefault(part, []).extend([found] * count)
        return max((self._trials[part].stepping(found) for part, found in each.items()), default=0)

    def _at(self, position: int) -> list[tuple[OptimizerBytes, int, str]]:
        found = []
        for (part, spread, dtype), count in self._alike.items():
            for held in spread.boxes[position]:
                found.append((self._trials[part].of(tuple(held.box.sizes), dtype), count, part))
        return found


def _in_words(recomputing: PerBlock | Off) -> str:
    match recomputing:
        case Off():
            return "activations kept"
        case PerBlock(every=1):
            return "blocks computed again"
        case PerBlock():
            return f"every {recomputing.every}th block computed again"
