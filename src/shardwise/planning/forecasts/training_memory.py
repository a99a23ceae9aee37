"""What is alive on a rank in each moment of a step: pure arithmetic over traced passes and FSDP2's groups.

[Note: Moments] FSDP2's order is followed group by group. *Forward*: a group is gathered into one buffer beside that
of the group before, copied out into parameters, used with its buffer still there, and freed; the root's parameters
stay. *Backward*: a group that has been gathered ahead is copied out, its buffer freed, and the next one gathered;
gradients grow; at its end the parameters go, gradients are copied into the input of a reduce-scatter (in the dtype
they are summed in), and what stays are those of this rank's shards; that input waits for the next group's. Without
ranks there are no groups, and whole gradients stay. Each of these is a :class:`Moment`, and the peak is the
greatest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from shardwise.layout import PassPart, Stretch, TensorKind, WorldLayout
from shardwise.tensors import DType


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """What a group of FSDP2 takes on one rank, in bytes.

    Attributes:
        gathered: the output of its all-gather, padding included.
        parameters: what is copied out of that.
        cast: this rank's shards, in the dtype that is gathered, where that is another than theirs.
        reduced: the input of the reduce-scatter of what is trained.
        gradients: what of its result stays on this rank, in the dtype of the parameters.
        summed: the same in the dtype it is summed in.
    """

    gathered: int
    parameters: int
    cast: int
    reduced: int
    gradients: int
    summed: int


@dataclass(frozen=True, slots=True)
class Ungrouped:
    """One process without groups: parameters are there, gradients stay whole."""


@dataclass(frozen=True, slots=True)
class InGroups:
    """FSDP2's groups, the root's last.

    Attributes:
        groups: of a rank.
        reshards: whether blocks are freed after their forward pass.
        copies_to_sum: whether the collective copies what it sums (gloo).
        reused: the largest buffer that is kept to gather into; larger ones are made and freed.
    """

    groups: tuple[GroupMemory, ...]
    reshards: bool = True
    copies_to_sum: bool = False
    reused: int = 0

    @property
    def kept(self) -> int:
        """The buffer that is kept to gather into."""
        return max((group.gathered for group in self.groups if group.gathered <= self.reused), default=0)


Grouped: TypeAlias = Ungrouped | InGroups


@dataclass(frozen=True, slots=True)
class Standing:
    """What a rank has all the time, in bytes.

    Attributes:
        weights: shards with their padding, whole parameters, buffers.
        optimizer: its state.
        gradients: of what is trained, once they have been summed over ranks.
        whole_gradients: those of them that are of whole parameters.
        between: gradients kept from one micro-batch to the next; 0 for one.
        stepping: what the optimizer needs for itself.
        gathering: what is kept to gather groups with.
    """

    weights: int
    optimizer: int
    gradients: int
    whole_gradients: int = 0
    between: int = 0
    stepping: int = 0
    gathering: int = 0


PASSES = ("forward", "loss", "backward")
PHASES = ("load", *PASSES, "optimizer", "checkpoint")

_PHASE_OF = {
    PassPart.FORWARD: "forward",
    PassPart.LOSS: "loss",
    PassPart.LOSS_BACKWARD: "loss",
    PassPart.BACKWARD: "backward",
}

WEIGHTS, OPTIMIZER, GRADIENTS = "weights", "optimizer state", "gradients"
GROUPS, REDUCED, ACTIVATIONS, LOGITS = "gathered groups", "reduce-scatter", "activations", "logits and loss"
STEPPING, STAGING, COPY = "optimizer's own", "staging", "checkpoint copy"


@dataclass(frozen=True, slots=True)
class Moment:
    """What is alive at once, by term, in bytes."""

    phase: str
    terms: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.terms.values())


@dataclass(slots=True)
class _Alive:
    """What comes and goes in the passes of one micro-batch."""

    level: int = 0
    body: int = 0
    """Of ``level``, what blocks have left behind."""
    open: dict[int, int] = field(default_factory=dict)
    """Parameters of groups, copied out."""
    buffer: tuple[int, int] = (-1, 0)
    """A group whose gathered buffer is there, and the bytes that were made for it."""
    lent: int = -1
    """The group whose gathered buffer is the kept one."""
    waiting: int = 0
    """The input of the last reduce-scatter."""
    gradients: int = 0


class _Now(Protocol):
    """A moment as things are, with more of this or that."""

    def __call__(self, way: PassPart, *, rise: int = 0, gathering: int = 0, reducing: int = 0) -> Moment: ...


def moments(stretches: Sequence[Stretch], how: Grouped, held: Standing) -> Iterator[Moment]:
    """Every moment of the passes of the last micro-batch of a step, in order; see [Note: Moments]."""
    alive = _Alive(gradients=held.between)
    order: list[int] = []
    is_back = False

    def now(way: PassPart, *, rise: int = 0, gathering: int = 0, reducing: int = 0) -> Moment:
        passing = max(alive.level + rise, 0)
        is_loss = way in (PassPart.LOSS, PassPart.LOSS_BACKWARD)
        body = min(alive.body, passing) if is_loss else passing
        return Moment(
            _PHASE_OF[way],
            {
                WEIGHTS: held.weights,
                OPTIMIZER: held.optimizer,
                GRADIENTS: alive.gradients,
                GROUPS: held.gathering + sum(alive.open.values()) + alive.buffer[1] + gathering,
                REDUCED: alive.waiting + reducing,
                ACTIVATIONS: body,
                LOGITS: passing - body,
            },
        )

    for stretch in stretches:
        way = stretch.way
        if not is_back and way in (PassPart.LOSS_BACKWARD, PassPart.BACKWARD):
            is_back, alive.buffer, alive.lent = True, (-1, 0), -1
            alive.gradients = max(alive.gradients, held.whole_gradients)
        if isinstance(how, InGroups):
            for group in stretch.opens:
                yield from _gather(alive, group, how, order, now, way, is_back=is_back)
        yield now(way, rise=stretch.rise)
        alive.level += stretch.kept
        if way is PassPart.FORWARD:
            alive.body = alive.level
        if isinstance(how, Ungrouped):
            alive.level -= stretch.released
            if not held.between:
                alive.gradients = min(alive.gradients + stretch.released, held.gradients)
            continue
        for place, group in enumerate(stretch.closes):
            if is_back:
                released = stretch.released if place == len(stretch.closes) - 1 else 0
                yield from _reduce(alive, group, how, held, released, now, way)
            else:
                order.append(group)
                if how.reshards:
                    alive.open.pop(group, None)


def _gather(
    alive: _Alive,
    group: int,
    how: InGroups,
    order: Sequence[int],
    now: _Now,
    way: PassPart,
    *,
    is_back: bool,
) -> Iterator[Moment]:
    own = how.groups[group]
    if group not in alive.open:
        if alive.buffer[0] != group:
            yield from _into_buffer(alive, group, how, now, way)
        alive.open[group] = own.parameters
        yield now(way)
    if not is_back:
        return
    alive.buffer, alive.lent = (-1, 0), -1
    before = [*order, len(how.groups) - 1]
    place = before.index(group) if group in before else 0
    ahead = before[place - 1] if place else -1
    if ahead >= 0 and ahead not in alive.open:
        yield from _into_buffer(alive, ahead, how, now, way)


def _into_buffer(alive: _Alive, group: int, how: InGroups, now: _Now, way: PassPart) -> Iterator[Moment]:
    """The all-gather; the buffer of the group before is there until it is done."""
    own = how.groups[group]
    is_lent = alive.lent < 0 and own.gathered <= how.reused
    made = 0 if is_lent else own.gathered
    yield now(way, gathering=made + own.cast)
    alive.buffer, alive.lent = (group, made), group if is_lent else -1


def _reduce(
    alive: _Alive, group: int, how: InGroups, held: Standing, released: int, now: _Now, way: PassPart
) -> Iterator[Moment]:
    own = how.groups[group]
    alive.open.pop(group, None)
    if own.reduced:
        alive.waiting = 0
        yield now(way, reducing=own.reduced)
    alive.level -= released
    if not own.reduced:
        return
    copied = own.reduced if how.copies_to_sum else 0
    yield now(way, reducing=own.reduced + max(copied + own.summed, own.summed + own.gradients))
    alive.waiting = own.reduced
    alive.gradients = max(min(alive.gradients + own.gradients, held.gradients), held.between)


def stepping(held: Standing) -> Moment:
    """The optimizer's step, when all else is gone."""
    gradients = max(held.gradients, held.between)
    return Moment(
        "optimizer",
        {
            WEIGHTS: held.weights,
            OPTIMIZER: held.optimizer,
            GRADIENTS: gradients,
            GROUPS: held.gathering,
            STEPPING: held.stepping,
        },
    )


def resting(phase: str, held: Standing, more: Mapping[str, int]) -> Moment:
    """Between steps: what stays, and what something else takes."""
    return Moment(phase, {WEIGHTS: held.weights, OPTIMIZER: held.optimizer, GROUPS: held.gathering, **more})


def greatest(found: Iterable[Moment]) -> dict[str, Moment]:
    """Of each phase its greatest moment, in the order of :data:`PHASES`."""
    most: dict[str, Moment] = {}
    for moment in found:
        if moment.phase not in most or moment.total > most[moment.phase].total:
            most[moment.phase] = moment
    return {phase: most[phase] for phase in PHASES if phase in most}


def group_memories(
    world: WorldLayout, gathered_as: DType | None, summed_in: DType | None, *, crosses: bool
) -> tuple[GroupMemory, ...]:
    """Those of a layout's groups; empty ones take nothing.

    Args:
        world: of all ranks.
        gathered_as: the dtype in which parameters are gathered; None: each in its own.
        summed_in: the dtype in which gradients are summed; None: that in which they are computed.
        crosses: whether shards come from the host to be gathered.
    """
    ranks = world.mesh.shard_size
    found: list[GroupMemory] = []
    for group in world.groups:
        gathered = parameters = cast = reduced = gradients = summed = 0
        for name in group.parameters:
            tensor, spread = world.first.by_name[name], world.spreads[name]
            own = tensor.dtype.bits // 8
            computed = gathered_as.bits // 8 if gathered_as is not None and tensor.dtype.kind == "float" else own
            gathered += spread.padded_numel * ranks * computed
            parameters += spread.padded_numel * ranks * computed
            cast += spread.padded_numel * computed if crosses or gathered_as is not None else 0
            if tensor.requires_grad:
                size = computed if summed_in is None else summed_in.bits // 8
                reduced += spread.padded_numel * ranks * size
                summed += spread.padded_numel * size
                gradients += spread.padded_numel * own
        found.append(
            GroupMemory(
                gathered if ranks > 1 else 0,
                parameters,
                cast,
                reduced,
                gradients,
                0 if summed == gradients else summed,
            )
        )
    return tuple(found)


def trained_bytes(world: WorldLayout, summed_in: DType | None) -> tuple[int, int, int]:
    """(gradients on a rank once summed, those of whole parameters, whole gradients of all that is trained)."""
    grouped = {name for group in world.groups for name in group.parameters}
    own = whole = all_whole = 0
    for tensor in world.first.tensors:
        if tensor.kind is not TensorKind.PARAMETER or not tensor.requires_grad:
            continue
        size = tensor.dtype.bits // 8
        own += world.spreads[tensor.fqn].padded_numel * size
        whole += 0 if tensor.fqn in grouped else tensor.numel * size
        all_whole += tensor.numel * (size if summed_in is None else summed_in.bits // 8)
    return own, whole, all_whole
