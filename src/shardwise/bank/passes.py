"""One pass of many tenants' rows through the base: forward, the loss of each token, backward."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from shardwise.bank.backends import BackendChoice, key_of, row_keys
from shardwise.bank.routing import Route, RouteSwitch, TenantRows
from shardwise.bank.rows import IGNORED, PassPlan, TenantRow
from shardwise.bank.tenant import Tenant
from shardwise.errors import DisagreementError, TrainingError
from shardwise.execution.world import Stopped, World
from shardwise.models.gradients import Gather, gather_zeros, seeing_gathers


@dataclass(frozen=True, slots=True)
class EntryRows:
    """What this rank has of one entry of a call."""

    tenant: Tenant | None
    rows: Sequence[TenantRow]
    first: int
    """How many rows of the entry lower ranks have."""


class FusedPass:
    """A micro-batch of many tenants on its way through the base. It owns its route ([Note: A route])."""

    def __init__(
        self,
        plan: PassPlan,
        entries: Sequence[EntryRows],
        device: torch.device,
        choice: BackendChoice,
        *,
        is_training: bool,
    ) -> None:
        self.spans: dict[int, slice] = {}
        members: list[TenantRows] = []
        rows: list[TenantRow] = []
        for number in plan.entries:
            entry = entries[number]
            span = slice(len(rows), len(rows) + len(entry.rows))
            rows.extend(entry.rows)
            self.spans[number] = span
            if entry.tenant is not None:
                key = key_of(entry.tenant.options.seed, entry.tenant.windows, entry.tenant.window.micro_batches)
                keys = row_keys(key, entry.first, len(entry.rows))
                members.append(TenantRows(entry.tenant, span.start, span.stop, keys))
        self.has_rows = bool(rows)
        shape = (max(len(rows), 1), plan.tokens)
        self.input_ids = torch.zeros(shape, dtype=torch.int64)
        self.attention_mask = torch.zeros(shape, dtype=torch.int64)
        self.labels = torch.full(shape, IGNORED)
        self.weights = torch.zeros(shape)
        for number, row in enumerate(rows):
            length = len(row.input_ids)
            self.input_ids[number, :length] = row.input_ids
            self.attention_mask[number, :length] = 1
            self.labels[number, :length] = row.labels
            self.weights[number, :length] = row.weights
        if not rows:  # this rank's shards are needed all the same
            self.attention_mask[:] = 1
        self.device = device
        anchor = torch.zeros((), device=device, requires_grad=True)
        self.route = Route(shape[0], shape[1], tuple(members), choice, anchor, is_training)
        self.logprobs: torch.Tensor | None = None
        """(rows, tokens - 1), float32: of each label, given what stands before it; 0 where there is none."""

    def forward(self, model: nn.Module, switch: RouteSwitch) -> None:
        """Collective: as the model is."""
        with switch.on(self.route):
            output: Any = model(
                input_ids=self.input_ids.to(self.device),
                attention_mask=self.attention_mask.to(self.device),
                use_cache=False,
            )
        logits: torch.Tensor = output.logits[:, :-1]
        following = self.labels[:, 1:].to(self.device)
        losses = F.cross_entropy(
            logits.flatten(0, 1).float(), following.flatten(), reduction="none", ignore_index=IGNORED
        )
        self.logprobs = -losses.view(following.shape)

    def backward(self, switch: RouteSwitch, scales: Mapping[int, float]) -> dict[int, float]:
        """Add to the gradients of the tenants, each token's loss times its weight and the scale of its entry.

        There is no sum over tenants that one of them could spoil: every token's loss has a gradient of its own.

        Collective: as the model is.

        Returns: by entry, the sum of the weighted losses of this rank's rows.
        """
        logprobs = self.logprobs
        assert logprobs is not None
        if not logprobs.requires_grad:
            raise TrainingError("the loss depends on no adapter of these tenants; look at their targets")
        weights = self.weights[:, 1:].clone()
        weights[self.labels[:, 1:] == IGNORED] = 0
        scaled = weights.clone()
        for number, span in self.spans.items():
            scaled[span] *= scales[number]
        with switch.on(self.route):
            torch.autograd.backward(logprobs, -scaled.to(self.device))
        self.logprobs = logprobs.detach()
        losses = (-self.logprobs.double() * weights.to(self.device)).cpu()
        return {number: float(losses[span].sum()) for number, span in self.spans.items()}


T = TypeVar("T")

_LOOK_S = 0.02
"""Between two looks whether another rank has failed."""


@contextmanager
def in_step(world: World, root: nn.Module | None, recover: Callable[[], object]) -> Iterator[StepKeeper]:
    """A block in which all ranks pass through a base, and then meet. See [Note: In step].

    Args:
        world: the ranks.
        root: the outermost module that FSDP2 has; None where nothing is gathered.
        recover: has FSDP2 forget a pass that was broken off on this rank.
    """
    keeper = StepKeeper(world, root if world.size > 1 else None, recover)
    try:
        yield keeper
    finally:
        keeper.end()


class StepKeeper:
    """Of one rank, and one block; see :func:`in_step`."""

    def __init__(self, world: World, root: nn.Module | None, recover: Callable[[], object]) -> None:
        self._world, self._root, self._recover = world, root, recover
        self._gathered: list[Gather] = []
        self._longest: list[Gather] = []
        self._fault: Exception | None = None
        self._is_stopping = False
        self._lock = threading.Lock()
        self._has_ended, self._is_settled = threading.Event(), threading.Event()
        if root is not None:
            threading.Thread(target=self._watch, name="shardwise-in-step", daemon=True).start()

    def end(self) -> None:
        self._has_ended.set()

    def run(self, passes: Callable[[], T]) -> T:
        """Passes through the base. To be called in a phase, at the end of which all ranks meet.

        Raises:
            Exception: what ``passes`` raises, once this rank is in step with the others.
            Stopped: another rank has failed.
        """
        with ExitStack() as stack:
            if self._root is not None:
                stack.enter_context(seeing_gathers(self._root, self._see))
            try:
                return passes()
            except Exception:
                stack.close()
                self._catch_up()
                raise

    def _see(self, gather: Gather) -> None:
        with self._lock:
            if self._is_stopping:
                raise Stopped("left its pass: another rank has failed")
            self._gathered.append(gather)

    def _watch(self) -> None:
        """On a thread of its own."""
        while not self._has_ended.wait(_LOOK_S):
            try:
                self._world.check()
            except Stopped:
                self._settle()
                return

    def _settle(self) -> None:
        with self._lock:
            self._is_stopping = True
        try:
            with World.current(self._world.group, self._world.patience, purpose="/in step") as beside:
                self._longest = beside.all_reduce(lambda: self._gathered, longest)
        except Exception as error:
            self._fault = error
        self._is_settled.set()

    def _catch_up(self) -> None:
        if self._root is None:
            return
        self._world.cut()
        self._recover()
        self._is_settled.wait()
        if self._fault is not None:
            raise self._fault
        gather_zeros(self._root, self._longest[len(self._gathered) :])


def longest(gathered: Sequence[list[Gather]]) -> list[Gather]:
    """The most that a rank has gathered, of all of which the others' are beginnings.

    Raises:
        DisagreementError: they are not.
    """
    most = max(gathered, key=len)
    for rank, own in enumerate(gathered):
        if own != most[: len(own)]:
            raise DisagreementError(
                f"rank {rank} has gathered other groups of the base than the rank that is ahead, so ranks cannot "
                "be brought into step: no collective of this process group can be relied on. The bank is over; "
                "start again, and go on from what was saved last"
            )
    return most
