"""Carries out a call with rows of many tenants: checks, meets, plans passes, runs them; or takes all of it back."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from shardwise.bank import guards
from shardwise.bank.backends import BackendChoice
from shardwise.bank.in_step import in_step
from shardwise.bank.passes import EntryRows, FusedPass
from shardwise.bank.routing import RouteSwitch
from shardwise.bank.rows import (
    AgreedRows,
    PassPlan,
    RowFacts,
    RowTensors,
    TenantRow,
    agreed_rows,
    facts_of,
    plan_passes,
    rows_of,
    without_meaning,
)
from shardwise.bank.tenant import Tenant, TokenMean, WeightedSum
from shardwise.errors import ConfigError, DisagreementError
from shardwise.execution.ranks.messages import OddRanks
from shardwise.execution.ranks.world import World
from shardwise.models.placement import root_of
from shardwise.models.torch_words import forget_pass
from shardwise.training.generation import evaluating

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class SharedBase:
    """The base of a bank, the ranks it is on, and how adapters on it are computed."""

    world: World
    model: PreTrainedModel
    device: torch.device
    switch: RouteSwitch
    backend: BackendChoice
    pad_to: int

    @property
    def words(self) -> int:
        embeddings: Any = self.model.get_input_embeddings()
        return int(embeddings.weight.shape[0])

    @property
    def longest(self) -> int:
        """The most tokens of a row."""
        found = getattr(self.model.config, "max_position_embeddings", None)
        return found if isinstance(found, int) and found > 0 else 1 << 30

    def recover(self) -> None:
        """Have FSDP2 forget a pass that was broken off. Collective: no."""
        root = root_of(self.model)
        if root is not None:
            forget_pass(root)


@dataclass
class RowCall:
    """One call with rows: what this rank has, and what all ranks know."""

    base: SharedBase
    rows: list[list[TenantRow]]
    tenants: list[Tenant | None]
    agreed: list[AgreedRows]
    chosen: Counter[str] = field(default_factory=Counter)
    logprobs: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    failure: Exception | None = None
    """What has broken off a pass on this rank."""

    def train(self) -> tuple[dict[int, float], int]:
        """Passes, forward and backward. Collective: as the base is.

        Returns: the sums of this rank's losses by entry, and how many passes there were.
        """
        base, sums = self.base, dict[int, float]()
        scales = {
            number: 1 / max(entry.learned_tokens, 1) if is_scaled_at_once(tenant) else 1.0
            for number, (tenant, entry) in enumerate(zip(self.tenants, self.agreed, strict=True))
        }
        passes = self._passes(is_training=True)
        with guards.no_random_numbers(base.device):
            for each in passes:
                each.forward(base.model, base.switch)
                sums |= each.backward(base.switch, {number: scales[number] for number in each.spans})
                each.route.require_reached()
                self._note(each)
        return sums, len(passes)

    def look(self) -> None:
        """Forward passes alone. Collective: as the base is."""
        with evaluating(self.base.model):
            for each in self._passes(is_training=False):
                each.forward(self.base.model, self.base.switch)
                self._note(each)

    def together(self, passes: Callable[[], T], conclude: Callable[[list[T]], R]) -> R:
        """Carry out passes on all ranks, and put together what each of them tells.

        Collective: yes.

        Raises:
            ShardwiseError: the same on every rank, and they are in step ([Note: In step]).
        """
        base = self.base

        def run() -> T:
            try:
                return keeper.run(passes)
            except Exception as error:
                self.failure = error
                _let_go(error)
                raise

        root: Any = root_of(base.model)
        with in_step(base.world, root, base.recover) as keeper:
            try:
                return base.world.all_reduce(run, conclude)
            except BaseException:
                base.recover()
                raise

    def alone(self, number: int) -> RowCall:
        """The call with one entry of this one."""
        return replace(
            self,
            rows=[self.rows[number]],
            tenants=[self.tenants[number]],
            agreed=[self.agreed[number]],
            **_nothing_told(),
        )

    def with_stand_ins(self, numbers: Iterable[int], absent: Iterable[int]) -> RowCall:
        """The call with rows that mean nothing in place of those of some entries, in the same layout.

        Rows of those that are ``absent``, too, are left out, as are those in whose passes there is nobody else.
        """
        idle, away = set(numbers), set(absent)
        for plan in self._plans():
            if idle.issuperset(plan.entries):
                away.update(plan.entries)
        rows, tenants, agreed = list(self.rows), list(self.tenants), list(self.agreed)
        for number in idle:
            tenant = tenants[number]
            tenants[number] = None if tenant is None else tenant.stand_in()
            rows[number] = [without_meaning(row) for row in rows[number]]
            if number in away:
                rows[number] = []
                agreed[number] = replace(agreed[number], rows=tuple(0 for _ in agreed[number].rows))
        return replace(self, rows=rows, tenants=tenants, agreed=agreed, **_nothing_told())

    def _passes(self, *, is_training: bool) -> list[FusedPass]:
        base = self.base
        entries = [
            EntryRows(tenant, own, sum(entry.rows[: base.world.rank]))
            for tenant, own, entry in zip(self.tenants, self.rows, self.agreed, strict=True)
        ]
        return [
            FusedPass(plan, entries, base.device, base.backend, is_training=is_training) for plan in self._plans()
        ]

    def _plans(self) -> list[PassPlan]:
        ranks = {tenant.name: tenant.rank for tenant in self.tenants if tenant is not None}
        return plan_passes(self.agreed, ranks, multiple=self.base.pad_to, longest=self.base.longest)

    def _note(self, done: FusedPass) -> None:
        assert done.logprobs is not None
        self.chosen.update(done.route.chosen)
        for number, span in done.spans.items():
            self.logprobs[number] = [
                values[: len(row.input_ids) - 1]
                for values, row in zip(done.logprobs[span], self.rows[number], strict=True)
            ]


def _let_go(error: BaseException) -> None:
    """Have an error keep where it came from, but not what was computed there: tenants are to be run again."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__


def _nothing_told() -> dict[str, Any]:
    return {"chosen": Counter(), "logprobs": {}, "failure": None}


def open_call(
    base: SharedBase,
    batches: Sequence[tuple[str | None, RowTensors]],
    tenants: Mapping[str, Tenant],
    require: Callable[[SharedBase, Sequence[Tenant | None]], object],
) -> RowCall:
    """The rows of a call, checked on all ranks, and counted. Collective: yes.

    Raises:
        ConfigError, DisagreementError: the same on every rank.
    """
    rows: list[list[TenantRow]] = []
    found: list[Tenant | None] = []

    def check() -> list[RowFacts]:
        _require_pairs(batches)
        found.extend(None if name is None else tenant_of(tenants, name) for name, _ in batches)
        require(base, found)
        for tenant, (name, batch) in zip(found, batches, strict=True):
            takes_weights = tenant is None or isinstance(tenant.options.reduction, WeightedSum)
            who = "the base" if name is None else repr(name)
            rows.append(rows_of(who, batch, words=base.words, longest=base.longest, may_have_weights=takes_weights))
        return [facts_of(name, own) for (name, _), own in zip(batches, rows, strict=True)]

    agreed = base.world.all_reduce(check, agreed_rows)
    return RowCall(base, rows, found, agreed)


def _require_pairs(batches: object) -> None:
    """Raises ConfigError for what is no list of names with rows."""
    if isinstance(batches, Mapping):
        names = ", ".join(map(repr, batches))
        raise ConfigError(f"the batches (of {names}) are a {type(batches).__name__}; pass list(batches.items())")
    if not isinstance(batches, Sequence) or isinstance(batches, str):
        raise ConfigError(f"the batches are a {type(batches).__name__}; pass a list of (name, rows)")
    for number, entry in enumerate(batches):
        if not isinstance(entry, tuple | list) or len(entry) != 2:
            raise ConfigError(f"batches[{number}] is a {type(entry).__name__}, and no pair; pass (name, rows)")
        if not isinstance(entry[0], str | None):
            raise ConfigError(f"batches[{number}] has a {type(entry[0]).__name__} for the name of an adapter")


@dataclass(frozen=True, slots=True)
class AskedStep:
    """What a rank tells of the step that it is about to take."""

    name: str
    changes: str
    settings: Mapping[str, str]


def require_one_step(told: Sequence[AskedStep]) -> None:
    """Refuse steps that are not the same on all ranks.

    Raises:
        DisagreementError: naming what differs.
    """
    first = told[0]
    if odd := OddRanks.among([(own.name, own.changes) for own in told]):
        raise DisagreementError(f"the tenant that takes a step, or how on rank {odd.shown} is not that of rank 0")
    if odd := OddRanks.among(told):
        own = told[odd.first].settings
        differing = (
            f"{key} ({own.get(key, 'absent')} against {first.settings.get(key, 'absent')})"
            for key in sorted({*own, *first.settings})
            if own.get(key) != first.settings.get(key)
        )
        raise DisagreementError(
            f"the step of {first.name!r} on rank {odd.shown} is not that of rank 0: {', '.join(differing)}; no "
            "step was taken. Give it the same optimizer and schedule on every rank"
        )


def tenant_of(tenants: Mapping[str, Tenant], name: str) -> Tenant:
    """Raises ConfigError where there is none of this name."""
    if name not in tenants:
        raise ConfigError(f"there is no adapter {name!r}; there are {', '.join(tenants) or 'none'}")
    return tenants[name]


def require_trainable(base: SharedBase, tenants: Sequence[Tenant | None]) -> None:
    """Refuse to train a tenant twice in a call, or past its window, or on a base that draws.

    Raises:
        ConfigError: naming it.
    """
    guards.require_no_chance(base.model)
    names = [tenant.name for tenant in tenants if tenant is not None]
    if len(names) < len(tenants):
        raise ConfigError("None is the base, which is not trained; name an adapter")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"{', '.join(map(repr, twice))} is named twice; give a tenant's rows as one batch")
    for tenant in tenants:
        if tenant is not None and tenant.window.micro_batches >= tenant.options.accumulation:
            raise ConfigError(
                f"the window of {tenant.name!r} is full ({tenant.options.accumulation} micro-batches); call "
                f"optim_step({tenant.name!r}) first"
            )


def is_scaled_at_once(tenant: Tenant | None) -> bool:
    """Whether the tokens of a tenant's window are known before its first backward pass: it is of one micro-batch.

    Its gradients are then, product by product, those of a mean; else the sum is divided at the end.
    """
    return (
        tenant is not None and isinstance(tenant.options.reduction, TokenMean) and tenant.options.accumulation == 1
    )


def added_up(told: Sequence[tuple[dict[int, float], int]]) -> tuple[dict[int, float], int]:
    """Sums of all ranks' losses by entry, and the passes, which are as many on each."""
    sums: dict[int, float] = {}
    for own, _ in told:
        for number, value in own.items():
            sums[number] = sums.get(number, 0.0) + value
    return sums, told[0][1]
