"""Optimizers by their names: which class is meant, what it is made with, and which parameters it has.

A name is looked up here, a class of ``torch.optim`` by its path. Any other path is imported only where the user
says so, since importing runs code. What a class can do to sharded parameters is not listed but tried
(:mod:`~shardwise.training.optimizing.optimizer_trial`).
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise.errors import ConfigError
from shardwise.models.optimizers.reduced import require_made_for_shards
from shardwise.models.view import canonical
from shardwise.training.options import NamedOptimizer, TrainOptions

_TORCH, _BITSANDBYTES, _TORCHAO = "torch.optim", "bitsandbytes.optim", "torchao.optim"
_KNOWN = (_TORCH, _BITSANDBYTES, _TORCHAO, "transformers.optimization")
"""Classes of these are imported by their paths as by their names, without further consent."""

_OF_TORCHAO = ("Adam8bit", "AdamW8bit", "Adam4bit", "AdamW4bit", "AdamFp8", "AdamWFp8")
_OURS = ("Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "Muon", "NAdam", "RAdam", "RMSprop")
SHORT_NAMES: Mapping[str, str] = {
    **{name.lower(): f"{_TORCH}.{name}" for name in (*_OURS, "Rprop", "SGD")},
    **{name.lower(): f"{_TORCHAO}.{name}" for name in _OF_TORCHAO},
}
"""The paths of classes, by their short names; these may also be written as the classes are (AdamW8bit)."""

_OTHERS = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_hf": "adamw",
    "adamw_apex_fused": "adamw",
    "adam_8bit": "adam8bit",
    "adamw_8bit": "adamw8bit",
    "adamw_bnb_8bit": "bitsandbytes.optim.AdamW8bit",
    "paged_adamw_8bit": "bitsandbytes.optim.PagedAdamW8bit",
    "paged_adamw_32bit": "bitsandbytes.optim.PagedAdamW32bit",
    "lion_8bit": "bitsandbytes.optim.Lion8bit",
    "paged_lion_8bit": "bitsandbytes.optim.PagedLion8bit",
    "adamw_torch_8bit": "adamw8bit",
    "adamw_torch_4bit": "adamw4bit",
}
"""What other trainers call them. Those of other libraries are taken by these names, too."""

_SAME = {name: path for name, path in _OTHERS.items() if path not in ("adam", "adamw")}

_TO_INSTALL = {
    "bitsandbytes": "take adamw8bit (pip install torchao), or",
    "torchao": "pip install torchao; or take",
}
"""What to do for a library that is not there."""

_OWN_KEYS = {
    "lr": "optimizer.learning_rate",
    "weight_decay": "optimizer.weight_decay",
    "betas": "optimizer.beta1 and optimizer.beta2",
    "eps": "optimizer.eps",
    "params": "what is trained, by tuning",
}
"""Arguments of optimizers that have keys of their own."""

MATRICES, OTHERS, EVERYTHING = "matrices", "others", "everything"
"""The parts of a training by a named optimizer."""


@dataclass(frozen=True, slots=True)
class OptimizerRecipe:
    """What an optimizer is made of, but for its parameters."""

    kind: type[Optimizer]
    settings: Mapping[str, Any]
    learning_rate: float
    weight_decay: float
    lora_plus_ratio: float = 1.0

    @property
    def name(self) -> str:
        """As users know the class."""
        is_torch = getattr(torch.optim, self.kind.__name__, None) is self.kind
        return f"{_TORCH}.{self.kind.__name__}" if is_torch else f"{self.kind.__module__}.{self.kind.__qualname__}"

    @property
    def decays(self) -> bool:
        """Whether it takes a weight decay."""
        return "weight_decay" in inspect.signature(self.kind).parameters

    def make(self, groups: Sequence[Mapping[str, Any]]) -> Optimizer:
        """One of these groups.

        Raises:
            ConfigError: the class refuses its arguments.
        """
        try:
            made: Optimizer = self.kind([dict(group) for group in groups], lr=self.learning_rate, **self.settings)  # type: ignore[call-arg]
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(f"optimizer.name={self.name!r}: it cannot be made ({error})") from error
        return made

    def of(self, parameters: Mapping[str, nn.Parameter]) -> Optimizer:
        """One of these parameters, by their names, in groups.

        torch's loops over many tensors at once take no mixture of sharded and whole.
        """
        is_mixed = len({isinstance(parameter, DTensor) for parameter in parameters.values()}) > 1
        has_foreach = "foreach" in inspect.signature(self.kind).parameters
        way = {"foreach": False} if is_mixed and has_foreach else {}
        made = replace(self, settings={**self.settings, **way}).make(self.groups(parameters))
        require_made_for_shards(made, parameters)
        return made

    def of_one_group(self, parameters: Sequence[nn.Parameter]) -> Optimizer:
        """One of these parameters, which all decay; what the class raises is raised."""
        settings = {**self.settings, **({"weight_decay": self.weight_decay} if self.decays else {})}
        made: Optimizer = self.kind(parameters, lr=self.learning_rate, **settings)  # type: ignore[call-arg]
        return made

    def groups(self, parameters: Mapping[str, nn.Parameter]) -> list[dict[str, Any]]:
        """Parameters by what is done to them: matrices decay, norms and biases do not.

        With LoRA+, B matrices have a rate of their own: ``lr_B = ratio * lr_A`` (Hayou, Ghosh, Yu: LoRA+, 2024,
        arXiv:2402.12354, section 5). The groups are the same whatever is sharded, so that any number of ranks can
        go on with them.
        """
        groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
        for name, parameter in parameters.items():
            is_b = self.lora_plus_ratio != 1.0 and _is_lora_b(name)
            groups.setdefault((parameter.ndim >= 2, is_b), []).append(parameter)
        made: list[dict[str, Any]] = []
        for (is_matrix, is_b), members in groups.items():
            group: dict[str, Any] = {"params": members}
            if self.decays:
                group["weight_decay"] = self.weight_decay if is_matrix else 0.0
            if is_b:
                group["lr"] = self.learning_rate * self.lora_plus_ratio
            made.append(group)
        return made


OptimizerParts: TypeAlias = Mapping[str, OptimizerRecipe]
"""Of each part of a training, by its name."""


def optimizers_of(options: TrainOptions) -> OptimizerParts:
    """What options ask for: one optimizer of everything; or, for Muon, that of matrices and AdamW of all else.

    Raises:
        ConfigError: the name is none, or is not to be imported, or takes no such options.
    """
    named = options.optimizer
    kind = class_named(named)
    ratio = 1.0 if named.lora_plus_ratio is None else named.lora_plus_ratio
    if kind is not _muon():
        return {EVERYTHING: _recipe(kind, options, named.options, ratio)}
    # Its updates then are as large as AdamW's are, so that one learning rate does for both (Liu et al.: Muon is
    # Scalable for LLM Training, 2025, arXiv:2502.16982, section 2.2).
    settings = {"adjust_lr_fn": "match_rms_adamw", **_checked(kind, named.options)}
    matrices = OptimizerRecipe(
        kind, {**settings, "weight_decay": options.weight_decay}, options.learning_rate, options.weight_decay, ratio
    )
    return {MATRICES: matrices, OTHERS: _recipe(torch.optim.AdamW, options, {}, ratio)}


def path_of(name: str) -> str:
    """The path of a class, by any of its names; what is none, as it is."""
    plain = _SAME.get(name, name)
    return plain if "." in plain else SHORT_NAMES.get(plain.lower(), plain)


def class_named(named: NamedOptimizer) -> type[Optimizer]:
    """The class that a name means.

    Raises:
        ConfigError: there is none, or its library is not installed, or it is not to be imported.
    """
    told = f"optimizer.name={named.name!r}"
    path = path_of(named.name)
    module_name, _, class_name = path.rpartition(".")
    if not module_name:
        names = [*SHORT_NAMES, *_OTHERS]
        near = difflib.get_close_matches(named.name, names, 1)
        meant = f"; did you mean {_OTHERS.get(near[0], near[0])}?" if near else ""
        raise ConfigError(f"{told}: there is no such optimizer{meant} There are {', '.join(sorted(SHORT_NAMES))}")
    if module_name not in _KNOWN and not named.may_import:
        raise ConfigError(
            f"{told}: importing it runs the code of {module_name}; say optimizer.allow_import=true if that is to "
            f"be, or take a class of {_TORCH}"
        )
    try:
        found: object = getattr(importlib.import_module(module_name), class_name, None)
    except ImportError as error:
        library = module_name.partition(".")[0]
        way = _TO_INSTALL.get(library, f"pip install {library}; or take")
        raise ConfigError(
            f"{told}: it is of {library}, which cannot be imported here ({error}); {way} adamw, whose moments are "
            "sharded over the ranks"
        ) from error
    if not (inspect.isclass(found) and issubclass(found, Optimizer)) or found is Optimizer:
        raise ConfigError(f"{told}: {path} is no class of optimizers (torch.optim.Optimizer)")
    return found


def _recipe(
    kind: type[Optimizer], options: TrainOptions, further: Mapping[str, Any], ratio: float
) -> OptimizerRecipe:
    settings = dict(_checked(kind, further))
    takes = inspect.signature(kind).parameters
    for key, name, value in (("betas", "beta1 and beta2", options.betas), ("eps", "eps", options.eps)):
        if value is not None and key not in takes:
            raise ConfigError(f"optimizer.{name}: {kind.__name__} takes no {key}; leave it out")
        if value is not None:
            settings[key] = value
    if options.weight_decay and "weight_decay" not in takes:
        raise ConfigError(f"optimizer.weight_decay: {kind.__name__} has none; leave it out")
    return OptimizerRecipe(kind, settings, options.learning_rate, options.weight_decay, ratio)


def _checked(kind: type[Optimizer], options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Further arguments, which the class has.

    Raises:
        ConfigError: naming all that it has not, or that have keys of their own.
    """
    takes = inspect.signature(kind).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values())
    faults = [
        f"optimizer.options.{name}: it is {_OWN_KEYS[name]}"
        if name in _OWN_KEYS
        else f"optimizer.options.{name}: {kind.__name__} takes no such argument, but "
        + ", ".join(other for other in takes if other not in _OWN_KEYS)
        for name in options
        if name in _OWN_KEYS or (name not in takes and not takes_any)
    ]
    if faults:
        raise ConfigError("the optimizer cannot be made so\n  " + "\n  ".join(faults))
    return options


def parameters_by_part(model: nn.Module, parts: OptimizerParts) -> dict[str, dict[str, nn.Parameter]]:
    """What of a model each part trains, by names; parts that have none are left out.

    Raises:
        ConfigError: LoRA+ is asked for, and there are no B matrices.
    """
    trained = {canonical(name): value for name, value in model.named_parameters() if value.requires_grad}
    if any(each.lora_plus_ratio != 1.0 for each in parts.values()) and not any(map(_is_lora_b, trained)):
        raise ConfigError("optimizer.lora_plus_ratio: there are no B matrices of a LoRA to train; leave it out")
    if MATRICES not in parts:
        return {EVERYTHING: trained}
    words = set(_of_words(model))
    dealt: dict[str, dict[str, nn.Parameter]] = {name: {} for name in parts}
    for name, value in trained.items():
        is_of_words = value in words or ".lora_embedding_" in name
        dealt[MATRICES if value.ndim == 2 and not is_of_words else OTHERS][name] = value
    return {name: parameters for name, parameters in dealt.items() if parameters}


def _of_words(model: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters with a row for each token, which are no maps from vectors to vectors: embeddings and the head."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            yield from module.parameters()
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if isinstance(head, nn.Module):
        yield from head.parameters()


def _is_lora_b(name: str) -> bool:
    return any(part in ("lora_B", "lora_embedding_B") for part in name.split("."))


def _muon() -> type[Optimizer] | None:
    found: type[Optimizer] | None = getattr(torch.optim, "Muon", None)
    return found
