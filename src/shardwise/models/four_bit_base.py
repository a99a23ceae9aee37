"""Puts a base into four bits, on meta: which layers, what is offered for them, what the model then says."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from transformers import PreTrainedModel
from transformers.utils.quantization_config import QuantizationMethod

from shardwise.conversion.computed import Bindings
from shardwise.conversion.expression import Expression, permute
from shardwise.conversion.four_bit import nest, quantise_rows
from shardwise.conversion.packed import nested_as_stored, packed, stored_form, stored_rows
from shardwise.errors import ConfigError
from shardwise.models.four_bit_experts import (
    are_experts_in_four_bits,
    put_experts_into_four_bits,
    scales_of,
    stacks_of,
    why_they_stay,
)
from shardwise.models.four_bit_linear import (
    NESTED,
    OFFSET,
    SCALES,
    WEIGHT,
    WHOLE_SCALES,
    FourBit,
    KeptForm,
    Packing,
    form_name,
    has_bitsandbytes,
    is_in_four_bits,
    is_mxfp4,
    of_form,
    put_into_four_bits,
    to_transformers,
    why_it_stays,
)
from shardwise.models.selection import has_adapters
from shardwise.models.torch_words import from_torch, original_class, parameters_of
from shardwise.report.names import collapse
from shardwise.tensors import Code, DType, FourBitForm

_ROUTERS = (".gate", ".router")


@dataclass(frozen=True, slots=True)
class Chosen:
    """Which linear layers and experts are put into four bits, and why the others are not.

    Attributes:
        layers: by name.
        stacks: stacked weights of experts, as (module, local name), by name.
        stay: names of linear layers, and of stacked weights of experts, that stay, to the reason.
        absent: names that were given, and match nothing.
    """

    layers: Mapping[str, nn.Linear]
    stacks: Mapping[str, tuple[nn.Module, str]]
    stay: Mapping[str, str]
    absent: tuple[str, ...] = ()


def choose_layers(
    model: nn.Module,
    quantization: KeptForm,
    offered: Callable[[str], bool],
    stored: Mapping[str, tuple[FourBitForm, int]] = MappingProxyType({}),
    *,
    must_match: bool = True,
) -> Chosen:
    """The linear layers and the experts of a model on meta, tied, that are to be in four bits.

    What computes logits stays, whatever is tied, routers, experts that are not computed one by one, what the
    checkpoint does not hold (``offered`` is asked by the name of a weight), and what is named. ``stored`` are
    stacks of experts that are taken as they are stored, by name, with their form and the size of their blocks.

    Raises:
        ConfigError: something named matches nothing, or nothing is left; not without ``must_match``.
    """
    uses = Counter(
        id(parameter)
        for _, module in model.named_modules(remove_duplicate=False)
        for parameter in parameters_of(module).values()
    )
    layers: dict[str, nn.Linear] = {}
    stacks: dict[str, tuple[nn.Module, str]] = {}
    stay: dict[str, str] = {}
    matched: set[str] = set()
    for item in _candidates(model, quantization, stored):
        named = [pattern for pattern in quantization.stay if any(_matches(pattern, name) for name in item.names)]
        matched.update(named)
        told = item.names[-1]
        if named:
            stay[told] = "as asked for"
        elif item.why is not None:
            stay[told] = f"it {item.why}"
        elif uses[id(item.module.get_parameter(item.local))] > 1:
            stay[told] = "its weight is tied"
        elif not offered(f"{item.names[0]}.{item.local}"):
            stay[told] = "the checkpoint does not hold it, or as numbers beside others in four bits"
        elif isinstance(item.module, nn.Linear):
            layers[told] = item.module
        else:
            stacks[told] = (item.module, item.local)
    absent = tuple(pattern for pattern in quantization.stay if pattern not in matched)
    if must_match and (wrong := list(absent)):
        known = ", ".join(pattern for pattern, _ in collapse(sorted({*layers, *stacks, *stay}))[:8])
        raise ConfigError(f"stay={wrong!r} matches no linear layer; there are {known}")
    if must_match and not layers and not stacks:
        raise ConfigError(
            f"nothing of {type(model).__name__} can be put into four bits"
            + "".join(f"; {name} stays: {why}" for name, why in list(stay.items())[:3])
        )
    return Chosen(layers, stacks, stay, absent)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A weight that may be put into four bits.

    Attributes:
        names: by which it is asked to stay: of its module, and its own where it is one of several in there.
        module: that it is in, as ``local``.
        why: it stays in any case; None where it need not.
    """

    names: tuple[str, ...]
    module: nn.Module
    local: str
    why: str | None


def _candidates(
    model: nn.Module, quantization: KeptForm, stored: Mapping[str, tuple[FourBitForm, int]]
) -> Iterator[_Candidate]:
    """All linear layers and stacks of experts."""
    head: Any = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    last = next(reversed([name for name, _ in model.named_parameters()]), "").rpartition(".")[0]
    modules = dict(model.named_modules())
    for name, module in modules.items():
        if original_class(module) is nn.Linear:
            assert isinstance(module, nn.Linear)
            why = why_it_stays(module, quantization)
            if module is head or name == last:
                why = "computes what comes out"
            elif name.endswith(_ROUTERS) and f"{name.rpartition('.')[0]}.experts" in modules:
                why = "chooses experts"
            yield _Candidate((name,), module, WEIGHT, why)
        for local, stack in stacks_of(name, module):
            fqn = f"{name}.{local}"
            why = why_they_stay(module, stack, quantization, is_stored=fqn in stored)
            yield _Candidate((name, fqn), module, local, why)


def _matches(pattern: str, name: str) -> bool:
    """As ``should_convert_module`` of transformers has it."""
    try:
        found = re.match(rf"(?:{pattern})(?:(?<=\.)|(?=\.|$))", name)
    except re.error as error:
        raise ConfigError(f"stay={pattern!r}: is no name, and no regex ({error})") from error
    return found is not None or name.endswith(pattern)


def put_base_into_four_bits(
    model: PreTrainedModel,
    bindings: Bindings,
    quantization: KeptForm,
    *,
    keeps_experts: bool = False,
    must_match: bool = True,
    config: Mapping[str, Any] | None = None,
) -> tuple[Bindings, tuple[str, ...]]:
    """Put the layers of a base on meta into four bits; what the checkpoint offers then, and notes for the report.

    Args:
        model: the base.
        bindings: what the checkpoint offers.
        quantization: how layers are packed that are not stored packed.
        keeps_experts: experts that are stored packed stay so.
        must_match: names of modules that stay are the user's, and not those of the checkpoint's config.
        config: the ``quantization_config`` of the checkpoint where the model is to have that.

    Raises:
        ConfigError: as of :func:`choose_layers`.
    """
    stored = {
        name for name, claims in bindings.offers.items() if any(stored_form(item) is not None for item in claims)
    }
    stacks = _stored_stacks(model, bindings) if keeps_experts else {}
    wanted = stored | stacks.keys()
    if not wanted and config is None:
        wanted = set(bindings.offers)
    chosen = choose_layers(
        model,
        quantization,
        lambda name: bool(bindings.offers.get(name)) and name in wanted,
        stacks,
        must_match=must_match,
    )
    if not chosen.layers and not chosen.stacks:
        return bindings, notes_of(chosen, quantization)
    for name, layer in chosen.layers.items():
        form = next(filter(None, map(stored_form, bindings.offers[f"{name}.{WEIGHT}"])), None)
        put_into_four_bits(layer, quantization if form is None else of_form(form, quantization))
    kinds: dict[nn.Module, dict[str, KeptForm]] = {}
    for name, (module, local) in chosen.stacks.items():
        kind = of_form(stacks[name], quantization) if name in stacks else quantization
        kinds.setdefault(module, {})[local] = kind
    for module, names in kinds.items():
        put_experts_into_four_bits(module, names)
    kept = tuple(sorted(pattern for pattern in chosen.stay))
    mark_in_four_bits(model, config or to_transformers(quantization, kept, model.dtype))
    return offered_in_four_bits(model, bindings), notes_of(chosen, quantization)


def _stored_stacks(model: nn.Module, bindings: Bindings) -> dict[str, tuple[FourBitForm, int]]:
    """Stacks of experts that a checkpoint has packed, by name: their form, and the size of their blocks."""
    found: dict[str, tuple[FourBitForm, int]] = {}
    for name, module in model.named_modules():
        for local, _ in stacks_of(name, module):
            for item in bindings.offers.get(f"{name}.{local}", ()):
                rows = stored_rows(_as_rows(item, is_transposed=getattr(module, "is_transposed", False)))
                if rows is not None:
                    found[f"{name}.{local}"] = rows.form, rows.block_size
    return found


def _as_rows(stack: Expression, *, is_transposed: bool) -> Expression:
    """A stack (experts, out, in), of one that may be (experts, in, out)."""
    return permute(stack, (0, 2, 1)) if is_transposed and len(stack.shape) == 3 else stack


def notes_of(chosen: Chosen, quantization: KeptForm) -> tuple[str, ...]:
    """What is in four bits and what is not, and why, in sentences."""
    by_reason: dict[str, list[str]] = {}
    for name, why in chosen.stay.items():
        by_reason.setdefault(why, []).append(name)
    how = f"{form_name(quantization.form)}, blocks of {quantization.block_size}"
    notes = (
        [f"{len(chosen.layers)} linear layers are in four bits ({how}), packed on the CPU"] if chosen.layers else []
    )
    if chosen.stacks:
        names = ", ".join(pattern for pattern, _ in collapse(sorted(chosen.stacks)))
        form = how if isinstance(quantization.form, Code) else f"{how}, plain scales"
        notes.append(f"experts are in four bits ({form}) and are computed one after the other: {names}")
    notes += [
        f"{', '.join(pattern for pattern, _ in collapse(members))} keeps its numbers: {why}"
        for why, members in by_reason.items()
    ]
    if chosen.absent:
        notes.append(f"llm_int8_skip_modules names modules that the model has not: {', '.join(chosen.absent)}")
    return tuple(notes)


@dataclass(frozen=True, slots=True)
class _Method:
    """What transformers says of a model that it does not save."""

    quant_method: str = "four bits by shardwise, whose shardwise.save(model, folder) writes its files,"


@dataclass(frozen=True, slots=True)
class _Quantiser:
    """What the Trainer asks a model in four bits for: whether adapters on it can be trained."""

    quantization_config: _Method = field(default_factory=_Method)
    is_trainable: bool = True
    is_qat_trainable: bool = False
    is_compileable: bool = False
    is_serializable: bool = True

    def dequantize(self, _model: nn.Module, dtype: object = None) -> nn.Module:  # noqa: ARG002 - transformers' own
        """Refuse: numbers are made while the files are read."""
        raise ConfigError(
            "dequantize: layers in four bits are not made numbers in their place; save the model by "
            "shardwise.save, and bring it up with shardwise.from_pretrained(folder, quantization='dequantize')"
        )

    def get_state_dict_and_metadata(self, _model: nn.Module) -> tuple[None, dict[str, str]]:
        """What transformers saves of an adapter that it has put on: the model's own state, and no more."""
        return None, {}


def mark_in_four_bits(model: PreTrainedModel, config: Mapping[str, Any]) -> None:
    """Let PEFT, accelerate and the Trainer see a quantised model; ``config`` goes into the model's config."""
    told: Any = model
    if has_bitsandbytes() and not is_mxfp4(config):  # whoever asks for this goes on to import it
        told.is_loaded_in_4bit = True
    told.is_quantized = True
    told.quantization_method = QuantizationMethod.MXFP4 if is_mxfp4(config) else QuantizationMethod.BITS_AND_BYTES
    told.hf_quantizer = _Quantiser()
    told.config.quantization_config = dict(config)


def offered_in_four_bits(model: nn.Module, bindings: Bindings) -> Bindings:
    """What a checkpoint offers for a model, with the weights of layers in four bits packed while they are read."""
    offers, own = dict(bindings.offers), set[str]()
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        if are_experts_in_four_bits(module):
            for local, packing in module.packings.items():
                if _are_packed(module, local, claims := offers.get(f"{prefix}{local}", ())):
                    own.add(f"{prefix}{scales_of(local)}")
                else:
                    offers |= _experts_offered(f"{prefix}{local}", packing, claims)
        if not is_in_four_bits(module):
            continue
        weight = f"{prefix}{WEIGHT}"
        claims = offers.get(weight, ())
        if _are_packed(module, WEIGHT, claims):
            own |= {f"{prefix}{local}" for local in (SCALES, NESTED, OFFSET)}
            continue
        found = [_kept(module, expression, weight) for expression in claims]
        offers |= {f"{prefix}{local}": tuple(kept[local] for kept in found) for local in found[0]}
        if module.is_nested and SCALES not in found[0]:
            module.whole_scales = offers.pop(f"{prefix}{WHOLE_SCALES}")
    taken = own.intersection(bindings.strays)
    unmatched = {key: name for key, name in bindings.unmatched.items() if name not in taken}
    return replace(
        bindings, offers=offers | {name: (bindings.strays[name],) for name in taken}, unmatched=unmatched
    )


def _are_packed(module: nn.Module, local: str, claims: Sequence[Expression]) -> bool:
    """Whether what is stored are the model's own bytes, as ``"internal"`` have them."""
    shape = tuple(module.get_parameter(local).shape)
    return all(item.dtype is DType.U8 and item.shape == shape for item in claims)


def _experts_offered(fqn: str, packing: Packing, claims: Sequence[Expression]) -> dict[str, tuple[Expression, ...]]:
    """What is offered for a stack of weights, packed and scales, by FQN."""
    rounds_to = from_torch(packing.dtype, fqn)
    rows = [_as_rows(item, is_transposed=packing.is_transposed) for item in claims]
    try:
        both = [packed(item, packing.form, packing.block_size, rounds_to=rounds_to) for item in rows]
    except ValueError as error:
        raise ConfigError(f"{fqn}: {error}; load the checkpoint that the model came from") from error
    return {fqn: tuple(weight for weight, _ in both), scales_of(fqn): tuple(scales for _, scales in both)}


def _kept(layer: Any, numbers: Expression, name: str) -> dict[str, Expression]:
    """What is kept of a weight, by local name; nested scales that are not stored so come as they are."""
    form, block = layer.packing.form, layer.packing.block_size
    if layer.is_nested and (parts := nested_as_stored(numbers, form, block)) is not None:
        return {WEIGHT: parts.packed, SCALES: parts.codes, NESTED: parts.nested, OFFSET: parts.offset}
    weight, scales = packed(numbers, form, block, rounds_to=from_torch(layer.packing.dtype, name))
    return {WEIGHT: weight, (WHOLE_SCALES if layer.is_nested else SCALES): scales}


_SHOWN = 20


def choose_to_pack(model: nn.Module, quantization: FourBit, optimizers: Sequence[Optimizer]) -> Chosen:
    """What of a model that is not sharded is put into four bits. Changes nothing.

    Memory: a byte for each number of a weight.

    Raises:
        ConfigError: the model has adapters already, or an optimizer has what is packed; values are not finite; as
            of ``choose_layers``.
    """
    if has_adapters(model):
        raise ConfigError(
            "quantization packs what adapters are put on; call shard before them, or from_pretrained with both"
        )
    chosen = choose_layers(model, quantization, lambda _name: True)
    trained = {id(each) for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]}
    weights = {f"{name}.{WEIGHT}": layer.weight for name, layer in chosen.layers.items()}
    weights |= {fqn: module.get_parameter(local) for fqn, (module, local) in chosen.stacks.items()}
    faults = [
        fault
        for name, weight in weights.items()
        if (fault := _why_not(weight, is_trained=id(weight) in trained, name=name))
    ]
    if faults:
        raise ConfigError("the model cannot be put into four bits:\n  " + "\n  ".join(faults[:_SHOWN]))
    return chosen


def _why_not(weight: torch.Tensor, *, is_trained: bool, name: str) -> str | None:
    if is_trained:
        return (
            f"{name} is in an optimizer, and not trained in four bits; make the optimizer of what is, after shard"
        )
    if weight.is_meta:
        return None
    bad = (~weight.detach().isfinite()).flatten(0, -2).any(-1).nonzero()
    return f"{name}: row {int(bad[0])} has values that are not finite" if len(bad) else None


def pack_model(model: nn.Module, chosen: Chosen, quantization: FourBit) -> tuple[str, ...]:
    """Put what has been chosen of a model into four bits, in place; what stays, in words.

    A weight with values is packed at once, on the CPU, one after the other; one on meta gets its bytes by ``load``.

    Memory: one weight as float32, beside the model.
    """
    for layer in chosen.layers.values():
        weight = layer.weight.detach()
        put_into_four_bits(layer, quantization)
        if not weight.is_meta:
            _give_values(layer, weight, quantization)
    stacks: dict[nn.Module, dict[str, FourBit]] = {}
    for module, local in chosen.stacks.values():
        stacks.setdefault(module, {})[local] = quantization
    for module, kinds in stacks.items():
        values = {local: getattr(module, local).detach() for local in kinds}
        put_experts_into_four_bits(module, kinds)
        for local, weight in values.items():
            if not weight.is_meta:
                packed, raw = _packed(weight, quantization)
                _install(module, {local: packed, scales_of(local): raw}, weight.device)
    if isinstance(model, PreTrainedModel):
        mark_in_four_bits(model, to_transformers(quantization, tuple(sorted(chosen.stay)), model.dtype))
    return notes_of(chosen, quantization)


def pack_again(layer: Any, numbers: torch.Tensor) -> None:
    """Put other numbers (out, in) into a layer in four bits that is not sharded.

    Raises:
        ConfigError: some are not finite; the layer is as it was.
    """
    if why := _why_not(numbers, is_trained=False, name="the merged weight"):
        raise ConfigError(f"it cannot be put into four bits: {why}")
    _give_values(layer, numbers, layer.quantization)


def _give_values(layer: Any, weight: torch.Tensor, quantization: FourBit) -> None:
    packed, raw = _packed(weight, quantization)
    values = {WEIGHT: packed, SCALES: raw}
    if layer.is_nested:
        codes, nested, offset = nest(raw.view(torch.float32))
        values[SCALES] = codes
        layer.register_buffer(NESTED, nested.to(weight.device))
        layer.register_buffer(OFFSET, offset.reshape(1).to(weight.device))
    _install(layer, values, weight.device)


def _packed(weight: torch.Tensor, quantization: FourBit) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed bytes, and the bytes of scales."""
    numbers = weight.cpu().contiguous()
    *outer, columns = numbers.shape
    packed = torch.empty(*outer, columns // 2, dtype=torch.uint8)
    scales = torch.empty(*outer, columns // quantization.block_size, dtype=torch.float32)
    quantise_rows(numbers, quantization.block_size, quantization.form, packed, scales)
    return packed, scales.view(torch.uint8)


def _install(module: nn.Module, values: Mapping[str, torch.Tensor], device: torch.device) -> None:
    for name, value in values.items():
        made = nn.Parameter(value.to(device), requires_grad=False)
        made.__dict__.update(module.get_parameter(name).__dict__)  # what PEFT asks a weight for
        module.register_parameter(name, made)
