"""Calls with rows of many tenants: check them, plan passes, run them, or roll everything back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from shardwise.bank.backends import BackendChoice, key_of, row_keys
from shardwise.bank.collective_resync import in_step
from shardwise.bank.routing import ActiveRouting, BatchRouting, TenantRows
from shardwise.bank.rows import (
    IGNORED,
    AgreedRows,
    PassPlan,
    RowTensors,
    TenantRow,
    agreed_rows,
    facts_of,
    no_random_numbers,
    plan_passes,
    rows_of,
)
from shardwise.bank.tenant import Tenant
from shardwise.errors import ConfigError, ShardwiseError, TrainingError
from shardwise.execution.world import World
from shardwise.models.gradients import forget_pass
from shardwise.models.torch_api import sent
from shardwise.models.view import root_of


@dataclass(frozen=True, slots=True)
class SharedBase:
    """The base of a bank, its ranks, and how adapters on it are computed."""

    world: World
    model: PreTrainedModel
    device: torch.device
    switch: ActiveRouting
    backend: BackendChoice
    pad_to: int

    @property
    def vocab_size(self) -> int:
        embeddings: Any = self.model.get_input_embeddings()
        return int(embeddings.weight.shape[0])

    @property
    def longest(self) -> int:
        """Maximum number of tokens in a row."""
        found = getattr(self.model.config, "max_position_embeddings", None)
        return found if isinstance(found, int) and found > 0 else 1 << 30

    def recover(self) -> None:
        """Reset FSDP2 after an interrupted pass. Collective: no."""
        root = root_of(self.model)
        if root is not None:
            forget_pass(root)


@dataclass
class RowCall:
    """One call with rows: the rows of this rank, and the facts of all ranks."""

    base: SharedBase
    rows: list[list[TenantRow]]
    tenants: list[Tenant | None]
    agreed: list[AgreedRows]
    chosen: Counter[str] = field(default_factory=Counter)
    logprobs: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    def train(self) -> tuple[dict[int, float], int]:
        """Accumulate the gradients of the tenants by forward and backward passes. Collective: yes.

        Returns:
            The losses of all ranks, summed by entry, and the number of passes.

        Raises:
            ShardwiseError: the same on every rank. A note names the tenants. Gradients are restored.
        """
        before = [
            (tenant.gradient, tenant.gradient.clone() if tenant.window.micro_batches else None)
            for tenant in self.tenants
            if tenant is not None
        ]
        try:
            return self._run(is_training=True)
        except BaseException:
            for gradient, kept in before:
                gradient.zero_() if kept is None else gradient.copy_(kept)
            raise

    def evaluate(self) -> None:
        """Run forward passes alone. Collective: yes.

        Raises:
            ShardwiseError: the same on every rank. A note names the tenants.
        """
        self._run(is_training=False)

    def _run(self, *, is_training: bool) -> tuple[dict[int, float], int]:
        """Run passes on all ranks, and sum their results. See [Note: In step]."""
        base = self.base
        root: Any = root_of(base.model)
        try:
            with in_step(base.world, root, base.recover) as resync:
                own = self._train if is_training else self._evaluate
                return base.world.map_reduce(resync.run, _summed, own)
        except BaseException as error:
            base.recover()
            if isinstance(error, ShardwiseError):
                names = ", ".join(repr(entry.name) for entry in self.agreed if sum(entry.rows))
                error.add_note(f"This was a pass of {names}; all of it is discarded.")
            raise

    def _evaluate(self) -> tuple[dict[int, float], int]:
        passes = self._passes(is_training=False)
        with _evaluating(self.base.model):
            for each in passes:
                each.forward(self.base.model, self.base.switch)
                self._note(each)
        return {}, len(passes)

    def _train(self) -> tuple[dict[int, float], int]:
        base, sums = self.base, dict[int, float]()
        scales = {
            number: 1 / max(entry.num_supervised_tokens, 1) if is_scaled_at_once(tenant) else 1.0
            for number, (tenant, entry) in enumerate(zip(self.tenants, self.agreed, strict=True))
        }
        passes = self._passes(is_training=True)
        with no_random_numbers(base.device):
            for each in passes:
                each.forward(base.model, base.switch)
                sums |= each.backward(base.switch, scales)
                each.route.require_reached()
                self._note(each)
        return sums, len(passes)

    def _passes(self, *, is_training: bool) -> list[FusedPass]:
        base = self.base
        ranks = {tenant.name: tenant.rank for tenant in self.tenants if tenant is not None}
        entries = [
            EntryRows(tenant, own, sum(entry.rows[: base.world.rank]))
            for tenant, own, entry in zip(self.tenants, self.rows, self.agreed, strict=True)
        ]
        return [
            FusedPass(plan, entries, base.device, base.backend, is_training=is_training)
            for plan in plan_passes(self.agreed, ranks, multiple=base.pad_to, longest=base.longest)
        ]

    def _note(self, done: FusedPass) -> None:
        assert done.logprobs is not None
        self.chosen.update(done.route.chosen)
        for number, span in done.spans.items():
            self.logprobs[number] = [
                values[: len(row.input_ids) - 1]
                for values, row in zip(done.logprobs[span], self.rows[number], strict=True)
            ]


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode without gradients. Afterwards restore each module's mode, and reshard.

    FSDP2 keeps the root group gathered after a forward pass, for a backward pass that none of these has.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
            if isinstance(module, FSDPModule):
                module.reshard()


def open_call(
    base: SharedBase,
    batches: Sequence[tuple[str | None, RowTensors]],
    tenants: Mapping[str, Tenant],
    *,
    is_training: bool,
) -> RowCall:
    """The rows of a call, checked on all ranks, and counted. Collective: yes.

    Raises:
        ConfigError, RankMismatchError: the same on every rank.
    """
    rows: list[list[TenantRow]] = []
    found: list[Tenant | None] = []

    def check() -> list[AgreedRows]:
        _require_pairs(batches)
        found.extend(None if name is None else tenant_of(tenants, name) for name, _ in batches)
        if is_training:
            _require_trainable(found)
        for tenant, (name, batch) in zip(found, batches, strict=True):
            takes_weights = tenant is None or tenant.options.reduction == "sum"
            who = "the base" if name is None else repr(name)
            rows.append(
                rows_of(
                    who, batch, vocab_size=base.vocab_size, longest=base.longest, may_have_weights=takes_weights
                )
            )
        return [facts_of(name, own) for (name, _), own in zip(batches, rows, strict=True)]

    agreed = base.world.map_reduce(check, agreed_rows)
    return RowCall(base, rows, found, agreed)


def _require_pairs(batches: object) -> None:
    """Raises ConfigError unless it is a list of names with rows."""
    entries: Any = batches if isinstance(batches, Sequence) and not isinstance(batches, str) else [None]
    for entry in entries:
        is_pair = isinstance(entry, tuple | list) and len(entry) == 2
        if not is_pair or not isinstance(entry[0], str | None):
            raise ConfigError(f"batches: is a {type(batches).__name__}, not a list of (name, rows). Pass that.")


def tenant_of(tenants: Mapping[str, Tenant], name: str) -> Tenant:
    """Raises ConfigError if there is no tenant of this name."""
    if name not in tenants:
        raise ConfigError(f"no adapter named {name!r}. Adapters: {', '.join(tenants) or 'none'}")
    return tenants[name]


def _require_trainable(tenants: Sequence[Tenant | None]) -> None:
    """Refuse to train a tenant twice in a call, or past its window.

    Raises:
        ConfigError: naming it.
    """
    names = [tenant.name for tenant in tenants if tenant is not None]
    if len(names) < len(tenants):
        raise ConfigError("the adapter None is the base, which is not trained. Name an adapter")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"{', '.join(map(repr, twice))} is named twice. Give a tenant's rows as one batch")
    for tenant in tenants:
        if tenant is None:
            continue
        steps = tenant.options.gradient_accumulation_steps
        if tenant.window.micro_batches >= steps:
            raise ConfigError(
                f"the window of {tenant.name!r} is full ({steps} micro-batches). "
                f"Call optim_step({tenant.name!r}) first"
            )


def is_scaled_at_once(tenant: Tenant | None) -> bool:
    """Return whether the number of tokens in a tenant's window is fixed before its first backward pass.

    It is of one micro-batch.

    Its gradients are then those of a mean, product by product. Otherwise the sum is divided at the end.
    """
    return (
        tenant is not None
        and tenant.options.reduction == "mean"
        and tenant.options.gradient_accumulation_steps == 1
    )


def _summed(results: Sequence[tuple[dict[int, float], int]]) -> tuple[dict[int, float], int]:
    """Sum the losses of all ranks by entry. The number of passes is equal on all."""
    sums: dict[int, float] = {}
    for losses, _ in results:
        for number, value in losses.items():
            sums[number] = sums.get(number, 0.0) + value
    return sums, results[0][1]


@dataclass(frozen=True, slots=True)
class EntryRows:
    """Rows of one entry of a call on this rank."""

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
        own: list[tuple[Tenant, slice]] = []
        keys = [torch.empty(0, dtype=torch.int64)]
        rows: list[TenantRow] = []
        for number in plan.entries:
            entry = entries[number]
            span = slice(len(rows), len(rows) + len(entry.rows))
            rows.extend(entry.rows)
            self.spans[number] = span
            if entry.tenant is not None:
                key = key_of(entry.tenant.options.seed, entry.tenant.windows, entry.tenant.window.micro_batches)
                keys.append(row_keys(key, entry.first, len(entry.rows)))
                own.append((entry.tenant, span))
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
        on_device = sent(torch.cat(keys), device)  # of tenants' rows, which come first
        members = tuple(TenantRows(tenant, at.start, at.stop, on_device[at]) for tenant, at in own)
        self.route = BatchRouting(shape[0], shape[1], members, choice, anchor, is_training)
        self.logprobs: torch.Tensor | None = None
        """(rows, tokens - 1), float32: of each label, given what stands before it; 0 where there is none."""

    def forward(self, model: nn.Module, switch: ActiveRouting) -> None:
        """Collective: as the model is."""
        with switch.on(self.route):
            output: Any = model(
                input_ids=sent(self.input_ids, self.device),
                attention_mask=sent(self.attention_mask, self.device),
                use_cache=False,
            )
        logits: torch.Tensor = output.logits[:, :-1]
        following = sent(self.labels, self.device)[:, 1:]
        losses = F.cross_entropy(
            logits.flatten(0, 1).float(), following.flatten(), reduction="none", ignore_index=IGNORED
        )
        self.logprobs = -losses.view(following.shape)

    def backward(self, switch: ActiveRouting, scales: Mapping[int, float]) -> dict[int, float]:
        """Add to the gradients of the tenants, each token's loss times its weight and the scale of its entry.

        There is no sum over tenants that one of them could spoil: every token's loss has a gradient of its own.

        Collective: as the model is.

        Returns: by entry, the sum of the weighted losses of this rank's rows.
        """
        logprobs = self.logprobs
        assert logprobs is not None
        if not logprobs.requires_grad:
            raise TrainingError("the loss depends on no adapter of these tenants. Look at their targets")
        weights = self.weights[:, 1:].clone()
        weights[self.labels[:, 1:] == IGNORED] = 0
        scaled = weights.clone()
        for number, span in self.spans.items():
            scaled[span] *= scales[number]
        with switch.on(self.route):
            torch.autograd.backward(logprobs, sent(-scaled, self.device))
        self.logprobs = logprobs.detach()
        losses = (-self.logprobs.double() * sent(weights, self.device)).cpu()  # the one wait of a pass
        return {number: float(losses[span].sum()) for number, span in self.spans.items()}
