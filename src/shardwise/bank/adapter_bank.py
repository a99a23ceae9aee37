"""``AdapterBank``: many adapters, each with an optimizer of its own, on one base."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, overload

import torch
from torch import nn

from shardwise.bank import adapter_files, batch, rows, training_facts
from shardwise.bank import training_state as states
from shardwise.bank.adapter import (
    DEFAULT_OPTIONS,
    AdapterLoss,
    AdapterOptions,
    AdapterStart,
    AdapterState,
    AdapterStep,
    BankAdapter,
    FusedLosses,
    require_name,
    require_options,
)
from shardwise.bank.hooks import SiteHooks
from shardwise.bank.kernels import BackendChoice
from shardwise.bank.optimizer_steps import step_together
from shardwise.bank.passes import SharedBase
from shardwise.bank.routes import ActiveRoute
from shardwise.bank.rows import Request, RowTensors
from shardwise.bank.sampling import Sample, SampleOutput, sample_tokens
from shardwise.core.errors import ConfigError, TrainingError, unknown_keyword
from shardwise.core.save_reports import SaveReport
from shardwise.fsdp.named_tensors import computing_device
from shardwise.models.selection import AdapterOnly
from shardwise.ranks.call_arguments import check_options, comparing_arguments, get_world
from shardwise.ranks.world import Clock, World
from shardwise.saving.prepare import SaveOptions, SaveRequest, resolve_dtype
from shardwise.saving.save import execute_save
from shardwise.state.digests import compute_digest
from shardwise.transfer.matching import OnFault

if TYPE_CHECKING:
    from peft import LoraConfig


_HINTS = {"on_other_base": OnFault, "on_not_finite": OnFault}


class AdapterBank:
    """Many LoRAs trained at once on one base, each as if it were alone.

    Adapters have their own ranks, targets, dropout, optimizers, accumulation windows and clipping. They
    can be added and deleted between any two steps. The base is not changed or sharded again. See [Note: Many
    adapters] in ``bank/__init__.py``.

    Every rank makes the same calls in the same order, each with its own rows. Methods state whether they are
    collective. Memory: with AdamW, 16 bytes for each trained number of each adapter, on every rank.

    A caller can expect the following sequence. The states are those of
    :class:`~shardwise.bank.adapter.AdapterState`.

    1. ``AdapterBank(model)``: the base is checked and frozen.
    2. :meth:`add_adapter` or :meth:`load`: the adapter exists on all ranks. It is ACCUMULATING, or in the state
       that was saved.
    3. :meth:`forward_backward`, any number of times. With ``gradient_accumulation_steps``, the adapter is FULL
       after as many, and another call is an error. If one of its losses raises, its gradient and window are as
       before the call, and those of other adapters have the micro-batch. After any other error, all are as before
       the call. :meth:`zero_grad` discards the window.
    4. :meth:`optim_step`: the matrices change, unless the gradient is not finite, and the adapter is ACCUMULATING
       with an empty window. If the step fails, it is FAILED, as are adapters of the call with equal optimizer
       settings: :meth:`load_state_dict`, :meth:`load` and :meth:`delete_adapter` are the only calls for it.
    5. :meth:`save`, :meth:`state_dict`, :meth:`compute_logprobs`, :meth:`copy_adapter` and :meth:`offload` at any
       time in between: they change nothing. :meth:`load_state_dict` and :meth:`load` replace the state.
    6. :meth:`delete_adapter`: the name is free, and the other adapters are not affected.

    When a rank is lost, or leaves a pass in which others wait for it, the bank has ended: this call and every later
    one raise the same RankLostError. When ranks are in different methods, it has ended with one RankMismatchError,
    which the first rank, and those in its method, raise in their next call. Start all ranks again, and :meth:`load`
    what was saved.

    Args:
        model: a model of ``shardwise.from_pretrained`` without ``tuning=``, sharded or not. It is frozen.
        backend: "auto" computes adjacent adapters with one LoRA rank and equally many rows by one batched product.
            "loop" computes one adapter after the other, as PEFT does.
        max_tokens_per_pass: maximum number of tokens of a pass on a rank, with padding.

    Raises:
        ConfigError: the model cannot be a base. The message has the reason.
    """

    def __init__(
        self, model: nn.Module, *, backend: BackendChoice = "auto", max_tokens_per_pass: int = 8192
    ) -> None:
        self._world = World.current(call="an AdapterBank")
        with self._world.collective("check the base"):
            self._model = rows.require_base(model, self._world.size)
        with comparing_arguments(self._world) as exchange:
            if type(max_tokens_per_pass) is not int or max_tokens_per_pass < 1:
                raise ConfigError(
                    f"max_tokens_per_pass={max_tokens_per_pass!r}: is not a positive integer. Pass 1 or more"
                )
            check_options({"backend": BackendChoice}, {"backend": backend})
            exchange.local = {"backend": backend, "max_tokens_per_pass": str(max_tokens_per_pass)}
        self._adapters: dict[str, BankAdapter] = {}
        for parameter in self._model.parameters():
            parameter.requires_grad_(False)
        active_route, device = ActiveRoute(), computing_device(next(self._model.parameters()))
        # One object for all: passes set its route, and hooks read it.
        self._hooks = SiteHooks(self._model, active_route)
        self._base = SharedBase(self._world, self._model, device, active_route, backend, max_tokens_per_pass)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the adapters, in the order in which they were added."""
        return tuple(self._adapters)

    @property
    def max_length(self) -> int:
        """Maximum number of tokens in a row."""
        return self._base.max_length

    # An adapter whose tensors are created in the caller's inference mode could not be trained later.
    @torch.inference_mode(mode=False)
    def add_adapter(self, name: str, config: LoraConfig, **keywords: Unpack[AdapterOptions]) -> None:
        """Add an adapter. Its matrices are initialized as PEFT's, depending on (seed, name of the matrix) alone.

        Collective: yes (two small exchanges).

        Args:
            name: 1 to 128 characters, no control characters.
            config: config of PEFT. It is copied.
            keywords: see :class:`~shardwise.bank.adapter.AdapterOptions`.

        Raises:
            ConfigError: the name is taken or invalid, the config is not supported, or the optimizer is not
                elementwise.
            RankMismatchError: ranks pass different arguments.
        """
        self._world.begin_call("AdapterBank.add_adapter")
        self._register(self._build_on_all_ranks(name, config, keywords, is_new=True))

    def _build_on_all_ranks(
        self, name: str, config: LoraConfig, keywords: AdapterOptions, *, is_new: bool, is_trained: bool = True
    ) -> BankAdapter:
        """Return an adapter, equal on all ranks and not registered yet. Unless it is new, its matrices are zeros.

        Collective: yes.
        """
        with self._world.collective("build the adapter"):
            if is_new:
                self._require_new(name)
            for keyword in keywords.keys() - DEFAULT_OPTIONS.keys():
                call = "add_adapter" if is_new else "load"
                raise unknown_keyword(call, keyword, DEFAULT_OPTIONS, {})
            options: AdapterOptions = {**DEFAULT_OPTIONS, **keywords}
            require_options(options)
            outline = adapter_files.outline_lora(self._model, config, is_new=is_new)
            self._hooks.require_supported(outline.sites)
            device, world = self._base.device, self._world
            adapter = BankAdapter(name, config, outline.sites, options, device, world, is_trained=is_trained)
            if is_new:
                # Equal on every rank without an exchange: the values follow from the seed and the matrix's name.
                for matrix in outline.matrices():
                    outline.initialize(matrix, adapter.matrices[matrix.key], options["seed"])
        # Functions cannot be compared, but what they have created can.
        values = [value for value in options.values() if not callable(value)]
        kinds = [type(each).__qualname__ for each in (adapter.optimizer, adapter.schedule)]
        current = [adapter.settings, adapter.schedule.state_dict()]
        digest = compute_digest([name, adapter.comparable_config, *values, *kinds, *current])
        self._world.require_equal(digest, f"the adapter {name!r} (its config or options)")
        return adapter

    def _require_new(self, name: str) -> None:
        if require_name(name) in self._adapters:
            raise ConfigError(f"the adapter {name!r} exists already. Delete it, or use another name")

    def _register(self, adapter: BankAdapter) -> None:
        # ``load`` replaces an adapter of this name.
        if adapter.name in self._adapters:
            self._hooks.remove(self._adapters[adapter.name].sites)
        self._hooks.add(adapter.sites)
        self._adapters[adapter.name] = adapter

    def _build_like(self, source: BankAdapter, name: str, *, is_trained: bool) -> BankAdapter:
        """Return an adapter with the sites and options of another one. Its matrices are zeros."""
        device, world = self._base.device, self._world
        return BankAdapter(name, source.config, source.sites, source.options, device, world, is_trained=is_trained)

    def delete_adapter(self, name: str) -> None:
        """Delete an adapter and its accumulated gradient. Collective: no, but call it on every rank."""
        adapter = batch.find_adapter(self._adapters, name)
        del self._adapters[name]
        self._hooks.remove(adapter.sites)

    def _adapter(self, name: str) -> BankAdapter:
        return batch.get_usable_adapter(self._adapters, name)

    # FSDP2's first gather in the caller's inference mode would create buffers that no later backward pass can use.
    @torch.inference_mode(mode=False)
    def forward_backward(
        self, requests: Sequence[Request | tuple[str, RowTensors]], *, gather: bool = False
    ) -> FusedLosses:
        """Run rows of many adapters through the base, together, and accumulate their gradients.

        Rows are sorted by length and cut into passes ([Note: Composed passes] in ``bank/compose.py``). If a pass
        fails, or gathering the outputs, the whole call is discarded on all ranks: gradients and windows do not
        change. If a loss raises, or its gradient is not finite, those of its adapter do not change, and the others'
        do.

        Collective: yes. Two small exchanges (two more for each pass for which the memory of a CPU is short), and
        FSDP2's all-gathers of each pass. Memory: that of a pass of ``max_tokens_per_pass`` tokens, with the logits
        of a chunk of positions ([Note: Logits in chunks] in ``bank/passes.py``), and a copy of gradients whose
        window is open.

        Args:
            requests: (adapter, its rows on this rank), or :class:`~shardwise.bank.rows.Request`. An adapter may be
                in several. All ranks pass the same adapters and losses, with empty rows if a rank has none.
            gather: True for the log probabilities of all ranks' rows on the first rank, rank by rank, on the CPU,
                and none on the others.

        Raises:
            ConfigError: rows, a loss or an adapter is invalid. Raised on every rank before anything is computed.
            RankMismatchError: ranks pass different adapters or losses.
            TrainingError: a pass does not fit into memory, a loss raises or does not depend on an adapter, or the
                base has drawn random numbers. After a loss that raised, ``output`` of the error has the outcome.
            RankLostError: a rank is lost, or failed while others waited for it. The bank has ended.
            ShardwiseError: a pass failed. A note names its adapters.
        """
        self._world.begin_call("AdapterBank.forward_backward")
        call = batch.plan_call(self._base, requests, self._adapters, is_training=True)
        trained = call.trained_requests()
        sums = call.run(gather=gather)
        # Before an error is raised: the gradients of adapters whose loss did not raise have the micro-batch.
        counted = []
        for name, numbers in trained.items():
            if not sums.failures.keys() & set(numbers):
                adapter = self._adapter(name)
                adapter.micro_batches += 1
                adapter.num_supervised_tokens += call.count_targets(numbers)
                counted.append(name)
        output = _make_output(call, sums)
        if sums.failures:
            others = f"; the micro-batches of {', '.join(map(repr, counted))} count" if counted else ""
            error = TrainingError(f"{call.describe(sums.failures)}. Its gradient is as before the call{others}")
            error.output = output
            raise error
        return output

    def zero_grad(self, name: str) -> None:
        """Discard an adapter's open window. Collective: no, but call it on every rank."""
        self._adapter(name).zero_grad()

    @overload
    def optim_step(self, steps: str, **changes: Any) -> AdapterStep: ...
    @overload
    def optim_step(self, steps: Mapping[str, Mapping[str, Any]]) -> dict[str, AdapterStep]: ...
    @torch.inference_mode(mode=False)  # the first step creates the state of the optimizer
    def optim_step(
        self, steps: str | Mapping[str, Mapping[str, Any]], **changes: Any
    ) -> AdapterStep | dict[str, AdapterStep]:
        """Take the optimizer steps of adapters, at the end of their windows.

        A window may have any number of micro-batches, unless the adapter has ``gradient_accumulation_steps``.
        Without any, the step is taken with a gradient of zeros. Several adapters at once step with the same bits as
        one after the other, in fewer calls.

        Collective: yes (two small exchanges, whatever the number of adapters, and an all-reduce of each gradient).

        Args:
            steps: by adapter, settings of its optimizer (``lr``, ``betas``, ...) or ``max_grad_norm`` (0 for no
                limit) for this step alone. Or the name of one adapter.
            changes: with a name, its settings.

        Raises:
            ConfigError: a window is not full, or a setting is invalid. No step is taken.
            RankMismatchError: ranks step different adapters or pass different settings, or their optimizers have
                different settings (for example, from different schedules) or step counts. No step is taken.
            RankLostError: a rank is lost. The bank has ended.
            ShardwiseError: the optimizer or the schedule of an adapter fails on a rank. It, and adapters of the
                call with equal optimizer settings, must be restored or deleted. The others took their steps, whose
                outcomes are the ``output`` of the error.
        """
        self._world.begin_call("AdapterBank.optim_step")
        by_name = {steps: changes} if isinstance(steps, str) else steps
        with comparing_arguments(self._world) as exchange:
            exchange.local = self._check_steps(by_name, are_names=not changes or isinstance(steps, str))
        # Only now, when all ranks have accepted the names and the settings.
        adapters = [(self._adapters[name], settings) for name, settings in by_name.items()]
        outcomes = step_together(self._world, adapters)
        return outcomes[steps] if isinstance(steps, str) else outcomes

    def _check_steps(self, by_name: object, *, are_names: bool) -> dict[str, str]:
        """Return the settings that ranks must have in common, after checking the changes."""
        if (
            not are_names
            or not isinstance(by_name, Mapping)
            or not all(isinstance(changes, Mapping) for changes in by_name.values())
        ):
            raise ConfigError(f"steps={by_name!r}: is not a dict of settings by name. Pass one, or a name")
        # In the order in which their gradients are summed.
        settings = {
            "the adapter that takes a step": ", ".join(map(str, by_name)),
            "the changes of its settings": repr([sorted(changes.items()) for changes in by_name.values()]),
        }
        for name, changes in by_name.items():
            adapter = self._adapter(name)
            adapter.require_trained()
            fixed = adapter.options["gradient_accumulation_steps"]
            if fixed is not None and adapter.state is not AdapterState.FULL:
                raise ConfigError(
                    f"adapter {name!r}: has accumulated {adapter.micro_batches} of {fixed} micro-batches. Call "
                    "forward_backward before optim_step"
                )
            if faults := adapter.find_invalid_settings(changes):
                raise ConfigError(f"invalid settings for the step of {name!r}:\n  " + "\n  ".join(faults))
            # Also what is not changed: schedules may have led ranks to different settings.
            for key, value in adapter.comparable_settings().items():
                settings[f"{key} of {adapter.name!r}"] = value
        return settings

    def compute_logprobs(
        self, requests: Sequence[Request | tuple[str | None, RowTensors]], *, gather: bool = False
    ) -> list[list[torch.Tensor]]:
        """Return the log probability of each label or target, without gradients and without dropout.

        Collective: yes. Two small exchanges (two more for each pass for which the memory of a CPU is short), and
        FSDP2's all-gathers of each pass.

        Args:
            requests: as in :meth:`forward_backward`. None selects the base without an adapter.
            gather: as in :meth:`forward_backward`.

        Returns:
            For each request and each of this rank's rows, the log probability of each label given the tokens before
            it, (tokens - 1,) float32, or those of its targets, of their shape; 0 for ignored ones.
        """
        self._world.begin_call("AdapterBank.compute_logprobs")
        call = batch.plan_call(self._base, requests, self._adapters, is_training=False)
        sums = call.run(gather=gather)
        if sums.failures:
            raise TrainingError(call.describe(sums.failures))
        return sums.logprobs

    def generate(self, samples: Sequence[Sample]) -> list[SampleOutput]:
        """Sample from adapters and the base, many at once. See :class:`~shardwise.bank.sampling.Sample`.

        Collective: yes. Each rank has its own samples, or none, and all of them end with the longest. Memory: the
        key-value cache of a batch of ``max_tokens_per_pass`` tokens, prompts and sampled ones.

        Raises:
            ConfigError: a sample is invalid. Raised on every rank before anything is computed.
            RankLostError, ShardwiseError: as of :meth:`forward_backward`.
        """
        self._world.begin_call("AdapterBank.generate")
        return sample_tokens(self._base, samples, self._adapters)

    @torch.inference_mode(mode=False)
    def copy_adapter(self, name: str, new: str, *, training: bool = False) -> None:
        """Copy an adapter under another name.

        Collective: yes (two small exchanges). Memory: 4 bytes for each trained number. With training 16, with
        AdamW.

        Args:
            name: the adapter.
            new: name of the copy.
            training: False for a copy to sample from, without gradient, optimizer and training state. True for all
                of it, an open window too.

        Raises:
            ConfigError: there is no such adapter, or the name is taken or invalid.
            RankMismatchError: ranks pass different arguments.
        """
        self._world.begin_call("AdapterBank.copy_adapter")
        with comparing_arguments(self._world) as exchange:
            exchange.local = _check_arguments(name, training, "training") | {"the name of the copy": repr(new)}
        with self._world.collective("copy the adapter"):
            source = self._adapter(name)
            if training and not source.is_trained:
                raise ConfigError(f"adapter {name!r}: is a copy for sampling, and has no training")
            self._require_new(new)
            adapter = self._build_like(source, new, is_trained=training)
            adapter.flat.detach().copy_(source.flat.detach())
            if training:
                adapter.copy_training(source)
        self._register(adapter)

    def offload(self, name: str) -> None:
        """Move an adapter's matrices, gradient and optimizer state to host memory, until it is used again.

        Each rank has its own copy. On CPU ranks, nothing is moved. Collective: yes (a small exchange).

        Raises:
            ConfigError: there is no such adapter.
            TrainingError: the host has too little free memory. The adapter stays on the device of that rank.
        """
        self._world.begin_call("AdapterBank.offload")
        with self._world.collective("move an adapter to the host"):
            batch.find_adapter(self._adapters, name).offload()

    def state_dict(self, name: str) -> dict[str, Any]:
        """Return a copy of an adapter's state: matrices by PEFT's names, open window, optimizer, schedule, counts.

        It is equal on every rank, and loads on any number of ranks. Collective: yes (small exchanges, and an
        all-reduce of the gradient if a window is open).
        """
        self._world.begin_call("AdapterBank.state_dict")
        with self._world.collective("find the adapter"):
            adapter = self._adapter(name)
        self._world.require_equal(adapter.name, "the name of the adapter")
        base_identity = training_facts.identify_base(self._world, self._model)
        with self._world.collective("copy the state"):
            return states.copy_state(adapter, base_identity)

    @torch.inference_mode(mode=False)
    def load_state_dict(
        self,
        name: str,
        state: Mapping[str, Any],
        *,
        on_other_base: OnFault = "error",
        on_not_finite: OnFault = "error",
    ) -> AdapterStart:
        """Restore an adapter that has been created with the same config and optimizer.

        From matrices alone, by PEFT's names, its training starts anew. The result tells which of the two it was.

        Collective: yes. Every rank passes the same state.

        Args:
            name: the adapter.
            state: from :meth:`state_dict`, or from ``peft.get_peft_model_state_dict``.
            on_other_base: as for :meth:`load`.
            on_not_finite: ``Ignore()``, or ``Ignore(only=...)`` with names of tensors, accepts matrices and moments
                with values that are not finite.

        Raises:
            ConfigError: the state belongs to another adapter, base or optimizer. The message has the differences.
                The adapter is unchanged.
            FormatError: values are not finite. The adapter is unchanged.
            RankMismatchError: ranks pass different values. The adapter is unchanged.
        """
        self._world.begin_call("AdapterBank.load_state_dict")
        what, world = f"the state of {name!r}", self._world
        with world.collective("check the state"):
            check_options(_HINTS, {"on_other_base": on_other_base, "on_not_finite": on_not_finite})
            current = batch.find_adapter(self._adapters, name)
            # A new adapter replaces the current one at the end, so that a failure leaves it unchanged.
            trains = current.is_trained
            adapter = self._build_like(current, name, is_trained=trains)
            matrices = adapter_files.remove_embeddings(self._model, adapter, state)
            training = states.parse_state(adapter, what, matrices)
            if not trains:
                training = AdapterStart(reason="it is a copy for sampling")
            digest = compute_digest(dict(state))
        world.require_equal(digest, f"the state that {name!r} is given")
        base_identity = training_facts.identify_base(world, self._model)
        with world.collective("find the tensors to restore"):
            targets = states.allocate_targets(adapter, training, base_identity, on_other_base)
        with world.collective("restore the state"):
            states.copy_values(adapter, state, targets)
            started = states.restore(adapter, what, training, targets, base_identity, on_other_base, on_not_finite)
        self._adapters[name] = adapter  # with the same sites, so hooks stay as they are
        return started

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
        """Save an adapter for ``PeftModel.from_pretrained``, with all guarantees of ``save_adapter``.

        The training state, within a window too, is a file next to the adapter and is committed in the same step.
        See docs/bank.md.

        Collective: yes. Memory: as for ``save_adapter``, and a copy of the gradient if a window is open.

        Args:
            name: the adapter.
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
        self._world.begin_call("AdapterBank.save")
        with comparing_arguments(self._world) as exchange:
            exchange.local = _check_arguments(name, training_state, "training_state")
        with self._world.collective("find the adapter"):
            adapter = self._adapter(name)
            whole = adapter_files.lend_tensors(self._model, adapter)
            cast = resolve_dtype(dtype)
        # Before the save begins: with an open window, the ranks sum its gradient.
        training = None  # nor has a copy for sampling one
        if training_state and adapter.is_trained:
            base_identity = training_facts.identify_base(self._world, self._model)
            with self._world.collective("collect the training state"):
                training = adapter_files.collect_training_state(adapter, base_identity, cast)
        request = SaveRequest(whole, directory, AdapterOnly(), cast, tokenizer=tokenizer, training=training)
        with get_world(options, "AdapterBank.save") as world:
            return execute_save(world, request, options, Clock(), verify=verify)

    @torch.inference_mode(mode=False)
    def load(
        self,
        name: str,
        directory: str | os.PathLike[str],
        *,
        training_state: bool = True,
        on_other_base: OnFault = "error",
        on_not_finite: OnFault = "error",
        **keywords: Unpack[AdapterOptions],
    ) -> AdapterStart:
        """Add an adapter from PEFT's files, or restore an existing one of this name from them.

        Every byte is compared with the recorded checksums. An adapter saved by PEFT has none and is accepted.

        With a training state, the training resumes on any number of ranks. Without one, it starts from these
        matrices. The result tells which of the two it was.

        Collective: yes. If it fails, the adapter is not added, or as it was.

        Args:
            name: as for :meth:`add_adapter`. An existing adapter keeps its options, except for those that are
                passed, and those that come from the training state.
            directory: a folder that all ranks see, with ``adapter_config.json`` and a file of tensors.
            training_state: ``False`` ignores the training state.
            on_other_base: ``Ignore()`` allows a training run to resume on another base. ``Ignore(only=...)`` allows
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
        self._world.begin_call("AdapterBank.load")
        world, permissions = self._world, {"on_other_base": on_other_base, "on_not_finite": on_not_finite}
        with comparing_arguments(world) as exchange:
            exchange.local = _check_arguments(name, training_state, "training_state", **permissions)
        # Before anything is created: checksums of all files, which the first rank reads.
        with world.broadcast("find the training state") as exchange:
            if world.rank == 0:
                folder = Path(os.path.expanduser(directory))
                exchange.local = adapter_files.find_training(folder, training_state=training_state)
        training = exchange.result
        with world.collective("read the adapter"):
            stored_adapter = adapter_files.read_adapter_headers(self._model, directory)
            existing = self._adapters.get(require_name(name))
        options: Any = {**(existing.options if existing is not None else {}), **keywords}
        is_trained = existing is None or existing.is_trained
        if not is_trained:
            training = AdapterStart(reason="it is a copy for sampling")
        # The least specific first: the existing adapter's options, the training's, and those that are passed.
        if not isinstance(training, AdapterStart):
            options = {**options, **training.facts.options(), **keywords}
        # A new one, also in place of an existing one, so that a failure leaves that as it is.
        adapter = self._build_on_all_ranks(
            name, stored_adapter.config, options, is_new=False, is_trained=is_trained
        )
        with world.collective("compare the adapter"):
            if existing is not None and (existing.shapes, existing.scalings) != (adapter.shapes, adapter.scalings):
                raise ConfigError(
                    f"{os.fspath(directory)}: has other matrices or scales than {name!r}. Use another name, or "
                    "delete it"
                )
        base_identity = training_facts.identify_base(world, self._model)
        with world.collective("find the tensors to restore"):
            targets = states.allocate_targets(adapter, training, base_identity, on_other_base)
        adapter_files.read_adapter(world, self._model, adapter, stored_adapter, training, targets, on_other_base)
        what = os.fspath(directory)
        with world.collective("restore the state"):
            started = states.restore(adapter, what, training, targets, base_identity, on_other_base, on_not_finite)
        self._register(adapter)  # the last step: a failure on any rank before it leaves the bank unchanged
        return started


def _make_output(call: batch.RowCall, sums: batch.PassSums) -> FusedLosses:
    outcomes = []
    for number, (placed, logprobs) in enumerate(zip(call.requests, sums.logprobs, strict=True)):
        # The loss in the report is that of this request. The divisor of the gradient is in BankAdapter.
        tokens, adapter = call.count_targets([number]), placed.adapter
        is_mean = adapter is not None and adapter.options["reduction"] == "mean"
        loss = math.nan if number in sums.failures else sums.losses.get(number, 0.0)
        divisor = max(tokens, 1) if is_mean else 1
        failure = sums.failures.get(number)
        outcomes.append(AdapterLoss(placed.request.adapter, loss / divisor, tokens, logprobs, failure))
    return FusedLosses(outcomes, len(call.passes))


def _check_arguments(name: str, switch: object, switch_name: str, **permissions: OnFault) -> dict[str, str]:
    """Return the arguments that ranks must have in common, after checking their types."""
    check_options(_HINTS, permissions)
    if not isinstance(switch, bool):
        raise ConfigError(f"{switch_name}={switch!r}: pass True or False")
    options = {switch_name: switch, **permissions}
    return {"the name of the adapter": name, **{key: repr(value) for key, value in options.items()}}
