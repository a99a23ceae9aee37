"""Forecast of memory and bytes read, from shapes and the mesh alone.

Parameters, gradients and optimizer states are exact. The peak of a step is the maximum over a few moments in
FSDP2's order: the root is all-gathered and stays unsharded, a block is gathered while the buffer of the block
before still exists, unsharded gradients of a group exist until its reduce-scatter, and activations peak when the
loss is computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Final

from shardwise.core.estimate_report import GroupEstimate, PhaseMemory, TrainingEstimate
from shardwise.core.layout import Activations, Spread, TensorKind, TensorLayout, WorldLayout
from shardwise.core.reports import RankEstimate
from shardwise.core.tensors import DType, numel
from shardwise.loading.memory_estimate import LoadSizes, MemoryPlacement, is_sharded, local_numel
from shardwise.loading.plan import LoadPlan


def estimate_ranks(plan: LoadPlan, world: WorldLayout, placement: MemoryPlacement) -> tuple[RankEstimate, ...]:
    """Forecast the load of ``plan`` on every rank of the mesh, if each rank reads its own bytes."""
    sizes = LoadSizes(plan, world.rank0.tensors, world.spreads)
    # Replicas are alike: one estimate for each position on the shard axis.
    at = [sizes.at(position, position, placement) for position in range(world.mesh.shard_size)]
    return tuple(replace(at[world.mesh.position(rank)], rank=rank) for rank in range(world.mesh.ranks))


# Training


def is_trained(tensor: TensorLayout) -> bool:
    return tensor.kind is TensorKind.PARAMETER and tensor.requires_grad


def estimate_groups(
    world: WorldLayout, gathered_as: DType | None, summed_in: DType | None
) -> tuple[GroupEstimate, ...]:
    """Return the parameter groups that are not empty, the root's last.

    Args:
        world: layout of all ranks.
        gathered_as: ``param_dtype`` of the mixed precision policy, or None for each parameter's own dtype.
        summed_in: ``reduce_dtype``, or None for the dtype in which gradients are computed.
    """
    estimates: list[GroupEstimate] = []
    for group in world.groups:
        tensors = [world.rank0.by_name[name] for name in group.parameters]
        gathered = gradients = reduced = 0
        for tensor in tensors:
            # A (10, 4) weight on 4 ranks: shards of 3 rows, the last one padded, gathered as 12 rows.
            size = world.spreads[tensor.fqn].padded_numel * world.mesh.shard_size
            computed = gathered_as if gathered_as is not None and tensor.dtype.kind == "float" else tensor.dtype
            gathered += size * computed.bits // 8
            if tensor.requires_grad:
                gradients += size * computed.bits // 8
                reduced += size * (summed_in or computed).bits // 8
        if tensors:
            dtypes = "+".join(dict.fromkeys(tensor.dtype.label for tensor in tensors))
            count = sum(tensor.numel for tensor in tensors)
            estimates.append(GroupEstimate(group.modules, dtypes, count, gathered, gradients, reduced))
    return tuple(estimates)


_STATES: Final[Mapping[str, tuple[float, float]]] = {
    "sgd": (0, 0),
    "rmsprop": (1, 0),
    "adagrad": (1, 0),
    "schedule_free_sgd": (1, 0),
    **dict.fromkeys(("lion_32bit", "paged_lion_32bit", "rmsprop_bnb", "rmsprop_bnb_32bit"), (1, 0)),
    "rmsprop_bnb_8bit": (0, 1 + 4 / 256),
    "adamw_torch_8bit": (0, 2 + 8 / 256),
    "adamw_torch_4bit": (0, 1 + 8 / 128),
}
"""Optimizer states by ``optim``: tensors in the dtype of the parameter, and further bytes for each element.

Any other optimizer but Adafactor is counted as AdamW, with two moments. 8-bit and 4-bit states have a scale for
each block: with ``adamw_torch_8bit`` two moments of one byte, and two float32 scales for 256 elements.
"""


_OTHER_KNOWN: Final = (
    *("adamw", "paged_adamw", "stable_adamw", "schedule_free_adamw", "schedule_free_radam"),
    *("lion_8bit", "paged_lion_8bit", "adafactor"),
)
"""Beginnings of the names of optimizers whose states :func:`optimizer_bytes` computes without the table."""


def has_known_states(optim: str) -> bool:
    return optim in _STATES or optim.startswith(_OTHER_KNOWN)


def optimizer_bytes(world: WorldLayout, trained: Iterable[TensorLayout], optim: str, position: int) -> int:
    """Return the bytes of the tensors' optimizer states at a position of the mesh, without padding."""
    # `moments` are tensors in the parameter's dtype, `more` bytes for each element. 2 moments of a bfloat16
    # parameter are 4 bytes for each element, in float32 they are 8.
    moments, more = _STATES.get(optim, (2, 0))
    if optim.endswith("_8bit") and optim not in _STATES:
        moments, more = (0, 1 + 4 / 256) if optim.startswith(("lion", "paged_lion")) else (0, 2 + 8 / 256)
    rates: dict[Spread, float] = {}
    for tensor in trained:
        spread = world.spreads[tensor.fqn]
        if optim == "adafactor":
            # A row and a column of second moments: 4 * (4096 + 1024) bytes for a weight of shape (4096, 1024).
            size = 4 * sum(tensor.shape[-2:]) / max(numel(tensor.shape[-2:]), 1)
        else:
            size = moments * tensor.dtype.bits / 8 + more
        rates[spread] = rates.get(spread, 0.0) + size
    return round(sum(local_numel(spread, position) * rate for spread, rate in rates.items()))


@dataclass(frozen=True, slots=True)
class Head:
    """A language model head, whose logits TRL computes in tiles.

    Attributes:
        vocab_size: size of the vocabulary.
        hidden: size of the hidden states.
        itemsize: bytes of an element of the compute dtype.
        is_cast: whether autocast casts the weight, by chunks.
        on_cpu: whether torch reduces the tiles, with copies in float32, instead of a Triton kernel.
        trained: whether the head has a gradient, which is accumulated in float32.
    """

    vocab_size: int
    hidden: int
    itemsize: int
    is_cast: bool
    on_cpu: bool
    trained: bool


@dataclass(frozen=True, slots=True)
class BankSizes:
    """Sizes of the adapters of a bank, each whole in float32 on every rank, with a gradient at any time.

    Attributes:
        adapters: by adapter, its optimizer as in ``TrainingArguments.optim``, and its number of elements.
        chunk_logits: logits that are computed at once.
    """

    adapters: tuple[tuple[str, int], ...]
    chunk_logits: int

    @property
    def gradients(self) -> list[int]:
        """Bytes of each adapter's gradient, and of its matrices."""
        return [4 * count for _, count in self.adapters]

    @property
    def optimizer_bytes(self) -> int:
        return round(sum(4 * count * _STATES.get(optim, (2, 0))[0] for optim, count in self.adapters))

    def logits_bytes(self, tokens: int, head: Head) -> int:
        """Return the memory of a chunk of logits, and of the hidden states of all positions and their gradient."""
        # Three float32 tensors: log-softmax, its gradient, and that of the logits.
        chunk = min(tokens * head.vocab_size, self.chunk_logits) * 12
        return chunk + 2 * tokens * head.hidden * head.itemsize


@dataclass(frozen=True, slots=True)
class Step:
    """The settings of a training step.

    Attributes:
        optim: the optimizer, as in ``TrainingArguments.optim``.
        batch_size: rows of a forward pass.
        max_length: tokens per row.
        accumulates: whether there is gradient accumulation. Sharded gradients then persist between micro-batches.
        head: the language model head. None for a model without one.
        activations: memory of activations as traced.
        twice: the same for twice as many rows.
        bank: adapters that are trained in place of that in the layout.
    """

    optim: str
    batch_size: int = 0
    max_length: int = 0
    accumulates: bool = False
    head: Head | None = None
    activations: Activations = field(default_factory=Activations)
    twice: Activations = field(default_factory=Activations)
    bank: BankSizes | None = None

    @property
    def logits_bytes(self) -> int:
        """Memory of the loss and its logits."""
        if self.head is None:
            return 0
        compute = trl_logits_bytes if self.bank is None else self.bank.logits_bytes
        return compute(self.batch_size * self.max_length, self.head)

    def with_rows(self, rows: int) -> Step:
        """Return the step with another number of rows. Activations grow linearly with it.

        Traced with 2 and 4 rows as 30 and 50 bytes, activations of 8 rows take 30 + (50 - 30) * (8 / 2 - 1) = 90.
        """
        # A line through the two traces, at `batch_size` rows and at twice that.
        share = rows / self.batch_size - 1
        sizes = zip(astuple(self.activations), astuple(self.twice), strict=True)
        activations = Activations(*(round(once + (twice - once) * share) for once, twice in sizes))
        return replace(self, batch_size=rows, activations=activations)


_MOST_ROWS: Final = 1 << 20


def estimate_training(
    world: WorldLayout,
    groups: Sequence[GroupEstimate],
    step: Step,
    placement: MemoryPlacement,
    *,
    param_dtype: bool,
    reshard_after_forward: bool | int,
    memory_bytes: int | None,
) -> TrainingEstimate:
    """Forecast the memory of a training step on rank 0, which has the largest shards.

    Args:
        world: layout of all ranks.
        groups: result of :func:`estimate_groups`.
        step: settings of the training step.
        placement: placement of tensors.
        param_dtype: whether shards are cast before they are gathered.
        reshard_after_forward: as in ``Sharding``.
        memory_bytes: memory of a rank, for which the largest batch is computed. None to compute none.
    """
    padded: dict[str, int] = {}  # bytes by FQN
    for tensor in world.rank0.tensors:
        padded[tensor.fqn] = world.spreads[tensor.fqn].padded_numel * tensor.dtype.bits // 8
    trained = [tensor for tensor in world.rank0.tensors if is_trained(tensor)]
    states = [optimizer_bytes(world, trained, step.optim, position) for position in range(world.mesh.shard_size)]
    root_names = set(world.groups[-1].parameters) | set(world.whole)
    gradients = [padded[tensor.fqn] for tensor in trained]
    # CPU offload moves sharded parameters to the host, and their gradients and states.
    offloaded = list(filter(is_sharded, world.rank0.tensors)) if placement.offloads_shards else []
    moved = [padded[tensor.fqn] for tensor in offloaded if is_trained(tensor)]
    staying = [padded[tensor.fqn] for tensor in trained if not (placement.offloads_shards and is_sharded(tensor))]
    on_host = {
        "weights": sum(padded[tensor.fqn] for tensor in offloaded),
        "optimizer": optimizer_bytes(world, filter(is_trained, offloaded), step.optim, 0),
        "gradients": sum(moved),
        "optimizer step": _step_bytes(step.optim, moved, "cpu"),
    }
    weights = sum(padded.values())
    update = on_host["optimizer step"] + _step_bytes(step.optim, staying, placement.device)
    # The adapters of the bank take the place of the layout's adapter. Their weights are as large as their
    # gradients.
    if step.bank is not None:
        weights += sum(step.bank.gradients) - sum(gradients)
        states = [step.bank.optimizer_bytes] * len(states)
        gradients = step.bank.gradients
        update = max(_step_bytes(optim, gradients, placement.device) for optim, _ in step.bank.adapters)
    # What does not depend on the number of rows is computed once. Activations and logits are added by phases().
    sizes = _GroupSizes.from_groups(world, groups, placement, reshard_after_forward)
    fixed = _FixedSizes(
        groups=sizes,
        placement=placement,
        on_host=on_host,
        weights=weights,
        optimizer=states[0],
        gradients=sum(gradients),
        in_blocks=sum(padded[tensor.fqn] for tensor in trained if tensor.fqn not in root_names),
        # Shards are cast, or copied to the device, into the input of the all-gather.
        cast=sizes.root // world.mesh.shard_size if param_dtype or placement.offloads_shards else 0,
        update=update,
    )
    return TrainingEstimate(
        step.optim,
        step.batch_size,
        step.max_length,
        fixed.weights,
        fixed.gradients,
        tuple(states[world.mesh.position(rank)] for rank in range(world.mesh.ranks)),
        fixed.phases(step),
        None if memory_bytes is None else fixed.largest_batch(step, memory_bytes),
    )


@dataclass(frozen=True, slots=True)
class _GroupSizes:
    """Bytes of the root group and of the largest block, all zero without a mesh.

    Attributes:
        root, block: gathered parameters.
        others: parameters of all other blocks that stay gathered, or are held by fewer ranks, until their backward
            pass.
        whole: unsharded gradients of a block.
        summed: input of a block's reduce-scatter.
        root_sum: unsharded gradients of the root and the input of its reduce-scatter.
    """

    root: int
    block: int
    others: int
    whole: int
    summed: int
    root_sum: int

    @classmethod
    def from_groups(
        cls,
        world: WorldLayout,
        groups: Sequence[GroupEstimate],
        placement: MemoryPlacement,
        reshard_after_forward: bool | int,  # noqa: FBT001 - FSDP2's own
    ) -> _GroupSizes:
        copies = 2 if placement.device == "cpu" else 1  # gloo copies its input
        if not placement.has_mesh(world.mesh.ranks):
            return cls(0, 0, 0, 0, 0, 0)
        roots = [group for group in groups if "" in group.modules]
        blocks = [group for group in groups if "" not in group.modules]
        gathered = [group.gathered_bytes for group in blocks]
        block = max(gathered, default=0)
        # Of blocks that are held by 2 of 8 ranks after their forward pass, each of the two has a half.
        is_freed = reshard_after_forward in (True, world.mesh.shard_size)
        others = 0 if is_freed else (sum(gathered) - block) // (int(reshard_after_forward) or 1)
        return cls(
            max((group.gathered_bytes for group in roots), default=0),
            block,
            others,
            max((group.gradient_bytes for group in blocks), default=0),
            max((group.reduced_bytes for group in blocks), default=0) * copies,
            max((group.gradient_bytes + group.reduced_bytes * copies for group in roots), default=0),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _FixedSizes:
    """Bytes on rank 0 that do not depend on the number of rows.

    Attributes:
        groups: gathered groups.
        placement: placement of tensors.
        on_host: by term, the most that CPU offload moves to the host.
        weights: parameters and buffers, padding included.
        optimizer: optimizer states.
        gradients: sharded gradients.
        in_blocks: sharded gradients of blocks.
        cast: shards of the root in the dtype that is gathered.
        update: temporary tensors of the optimizer's step.
    """

    groups: _GroupSizes
    placement: MemoryPlacement
    on_host: Mapping[str, int]
    weights: int
    optimizer: int
    gradients: int
    in_blocks: int
    cast: int
    update: int

    def largest_batch(self, step: Step, memory_bytes: int) -> int:
        """Return the most rows that fit into memory, by bisection, or 0 if one row does not fit."""
        # Invariant: `fitting` rows fit, and more than `most` do not.
        fitting, most = 0, _MOST_ROWS
        while fitting < most:
            rows = (fitting + most + 1) // 2
            peak = max(phase.bytes_on(self.placement.device) for phase in self.phases(step.with_rows(rows)))
            fitting, most = (rows, most) if peak <= memory_bytes else (fitting, rows - 1)
        return fitting

    def phases(self, step: Step) -> tuple[PhaseMemory, ...]:
        """Return the candidates for the peak of a step."""
        sizes, activations = self.groups, step.activations
        # Sharded gradients of blocks exist at the end of a backward pass. With accumulation, all exist from the
        # start.
        earlier = self.gradients if step.accumulates else 0  # of the micro-batches before
        gathered, ended = sizes.root + sizes.block, max(self.in_blocks, earlier)
        terms: dict[str, dict[str, int]] = {
            # The unsharded root, and the largest of its all-gather's output, its cast shards, and two blocks (one
            # computes while the next one is gathered) beside those that stay.
            "forward": {
                "gathered groups": sizes.root + max(sizes.root, self.cast, 2 * sizes.block + sizes.others),
                "gradients": earlier,
            },
            "loss": {
                "gathered groups": gathered + sizes.others,
                "activations": activations.kept + activations.loss,
                "logits": step.logits_bytes,
                "gradients": earlier,
            },
            "backward": {
                "gathered groups": gathered + sizes.block + sizes.others,
                "activations": activations.kept + activations.backward,
                "gradients": earlier,
                "whole gradients": sizes.whole + sizes.summed,
            },
            "end of backward": {
                "gathered groups": gathered,
                "activations": activations.last,
                "gradients": ended,
                "whole gradients": sizes.summed,
            },
            "reduction of the root": {"gradients": ended, "whole gradients": sizes.root_sum},
            "optimizer step": {"gradients": self.gradients, "optimizer step": self.update},
        }
        base = {"weights": self.weights, "optimizer": self.optimizer}
        return tuple(self._place(phase, {**base, **more}) for phase, more in terms.items())

    def _place(self, phase: str, terms: Mapping[str, int]) -> PhaseMemory:
        if self.placement.device == "cpu":
            return PhaseMemory(phase, {}, terms)
        host = {term: min(size, self.on_host.get(term, 0)) for term, size in terms.items()}
        device = {term: size - host[term] for term, size in terms.items() if size > host[term] or not size}
        return PhaseMemory(phase, device, {term: size for term, size in host.items() if size})


def _step_bytes(optim: str, gradients: Sequence[int], device: str) -> int:
    """Return the bytes of an optimizer step's temporary tensors, of all parameters (foreach) or one at a time.

    ``gradients`` are the bytes of each sharded gradient.
    """
    if not gradients or optim.endswith("_fused") or optim == "sgd":
        return 0
    # Foreach is for accelerators. Elsewhere, and by these optimizers, parameters are updated one at a time.
    if device == "cpu" or optim.endswith(("_8bit", "_4bit")):
        return 2 * max(gradients)
    return sum(gradients)


_TOKEN_CHUNK, _VOCAB_CHUNK = 4096, 32768
"""Tokens and words of a tile in TRL's fused language model head (``trl.kernels.chunked_logprob``)."""


def trl_logits_bytes(tokens: int, head: Head) -> int:
    """Return the memory of TRL's loss for so many tokens of a micro-batch. Logits are computed in tiles."""
    # For 8,192 tokens and a vocabulary of 151,936: tiles of (4096, 32768) logits, hidden states of (8192, hidden).
    words = min(head.vocab_size, _VOCAB_CHUNK)
    tile, chunk = min(tokens, _TOKEN_CHUNK) * words, words * head.hidden  # elements of logits, and of the weight
    # A gradient in the dtype of the weight is among the activations that are traced.
    is_summed_apart = head.trained and head.itemsize < 4 and not head.is_cast
    gradient = head.vocab_size * head.hidden * 4 if is_summed_apart else 0
    copies = 0
    if head.on_cpu:
        # Seven float32 copies of a tile and a mask while its gradient is computed. Then the tile and the chunk are
        # multiplied in float32.
        copies = max(tile * (7 * 4 + 1), (tile + chunk) * 4 if head.itemsize < 4 else 0)
    cast = chunk * head.itemsize if head.is_cast else 0
    return tile * head.itemsize + copies + cast + tokens * head.hidden * 4 + gradient
