"""Conversion of a base on meta to 4 bits: choice of layers, their bindings, and marks on the model."""

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.utils.quantization_config import QuantizationMethod

from shardwise.core.errors import ConfigError
from shardwise.core.expression import Bindings, Expression, permute
from shardwise.core.formatting import collapse
from shardwise.core.tensors import Code, DType, FourBitForm
from shardwise.core.untrusted import Pattern, require_quick_patterns
from shardwise.files.packed import find_quant_type, find_stored_nested, find_stored_rows, pack
from shardwise.files.urls import shown
from shardwise.fsdp.torch_private import from_torch, get_parameters, original_class
from shardwise.models.four_bit import layers
from shardwise.models.four_bit.config import (
    KeptForm,
    Packing,
    has_bitsandbytes,
    is_mxfp4,
    quant_type_name,
    to_transformers,
    with_stored_form,
)
from shardwise.models.pretrained import get_unquantized_names


@dataclass(frozen=True, slots=True)
class SelectedModules:
    """Linear layers and experts to quantize, and the others with reasons.

    Attributes:
        layers: by name.
        stacks: stacked weights of experts, as (module, local name), by name.
        skip_modules: the reason for each layer and stack that is not quantized.
        absent: requested names that match nothing.
    """

    layers: Mapping[str, nn.Linear]
    stacks: Mapping[str, tuple[nn.Module, str]]
    skip_modules: Mapping[str, str]
    absent: tuple[str, ...] = ()


def _select(
    model: nn.Module,
    quantization: KeptForm,
    fqns: Collection[str],
    stored: Mapping[str, tuple[FourBitForm, int]],
    *,
    must_match: bool,
    names_must_match: bool,
) -> SelectedModules:
    """Choose weights of a tied model on meta that can be kept in 4 bits, among those named in ``fqns``.

    The output layer, tied weights, routers, layers that the class keeps in full precision, experts that are not
    computed one by one, and named modules are not converted. ``stored`` are stacks of experts that are kept as they
    are stored.

    Raises:
        ConfigError: a name matches nothing and ``names_must_match``, or the whole choice does and ``must_match``.
    """
    uses: Counter[int] = Counter()  # by id of the parameter
    for _, each in model.named_modules(remove_duplicate=False):
        uses.update(map(id, get_parameters(each).values()))
    linear: dict[str, nn.Linear] = {}
    stacks: dict[str, tuple[nn.Module, str]] = {}
    skip_modules: dict[str, str] = {}
    matched: set[str] = set()
    candidates = [*_candidates(model, quantization, stored)]
    patterns = [Pattern("skip_modules", text, _regex(text)) for text in quantization.skip_modules]
    require_quick_patterns(patterns, [name for names, *_ in candidates for name in names])
    for names, module, local, why in candidates:
        named = [pattern for pattern in quantization.skip_modules if any(_matches(pattern, name) for name in names)]
        matched.update(named)
        shown = names[-1]
        # The first reason counts: the request, the layer itself, a tie, the checkpoint.
        if named:
            skip_modules[shown] = "as requested"
        elif why is not None:
            skip_modules[shown] = f"it {why}"
        elif uses[id(module.get_parameter(local))] > 1:
            skip_modules[shown] = "its weight is tied"
        elif f"{names[0]}.{local}" not in fqns:
            skip_modules[shown] = "the checkpoint does not have it, or not in 4 bits like others"
        elif isinstance(module, nn.Linear):
            linear[shown] = module
        else:
            stacks[shown] = (module, local)
    absent = tuple(pattern for pattern in quantization.skip_modules if pattern not in matched)
    if names_must_match and absent:
        known = ", ".join(pattern for pattern, _ in collapse(sorted({*linear, *stacks, *skip_modules}))[:8])
        raise ConfigError(f"skip_modules={list(absent)!r} matches no linear layer. There are {known}")
    if must_match and not linear and not stacks:
        raise ConfigError(
            f"{type(model).__name__}: no weight can be quantized to 4 bits"
            + "".join(f"; {name} stays: {why}" for name, why in list(skip_modules.items())[:3])
        )
    return SelectedModules(linear, stacks, skip_modules, absent)


def _candidates(
    model: nn.Module, quantization: KeptForm, stored: Mapping[str, tuple[FourBitForm, int]]
) -> Iterator[tuple[tuple[str, ...], nn.Module, str, str | None]]:
    """Yield linear layers and stacks of experts: names for ``skip_modules``, module, local name, reason to skip."""
    head: Any = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    unquantized = get_unquantized_names(model)
    last = next(reversed([name for name, _ in model.named_parameters()]), "").rpartition(".")[0]
    modules = dict(model.named_modules())
    for name, module in modules.items():
        if original_class(module) is nn.Linear:
            assert isinstance(module, nn.Linear)
            why = layers.skip_reason(module.weight.dtype, module.in_features, quantization)
            weight = f"{name}.{layers.WEIGHT}"
            if module is head or name == last:
                why = "is the output layer"
            elif _is_router(name, modules):
                why = "is the router of experts"
            elif any(_matches(pattern, name) or _matches(pattern, weight) for pattern in unquantized):
                why = "is kept in full precision by its class"
            yield (name,), module, layers.WEIGHT, why
        for local, stack in layers.iter_stacks(name, module):
            fqn = f"{name}.{local}"
            why = layers.experts_skip_reason(module, stack, quantization, is_stored=fqn in stored)
            yield (name, fqn), module, local, why


def _is_router(name: str, modules: Collection[str]) -> bool:
    """Return whether a layer selects experts: it is a router or a gate beside experts, or a part of one."""
    parts = name.split(".")
    for index, part in enumerate(parts):
        if part == "router" or (part == "gate" and ".".join([*parts[:index], "experts"]) in modules):
            return True
    return False


def _matches(pattern: str, name: str) -> bool:
    """Match a module's name like ``should_convert_module`` of transformers."""
    try:
        match = re.match(_regex(pattern), name)
    except re.error as error:
        raise ConfigError(f"skip_modules={pattern!r}: is neither a name nor a valid regex ({error})") from error
    return match is not None or name.endswith(pattern)


def _regex(pattern: str) -> str:
    return rf"(?:{pattern})(?:(?<=\.)|(?=\.|$))"


def convert_base_to_four_bits(
    model: PreTrainedModel,
    bindings: Bindings,
    quantization: KeptForm,
    *,
    keeps_experts: bool = False,
    must_match: bool = True,
    names_must_match: bool = True,
    config: Mapping[str, Any] | None = None,
) -> tuple[Bindings, tuple[str, ...]]:
    """Convert layers of a base on meta to 4 bits. Return the new bindings, and notes for the report.

    Args:
        model: the base.
        bindings: the checkpoint's bindings.
        quantization: the requested form. What the checkpoint stores in 4 bits keeps its own, for the config too.
        keeps_experts: whether experts that are stored in 4 bits are kept so.
        must_match: whether it is an error if nothing is converted.
        names_must_match: whether unmatched names in ``skip_modules`` are an error. Otherwise, a note names them.
        config: the ``quantization_config`` of the model. None for that of ``quantization``.

    Raises:
        ConfigError: a name matches nothing, or no layer is left.
    """
    # What the checkpoint stores in four bits, and in which form.
    forms: dict[str, tuple[FourBitForm, int]] = {}
    for name, expressions in bindings.matched.items():
        form = next(filter(None, map(find_quant_type, expressions)), None)
        if form is not None:
            forms[name] = form
    stacks = _find_stored_stacks(model, bindings) if keeps_experts else {}
    # What is stored decides, also for the config, the notes, and the columns that fit.
    quantization = with_stored_form(next(iter({**stacks, **forms}.values()), None), quantization)
    # If there is any, these are all: whoever made the checkpoint has chosen. If there is none, all weights of the
    # checkpoint can be quantized, unless ``config`` is given, which is that of the checkpoint.
    candidates = forms.keys() | stacks.keys()
    if not candidates and config is None:
        candidates = {name for name, expressions in bindings.matched.items() if expressions}
    selected = _select(
        model, quantization, candidates, stacks, must_match=must_match, names_must_match=names_must_match
    )
    if not selected.layers and not selected.stacks:
        return bindings, build_notes(selected, quantization)
    for name, layer in selected.layers.items():
        layers.convert_to_four_bits(layer, with_stored_form(forms.get(f"{name}.{layers.WEIGHT}"), quantization))
    # All stacks of a module at once, because its class is changed.
    kinds: dict[nn.Module, dict[str, KeptForm]] = {}
    for name, (module, local) in selected.stacks.items():
        kinds.setdefault(module, {})[local] = with_stored_form(stacks.get(name), quantization)
    for module, names in kinds.items():
        layers.convert_experts_to_four_bits(module, names)
    skipped = tuple(sorted(selected.skip_modules))
    mark_in_four_bits(model, config or to_transformers(quantization, skipped, model.dtype))
    return quantize_bindings(model, bindings), build_notes(selected, quantization)


def _find_stored_stacks(model: nn.Module, bindings: Bindings) -> dict[str, tuple[FourBitForm, int]]:
    """Return the form and the block size of stacks of experts that are stored in 4 bits, by name."""
    forms: dict[str, tuple[FourBitForm, int]] = {}
    for name, module in model.named_modules():
        for local, _ in layers.iter_stacks(name, module):
            for item in bindings.matched.get(f"{name}.{local}", ()):
                rows = find_stored_rows(_as_rows(item, is_transposed=getattr(module, "is_transposed", False)))
                if rows is not None:
                    forms[f"{name}.{local}"] = rows.form, rows.block_size
    return forms


def _as_rows(stack: Expression, *, is_transposed: bool) -> Expression:
    """Return the stack as (experts, out, in)."""
    return permute(stack, (0, 2, 1)) if is_transposed and len(stack.shape) == 3 else stack


def build_notes(selected: SelectedModules, quantization: KeptForm) -> tuple[str, ...]:
    """Return sentences on the quantized modules, and on the others with the reasons."""
    by_reason: dict[str, list[str]] = {}
    for name, why in selected.skip_modules.items():
        by_reason.setdefault(why, []).append(name)
    how = f"{quant_type_name(quantization.form)}, blocks of {quantization.block_size}"
    notes: list[str] = []
    if selected.layers:
        notes.append(f"{len(selected.layers)} linear layers are in four bits ({how}), packed while they are read")
    if selected.stacks:
        names = ", ".join(pattern for pattern, _ in collapse(sorted(selected.stacks)))
        form = how if isinstance(quantization.form, Code) else f"{how}, plain scales"
        notes.append(f"experts are in four bits ({form}) and are computed one after the other: {names}")
    notes += [
        f"{', '.join(pattern for pattern, _ in collapse(members))} is not quantized: {why}"
        for why, members in by_reason.items()
    ]
    if selected.absent:
        notes.append(
            f"llm_int8_skip_modules names modules that the model does not have: {', '.join(selected.absent)}"
        )
    return tuple(notes)


class _Quantizer:
    """Quantizer that the Trainer expects on a 4-bit model. It reports that adapters can be trained."""

    quantization_config = SimpleNamespace(
        quant_method="four bits by shardwise, whose shardwise.save(model, folder) writes its files,"
    )
    """transformers names the method in its error for a model that it does not save."""
    is_trainable = is_serializable = True
    is_qat_trainable = is_compileable = False

    def dequantize(self, _model: nn.Module, dtype: object = None) -> nn.Module:  # noqa: ARG002 - transformers' own
        """Raise ConfigError, because weights are dequantized only while files are read."""
        raise ConfigError(
            "dequantize: layers in four bits cannot be dequantized in place. Save the model by "
            "shardwise.save, and load it with shardwise.from_pretrained(folder, quantization='dequantize')"
        )

    def get_state_dict_and_metadata(self, _model: nn.Module) -> tuple[None, dict[str, str]]:
        """Return no state of its own, so that transformers saves an adapter as usual."""
        return None, {}


def mark_in_four_bits(model: PreTrainedModel, config: Mapping[str, Any]) -> None:
    """Mark a model as quantized for PEFT, accelerate and the Trainer. ``config`` goes into the model's config."""
    marked: Any = model
    if has_bitsandbytes() and not is_mxfp4(config):  # readers of this attribute import bitsandbytes
        marked.is_loaded_in_4bit = True
    marked.is_quantized = True
    marked.quantization_method = QuantizationMethod.MXFP4 if is_mxfp4(config) else QuantizationMethod.BITS_AND_BYTES
    marked.hf_quantizer = _Quantizer()
    marked.config.quantization_config = dict(config)
    # By this attribute, classes that compute with a weight itself (FalconMamba, Jamba) call its layer instead.
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.config._is_quantized = True


def quantize_bindings(model: nn.Module, bindings: Bindings, quant_type: str = "") -> Bindings:
    """Return a checkpoint's bindings for a model, with weights of 4-bit layers quantized while they are read.

    ``quant_type`` is the form of codes that the checkpoint has as the model has them, or "" if it is known to be
    that of the model.

    Raises:
        ConfigError: the codes are of another form, or a weight cannot be quantized.
    """
    matched = dict(bindings.matched)
    stored_as_bytes: set[str] = set()  # scales that the checkpoint has as the model has them
    # For each weight in four bits the checkpoint has either the model's own codes, which are read as they are
    # together with their scales, or a weight, of which codes and scales are computed.
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        if layers.are_experts_in_four_bits(module):
            for local, packing in module.packings.items():
                if _are_packed(module, local, expressions := matched.get(f"{prefix}{local}", ())):
                    _require_form(f"{prefix}{local}", expressions, packing, quant_type)
                    stored_as_bytes.add(f"{prefix}{layers.scales_name(local)}")
                else:
                    matched |= _quantize_experts(f"{prefix}{local}", packing, expressions)
        if not layers.is_in_four_bits(module):
            continue
        weight = f"{prefix}{layers.WEIGHT}"
        expressions = matched.get(weight, ())
        if _are_packed(module, layers.WEIGHT, expressions):
            _require_form(weight, expressions, module.packing, quant_type)
            stored_as_bytes |= {f"{prefix}{local}" for local in (layers.SCALES, layers.NESTED, layers.OFFSET)}
            continue
        quantized = [_quantize_weight(module, expression, weight) for expression in expressions]
        matched |= {f"{prefix}{local}": tuple(tensors[local] for tensors in quantized) for local in quantized[0]}
        # Scales are nested by the mean of all of them, so only after all are read. Until then they are here.
        if module.is_nested and layers.SCALES not in quantized[0]:
            module.full_scales = matched.pop(f"{prefix}{layers.FULL_SCALES}")
    # The keys of these scales matched nothing when they were bound, before the layers had parameters for them.
    from_leftover = stored_as_bytes.intersection(bindings.leftover)
    unmatched = {key: name for key, name in bindings.unmatched.items() if name not in from_leftover}
    return replace(
        bindings,
        matched=matched | {name: (bindings.leftover[name],) for name in from_leftover},
        unmatched=unmatched,
    )


def _are_packed(module: nn.Module, local: str, expressions: Sequence[Expression]) -> bool:
    """Return whether the checkpoint has the model's own codes, as saved with ``"internal"`` names."""
    shape = tuple(module.get_parameter(local).shape)
    return all(item.dtype is DType.U8 and item.shape == shape for item in expressions)


def _require_form(name: str, codes: Sequence[Expression], packing: Packing, quant_type: str) -> None:
    """Raise ConfigError if the checkpoint has codes of another form than the model."""
    form = quant_type_name(packing.form).lower()
    if codes and quant_type not in ("", form):
        raise ConfigError(
            f"{name}: the checkpoint has codes of {shown(quant_type)}, and the model those of {form}. Build the "
            "model with the quantization of the checkpoint"
        )


def _quantize_experts(
    fqn: str, packing: Packing, expressions: Sequence[Expression]
) -> dict[str, tuple[Expression, ...]]:
    """Return the expressions of the codes and scales of a stack of weights, by FQN."""
    rounds_to = from_torch(packing.dtype, fqn)
    rows = [_as_rows(item, is_transposed=packing.is_transposed) for item in expressions]
    try:
        both = [pack(item, packing.form, packing.block_size, rounds_to=rounds_to) for item in rows]
    except ValueError as error:
        raise ConfigError(f"{fqn}: {error}. Load the checkpoint that the model came from") from error
    return {
        fqn: tuple(weight for weight, _ in both),
        layers.scales_name(fqn): tuple(scales for _, scales in both),
    }


def _quantize_weight(layer: Any, weight: Expression, name: str) -> dict[str, Expression]:
    """Return the expressions of a weight's codes and scales by local name.

    Scales that are to be nested, and are not stored nested, are ``weight_full_scales``.
    """
    form, block = layer.packing.form, layer.packing.block_size
    if layer.is_nested and (stored := find_stored_nested(weight, form, block)) is not None:
        return dict(zip((layers.WEIGHT, layers.SCALES, layers.NESTED, layers.OFFSET), stored, strict=True))
    weight, scales = pack(weight, form, block, rounds_to=from_torch(layer.packing.dtype, name))
    scales_name = layers.FULL_SCALES if layer.is_nested else layers.SCALES
    return {layers.WEIGHT: weight, scales_name: scales}
