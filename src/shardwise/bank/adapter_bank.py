"""``AdapterBank``: many adapters, each with an optimizer of its own, on one base."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, get_args

import torch
from torch import nn
from typing_extensions import TypedDict

from shardwise.bank import adapter as tenants
from shardwise.bank import adapter_settings, batch, rows
from shardwise.bank import training_state as states
from shardwise.bank.adapter_files import (
    collect_training_state,
    find_training,
    outlined,
    read_adapter,
    read_tenant,
    with_lent_tensors,
    without_embeddings,
)
from shardwise.bank.hooks import ActiveRouting, SiteHooks
from shardwise.bank.kernels import BackendChoice
from shardwise.bank.optimizer_steps import step_and_mark
from shardwise.bank.passes import SharedBase
from shardwise.bank.rows import RowTensors
from shardwise.checkpoints.header import compute_digest
from shardwise.core.errors import ConfigError, TrainingError, unknown_keyword
from shardwise.core.save_reports import SaveReport
from shardwise.fsdp.named_tensors import computing_device
from shardwise.models.selection import AdapterOnly
from shardwise.ranks.call_arguments import check_options, comparing_arguments, get_world
from shardwise.ranks.world import Clock, World
from shardwise.saving.prepare import SaveOptions, SaveRequest, resolve_dtype
from shardwise.saving.save import execute_save
from shardwise.transfer.matching import OnFault

if TYPE_CHECKING:
    from peft import LoraConfig


_HINTS = {"on_other_base": OnFault, "on_not_finite": OnFault}


class TenantKeywords(TypedDict, total=False):
    """See :class:`~shardwise.bank.adapter.TenantOptions`."""

    optimizer: tenants.OptimizerMaker
    schedule: tenants.ScheduleMaker
    max_grad_norm: float
    gradient_accumulation_steps: int
    reduction: tenants.Reduction
    seed: int


class AdapterBank:
    """Many LoRAs trained at once on one base, each as if it were alone.

    Adapters ("tenants") have their own ranks, targets, dropout, optimizers, accumulation windows and clipping. They
    can be added and deleted between any two steps. The base is not changed or sharded again. See [Note: Many
    adapters].

    Every rank makes the same calls in the same order, each with its own rows. Methods state whether they are
    collective. Memory: with AdamW, 16 bytes for each trained number of each tenant, on every rank.

    A caller can expect the following sequence. The states are those of
    :class:`~shardwise.bank.adapter.AdapterState`.

    1. ``AdapterBank(model)``: the base is checked and frozen.
    2. :meth:`add_adapter` or :meth:`load`: the tenant exists on all ranks. It is ACCUMULATING, or in the state that
       was saved.
    3. :meth:`forward_backward`, ``gradient_accumulation_steps`` times: after the last the tenant is FULL, and takes
       no more rows. If its loss raises, its gradient and window are as before the call, and those of other tenants
       have the micro-batch. After any other error, all are as before the call.
    4. :meth:`optim_step` or :meth:`optim_steps`: the matrices change, unless the gradient is not finite, and the
       tenant is ACCUMULATING with an empty window. If the step fails, it is FAILED, and takes nothing but
       :meth:`load_state_dict` and :meth:`delete_adapter`.
    5. :meth:`save`, :meth:`state_dict` and :meth:`compute_logprobs` at any time in between: they change nothing.
       :meth:`load_state_dict` replaces the state of the tenant.
    6. :meth:`delete_adapter`: the name is free, and the other tenants are not affected.

    When a rank is lost, or leaves a pass in which others wait for it, the bank has ended: this call and every later
    one raise the same RankLostError. Start all ranks again, and :meth:`load` what was saved.

    Args:
        model: a model of ``shardwise.from_pretrained`` without ``tuning=``, sharded or not. It is frozen.
        backend: "auto" computes adjacent tenants with one LoRA rank and equally many rows by one batched product.
            "loop" computes one tenant after the other, as PEFT does.
        pad_to: lengths of rows are rounded up to a multiple of it.

    Raises:
        ConfigError: the model cannot be a base. The message has the reason.
    """

    def __init__(self, model: nn.Module, *, backend: BackendChoice = "auto", pad_to: int = 64) -> None:
        self._world = World.current(call="an AdapterBank")
        with self._world.collective("check the base"):
            self._model = rows.require_base(model, self._world.size)
        with comparing_arguments(self._world) as exchange:
            exchange.local = _comparable_options(backend, pad_to)
        self._tenants: dict[str, tenants.Tenant] = {}
        self._switch = ActiveRouting()
        self._hooks = SiteHooks(self._model, self._switch)
        for parameter in self._model.parameters():
            parameter.requires_grad_(False)
        self._device = computing_device(next(self._model.parameters()))
        self._base = SharedBase(self._world, self._model, self._device, self._switch, backend, pad_to)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tenants, in the order in which they were added."""
        return tuple(self._tenants)

    @property
    def max_length(self) -> int:
        """Maximum number of tokens in a row."""
        return self._base.max_length

    def num_trainable_parameters(self) -> dict[str, int]:
        """Return the number of trained elements by tenant."""
        return {name: tenant.flat.numel() for name, tenant in self._tenants.items()}

    def add_adapter(self, name: str, config: LoraConfig, **keywords: Unpack[TenantKeywords]) -> None:
        """Add a tenant. Its matrices are initialized as PEFT's, depending on (seed, name of the matrix) alone.

        Collective: yes (two small exchanges).

        Args:
            name: letters, digits, ``.``, ``_`` and ``-``.
            config: config of PEFT. It is copied.
            keywords: see :class:`~shardwise.bank.adapter.TenantOptions`.

        Raises:
            ConfigError: the name is taken or invalid, the config is not supported, or the optimizer is not
                elementwise.
            RankMismatchError: ranks pass different arguments.
        """
        self._admit(self._create_equal(name, config, keywords, is_new=True))

    def _create_equal(
        self, name: str, config: LoraConfig, keywords: TenantKeywords, *, is_new: bool
    ) -> tenants.Tenant:
        """Return a new tenant, equal on all ranks and not registered yet. Collective: yes."""
        with self._world.collective("build the adapter"):
            tenant = self._new(name, config, keywords, is_new=is_new)
        optimizer, schedule, options = tenant.optimizer, tenant.schedule, tenant.options
        kinds = [type(each).__qualname__ for each in (optimizer, schedule)]
        numbers = [options.max_grad_norm, options.gradient_accumulation_steps, options.seed, options.reduction]
        digest = compute_digest(
            [name, tenant.comparable_config, *kinds, tenant.settings, schedule.state_dict(), *numbers]
        )
        self._world.require_equal(digest, f"the adapter {name!r} (its config or options)")
        return tenant

    def _admit(self, tenant: tenants.Tenant) -> None:
        self._hooks.add(tenant.sites)
        self._tenants[tenant.name] = tenant

    def _new(self, name: str, config: LoraConfig, keywords: TenantKeywords, *, is_new: bool) -> tenants.Tenant:
        if tenants.require_name(name) in self._tenants:
            raise ConfigError(f"the adapter {name!r} exists already. Remove it, or use another name")
        known = [item.name for item in fields(tenants.TenantOptions)]
        for keyword in keywords:
            if keyword not in known:
                call = "add_adapter" if is_new else "load"
                raise unknown_keyword(call, keyword, known, {})
        return self._build(name, config, tenants.TenantOptions(**keywords), is_new=is_new)

    def _build(
        self, name: str, config: LoraConfig, options: tenants.TenantOptions, *, is_new: bool
    ) -> tenants.Tenant:
        outline = outlined(self._model, config, is_new=is_new)
        self._hooks.require_supported(outline.sites)
        return tenants.Tenant(name, config, outline, options, self._device, self._world)

    def delete_adapter(self, name: str) -> None:
        """Delete a tenant and its accumulated gradient. Collective: no, but call it on every rank."""
        tenant = batch.find_tenant(self._tenants, name)
        del self._tenants[name]
        self._hooks.remove(tenant.sites)

    def _tenant(self, name: str) -> tenants.Tenant:
        return batch.get_tenant(self._tenants, name)

    def forward_backward(self, batches: Sequence[tuple[str, RowTensors]]) -> tenants.FusedLosses:
        """Run a micro-batch of each given tenant through the base, together, and accumulate their gradients.

        If a pass fails, the whole call is discarded on all ranks: gradients and windows do not change. If a loss
        raises, those of its tenant do not change, and the others' do.

        Collective: yes. Two small exchanges, and FSDP2's all-gathers of each pass. Memory: the logits of
        all rows of a pass and their gradient, those of the tenant with the most rows in float32, and a copy of
        gradients whose window is open.

        Args:
            batches: (tenant, its rows on this rank), each tenant once. All ranks name the same tenants, with empty
                rows if a rank has none. See :data:`~shardwise.bank.rows.RowTensors`.

        Raises:
            ConfigError: a batch or a tenant is invalid. Raised on every rank before anything is computed.
            RankMismatchError: ranks name different tenants.
            TrainingError: the logits do not fit into memory, a loss raises or does not depend on an adapter, or the
                base has drawn random numbers.
            RankLostError: a rank is lost, or failed while others waited for it. The bank has ended.
            ShardwiseError: a pass failed. A note names its tenants.
        """
        call = batch.open_call(self._base, batches, self._tenants, is_training=True)
        sums = call.accumulate_gradients()
        # Before raising: micro-batches of tenants whose loss did not raise count.
        losses = {}
        for number, entry in enumerate(call.agreed):
            if number in sums.failures:
                continue
            tenant = self._tenant(str(entry.name))
            tenant.window.micro_batches += 1
            tenant.window.num_supervised_tokens += entry.num_supervised_tokens
            # Of this micro-batch, for the report. What divides the gradient is in RowCall and _step_all.
            divisor = max(entry.num_supervised_tokens, 1) if tenant.options.reduction == "mean" else 1
            losses[tenant.name] = tenants.TenantLoss(
                sums.losses.get(number, 0.0) / divisor, entry.num_supervised_tokens, call.logprobs.get(number, [])
            )
        if sums.failures:
            counted = f"; the micro-batches of {', '.join(map(repr, losses))} count" if losses else ""
            raise TrainingError(f"{call.describe(sums.failures)}. Its gradient is as before the call{counted}")
        return tenants.FusedLosses(losses, sums.num_passes, dict(call.chosen))

    def optim_step(self, name: str, **changes: Any) -> tenants.TenantStep:
        """Take a tenant's optimizer step at the end of its window.

        Collective: yes (two small exchanges and an all-reduce of its gradient).

        Args:
            name: the tenant.
            changes: settings of its optimizer (``lr``, ``betas``, ...) or ``max_grad_norm``, for this and all later
                steps.

        Raises:
            ConfigError: its window is not full, or a change is invalid.
            RankMismatchError: ranks step different tenants or pass different changes, or their optimizers have
                different settings (for example, from different schedules) or step counts. No step is taken.
            RankLostError: a rank is lost. The bank has ended.
            ShardwiseError: the optimizer or the schedule of a tenant fails on a rank. It, and tenants of the call
                with equal optimizer settings, must be restored or deleted. The others took their steps.
        """
        return self._step_all([name], changes)[name]

    def optim_steps(self, names: Sequence[str]) -> dict[str, tenants.TenantStep]:
        """Take the steps of several tenants: bitwise equal to :meth:`optim_step` of each, in fewer calls.

        Collective: yes (two small exchanges, and an all-reduce for each tenant).
        """
        return self._step_all(names, {})

    def _step_all(self, names: Sequence[str], changes: Mapping[str, Any]) -> dict[str, tenants.TenantStep]:
        with comparing_arguments(self._world) as exchange:
            exchange.local = self._comparable_steps(names, changes)
        names = list(dict.fromkeys(names))
        stepping = [self._require_full(name) for name in names]
        for tenant in stepping:
            tenant.change(changes)
        rates = [float(tenant.optimizer.param_groups[0].get("lr", math.nan)) for tenant in stepping]
        tokens = [tenant.window.num_supervised_tokens for tenant in stepping]
        scales = [
            1 / max(count, 1)
            if tenant.options.reduction == "mean" and not batch.scales_before_backward(tenant)
            else 1.0
            for tenant, count in zip(stepping, tokens, strict=True)
        ]
        outcomes = step_and_mark(self._world, stepping, scales)
        found = zip(names, outcomes, tokens, rates, strict=True)
        return {name: tenants.TenantStep(*outcome, count, rate) for name, outcome, count, rate in found}

    def _comparable_steps(self, names: Sequence[str], changes: Mapping[str, Any]) -> dict[str, str]:
        """Return the settings that ranks must have in common, after checking the changes."""
        if not isinstance(names, list | tuple):
            raise ConfigError(f"names={names!r}: is not a list of names. Pass one")
        settings = {
            "the tenant that takes a step": ", ".join(map(str, names)),
            "the changes of its settings": repr(sorted(changes.items())),
        }
        for tenant in map(self._require_full, names):
            tenant.require_changes(changes)
            settings |= {f"{key} of {tenant.name!r}": value for key, value in tenant.comparable_settings().items()}
        return settings

    def _require_full(self, name: str) -> tenants.Tenant:
        tenant = self._tenant(name)
        if tenant.state is not tenants.AdapterState.FULL:
            raise ConfigError(
                f"the window of {name!r} has {tenant.window.micro_batches} micro-batches of "
                f"{tenant.options.gradient_accumulation_steps}. Call forward_backward until it is full"
            )
        return tenant

    def compute_logprobs(self, batches: Sequence[tuple[str | None, RowTensors]]) -> list[list[torch.Tensor]]:
        """Return the log probability of each label, without gradients and without dropout.

        Collective: yes. Two small exchanges, and FSDP2's all-gathers of each pass.

        Args:
            batches: as in :meth:`forward_backward`. None selects the base without an adapter. A tenant may be named
                twice.

        Returns:
            For each entry and each of this rank's rows, (tokens - 1,) float32: the log probability of each label
            given the tokens before it, 0 for ignored labels.
        """
        call = batch.open_call(self._base, batches, self._tenants, is_training=False)
        call.evaluate()
        return [call.logprobs.get(number, []) for number in range(len(call.rows))]

    def state_dict(self, name: str) -> dict[str, Any]:
        """Return a copy of a tenant's state: matrices by PEFT's names, open window, optimizer, schedule, counts.

        It is equal on every rank, and loads on any number of ranks. Collective: yes (small exchanges, and an
        all-reduce of the gradient if a window is open).
        """
        with self._world.collective("find the adapter"):
            tenant = self._tenant(name)
        self._world.require_equal(tenant.name, "the name of the tenant")
        base = adapter_settings.identify_base(self._world, self._model)
        with self._world.collective("copy the state"):
            return states.copied_state(tenant, base)

    def load_state_dict(
        self,
        name: str,
        state: Mapping[str, Any],
        *,
        on_other_base: OnFault = "error",
        on_not_finite: OnFault = "error",
    ) -> tenants.TenantStart:
        """Restore a tenant that has been created with the same config and optimizer.

        From matrices alone, by PEFT's names, its training starts anew. The result tells which of the two it was.

        Collective: yes. Every rank passes the same state.

        Args:
            name: the tenant.
            state: from :meth:`state_dict`, or from ``peft.get_peft_model_state_dict``.
            on_other_base: as for :meth:`load`.
            on_not_finite: ``Ignore()``, or ``Ignore(only=...)`` with names of tensors, accepts matrices and moments
                with values that are not finite.

        Raises:
            ConfigError: the state belongs to another adapter, base or optimizer. The message has the differences.
                The tenant is unchanged.
            FormatError: values are not finite. The tenant is unchanged.
            RankMismatchError: ranks pass different values. The tenant is unchanged.
        """
        what, world = f"the state of {name!r}", self._world
        with world.collective("check the state"):
            check_options(_HINTS, {"on_other_base": on_other_base, "on_not_finite": on_not_finite})
            tenant = self._renewed(name)
            matrices = without_embeddings(self._model, tenant, state)
            found = states.parse_state(tenant, what, matrices)
            digest = compute_digest(dict(state))
        world.require_equal(digest, f"the state that {name!r} is given")
        base = adapter_settings.identify_base(world, self._model)
        with world.collective("find the tensors to restore"):
            targets = states.restore_targets(tenant, found, base, on_other_base)
        states.copy_values(tenant, state, targets)
        with world.collective("restore the state"):
            started = states.restore(tenant, what, found, targets, base, on_other_base, on_not_finite)
        self._tenants[name] = tenant
        return started

    def _renewed(self, name: str) -> tenants.Tenant:
        """Return a tenant as it was created."""
        tenant = batch.find_tenant(self._tenants, name)
        return self._build(name, tenant.config, tenant.options, is_new=False)

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
        """Save a tenant for ``PeftModel.from_pretrained``, with all guarantees of ``save_adapter``.

        The training state, within a window too, is a file next to the adapter and is committed in the same step.
        See docs/bank.md.

        Collective: yes. Memory: as for ``save_adapter``, and a copy of the gradient if a window is open.

        Args:
            name: the tenant.
            directory: a folder that all ranks see. It is created if it does not exist.
            training_state: ``False`` omits the optimizer, schedule and counters.
            tokenizer: saved as well, if given.
            dtype: matrices are cast to it. The training state keeps its dtypes.
            verify: ``True`` reads tensors and headers back before the save is committed.
            options: memory budget, progress, process group, timeouts.

        Raises:
            ConfigError: the optimizer or the schedule has a value that is not plain data, or the directory cannot
                hold the files.
            RankMismatchError, FormatError, StorageError, RankLostError: as for ``save_adapter``.
        """
        with comparing_arguments(self._world) as exchange:
            exchange.local = _comparable(name, training_state=training_state)
        with self._world.collective("find the adapter"):
            tenant = self._tenant(name)
            whole = with_lent_tensors(self._model, tenant)
            cast = resolve_dtype(dtype)
        training = None
        if training_state:
            base = adapter_settings.identify_base(self._world, self._model)
            with self._world.collective("collect the training state"):
                training = collect_training_state(tenant, base, cast)
        request = SaveRequest(whole, directory, AdapterOnly(), cast, tokenizer=tokenizer, training=training)
        with get_world(options, "AdapterBank.save") as world:
            return execute_save(world, request, options, Clock(), verify=verify)

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
        """Add a tenant from an adapter in PEFT's files.

        Every byte is compared with the recorded checksums. An adapter saved by PEFT has none and is accepted.

        With a training state, the training resumes on any number of ranks. Without one, it starts from these
        matrices. The result tells which of the two it was.

        Collective: yes. If it fails, the tenant is not added.

        Args:
            name: as for :meth:`add_adapter`.
            directory: a folder that all ranks see, with ``adapter_config.json`` and a file of tensors.
            training_state: ``False`` ignores the training state.
            on_other_base: ``Ignore()`` allows a training to resume on another base. ``Ignore(only=...)`` allows
                differences in "config", "shapes" (and names) or "values".
            on_not_finite: ``Ignore()``, or ``Ignore(only=...)`` with names of tensors, accepts matrices and moments
                with values that are not finite.
            keywords: as for :meth:`add_adapter`. Pass the same optimizer class and schedule again. The learning
                rate, other settings and ``max_grad_norm`` come from the training state, and so do accumulation,
                reduction and seed unless they are passed.

        Raises:
            KeyMismatchError: the tensors do not match the config and this base.
            FormatError: a file is damaged, the training state has no checksums, values are not finite, or the
                folder has no adapter. The message names the file.
            StorageError: the folder cannot be read.
            ConfigError, RankMismatchError: as for :meth:`add_adapter`, or the training belongs to another adapter,
                base, optimizer or schedule. The message has the differences.
        """
        world, permissions = self._world, {"on_other_base": on_other_base, "on_not_finite": on_not_finite}
        with comparing_arguments(world) as exchange:
            exchange.local = _comparable(name, training_state=training_state, **permissions)
        with world.broadcast("find the training state") as exchange:
            if world.rank == 0:
                exchange.local = find_training(Path(directory), training_state=training_state)
        found = exchange.result
        with world.collective("read the adapter"):
            adapter = read_adapter(self._model, directory)
        options: Any = keywords if isinstance(found, tenants.TenantStart) else {**found.facts.options(), **keywords}
        tenant = self._create_equal(name, adapter.config, options, is_new=False)
        base = adapter_settings.identify_base(world, self._model)
        with world.collective("find the tensors to restore"):
            targets = states.restore_targets(tenant, found, base, on_other_base)
        read_tenant(world, self._model, tenant, adapter, found, targets, on_other_base)
        what = os.fspath(directory)
        with world.collective("restore the state"):
            started = states.restore(tenant, what, found, targets, base, on_other_base, on_not_finite)
        self._admit(tenant)
        return started


def _comparable_options(backend: object, pad_to: object) -> dict[str, str]:
    if type(pad_to) is not int or pad_to < 1:
        raise ConfigError(f"pad_to={pad_to!r}: is not a positive integer. Pass 1 or more")
    if backend not in get_args(BackendChoice):
        raise ConfigError(f"backend={backend!r}: pass 'auto' or 'loop'")
    return {"backend": str(backend), "pad_to": str(pad_to)}


def _comparable(name: str, training_state: object, **permissions: OnFault) -> dict[str, str]:
    """Return the arguments that ranks must have in common, after checking their types."""
    check_options(_HINTS, permissions)
    if not isinstance(training_state, bool):
        raise ConfigError(f"training_state={training_state!r}: pass True or False")
    options = {"training_state": training_state, **permissions}
    return {"the name of the adapter": name, **{key: repr(value) for key, value in options.items()}}
