"""Calls with rows of many tenants: checks them, plans passes, runs them, or rolls everything back."""

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

from shardwise.bank.backends import BackendChoice, row_keys, stable_key
from shardwise.bank.collective_resync import in_step
from shardwise.bank.routing import ActiveRouting, BatchRouting, TenantRows
from shardwise.bank.rows import (
    IGNORED,
    PassPlan,
    RowCounts,
    RowTensors,
    TenantRow,
    combine_counts,
    no_random_numbers,
    parse_batch,
    plan_passes,
    summarize_rows,
)
from shardwise.bank.tenant import Tenant
from shardwise.errors import ConfigError, ShardwiseError, TrainingError
from shardwise.execution.world import World
from shardwise.models.gradients import reset_fsdp_state
from shardwise.models.torch_api import sent
from shardwise.models.view import find_fsdp_root


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
        root = find_fsdp_root(self.model)
        if root is not None:
            reset_fsdp_state(root)


@dataclass
class RowCall:
    """A call with rows. An entry is a tenant's name with its rows, and each list has one item for each entry.

    Attributes:
        base: the base.
        rows: rows of this rank.
        tenants: the tenant of each entry. None is the base without an adapter.
        agreed: counts of the rows of each entry on all ranks.
        chosen: number of adapted layer calls, by how they were computed.
        logprobs: log probabilities of this rank's rows, by entry number.
    """

    base: SharedBase
    rows: list[list[TenantRow]] = field(default_factory=list)
    tenants: list[Tenant | None] = field(default_factory=list)
    agreed: list[RowCounts] = field(default_factory=list)
    chosen: Counter[str] = field(default_factory=Counter)
    logprobs: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    def check(
        self,
        batches: Sequence[tuple[str | None, RowTensors]],
        tenants: Mapping[str, Tenant],
        *,
        is_training: bool,
    ) -> list[RowCounts]:
        """Check the batches of this rank. Return counts of their rows.

        Raises:
            ConfigError: a batch or a tenant is invalid.
        """
        _require_pairs(batches)
        self.tenants = [None if name is None else get_tenant(tenants, name) for name, _ in batches]
        if is_training:
            _require_trainable(self.tenants)
        for tenant, (name, batch) in zip(self.tenants, batches, strict=True):
            has_weights = tenant is None or tenant.options.reduction == "sum"
            limits = {"vocab_size": self.base.vocab_size, "longest": self.base.longest}
            self.rows.append(parse_batch(_shown(name), batch, **limits, may_have_weights=has_weights))
        return [summarize_rows(name, own) for (name, _), own in zip(batches, self.rows, strict=True)]

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
        """Run forward passes only. Collective: yes.

        Raises:
            ShardwiseError: the same on every rank. A note names the tenants.
        """
        self._run(is_training=False)

    def _run(self, *, is_training: bool) -> tuple[dict[int, float], int]:
        """Run passes on all ranks, and sum their results. See [Note: In step]."""
        base = self.base
        root: Any = find_fsdp_root(base.model)
        try:
            with in_step(base.world, root, base.recover) as resync:
                own = self._train if is_training else self._evaluate
                with base.world.all_reduce("compute the pass", _summed) as exchange:
                    exchange.local = resync.run(own)
                summed: tuple[dict[int, float], int] = exchange.result
                return summed
        except BaseException as error:
            base.recover()
            if isinstance(error, ShardwiseError):
                names = ", ".join(_shown(entry.name) for entry in self.agreed if sum(entry.rows))
                error.add_note(f"This was a pass of {names}; all of it is discarded.")
            raise

    def _evaluate(self) -> tuple[dict[int, float], int]:
        passes = self._passes(is_training=False)
        with _evaluating(self.base.model):
            for each in passes:
                each.forward(self.base.model, self.base.switch)
                self._collect(each)
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
                self._collect(each)
        return sums, len(passes)

    def _passes(self, *, is_training: bool) -> list[FusedPass]:
        ranks = {tenant.name: tenant.rank for tenant in self.tenants if tenant is not None}
        plans = plan_passes(self.agreed, ranks, multiple=self.base.pad_to, longest=self.base.longest)
        return [FusedPass(self, plan, is_training=is_training) for plan in plans]

    def _collect(self, done: FusedPass) -> None:
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

    FSDP2 keeps the root group unsharded after a forward pass for the backward pass, which does not follow here.
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
    """Return a call with the rows of this rank, checked and counted on all ranks. Collective: yes.

    Raises:
        ConfigError, RankMismatchError: the same on every rank.
    """
    call = RowCall(base)
    with base.world.all_reduce("check the rows", combine_counts) as exchange:
        exchange.local = call.check(batches, tenants, is_training=is_training)
    call.agreed = exchange.result
    return call


def _require_pairs(batches: object) -> None:
    """Raise ConfigError unless ``batches`` is a list of (name, rows)."""
    if not isinstance(batches, Sequence) or isinstance(batches, str):
        raise ConfigError(f"batches: is a {type(batches).__name__}, not a list of (name, rows). Pass one")
    for number, entry in enumerate(batches):
        if not isinstance(entry, tuple | list) or len(entry) != 2:
            raise ConfigError(f"batches[{number}]: is a {type(entry).__name__}, not a pair (name, rows). Pass one")
        if not isinstance(entry[0], str | None):
            kind = type(entry[0]).__name__
            raise ConfigError(
                f"batches[{number}]: its name is a {kind}, not a string, or None for the base. Pass one"
            )


def _shown(name: str | None) -> str:
    return "the base" if name is None else repr(name)


def get_tenant(tenants: Mapping[str, Tenant], name: object) -> Tenant:
    """Return the tenant of this name, or raise ConfigError if there is none or its last step failed."""
    found = find_tenant(tenants, name)
    if found.failure is not None:
        raise ConfigError(f"{name!r}: a step failed, {found.failure}. Call load_state_dict, or delete it")
    return found


def find_tenant(tenants: Mapping[str, Tenant], name: object) -> Tenant:
    """Return the tenant of this name, or raise ConfigError."""
    if not isinstance(name, str) or name not in tenants:
        raise ConfigError(f"no adapter named {name!r}. Adapters: {', '.join(tenants) or 'none'}")
    return tenants[name]


def _require_trainable(tenants: Sequence[Tenant | None]) -> None:
    """Raise ConfigError for the base, for a tenant that is named twice, and for one whose window is full."""
    names = [tenant.name for tenant in tenants if tenant is not None]
    if len(names) < len(tenants):
        raise ConfigError("None is the base, which is not trained. Name an adapter")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"{', '.join(map(repr, twice))} is named twice. Pass a tenant's rows as one batch")
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
    """Return whether a tenant's loss is divided by its number of supervised tokens before the backward pass.

    That is possible for a mean over a window of one micro-batch. Otherwise the gradient is divided at the end.
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


class FusedPass:
    """A pass of a micro-batch of many tenants through the base. It owns its route ([Note: A route])."""

    def __init__(self, call: RowCall, plan: PassPlan, *, is_training: bool) -> None:
        base = call.base
        self.spans: dict[int, slice] = {}
        own: list[tuple[Tenant, slice]] = []
        keys = [torch.empty(0, dtype=torch.int64)]
        rows: list[TenantRow] = []
        for number in plan.entries:
            tenant, first = call.tenants[number], sum(call.agreed[number].rows[: base.world.rank])
            span = slice(len(rows), len(rows) + len(call.rows[number]))
            rows.extend(call.rows[number])
            self.spans[number] = span
            if tenant is not None:
                key = stable_key(tenant.options.seed, tenant.windows, tenant.window.micro_batches)
                keys.append(row_keys(key, first, len(call.rows[number])))
                own.append((tenant, span))
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
        if not rows:  # one dummy row, so that this rank takes part in FSDP2's all-gathers
            self.attention_mask[:] = 1
        self.device = base.device
        anchor = torch.zeros((), device=self.device, requires_grad=True)
        on_device = sent(torch.cat(keys), self.device)  # keys of tenants' rows; rows of the base come last
        members = tuple(TenantRows(tenant, at.start, at.stop, on_device[at]) for tenant, at in own)
        self.route = BatchRouting(shape[0], shape[1], members, base.backend, anchor, is_training)
        self.logprobs: torch.Tensor | None = None
        """Log probability of each label, (rows, tokens - 1), float32. 0 for ignored labels."""

    def forward(self, model: nn.Module, switch: ActiveRouting) -> None:
        """Run the forward pass, and keep the log probabilities. Collective: if the model is sharded."""
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
        """Accumulate the tenants' gradients of each token's loss, times the token's weight and the entry's scale.

        Losses are not summed over tenants, so a non-finite loss of one tenant does not affect the others.

        Collective: as the model is.

        Returns:
            The sum of the weighted losses of this rank's rows by entry.
        """
        logprobs = self.logprobs
        assert logprobs is not None
        if not logprobs.requires_grad:
            raise TrainingError("the loss depends on no adapter of these tenants. Check their targets")
        weights = self.weights[:, 1:].clone()
        weights[self.labels[:, 1:] == IGNORED] = 0
        scaled = weights.clone()
        for number, span in self.spans.items():
            scaled[span] *= scales[number]
        with switch.on(self.route):
            torch.autograd.backward(logprobs, sent(-scaled, self.device))
        self.logprobs = logprobs.detach()
        losses = (-self.logprobs.double() * sent(weights, self.device)).cpu()  # the only device sync of a pass
        return {number: float(losses[span].sum()) for number, span in self.spans.items()}
