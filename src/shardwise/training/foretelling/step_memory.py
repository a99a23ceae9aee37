"""The memory of a training, phase by phase: its passes traced, its groups and optimizer counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch.distributed.fsdp import CPUOffloadPolicy

from shardwise.checkpoints.modes import CheckpointerOptions
from shardwise.engines.forecasting import Foreseen
from shardwise.errors import ConfigError, PlacementError
from shardwise.layout import Stretch
from shardwise.models.selection import Everything
from shardwise.models.torch_words import from_torch, to_torch
from shardwise.models.traced_activations import TracedModel
from shardwise.models.wrapping.blocks import Off
from shardwise.models.wrapping.policies import repeated_blocks
from shardwise.models.wrapping.wrap import Sharding, prepare_blocks
from shardwise.planning.forecasts.training_memory import (
    COPY,
    GRADIENTS,
    OPTIMIZER,
    PASSES,
    STAGING,
    STEPPING,
    WEIGHTS,
    Grouped,
    InGroups,
    Moment,
    Standing,
    Ungrouped,
    greatest,
    group_memories,
    moments,
    resting,
    stepping,
    trained_bytes,
)
from shardwise.report.training_plan import PhaseMemory, RankPeak
from shardwise.training.configuration.config_sections import TrainConfig
from shardwise.training.configuration.config_values import loss_of
from shardwise.training.data.batches import Batch
from shardwise.training.optimizing.optimizer_memory import OptimizersMemory
from shardwise.training.passes.losses import WholeLogits, untried_loss
from shardwise.tuning.modes import AnyTuning

_TRACED_ROWS = 8
"""Larger batches are not run: a loss in chunks would be run for each of them."""

_LINEAR_TOKENS = 1024
"""From so many on, two chunks of the logits, all grows in a line."""

_REUSED_BYTES = 256 << 20
_WINDOW_HALF_BYTES = 16 << 20
"""Of ``execution.moving.group_gather``, by which ranks of one machine gather on its processors."""


@dataclass(frozen=True, slots=True)
class Measured:
    """By reading a part of the checkpoint, here and now."""


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
    read_bytes_per_s: float | Measured | None = None

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "flops_per_s", "read_bytes_per_s"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, Measured) and not 0 < value < float("inf"):
                raise ConfigError(f"{name}={value}: it must be greater than 0; leave it out where it is not known")


class StepMemory:
    """The memory of a training by phase, for any number of rows.

    Args:
        config: in which what is ``auto`` has been decided.
        machines: on what it is to run.
        sharding: without a mesh.
        tuning: what is trained.
        foreseen: the forecast of its load. Its model is changed for good.
    """

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
        self.optimizers = OptimizersMemory(
            self.options, self.tuned.model, self.world, is_together=not self.on_cpu and not self.offloads
        )
        self._traced: dict[int, tuple[Stretch, ...]] = {}

    # ── memory ────────────────────────────────────────────────────────────────────────────────────

    @cached_property
    def how(self) -> Grouped:
        if self.is_alone:
            return Ungrouped()
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
    def held(self) -> Standing:
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
        return Standing(
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
            *((WEIGHTS, OPTIMIZER, GRADIENTS, STEPPING) if self.offloads else ()),
        }
        host = {term: nbytes for term, nbytes in moment.terms.items() if term in there}
        device = {term: nbytes for term, nbytes in moment.terms.items() if term not in there}
        return PhaseMemory(moment.phase, device, {**host, **copied})

    def peak(self, rows: int) -> int:
        return max(phase.bytes_on(self.machines.device) for phase in self.phases(rows))

    def passing(self, rows: int) -> int:
        """The most of the passes, which is what grows with the rows."""
        passes = [phase for phase in self.phases(rows) if phase.phase in PASSES]
        return max(phase.bytes_on(self.machines.device) for phase in passes)

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
        except PlacementError:  # a model without any is run as a whole
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
        """Those of a batch. Of a large one they follow from two smaller ones: all grows in a line."""
        few = max(2, -(-_LINEAR_TOKENS // self.options.max_length))
        if rows > max(2 * few, _TRACED_ROWS):
            one, other = self._traced_at(few), self._traced_at(2 * few)
            if len(one) == len(other):
                return tuple(low.extended(high, rows / few - 1) for low, high in zip(one, other, strict=True))
        return self._traced_at(rows)

    def _traced_at(self, rows: int) -> tuple[Stretch, ...]:
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
