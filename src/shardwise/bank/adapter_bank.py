"""``AdapterBank``: many adapters, each with an optimizer of its own, on one base."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, get_args

import torch
from torch import nn
from typing_extensions import TypedDict

from shardwise.bank import calls, rows, tenant_facts
from shardwise.bank import state as states
from shardwise.bank import tenant as tenants
from shardwise.bank.backends import BackendChoice
from shardwise.bank.files import (
    agree,
    beside,
    config_of,
    find_training,
    names_of_peft,
    outlined,
    read_tenant,
    with_lent_tensors,
)
from shardwise.bank.routing import ActiveRouting, SiteHooks
from shardwise.bank.rows import RowTensors
from shardwise.bank.stepping import step_together, sum_all
from shardwise.checkpoints.facts import digest_of
from shardwise.engines.arguments import require_meant, require_same_arguments, world_of
from shardwise.engines.save_plan import PeftNames, SaveOptions, SaveRequest, resolved_dtype
from shardwise.engines.saving import execute_save
from shardwise.errors import ConfigError
from shardwise.execution.world import Clock, World
from shardwise.models.view import computing_device
from shardwise.planning.matching import OnFault
from shardwise.report.save_reports import SaveReport

if TYPE_CHECKING:
    from peft import LoraConfig


_PERMISSION = {"on_other_base": OnFault}


class TenantKeywords(TypedDict, total=False):
    """See :class:`~shardwise.bank.tenant.TenantOptions`."""

    optimizer: tenants.OptimizerMaker
    schedule: tenants.ScheduleMaker
    max_grad_norm: float
    gradient_accumulation_steps: int
    reduction: tenants.Reduction
    seed: int


class AdapterBank:
    """Many LoRAs trained at once on one base, each as if it were alone.

    Adapters ("tenants") have ranks, targets, dropout, optimizers, windows and clips of their own. They can be added
    and deleted between any two steps. The base is not changed or sharded again. See [Note: Many adapters].

    Every rank makes the same calls in the same order, each with its own rows. Methods state whether they are
    collective. Memory: for each tenant, on every rank, 16 bytes for each trained number (with AdamW's two moments).

    Args:
        model: as ``shardwise.from_pretrained`` brings it up without ``tuning=``, sharded or not. It is frozen.
        backend: "auto" computes adjacent tenants of one rank with equally many rows by one batched product. "loop"
            computes one tenant after the other, as PEFT does.
        pad_to: the multiple that rows' lengths are rounded up to.

    Raises:
        ConfigError: the model cannot be a base. The message has the reason.
    """

    def __init__(self, model: nn.Module, *, backend: BackendChoice = "auto", pad_to: int = 64) -> None:
        self._world = World.current(call="an AdapterBank")
        self._model = self._world.run_all(rows.require_base, model, self._world.size)
        if pad_to < 1:
            raise ConfigError(f"pad_to={pad_to}: rows are padded to a multiple of 1 or more")
        if backend not in get_args(BackendChoice):
            raise ConfigError(f"backend={backend!r}: pass 'auto' or 'loop'")
        self._tenants: dict[str, tenants.Tenant] = {}
        self._switch = ActiveRouting()
        self._hooks = SiteHooks(self._model, self._switch)
        for parameter in self._model.parameters():
            parameter.requires_grad_(False)
        self._device = computing_device(next(self._model.parameters()))
        self._base = calls.SharedBase(self._world, self._model, self._device, self._switch, backend, pad_to)

    # ── tenants ───────────────────────────────────────────────────────────────────────────────────

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tenants, in the order they came in."""
        return tuple(self._tenants)

    @property
    def max_length(self) -> int:
        """The most tokens of a row that the base takes."""
        return self._base.longest

    def num_trainable_parameters(self) -> dict[str, int]:
        """Count the numbers that each tenant trains."""
        return {name: tenant.trained_count for name, tenant in self._tenants.items()}

    def add_adapter(self, name: str, config: LoraConfig, **keywords: Unpack[TenantKeywords]) -> None:
        """Add a tenant. Its matrices begin as PEFT's do, from (seed, name of the matrix) alone.

        Collective: yes (two small exchanges).

        Args:
            name: letters, digits, ``.``, ``_`` and ``-``.
            config: PEFT's config. It is copied.
            keywords: see :class:`~shardwise.bank.tenant.TenantOptions`.

        Raises:
            ConfigError: the name is taken or invalid, the config is not supported, or the optimizer is not
                elementwise.
            RankMismatchError: ranks pass different arguments.
        """
        self._admit(self._agreed(name, config, keywords))

    def _agreed(self, name: str, config: LoraConfig, keywords: TenantKeywords) -> tenants.Tenant:
        """Return a tenant that all ranks have agreed on and that is not registered yet. Collective: yes."""
        tenant = self._world.run_all(lambda: self._made(name, config, tenants.TenantOptions(**keywords)))
        optimizer, schedule, options = tenant.optimizer, tenant.schedule, tenant.options
        settings = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
        kinds = [type(each).__qualname__ for each in (optimizer, schedule)]
        numbers = [options.max_grad_norm, options.gradient_accumulation_steps, options.seed, options.reduction]
        told = digest_of([name, tenant.comparable_config, *kinds, settings, schedule.state_dict(), *numbers])
        self._world.require_equal(told, f"the adapter {name!r} (its config or options)")
        return tenant

    def _admit(self, tenant: tenants.Tenant) -> None:
        self._hooks.add(tenant.sites)
        self._tenants[tenant.name] = tenant

    def _made(self, name: str, config: LoraConfig, options: tenants.TenantOptions) -> tenants.Tenant:
        if tenants.require_name(name) in self._tenants:
            raise ConfigError(f"the adapter {name!r} exists already. Remove it, or use another name")
        outline = outlined(self._model, config)
        self._hooks.require_fitting(outline.sites)
        return tenants.Tenant(name, config, outline, options, self._device, self._world)

    def delete_adapter(self, name: str) -> None:
        """Delete a tenant and its accumulated gradient. Collective: no, but every rank does it."""
        tenant = self._tenant(name)
        del self._tenants[name]
        self._hooks.remove(tenant.sites)

    def _tenant(self, name: str) -> tenants.Tenant:
        return calls.tenant_of(self._tenants, name)

    # ── training ──────────────────────────────────────────────────────────────────────────────────

    def forward_backward(self, batches: Sequence[tuple[str, RowTensors]]) -> tenants.FusedLosses:
        """Run one micro-batch of each of some tenants through the base in one pass, and add to their gradients.

        If a pass fails on any rank, all of the call is discarded on all ranks: gradients and windows are as before.

        Collective: yes. Two small exchanges, and FSDP2's all-gathers of each pass. Memory: float32 logits of all
        rows of a pass, and a copy of gradients whose window is open.

        Args:
            batches: (tenant, its rows on this rank), each tenant once. The same tenants on every rank, with empty
                rows if a rank has none. See :data:`~shardwise.bank.rows.RowTensors`.

        Raises:
            ConfigError: a batch or a tenant is invalid. Raised on every rank before anything is run.
            RankMismatchError: ranks name other tenants.
            TrainingError: an adapter was passed by, or the base has drawn random numbers.
            ShardwiseError: a pass failed. A note names its tenants.
        """
        call = calls.open_call(self._base, batches, self._tenants, is_training=True)
        sums, passes = call.train()
        losses = {}
        for number, entry in enumerate(call.agreed):
            tenant = self._tenant(str(entry.name))
            tenant.window.micro_batches += 1
            tenant.window.num_supervised_tokens += entry.num_supervised_tokens
            divisor = max(entry.num_supervised_tokens, 1) if tenant.options.reduction == "mean" else 1
            losses[tenant.name] = tenants.TenantLoss(
                sums.get(number, 0.0) / divisor, entry.num_supervised_tokens, call.logprobs.get(number, [])
            )
        return tenants.FusedLosses(losses, passes, dict(call.chosen))

    def optim_step(self, name: str, **changes: Any) -> tenants.TenantStep:
        """Take a tenant's step, at the end of its window. One all-reduce of its gradient.

        Collective: yes (two small exchanges and the all-reduce).

        Args:
            name: of the tenant. No other tenant's numbers are looked at.
            changes: settings of its optimizer (``lr``, ``betas``, ...) or ``max_grad_norm``, from now on.

        Raises:
            ConfigError: its window is not full, or a change is none.
            RankMismatchError: ranks step different tenants or pass different changes, or their optimizers have
                different settings (for example, from different schedules) or step counts. No step is taken then.
            RankLostError: a rank is lost. The bank is over then.
        """
        return self._step_all([name], changes)[name]

    def optim_steps(self, names: Sequence[str]) -> dict[str, tenants.TenantStep]:
        """Take the steps of several tenants as :meth:`optim_step` does: the same bits, in fewer calls.

        Collective: yes (two small exchanges, and an all-reduce for each tenant).

        Args:
            names: of the tenants, each once.
        """
        return self._step_all(list(dict.fromkeys(names)), {})

    def _step_all(self, names: Sequence[str], changes: Mapping[str, Any]) -> dict[str, tenants.TenantStep]:
        def check() -> dict[str, str]:
            settings = {
                "the tenant that takes a step": ", ".join(names),
                "the changes of its settings": repr(sorted(changes.items())),
            }
            for tenant in map(self._require_full, names):
                tenant.require_changes(changes)
                settings |= {f"{key} of {tenant.name!r}": value for key, value in tenant.settings().items()}
            return settings

        require_same_arguments(self._world, check)
        stepping = [self._require_full(name) for name in names]
        for tenant in stepping:
            tenant.change(changes)
        rates = [float(tenant.optimizer.param_groups[0].get("lr", math.nan)) for tenant in stepping]
        learned = [tenant.window.num_supervised_tokens for tenant in stepping]
        scales = [
            1 / max(count, 1) if tenant.options.reduction == "mean" and not calls.is_scaled_at_once(tenant) else 1.0
            for tenant, count in zip(stepping, learned, strict=True)
        ]

        def step() -> list[tuple[bool, float]]:
            sum_all(self._world, [tenant.gradient for tenant in stepping])
            return step_together(stepping, scales) if stepping else []

        found = zip(names, self._world.run_all(step), learned, rates, strict=True)
        return {name: tenants.TenantStep(*outcome, count, rate) for name, outcome, count, rate in found}

    def _require_full(self, name: str) -> tenants.Tenant:
        tenant = self._tenant(name)
        micro_batches, wanted = tenant.window.micro_batches, tenant.options.gradient_accumulation_steps
        if micro_batches < wanted:
            raise ConfigError(
                f"the window of {name!r} has {micro_batches} micro-batches of {wanted}. Call forward_backward "
                "until it is full"
            )
        return tenant

    # ── evaluation ────────────────────────────────────────────────────────────────────────────────

    def compute_logprobs(self, batches: Sequence[tuple[str | None, RowTensors]]) -> list[list[torch.Tensor]]:
        """The log probability of each label, without gradients and without dropout.

        Collective: yes. Two small exchanges, and FSDP2's all-gathers of each pass.

        Args:
            batches: as in :meth:`forward_backward`. None selects the base without an adapter. A tenant may come
                twice.

        Returns: for each entry and each of this rank's rows, (tokens - 1,) float32: the log probability of each
        label given the tokens before it, 0 for ignored labels.
        """
        call = calls.open_call(self._base, batches, self._tenants, is_training=False)
        call.look()
        return [call.logprobs.get(number, []) for number in range(len(call.rows))]

    # ── state ─────────────────────────────────────────────────────────────────────────────────────

    def state_dict(self, name: str) -> dict[str, Any]:
        """All of a tenant: matrices and open window by PEFT's names, optimizer, schedule, counts. A copy.

        It is equal on every rank, and loads on any number of ranks. Collective: yes (a small exchange, and one of
        the gradient if a window is open).
        """
        self._world.require_equal(self._world.run_all(self._tenant, name).name, "the tenant that is asked for")
        tenant, base = self._tenant(name), tenant_facts.facts_of_base(self._world, self._model)

        def state() -> dict[str, Any]:
            training = states.training_tensors(tenant, states.window_gradient(tenant))
            return {
                "adapter": {key: values.clone() for key, values in tenant.matrices.items()},
                "training": {key: values.clone() for key, values in training.items()},
                "facts": tenant_facts.facts_of(tenant, base).to_dict(),
            }

        return self._world.run_all(state)

    def load_state_dict(
        self,
        name: str,
        state: Mapping[str, Any],
        *,
        on_other_base: OnFault = "error",
        on_not_finite: OnFault = "error",
    ) -> tenants.TenantStart:
        """Give a tenant, created with the same config and optimizer, the state of one.

        With the matrices alone, as ``peft.get_peft_model_state_dict`` gives them, it begins anew, as created. The
        returned value distinguishes the two.

        Collective: yes. Every rank passes the same state.

        Args:
            name: of the tenant.
            state: from :meth:`state_dict`, or matrices by PEFT's names.
            on_other_base: as of :meth:`load`.
            on_not_finite: ``Ignore()``, or ``Ignore(only=...)`` with names of tensors, takes matrices and moments
                that have values that are not finite.

        Raises:
            ConfigError: it belongs to another adapter, base or optimizer. The message has the differences. Nothing
                is changed.
            FormatError: values are not finite. Nothing is changed.
            RankMismatchError: ranks pass different values. Nothing is changed.
        """
        tenant = self._world.run_all(self._asked, name, on_other_base, on_not_finite)
        found = states.parse_training(tenant, state, lambda: names_of_peft(self._model, tenant))
        base, allowed = (
            tenant_facts.facts_of_base(self._world, self._model),
            states.AllowedFaults(on_other_base, on_not_finite),
        )
        started = states.go_on(
            tenant, f"the state of {name!r}", found, lambda to: states.copy_given(tenant, state, to), base, allowed
        )
        self._tenants[name] = tenant
        return started

    def _asked(self, name: str, on_other_base: OnFault, on_not_finite: OnFault) -> tenants.Tenant:
        """The tenant as it was created."""
        require_meant(_PERMISSION, {"on_other_base": on_other_base})
        states.require_on_fault(on_not_finite)
        tenant = self._tenant(name)
        outline = outlined(self._model, tenant.config)
        return tenants.Tenant(name, tenant.config, outline, tenant.options, self._device, self._world)

    # ── files ─────────────────────────────────────────────────────────────────────────────────────

    def save(
        self,
        name: str,
        directory: str | os.PathLike[str],
        *,
        training_state: bool = True,
        tokenizer: Any = None,
        dtype: torch.dtype | str | None = None,
        verify: bool = False,
        options: SaveOptions = SaveOptions(),  # noqa: B008
    ) -> SaveReport:
        """Save a tenant as ``PeftModel.from_pretrained`` loads it, with all that ``save_adapter`` promises.

        The training state is a file next to the adapter, also in the middle of a window, and is committed in the
        same step. See docs/bank.md.

        Collective: yes. Memory: as for ``save_adapter``, and a copy of the gradient if a window is open.

        Args:
            name: of the tenant.
            directory: a folder that all ranks see, which need not be there yet.
            training_state: ``False`` omits the optimizer, schedule and counters.
            tokenizer: saved with it, if given.
            dtype: matrices are cast to it. The training state keeps its dtypes.
            verify: ``True`` reads tensors and headers back before the save counts.
            options: memory budget, progress, process group, timeouts.

        Raises:
            ConfigError: the optimizer or the schedule has a value that is not plain data, or the directory cannot
                hold the files.
            RankMismatchError, FormatError, StorageError, RankLostError: as of ``save_adapter``.
        """
        tenant = self._world.run_all(self._tenant, name)
        agree(self._world, name, training_state)
        whole = self._world.run_all(with_lent_tensors, self._model, tenant)
        cast = self._world.run_all(resolved_dtype, dtype)
        training = None
        if training_state:
            training = beside(self._world, tenant, tenant_facts.facts_of_base(self._world, self._model), cast)
        request = SaveRequest(whole, directory, PeftNames(), cast, tokenizer=tokenizer, training=training)
        with world_of(options, "AdapterBank.save") as world:
            return execute_save(world, request, "first_rank", options, Clock(), verify=verify)

    def load(
        self,
        name: str,
        directory: str | os.PathLike[str],
        *,
        training_state: bool = True,
        on_other_base: OnFault = "error",
        on_not_finite: OnFault = "error",
        **keywords: Unpack[TenantKeywords],
    ) -> tenants.TenantStart:
        """Add a tenant whose config and matrices are in a folder of PEFT's, that all ranks see.

        Every byte is compared with the recorded checksums. An adapter saved by PEFT has none and is accepted.

        With a training state, the training resumes on any number of ranks. Without one, it starts from these
        matrices. The returned value distinguishes the two.

        Collective: yes. If it fails, there is no such tenant.

        Args:
            name: as of :meth:`add_adapter`.
            directory: with ``adapter_config.json``, and a file of tensors.
            training_state: ``False`` begins anew in any case.
            on_other_base: ``Ignore()`` allows a training to resume on a base other than its own.
                ``Ignore(only=...)`` allows differences in "config", "shapes" (and names) or "values".
            on_not_finite: ``Ignore()``, or ``Ignore(only=...)`` with names of tensors, takes matrices and moments
                that have values that are not finite.
            keywords: as of :meth:`add_adapter`. The learning rate, other settings and ``max_grad_norm`` come from
                the training state. The optimizer class, accumulation, reduction and seed come from it unless they
                are passed. Pass the same schedule again.

        Raises:
            KeyMismatchError: the tensors are not those that the config wants of this base.
            FormatError: a file is damaged, the training state has no checksums, values are not finite, or the
                folder has no adapter. The message names the file.
            StorageError: the folder cannot be read.
            ConfigError, RankMismatchError: as in :meth:`add_adapter`, or the training belongs to another adapter,
                base, optimizer or schedule. The message has the differences.
        """
        self._world.run_all(require_meant, _PERMISSION, {"on_other_base": on_other_base})
        found = find_training(self._world, name, directory, on_not_finite, training_state=training_state)
        config = self._world.run_all(config_of, directory)
        options: Any = keywords if isinstance(found, tenants.TenantStart) else {**found.facts.options(), **keywords}
        tenant = self._agreed(name, config, options)
        base, allowed = (
            tenant_facts.facts_of_base(self._world, self._model),
            states.AllowedFaults(on_other_base, on_not_finite),
        )
        fill = read_tenant(self._world, self._model, tenant, Path(directory), found)
        started = states.go_on(tenant, os.fspath(directory), found, fill, base, allowed)
        self._admit(tenant)
        return started
