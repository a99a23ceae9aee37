"""Former names of a model's tensors, and single experts that are fused today.

An adapter has the names of the model that it was trained on. Those of earlier versions of transformers are mapped
like the keys of a checkpoint, by its renames and converters. The names of a text model are also those of the text
part of a vision-language model, which no rename covers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from shardwise.core.computed import Computed, ComputedBlock, copies
from shardwise.core.errors import KeyMismatchError
from shardwise.core.expression import Expression, Stored, concat, reshape, stack
from shardwise.core.layout import ModelLayout
from shardwise.core.tensors import Box, DType, Strided
from shardwise.fsdp.torch_private import to_torch
from shardwise.models import pretrained
from shardwise.models.pretrained import assign_keys
from shardwise.models.tracing import Conversion, trace_conversions


@dataclass
class MatchedNames:
    """Today's names by former ones, and the conversions of the others.

    The keys of conversions are names that transformers knows, each with its former name in ``former``.
    """

    plain: dict[str, str] = field(default_factory=dict)
    conversions: list[Conversion] = field(default_factory=list)
    former: dict[str, str] = field(default_factory=dict)


def match_former_names(
    model: PreTrainedModel, former: Sequence[str], names: Mapping[str, object], transforms: Sequence[Any]
) -> MatchedNames:
    """Match names of tensors with those of a model. ``names`` are the tensors that the model saves."""
    matched = MatchedNames({name: name for name in former if name in names})
    unmatched = _match(model, {name: name for name in former if name not in names}, names, transforms, matched)
    # The others as names of the text part: model.layers.0 may be model.language_model.layers.0 here.
    if unmatched and (prefix := _text_prefix(model)) is not None:
        in_text = {f"{prefix}.{name.partition('.')[2]}": name for name in unmatched}
        _match(model, in_text, names, transforms, matched)
    return matched


def _match(
    model: PreTrainedModel,
    former_by_key: Mapping[str, str],
    names: Mapping[str, object],
    transforms: Sequence[Any],
    matched: MatchedNames,
) -> list[str]:
    """Add the names that are keys to transformers. Return the former names of the other keys.

    ``former_by_key`` has the former name of each key.
    """
    assigned = assign_keys(model, list(former_by_key), names, transforms)
    matched.plain.update({former_by_key[key]: name for name, keys in assigned.plain.items() for key in keys})
    matched.conversions.extend(assigned.conversions.values())
    matched.former.update({key: former_by_key[key] for item in assigned.conversions.values() for key in item.keys})
    return [former_by_key[key] for key in assigned.unmatched]


def _text_prefix(model: PreTrainedModel) -> str | None:
    """Return the name of the text part in a model that has other parts."""
    decoder = model.get_decoder() if pretrained.has_other_models(model) else model
    return next((name for name, module in model.named_modules() if module is decoder and name), None)


@dataclass(frozen=True, slots=True)
class LowRankPair:
    """``lora_A`` (r, in) and ``lora_B`` (out, r) of a layer, with the factor of their product.

    Those of a parameter of stacked experts are (experts * r, in) and (out, r * experts).
    """

    lora_A: Expression
    lora_B: Expression
    r: int
    scaling: float


def fuse_experts(
    model: PreTrainedModel,
    layout: ModelLayout,
    matched: MatchedNames,
    pairs: Mapping[str, LowRankPair],
    *,
    what: str,
) -> dict[str, LowRankPair]:
    """Return the matrices of stacked experts, by parameter, made of those of single experts.

    Each layer that a parameter consists of (gate and up of an expert) has ranks of its own, so ``lora_B`` is zero
    where the rows of one meet the ranks of another.

    Args:
        model: the model on meta.
        layout: its tensors.
        matched: the names of the experts' weights, with their conversions.
        pairs: the matrices by former name of the weight.
        what: the adapter, for the error.

    Raises:
        KeyMismatchError: a parameter's layers are not all adapted, or differ in rank or scaling. The message has
            all such parameters.
    """
    # The converter is traced on stand-ins for the weights (out, in) of single experts. Its result then shows where
    # the delta of each expert, lora_B @ lora_A, belongs in the parameter of the model.
    leaves: dict[str, Stored] = {}
    for name, old in matched.former.items():
        lora_A, lora_B = pairs[old].lora_A, pairs[old].lora_B
        leaves[name] = Stored(name, (lora_B.shape[0], lora_A.shape[1]), lora_A.dtype)
    fused: dict[str, LowRankPair] = {}
    errors: list[str] = []
    transposed = {name for name, module in model.named_modules() if getattr(module, "is_transposed", False) is True}

    def get_dtype(name: str) -> torch.dtype:
        return to_torch(layout.by_name[name].dtype)

    for conversion, expressions, why in trace_conversions(model, layout, leaves, get_dtype, matched.conversions):
        for name, expression in expressions.items():
            parts = {old: pairs[matched.former[old]] for old in conversion.keys}
            pair = _fuse(expression, parts, is_transposed=name.rpartition(".")[0] in transposed)
            is_whole = expression.shape == layout.by_name[name].shape
            if pair is None or not is_whole:
                why = f"{name}: the adapter lacks some of its layers, or they differ in rank or scaling"
            else:
                fused[name] = pair
        if why:
            errors.append(why)
    if errors:
        listed = "\n  ".join(errors)
        raise KeyMismatchError(
            f"{what}: its matrices of single experts do not fit the fused experts of the model\n  {listed}\n"
            "Merge it into a base that stores experts one by one"
        )
    return fused


def _fuse(weight: Expression, pairs: Mapping[str, LowRankPair], *, is_transposed: bool) -> LowRankPair | None:
    """Fuse pairs whose products are parts of a weight: rows of one expert each. None if they are not."""
    if len(weight.shape) != 3 or len({pair.scaling for pair in pairs.values()}) != 1:
        return None
    # For example gate_up (experts, 2 * width, in) of gates and ups (width, in), with pairs of rank r. lora_A has
    # 2 r rows for each expert, first those of the gate. lora_B of an expert is (2 * width, 2 r),
    #     gate.lora_B       0
    #          0        up.lora_B
    # so that its product with lora_A is the gate's delta in the rows of the gate, and the up's in those of the up.
    experts, rows, columns = weight.shape
    by_row: dict[int, dict[int, LowRankPair]] = {}  # by first row in an expert, and by expert
    for copy in copies(weight, Box.whole(weight.shape)):
        shape = copy.leaf.shape
        expert, start = divmod(copy.target.offset, rows * columns)
        strides = (1, columns) if is_transposed else (columns, 1)
        into = Strided(copy.target.offset, shape, strides)
        # Each part must be copied whole, as rows one after the other (columns, if the weight is transposed).
        # Rows must begin at a row's first element. Where strides[0] is 1, any element begins a column.
        if copies(copy.leaf, Box.whole(shape), into) != [copy] or start % strides[0]:
            return None
        by_row.setdefault(start // strides[0], {})[expert] = pairs[copy.leaf.key]
    parts = [by_row[row] for row in sorted(by_row)]
    if any({pair.lora_A.shape for pair in part.values()} != {part[0].lora_A.shape} for part in parts):
        return None
    # (experts * r, in), where r is the sum of the ranks of the parts: for each expert, the lora_A of its parts.
    dtype, ranks = parts[0][0].lora_A.dtype, [part[0].r for part in parts]
    lora_A = concat([part[expert].lora_A for expert in range(experts) for part in parts], 0)
    # For each part the rows of lora_B that belong to it, (height, r, experts): zero but for the ranks of the part.
    blocks = []
    for number, part in enumerate(parts):
        height = part[0].lora_B.shape[0]
        diagonal = stack([part[expert].lora_B for expert in range(experts)], 2)  # (rows, ranks, experts)
        zeros = [Computed(_ZeroBlocks(dtype), "zeros", (height, rank, experts), dtype, ()) for rank in ranks]
        blocks.append(concat([*zeros[:number], diagonal, *zeros[number + 1 :]], 1))
    lora_B = concat(blocks, 0)
    # (out, r, experts) is (out, r * experts), rank by rank, as PEFT has it.
    r = sum(ranks)
    return LowRankPair(lora_A, reshape(lora_B, (lora_B.shape[0], r * experts)), r, parts[0][0].scaling)


@dataclass(frozen=True, slots=True)
class _ZeroBlocks:
    dtype: DType
    label: str = "zeros"

    def blocks(self, requested: Mapping[str, Sequence[Box]], _max_block_bytes: int) -> Iterator[ComputedBlock]:
        for box in requested["zeros"]:
            yield ComputedBlock((), {"zeros": box}, box.numel * self.dtype.itemsize)

    def evaluate(self, block: ComputedBlock, _values: Sequence[Any]) -> Mapping[str, Any]:
        sizes = block.outputs["zeros"].sizes
        return {"zeros": torch.zeros(sizes, dtype=to_torch(self.dtype), device="cpu")}
