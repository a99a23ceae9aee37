"""``AdapterBank``: many adapters, each with an optimizer of its own, on one base."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Unpack

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from typing_extensions import TypedDict

from shardwise.bank import guards
from shardwise.bank.backends import BackendChoice, FewestProducts
from shardwise.bank.files import config_of, lent, outlined, read_tenant
from shardwise.bank.hooks import SiteHooks
from shardwise.bank.passes import EntryRows, FusedPass
from shardwise.bank.routing import RouteSwitch
from shardwise.bank.rows import (
    AgreedRows,
    RowFacts,
    RowTensors,
    TenantRow,
    agreed_rows,
    facts_of,
    plan_passes,
    rows_of,
)
from shardwise.bank.state import load_tenant_state, tenant_state
from shardwise.bank.tenant import (
    OptimizerMaker,
    Reduction,
    ScheduleMaker,
    Tenant,
    TenantOptions,
    TokenMean,
    WeightedSum,
    require_name,
)
from shardwise.engines.save_options import SaveOptions, Trust, Verification
from shardwise.errors import ConfigError
from shardwise.execution.ranks.world import World
from shardwise.models.standing import computing_device, root_of
from shardwise.report.save_report import SaveReport
from shardwise.training.evaluation import evaluating
from shardwise.verbs.save import save_adapter

if TYPE_CHECKING:
    from peft import LoraConfig


class TenantKeywords(TypedDict, total=False):
    """See :class:`~shardwise.bank.tenant.TenantOptions`."""

    optimizer: OptimizerMaker
    schedule: ScheduleMaker
    max_grad_norm: float
    accumulation: int
    reduction: Reduction
    seed: int


@dataclass(frozen=True, slots=True)
class TenantLoss:
    """What a micro-batch was for one tenant."""

    loss: float
    """Of all ranks' rows: the mean over the tokens that are learned, or the sum with weights."""
    learned_tokens: int
    """On all ranks."""
    logprobs: list[torch.Tensor]
    """Of this rank's rows, one tensor (tokens - 1,) for each: of each label, given what stands before it."""


@dataclass(frozen=True, slots=True)
class FusedLosses:
    """What a call of ``forward_backward`` was."""

    tenants: dict[str, TenantLoss]
    passes: int
    """Through the base; tenants whose rows have one length share a pass."""
    backends: dict[str, int]
    """How adapters were computed and why, to how many layers were on this rank."""


@dataclass(frozen=True, slots=True)
class TenantStep:
    """What a call of ``optim_step`` was, the same on every rank."""

    is_taken: bool
    """False where the gradient was not finite: matrices, moments and schedule are as before."""
    grad_norm: float
    """Before it was clipped."""
    learned_tokens: int
    learning_rate: float
    """That the step was taken with."""


@dataclass
class _Call:
    """One call with rows: what this rank has, and what all ranks know."""

    rows: list[list[TenantRow]]
    tenants: list[Tenant | None]
    agreed: list[AgreedRows]
    chosen: Counter[str] = field(default_factory=Counter)
    logprobs: dict[int, list[torch.Tensor]] = field(default_factory=dict)


class AdapterBank:
    """Many LoRAs trained at once on one base, each as if it were alone.

    Adapters ("tenants") have ranks, targets, dropout, optimizers, windows and clips of their own. They come and go
    between any two steps; the base is not touched, nor sharded again. See [Note: Many adapters].

    Every rank makes the same calls in the same order, each with its own rows; methods say which are collective.
    Memory: for each tenant, on every rank, 16 bytes for each trained number (with AdamW's two moments).

    Args:
        model: as ``shardwise.from_pretrained`` brings it up without ``tuning=``, sharded or not. It is frozen.
        backend: how adapters are computed; by default whatever takes fewest products.
        pad_to: the multiple that rows' lengths are rounded up to.

    Raises:
        ConfigError: the model cannot be a base; it names why.
    """

    def __init__(self, model: nn.Module, *, backend: BackendChoice | None = None, pad_to: int = 64) -> None:
        self._world = World.current(call="an AdapterBank")
        self._model = self._world.together(lambda: guards.require_base(model, self._world.size))
        if pad_to < 1:
            raise ConfigError(f"pad_to={pad_to}: rows are padded to a multiple of 1 or more")
        self._backend = backend if backend is not None else FewestProducts()
        self._pad_to = pad_to
        self._tenants: dict[str, Tenant] = {}
        self._switch = RouteSwitch()
        self._hooks = SiteHooks(self._model, self._switch)
        for parameter in self._model.parameters():
            parameter.requires_grad_(False)
        self._device = computing_device(next(self._model.parameters()))

    # ── tenants ───────────────────────────────────────────────────────────────────────────────────

    @property
    def names(self) -> tuple[str, ...]:
        """Of the tenants, in the order they came in."""
        return tuple(self._tenants)

    def trained_counts(self) -> dict[str, int]:
        """How many numbers each tenant trains."""
        return {name: tenant.trained_count for name, tenant in self._tenants.items()}

    def create(self, name: str, config: LoraConfig, **keywords: Unpack[TenantKeywords]) -> None:
        """Add a tenant. Its matrices begin as PEFT's do, from (seed, name of the matrix) alone.

        Collective: yes; two short meetings.

        Args:
            name: letters, digits, ``.``, ``_`` and ``-``.
            config: PEFT's own; it is copied.
            keywords: see :class:`~shardwise.bank.tenant.TenantOptions`.

        Raises:
            ConfigError: the name is taken or none; the config cannot be honoured; the optimizer is not elementwise.
            DisagreementError: ranks ask for something else.
        """
        tenant = self._world.together(lambda: self._made(name, config, TenantOptions(**keywords)))
        optimizer = tenant.part.optimizer
        settings = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
        options = tenant.options
        words = (name, tenant.words, type(optimizer).__qualname__, repr(settings))
        numbers = (options.max_grad_norm, options.accumulation, repr(options.reduction), options.seed)
        self._world.require_equal((*words, *numbers), f"the adapter {name!r} (its config or options)")
        self._hooks.add(tenant.sites)
        self._tenants[name] = tenant

    def _made(self, name: str, config: LoraConfig, options: TenantOptions) -> Tenant:
        if require_name(name) in self._tenants:
            raise ConfigError(f"there is an adapter {name!r} already; remove it, or take another name")
        outline = outlined(self._model, config)
        self._hooks.require_fitting(outline.sites)
        return Tenant(name, config, outline, options, self._device)

    def remove(self, name: str) -> None:
        """Forget a tenant, and what it has gathered. Collective: no, but every rank does it."""
        tenant = self._tenant(name)
        del self._tenants[name]
        self._hooks.remove(tenant.sites)

    def _tenant(self, name: str) -> Tenant:
        if name not in self._tenants:
            raise ConfigError(f"there is no adapter {name!r}; there are {', '.join(self._tenants) or 'none'}")
        return self._tenants[name]

    # ── training ──────────────────────────────────────────────────────────────────────────────────

    def forward_backward(self, batches: Sequence[tuple[str, RowTensors]]) -> FusedLosses:
        """A micro-batch of each of some tenants, through the base at once; adds to their gradients.

        If it fails, the gradients of these tenants are what they were before the call.

        Collective: yes. Two short meetings, and what FSDP2 gathers for each pass.
        Memory: logits of all rows of a pass in float32.

        Args:
            batches: (tenant, its rows on this rank), each tenant once; the same tenants on every rank, with no rows
                where there are none. See :data:`~shardwise.bank.rows.RowTensors`.

        Raises:
            ConfigError: a batch or a tenant is not what it must be; the same on every rank, before anything is run.
            DisagreementError: ranks name other tenants.
            TrainingError: an adapter was passed by, or the base has drawn random numbers.
        """
        call = self._called(batches, self._require_trainable, _require_named_once)
        tenants = [tenant for tenant in call.tenants if tenant is not None]
        with self._kept_gradients(tenants):
            sums, passes = self._world.all_reduce(lambda: self._run(call), _added)
        losses = {}
        for number, (tenant, entry) in enumerate(zip(tenants, call.agreed, strict=True)):
            tenant.window.micro_batches += 1
            tenant.window.learned_tokens += entry.learned_tokens
            divisor = max(entry.learned_tokens, 1) if isinstance(tenant.options.reduction, TokenMean) else 1
            losses[tenant.name] = TenantLoss(
                sums.get(number, 0.0) / divisor, entry.learned_tokens, call.logprobs.get(number, [])
            )
        return FusedLosses(losses, passes, dict(call.chosen))

    def _run(self, call: _Call) -> tuple[dict[int, float], int]:
        """Passes, forward and backward; the sums of this rank's losses by entry, and how many passes."""
        sums: dict[int, float] = {}
        scales = {
            number: 1 / max(entry.learned_tokens, 1) if _is_scaled_at_once(tenant) else 1.0
            for number, (tenant, entry) in enumerate(zip(call.tenants, call.agreed, strict=True))
        }
        passes = self._passes(call, is_training=True)
        with guards.no_random_numbers(self._device):
            for each in passes:
                each.forward(self._model, self._switch)
                sums |= each.backward(self._switch, {number: scales[number] for number in each.spans})
                each.route.require_reached()
                self._note(call, each)
        return sums, len(passes)

    def _look(self, call: _Call) -> None:
        """Forward passes alone."""
        with evaluating(self._model):
            for each in self._passes(call, is_training=False):
                each.forward(self._model, self._switch)
                self._note(call, each)

    def optim_step(self, name: str, **changes: Any) -> TenantStep:
        """Take a tenant's step, at the end of its window. One all-reduce of its gradient.

        Collective: yes; a short meeting and the all-reduce.

        Args:
            name: of the tenant. No other tenant's numbers are looked at.
            changes: settings of its optimizer (``lr``, ``betas``, ...) or ``max_grad_norm``, from now on.

        Raises:
            ConfigError: its window is not full, or a change is none.
            DisagreementError: ranks step for another tenant, or change something else.
        """

        def check() -> tuple[str, str]:
            tenant = self._tenant(name)
            found, wanted = tenant.window.micro_batches, tenant.options.accumulation
            if found < wanted:
                raise ConfigError(
                    f"the window of {name!r} has {found} micro-batches of {wanted}; it steps when full"
                )
            tenant.require_changes(changes)
            return name, repr(sorted(changes.items()))

        self._world.require_equal(self._world.together(check), "the tenant that takes a step, or how")
        tenant = self._tenant(name)
        tenant.change(changes)
        learning_rate = tenant.part.learning_rate
        learned = tenant.window.learned_tokens
        self._sum_over_ranks(tenant)
        is_mean = isinstance(tenant.options.reduction, TokenMean) and not _is_scaled_at_once(tenant)
        is_taken, norm = tenant.step(1 / max(learned, 1) if is_mean else 1.0)
        return TenantStep(is_taken, norm, learned, learning_rate)

    def _sum_over_ranks(self, tenant: Tenant) -> None:
        if self._world.size > 1:
            dist.all_reduce(tenant.gradient, group=self._world.group)

    # ── evaluation ────────────────────────────────────────────────────────────────────────────────

    def forward(self, batches: Sequence[tuple[str | None, RowTensors]]) -> list[list[torch.Tensor]]:
        """The log probability of each label, without gradients and without dropout.

        Collective: yes. Two short meetings, and what FSDP2 gathers for each pass.

        Args:
            batches: as of :meth:`forward_backward`; None for the base without an adapter. A tenant may come twice.

        Returns: for each entry, for each of this rank's rows, (tokens - 1,) float32: of each label, given what
        stands before it; 0 where it is none.
        """
        call = self._called(batches, lambda tenant: None, lambda names: None)
        try:
            self._world.together(lambda: self._look(call))
        except BaseException:
            _recover(self._model)
            raise
        return [call.logprobs.get(number, []) for number in range(len(call.rows))]

    # ── state ─────────────────────────────────────────────────────────────────────────────────────

    def state_dict(self, name: str) -> dict[str, Any]:
        """A tenant between two windows: its matrices by PEFT's names, optimizer, schedule, counts. A copy.

        It is the same on every rank, and goes on on any number of them. Collective: no.

        Raises:
            ConfigError: its window is not over.
        """
        return tenant_state(self._tenant(name))

    def load_state_dict(self, name: str, state: Mapping[str, Any]) -> None:
        """Give a tenant, created with the same config and optimizer, the state of one. Collective: no.

        Raises:
            ConfigError: it is that of another, naming what differs; nothing is changed then.
        """
        load_tenant_state(self._tenant(name), state)

    # ── files ─────────────────────────────────────────────────────────────────────────────────────

    def save(
        self,
        name: str,
        directory: str | os.PathLike[str],
        *,
        dtype: torch.dtype | str | None = None,
        verify: Verification = Trust(),  # noqa: B008 - frozen
        options: SaveOptions = SaveOptions(),  # noqa: B008
    ) -> SaveReport:
        """Save a tenant as ``PeftModel.from_pretrained`` loads it, with all that ``save_adapter`` promises.

        Its optimizer is not saved; see :meth:`state_dict`. Collective: yes.
        """
        whole = self._world.together(lambda: lent(self._model, self._tenant(name)))
        return save_adapter(whole, directory, dtype=dtype, verify=verify, options=options)

    def load(self, name: str, directory: str | os.PathLike[str], **keywords: Unpack[TenantKeywords]) -> None:
        """Add a tenant whose config and matrices are in a folder of PEFT's, that all ranks see.

        Collective: yes. If it fails, there is no such tenant.

        Args:
            name: as of :meth:`create`.
            directory: with ``adapter_config.json``, and a file of tensors.
            keywords: as of :meth:`create`.

        Raises:
            CoverageError: the tensors are not those that the config wants of this base.
            FormatError, StorageError: the folder cannot be read.
            ConfigError, DisagreementError: as of :meth:`create`.
        """
        self.create(name, self._world.together(lambda: config_of(directory)), **keywords)
        try:
            read_tenant(self._world, self._model, self._tenants[name], directory)
        except BaseException:
            self.remove(name)
            raise

    # ── within ────────────────────────────────────────────────────────────────────────────────────

    def _called(
        self,
        batches: Sequence[tuple[str | None, RowTensors]],
        require: Callable[[Tenant], object],
        require_names: Callable[[Sequence[str | None]], object],
    ) -> _Call:
        """The rows of a call, checked on all ranks, and counted."""
        rows: list[list[TenantRow]] = []
        tenants: list[Tenant | None] = []

        def check() -> list[RowFacts]:
            require_names([name for name, _ in batches])
            for name, batch in batches:
                tenant = None if name is None else self._tenant(name)
                if tenant is not None:
                    require(tenant)
                may_have_weights = tenant is None or isinstance(tenant.options.reduction, WeightedSum)
                tenants.append(tenant)
                rows.append(
                    rows_of(
                        repr(name) if name else "the base",
                        batch,
                        words=self._words(),
                        longest=self._longest(),
                        may_have_weights=may_have_weights,
                    )
                )
            return [facts_of(name, own) for (name, _), own in zip(batches, rows, strict=True)]

        return _Call(rows, tenants, self._world.all_reduce(check, agreed_rows))

    def _require_trainable(self, tenant: Tenant) -> None:
        guards.require_no_chance(self._model)
        if tenant.window.micro_batches >= tenant.options.accumulation:
            raise ConfigError(
                f"the window of {tenant.name!r} is full ({tenant.options.accumulation} micro-batches); call "
                f"optim_step({tenant.name!r}) first"
            )

    def _passes(self, call: _Call, *, is_training: bool) -> list[FusedPass]:
        rank = self._world.rank
        entries = [
            EntryRows(tenant, own, sum(entry.rows[:rank]))
            for tenant, own, entry in zip(call.tenants, call.rows, call.agreed, strict=True)
        ]
        ranks = {name: tenant.rank for name, tenant in self._tenants.items()}
        plans = plan_passes(call.agreed, ranks, multiple=self._pad_to, longest=self._longest())
        return [FusedPass(plan, entries, self._device, self._backend, is_training=is_training) for plan in plans]

    def _note(self, call: _Call, done: FusedPass) -> None:
        assert done.logprobs is not None
        call.chosen.update(done.route.chosen)
        for number, span in done.spans.items():
            own = done.logprobs[span]
            call.logprobs[number] = [
                values[: len(row.input_ids) - 1] for values, row in zip(own, call.rows[number], strict=True)
            ]

    @contextmanager
    def _kept_gradients(self, tenants: Sequence[Tenant]) -> Iterator[None]:
        """If the block fails, gradients are what they were; a window that has just begun has none."""
        before = [tenant.gradient.clone() if tenant.window.micro_batches else None for tenant in tenants]
        try:
            yield
        except BaseException:
            for tenant, gradient in zip(tenants, before, strict=True):
                tenant.gradient.zero_() if gradient is None else tenant.gradient.copy_(gradient)
            _recover(self._model)
            raise

    def _words(self) -> int:
        embeddings: Any = self._model.get_input_embeddings()
        return int(embeddings.weight.shape[0])

    def _longest(self) -> int:
        config: Any = self._model.config
        found = getattr(config, "max_position_embeddings", None)
        return found if isinstance(found, int) and found > 0 else 1 << 30


def _require_named_once(names: Sequence[str | None]) -> None:
    if twice := sorted({str(name) for name in names if names.count(name) > 1}):
        raise ConfigError(f"{', '.join(map(repr, twice))} is named twice; give a tenant's rows as one batch")


def _recover(model: nn.Module) -> None:
    """Have FSDP2 forget a pass that was broken off: what is gathered, and what it waits for. Collective: no."""
    root: Any = root_of(model)
    if hasattr(root, "reset_iter_state"):  # torch 2.13
        root.reset_iter_state()
        return
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _is_scaled_at_once(tenant: Tenant | None) -> bool:
    """Whether the tokens of a tenant's window are known before its first backward pass: it is of one micro-batch.

    Its gradients are then, product by product, those of a mean; else the sum is divided at the end.
    """
    return (
        tenant is not None and isinstance(tenant.options.reduction, TokenMean) and tenant.options.accumulation == 1
    )


def _added(told: Sequence[tuple[dict[int, float], int]]) -> tuple[dict[int, float], int]:
    """Sums of all ranks' losses by entry, and the passes, which are as many on each."""
    sums: dict[int, float] = {}
    for own, _ in told:
        for number, value in own.items():
            sums[number] = sums.get(number, 0.0) + value
    return sums, told[0][1]
