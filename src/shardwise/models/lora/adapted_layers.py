"""The layers that a LoRA adapts and the initialization of its matrices, from PEFT's model on meta."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn
from transformers import PreTrainedModel

from shardwise.core.errors import ConfigError
from shardwise.core.expression import Bindings
from shardwise.core.layout import LocalBox
from shardwise.core.tensors import Box, Strided
from shardwise.fsdp.named_tensors import TensorRef, collect_tensors
from shardwise.models.initial_programs import Program, copy_program, values_from_program
from shardwise.models.initialize import Initializers
from shardwise.models.lora import peft_private
from shardwise.models.lora.inject import inject_lora

if TYPE_CHECKING:
    from peft import LoraConfig

_ADAPTER = "default"
_PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True)
class AdaptedMatrix:
    """A matrix of an adapter. Its FQN has the adapter name "default"."""

    fqn: str
    shape: tuple[int, ...]

    @property
    def key(self) -> str:
        """The matrix's name in PEFT's files."""
        return self.fqn.replace(f".{_ADAPTER}", "")


@dataclass(frozen=True, slots=True)
class _Site:
    """A module with an adapter."""

    module: str
    lora_A: AdaptedMatrix
    lora_B: AdaptedMatrix
    r: int
    scaling: float


@dataclass(frozen=True, slots=True)
class LinearSite(_Site):
    """A linear layer with an adapter: ``y + scaling * lora_B(lora_A(dropout(x)))``, A (r, in), B (out, r)."""

    dropout: float


@dataclass(frozen=True, slots=True)
class EmbeddingSite(_Site):
    """An embedding with an adapter: A is (r, words) and B (width, r)."""


@dataclass(frozen=True, slots=True)
class ExpertsSite(_Site):
    """A parameter of fused experts with an adapter per expert: A is (r * experts, in) and B (out, r * experts)."""

    parameter: str
    experts: int


AdaptedSite: TypeAlias = LinearSite | EmbeddingSite | ExpertsSite


@dataclass(frozen=True)
class AdapterOutline:
    """An adapter without a model: its sites in the order of the model, and its initialization."""

    sites: tuple[AdaptedSite, ...]
    tensors: Mapping[str, TensorRef]
    initializers: Initializers
    programs: Mapping[str, Program]

    @property
    def model(self) -> nn.Module:
        """The base with the adapter in it, on meta."""
        return self.initializers.model

    def matrices(self) -> Iterator[AdaptedMatrix]:
        for site in self.sites:
            yield site.lora_A
            yield site.lora_B

    def initialize(self, matrix: AdaptedMatrix, values: torch.Tensor, seed: int) -> None:
        """Initialize a contiguous matrix as ``from_pretrained`` with ``Lora(config)`` does, from (seed, FQN)."""
        program = self.programs[matrix.fqn]
        if not program.is_elementwise:
            whole = self.initializers.initialize_whole(self.tensors[matrix.fqn], seed=seed)
            program = copy_program(whole)
        box = LocalBox(Box.whole(matrix.shape), Strided.contiguous(matrix.shape))
        for target, block in values_from_program(program, values, [box], seed=seed, fqn=matrix.fqn):
            target.copy_(block)


def name_in_base(name: str) -> str:
    """Return the name in the base of a module or tensor of PEFT's model."""
    return name.removeprefix(_PREFIX).replace(".base_layer", "")


def outline_adapter(base: PreTrainedModel, config: LoraConfig, *, is_new: bool) -> AdapterOutline:
    """Return the outline of the adapter that PEFT injects into a model.

    Args:
        base: the model on meta, in float32, which is changed.
        config: the config of the adapter.
        is_new: whether every name in the config has to match something.

    Raises:
        ConfigError: nothing matches, or the adapter has other parts than pairs of matrices.
    """
    _require_matrices(config)
    tuned = inject_lora(base, Bindings({}), config, _ADAPTER, None, is_new=is_new)
    refs = collect_tensors(tuned.model)
    errors: list[str] = []
    sites: list[AdaptedSite] = []
    names = {id(item.tensor): item.fqn for item in refs}
    model: Any = tuned.model
    for name, layer in peft_private.layers(model):
        try:
            sites.append(_make_site(name_in_base(name), layer, names))
        except ConfigError as error:
            errors.append(str(error))
    if errors:
        raise ConfigError("this LoRA cannot be trained beside others:\n  " + "\n  ".join(errors[:20]))
    initializers = Initializers(tuned.model, refs, tuned.additions)
    programs = initializers.programs(sorted(tuned.additions.from_tuning))
    tensors = {name: item for item in refs for name in item.names}
    return AdapterOutline(tuple(sites), tensors, initializers, programs)


def _require_matrices(config: LoraConfig) -> None:
    """Reject settings that add more than a pair of matrices per weight.

    Raises:
        ConfigError: the message has these settings.
    """
    peft_private.require_supported(config, None)
    errors = []
    if config.use_dora:
        errors.append("use_dora=True needs norms of whole weights at each step. Leave it out")
    if config.bias != "none":
        errors.append(f"bias={config.bias!r} trains the base, which all adapters share. Pass 'none'")
    if getattr(config, "lora_bias", False):
        errors.append("lora_bias=True is not supported. Leave it out")
    if config.modules_to_save:
        names = ", ".join(sorted(config.modules_to_save))
        errors.append(f"modules_to_save ({names}) are copies of the base. Make them target_modules")
    if errors:
        raise ConfigError("this LoRA cannot be trained beside others:\n  " + "\n  ".join(errors))


def _make_site(module: str, layer: Any, names: Mapping[int, str]) -> AdaptedSite:
    """Return the site of one of PEFT's layers. ``names`` are FQNs by ``id`` of the tensor.

    Raises:
        ConfigError: it is a layer of another kind.
    """
    from peft.tuners.lora import Embedding, Linear, ParamWrapper
    from transformers.pytorch_utils import Conv1D

    base = layer.get_base_layer()
    matrices = [
        AdaptedMatrix(names[id(getattr(owner, local))], tuple(getattr(owner, local).shape))
        for owner, local in peft_private.matrices(layer, _ADAPTER)
    ]
    # With a further parameter, such as a bias of lora_B, there are more than two, and the layer is rejected.
    r, scaling = layer.r[_ADAPTER], float(layer.scaling[_ADAPTER])
    if len(matrices) == 2 and math.isfinite(scaling):
        lora_A, lora_B = matrices
        if isinstance(layer, ParamWrapper) and getattr(base, layer.parameter_name).ndim == 3:
            return ExpertsSite(module, lora_A, lora_B, r, scaling, layer.parameter_name, layer.num_experts)
        if isinstance(layer, Embedding):  # PEFT applies no dropout to these
            return EmbeddingSite(module, lora_A, lora_B, r, scaling)
        # A matrix in ``target_parameters`` has the product of the linear layer.
        if isinstance(layer, ParamWrapper) and isinstance(base, nn.Linear) and layer.parameter_name == "weight":
            return LinearSite(module, lora_A, lora_B, r, scaling, 0.0)
        if isinstance(layer, Linear) and isinstance(base, nn.Linear | Conv1D):
            dropout = getattr(layer.lora_dropout[_ADAPTER], "p", 0.0)
            return LinearSite(module, lora_A, lora_B, r, scaling, float(dropout))
    raise ConfigError(
        f"{module}: is a {type(base).__name__} adapted as {type(layer).__name__}. Only linear layers, embeddings "
        "and fused experts are supported. Take it out of the targets"
    )
