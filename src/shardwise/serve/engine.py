"""Carries out turns on a rank. All ranks have the same turn, and each has its share of the rows and prompts."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any, Final

from torch import nn

from shardwise.bank.adapter_bank import AdapterBank
from shardwise.bank.experts import unsupported_experts_reason
from shardwise.bank.rows import Request
from shardwise.core.errors import ConfigError, RankLostError, ShardwiseError, TrainingError
from shardwise.models.lora.peft_private import lora_config
from shardwise.ranks.world import World
from shardwise.serve.checkpoints import require_saved, require_saved_by
from shardwise.serve.operations import (
    CopyModel,
    CreateModel,
    ForgetModels,
    Generate,
    LaterOperation,
    LoadModel,
    OffloadModels,
    OptimStep,
    Pass,
    PassOutcome,
    Refusal,
    SaveModel,
    Turn,
)

LORA_ALPHA: Final = 32
"""Of all models: the protocol has no key for it."""

_FORGOTTEN: Final = "is gone (a model has the max_snapshots of your key that were used last)"

_GONE: Final = Refusal(
    f"the model or snapshot {_FORGOTTEN}, or its last step failed. Load a checkpoint, or save it again"
)
"""A call of the bank with one model that it does not take would be refused as a whole."""

_log = logging.getLogger(__name__)

Outcomes = dict[str, Any]
"""By request: a :class:`PassOutcome`, a ``SampleOutput``, metrics, a :class:`Refusal`, or None."""


class Engine:
    """A bank and the operations on it. Every rank has one, and calls :meth:`run` with the same turns."""

    def __init__(self, world: World, bank: AdapterBank, model: nn.Module) -> None:
        self._world = world
        self._bank = bank
        self._parts = find_parts(model)
        self._failed: set[str] = set()
        """Models whose step failed. The bank refuses them until they are loaded again."""
        self._incomplete: dict[str | None, int] = {}
        """By model, the seq_id of a pass that failed since its last step. A step must not be taken on a part of a
        batch. Ranks have the same outcomes, so they have the same entries."""
        self._saved: dict[str, str] = {}
        """By folder, the last save of the turn, which is not recorded yet."""

    def run(self, turn: Turn) -> Outcomes:
        """Carry out a turn. The outcomes on the first rank count. Collective: yes.

        Raises:
            RankLostError: a rank is lost. The server has ended.
        """
        outcomes: Outcomes = {}
        passes: list[Pass] = []
        steps: list[OptimStep] = []
        later: list[LaterOperation] = []
        generates: list[Generate] = []
        for operation in turn.operations:
            match operation:
                case Pass() | OptimStep() if not self._has(operation.model):
                    outcomes[operation.request_id] = _GONE
                case Pass():
                    passes.append(operation)
                case OptimStep():
                    steps.append(operation)
                case Generate():
                    generates.append(operation)
                case _:
                    later.append(operation)
        self._saved = {each.folder: each.request_id for each in later if isinstance(each, SaveModel)}
        # Passes, then steps, then the rest: as within the queue of a model (Stage).
        self._run_passes([each for each in passes if not each.is_refused], outcomes)
        for each in passes:
            if each.backward and not isinstance(outcomes.get(each.request_id), PassOutcome):
                self._incomplete[each.model] = each.seq_id
        self._run_steps(steps, outcomes)
        for operation in later:
            try:
                outcomes[operation.request_id] = self._run_other(operation)
            except RankLostError:
                raise
            except ShardwiseError as error:  # the same on all ranks
                outcomes[operation.request_id] = refuse(error, getattr(operation, "folder", None))
        # Samples come last: a copy or checkpoint of this turn is there.
        self._run_generates(generates, outcomes)
        return outcomes

    def _has(self, model: str | None) -> bool:
        return model is None or (model in self._bank.names and model not in self._failed)

    def _run_passes(self, passes: Sequence[Pass], outcomes: Outcomes) -> None:
        """Run the rows of all models in one call of the bank, or by halves if it fails.

        A call that fails is discarded as a whole, before or after something was computed. So one request that does
        not fit into memory fails alone, and the others run once more, in fewer calls than one by one.
        """
        if not passes:
            return
        # All ranks have all rows, and compute the same shares. shares[request][rank] are numbers of rows.
        size, rank = self._world.size, self._world.rank
        shares = deal_rows([[len(row["input_ids"]) for row in each.rows] for each in passes], size)
        requests = []
        for each, share in zip(passes, shares, strict=True):
            rows = [each.rows[number] for number in share[rank]]
            requests.append(Request(each.model, rows, each.loss, each.config, each.backward))
        results, text = None, ""
        try:
            results = self._bank.forward_backward(requests, gather=True).requests
        except RankLostError:
            raise
        except ShardwiseError as error:  # the same on all ranks, so they go on alike
            text = str(error)
            if error.output is not None:
                results = error.output.requests  # the losses of some requests raised
        # After the handler: until it ends, the error's traceback keeps the memory of the call that failed.
        if results is None:
            middle = len(passes) // 2
            if middle:
                self._run_passes(passes[:middle], outcomes)
                self._run_passes(passes[middle:], outcomes)
            else:
                _log.error("a pass failed: %s", text)
                text = "the pass failed on the server, whose log has the reason. Send fewer or shorter rows"
                outcomes[passes[0].request_id] = Refusal(text, is_users=False)
            return
        for each, result, share in zip(passes, results, shares, strict=True):
            if result.failure is not None:
                outcomes[each.request_id] = Refusal(f"the loss raised, {result.failure}")
                continue
            # On the first rank, rows are those of rank 0, then of rank 1, and so on. Other ranks have none.
            order = [number for of_rank in share for number in of_rank]
            logprobs = [
                row for _, row in sorted(zip(order, result.logprobs, strict=False), key=lambda pair: pair[0])
            ]
            outcomes[each.request_id] = PassOutcome(result.loss, logprobs)

    def _run_steps(self, steps: Sequence[OptimStep], outcomes: Outcomes) -> None:
        """Take the steps that are due, at most one of each model. One whose batch lacks a pass is not taken."""
        due: dict[str, OptimStep] = {}
        for step in steps:
            # pop: a step that is refused begins a new batch, too.
            seq_id = self._incomplete.pop(step.model, None)
            if seq_id is None:
                due[step.model] = step
                continue
            self._bank.zero_grad(step.model)
            outcomes[step.request_id] = Refusal(
                f"optim_step: forward_backward with seq_id {seq_id} failed since the last step. No step was taken, "
                "and the gradient is zero. Send the whole batch again"
            )
        if not due:
            return
        try:
            results = self._bank.optim_step({name: step.settings for name, step in due.items()})
        except RankLostError:
            raise
        except ShardwiseError as error:
            _log.error("a step of %d models failed: %s", len(due), error)
            results = error.output or {}  # of those that took their step
            refusal = Refusal("the step failed on the server, whose log has the reason", is_users=False)
            for name in due.keys() - results.keys():
                outcomes[due[name].request_id] = refusal
                try:
                    self._bank.zero_grad(name)
                except ConfigError:  # this model's values are not certain
                    self._failed.add(name)
        for name, result in results.items():
            if not result.is_taken:  # and so the gradient is dropped
                self._bank.zero_grad(name)
            norm = {"grad_norm:mean": result.grad_norm} if result.is_taken else {}
            outcomes[due[name].request_id] = {"skipped:max": float(not result.is_taken), **norm}

    def _run_other(self, operation: LaterOperation) -> object:
        bank = self._bank
        match operation:
            case CreateModel():
                bank.add_adapter(
                    operation.model, self._make_config(operation), reduction="sum", seed=operation.seed
                )
            case LoadModel():
                training_state = operation.training_state
                with self._world.collective("find the checkpoint"):
                    if self._world.rank == 0:
                        require_saved(operation.folder)
                bank.load(operation.model, operation.folder, training_state=training_state, reduction="sum")
                # A model begins its batch anew: the client sends all parts of it since the last step.
                bank.zero_grad(operation.model)
                self._forget_failures(operation.model)
            case SaveModel():
                bank.save(operation.model, operation.folder, training_state=operation.training_state)
            case CopyModel():
                bank.copy_adapter(operation.model, operation.new)
            case ForgetModels():
                for name in operation.names:
                    if name in bank.names:
                        bank.delete_adapter(name)
                    self._forget_failures(name)
            case OffloadModels():
                for name in operation.names:
                    if name in bank.names:
                        try:
                            bank.offload(name)
                        except TrainingError as error:  # others may be smaller
                            _log.warning("a model stays on the device: %s", error)
        return None

    def _forget_failures(self, model: str) -> None:
        self._failed.discard(model)
        self._incomplete.pop(model, None)

    def _make_config(self, create: CreateModel) -> Any:
        modules: list[str] = []
        parameters: list[str] = []
        for part in sorted(create.parts):
            modules += self._parts[part][0]
            parameters += self._parts[part][1]
        if not modules and not parameters:
            raise ConfigError(f"lora_config: the base has none of the parts {', '.join(sorted(create.parts))}")
        return lora_config(
            r=create.rank,
            lora_alpha=LORA_ALPHA,
            target_modules=modules,
            target_parameters=parameters or None,
            task_type="CAUSAL_LM",
        )

    def _run_generates(self, generates: Sequence[Generate], outcomes: Outcomes) -> None:
        """Sample from the prompts of all models in one call of the bank, or by halves, as :meth:`_run_passes`.

        Each rank has a share of them.
        """
        loaded = []
        for each in generates:
            name = each.sample.adapter
            try:
                if name is not None and name not in self._bank.names:
                    if each.folder is None:
                        raise ConfigError(f"the model or snapshot to sample from {_FORGOTTEN}. Save it again")
                    self._load_copy(name, each.folder, each.save_id)
                loaded.append(each)
            except RankLostError:
                raise
            except ShardwiseError as error:
                outcomes[each.request_id] = refuse(error, each.folder)
        if not loaded:
            return
        lengths = [[len(each.sample.prompt) + each.sample.max_tokens] for each in loaded]
        shares = deal_rows(lengths, self._world.size)
        numbers = [number for number, share in enumerate(shares) if share[self._world.rank]]
        outputs, text = None, ""
        try:
            outputs = self._bank.generate([loaded[number].sample for number in numbers])
        except RankLostError:
            raise
        except ShardwiseError as error:
            text = str(error)
        if outputs is None:  # after the handler, as in _run_passes()
            middle = len(loaded) // 2
            if middle:
                self._run_generates(loaded[:middle], outcomes)
                self._run_generates(loaded[middle:], outcomes)
            else:
                _log.error("a sample failed: %s", text)
                text = "sampling failed on the server, whose log has the reason"
                outcomes[loaded[0].request_id] = Refusal(text, is_users=False)
            return
        with self._world.all_gather("gather the samples") as exchange:
            exchange.local = dict(zip(numbers, outputs, strict=True))
        for of_rank in exchange.result:
            for number, output in of_rank.items():
                outcomes[loaded[number].request_id] = output

    def _load_copy(self, name: str, folder: str, save_id: str) -> None:
        """Load a checkpoint to sample from it, without the gradient that a loaded adapter has."""
        with self._world.collective("find the checkpoint"):
            if self._world.rank == 0:
                require_saved_by(self._saved.get(folder, save_id), folder)
        whole = f"{name} (whole)"
        self._bank.load(whole, folder, training_state=False)
        try:
            self._bank.copy_adapter(whole, name)
        finally:
            self._bank.delete_adapter(whole)


def refuse(error: ShardwiseError, folder: str | None) -> Refusal:
    """Return the outcome of an operation on one model that raised. Clients see no paths of the server."""
    if isinstance(error, ConfigError):
        return Refusal(str(error).replace(folder, "the checkpoint") if folder else str(error))
    _log.error("an operation failed: %s", error)
    return Refusal(f"{type(error).__name__} on the server, whose log has the reason", is_users=False)


def deal_rows(lengths: Sequence[Sequence[int]], num_ranks: int) -> list[list[list[int]]]:
    """Deal rows to ranks in turn, the longest first.

    The k-th longest rows of all ranks are padded to the longest of them ([Note: Composed passes] in
    ``bank/compose.py``). So they differ least.

    Args:
        lengths: of the rows of each request, in tokens.
        num_ranks: number of ranks.

    Returns:
        For each request, by rank, the numbers of its rows.
    """
    shares: list[list[list[int]]] = [[[] for _ in range(num_ranks)] for _ in lengths]
    rows = [(-length, request, row) for request, of in enumerate(lengths) for row, length in enumerate(of)]
    for place, (_, request, row) in enumerate(sorted(rows)):
        shares[request][place % num_ranks].append(row)
    return shares


_ATTENTION = re.compile(r"(attn|attention|mixer)")
_LAYER = re.compile(r"\.\d+\.")
_LEFT_OUT = {"gate", "router", "shared_expert_gate", "indexer"}
"""Routers of experts, and indexers of sparse attention, which run without gradients."""
_FORMER_EXPERTS = {"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
"""Names of layers of single experts in transformers 4. PEFT takes them for those of fused experts."""
_MAMBA_TYPES = {"falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"}
"""Models whose out_proj PEFT refuses, since kernels use its weight alone."""


def find_parts(model: nn.Module) -> dict[str, tuple[list[str], list[str]]]:
    """Return what ``train_attn``, ``train_mlp`` and ``train_unembed`` mean for a model, as PEFT's targets.

    Attention is what a layer calls attn, attention or mixer. The other matrices of layers are its MLP. What cannot
    have adapters is left out. Fused experts are parameters (experts, out, in). So are the weights of shared experts
    and dense layers beside them: in ``target_modules``, PEFT would replace their names by those of the experts.

    Returns:
        By part ("attn", "mlp", "unembed"), target_modules and target_parameters. Modules are named by their last
        word if it is that of no other module.
    """
    head = model.get_output_embeddings()  # type: ignore[operator]
    all_names = [name for name, _ in model.named_modules()]
    has_experts = any(name.endswith(".experts") for name in all_names)
    config: Any = model.config
    is_mamba = config.model_type in _MAMBA_TYPES
    modules: dict[str, list[str]] = {"attn": [], "mlp": [], "unembed": []}
    parameters: dict[str, list[str]] = {"attn": [], "mlp": [], "unembed": []}
    for name, module in model.named_modules():
        match = _LAYER.search(name)
        place = name[match.end() :] if match else ""
        last = name.rpartition(".")[2]
        if module is head:
            modules["unembed"].append(name)
        elif not place or not _LEFT_OUT.isdisjoint(place.split(".")) or (is_mamba and last == "out_proj"):
            continue
        elif isinstance(module, nn.Linear):
            part = "attn" if _ATTENTION.search(place) else "mlp"
            if has_experts and last in _FORMER_EXPERTS:
                parameters[part].append(f"{name}.weight")
            else:
                modules[part].append(name)
        elif last == "experts":
            keys = [key for key, value in module.named_parameters(recurse=False) if value.ndim == 3]
            parameters["mlp"] += [
                f"{name}.{key}" for key in keys if not unsupported_experts_reason(name, module, key)
            ]
    for part, of in modules.items():
        words = {name.rpartition(".")[2] for name in of}
        if words.isdisjoint(name.rpartition(".")[2] for name in set(all_names).difference(of)):
            modules[part] = sorted(words)
    return {part: (modules[part], parameters[part]) for part in modules}
