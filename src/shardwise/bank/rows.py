"""Checks of the rows of requests, and of the base.

[Note: What couples rows] Nearly all of a transformer computes each row of a batch independently. Exceptions:
normalization over the batch, rotary embeddings whose frequencies depend on the longest row (dynamic, longrope),
losses and capacities of routers, which count all tokens, and draws from torch's random generator, which depend on
the number of rows.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from shardwise.bank.losses import LOSSES
from shardwise.core.errors import ConfigError, TrainingError
from shardwise.core.formatting import canonical_name
from shardwise.fsdp.torch_private import is_compiled_in_place, normalizes_over_rows, splitting_dim

IGNORED: Final = -100
"""The label or target of positions that do not count."""

RowTensors: TypeAlias = Mapping[str, torch.Tensor]
"""Rows as a batch: ``input_ids`` (rows, tokens); optionally ``attention_mask``, ``labels`` (not shifted, -100 for
tokens without supervision; default: all tokens) and ``weights`` of the labels, all of that shape.

Or one row without padding: ``input_ids`` (tokens,) and ``targets``, (tokens,) or (tokens, K), the tokens whose log
probabilities are computed at each position, -100 for none; optionally ``weights``, ``logprobs`` (of the policy that
sampled the row, or of a reference) and ``advantages``, of the shape of the targets, and others for a loss of the
caller's own."""

RowLoss: TypeAlias = Callable[[list[torch.Tensor], list[RowTensors], Mapping[str, Any]], torch.Tensor]
"""A loss of the caller's own, of the rows of one group: see :class:`Request`."""


@dataclass(frozen=True, slots=True)
class Request:
    """Rows of an adapter, with a loss.

    Attributes:
        adapter: its name. None is the base, which is not trained.
        rows: a batch, or a list of rows, of this rank. See :data:`RowTensors`.
        loss: a name of ``bank/losses.py``, or a function ``(logprobs, rows, config) -> scalar``, which is called
            for each group with the log probabilities of each row (of the shape of its targets, 0 where they do not
            count), the rows, and ``loss_config``. Its results are summed.
        loss_config: settings of the loss.
        backward: False for log probabilities alone, without dropout.
        group_size: rows that a function sees at once, one after the other in ``rows``. They share a pass. None for
            all rows of the request on this rank.
    """

    adapter: str | None
    rows: RowTensors | Sequence[RowTensors]
    loss: str | RowLoss = "cross_entropy"
    loss_config: Mapping[str, Any] = field(default_factory=dict)
    backward: bool = True
    group_size: int | None = 1


@dataclass(frozen=True, slots=True)
class UnpaddedRow:
    """One row without padding, on the CPU.

    Attributes:
        input_ids: (tokens,).
        targets: (tokens,) or (tokens, K). Those of a batch are its labels, shifted: the last one is ignored.
        values: weights, and what else the loss needs, by name. Of the shape of the targets.
        positions: (positions,), where a target counts.
        num_outputs: number of log probabilities that are returned: ``tokens``, or one less for a row of a batch.
    """

    input_ids: torch.Tensor
    targets: torch.Tensor
    values: Mapping[str, torch.Tensor]
    positions: torch.Tensor
    num_outputs: int


def make_scored_row(prompt: Sequence[int]) -> RowTensors:
    """Return a row for the log probabilities of a prompt: a position predicts the next token, the last nothing."""
    ids = torch.as_tensor(prompt, device="cpu")
    return {"input_ids": ids, "targets": torch.cat([ids[1:], ids.new_tensor([IGNORED])])}


_KEYS = ("input_ids", "attention_mask", "labels", "weights")
_INTEGERS = (torch.int64, torch.int32)
FLOAT_KEYS: Final = ("weights", "logprobs", "advantages")


def parse_rows(
    who: str,
    rows: Any,
    *,
    vocab_size: int,
    longest: int,
    may_have_weights: bool = True,
    loss: str | None = "cross_entropy",
) -> list[UnpaddedRow]:
    """Return the rows of a request without padding.

    Args:
        who: the adapter, for errors.
        rows: a batch or a list of rows, see :data:`RowTensors`. There may be none.
        vocab_size: size of the vocabulary.
        longest: maximum number of tokens in a row.
        may_have_weights: whether the adapter's loss has weights.
        loss: a name of ``bank/losses.py``. None for a loss of the caller's own, which takes any values.

    Raises:
        ConfigError: the rows are invalid. The message has the reason.
    """
    is_batch = not isinstance(rows, list | tuple)
    needs = () if loss is None else LOSSES[loss].needs
    keys = None if loss is None else ("weights", *needs)
    if is_batch:
        parsed, mappings, labels = _parse_batch(who, rows, longest), [rows], "labels"
    else:
        parsed, mappings, labels = _parse_list(who, rows, longest, keys), rows, "targets"
    # Those that the caller passed: every parsed row has weights, of 1 if none were passed.
    if not may_have_weights and any("weights" in mapping for mapping in mappings):
        raise ConfigError(f"{who}: weights need reduction='sum'. The mean over tokens has none")
    # On an accelerator, an id that is out of range would end the process by an assertion of the device.
    for key, tensors in (
        ("input_ids", [row.input_ids for row in parsed]),
        (labels, [row.targets[row.targets != IGNORED] for row in parsed]),
    ):
        values = torch.cat([each.flatten() for each in tensors]) if tensors else torch.empty(0)
        low, high = values.aminmax() if len(values) else (0, 0)
        if low < 0 or high >= vocab_size:
            raise ConfigError(f"{who}: {key} are from {int(low)} to {int(high)}. The model has {vocab_size} tokens")
    for key in FLOAT_KEYS:
        tensors = [row.values[key].flatten() for row in parsed if key in row.values]
        if tensors and not bool(torch.cat(tensors).isfinite().all()):
            raise ConfigError(f"{who}: {key} are not all finite")
    for number, row in enumerate(parsed):
        if missing := [key for key in needs if key not in row.values]:
            raise ConfigError(
                f"{who}: row {number} has no {', '.join(missing)}, which {loss} needs. Pass them in a list of rows"
            )
    return parsed


def _parse_batch(who: str, batch: object, longest: int) -> list[UnpaddedRow]:
    tensors = _require_tensors(who, batch)
    ids = tensors["input_ids"].cpu().long()  # (rows, tokens), as all others
    mask = tensors.get("attention_mask", torch.ones_like(ids)).cpu() != 0
    lengths = mask.sum(1)  # (rows,)
    # A row with its padding at the end has ones exactly before its length: [1, 1, 0], and not [0, 1, 1].
    if not mask.equal(torch.arange(ids.shape[1], device="cpu") < lengths.unsqueeze(1)):
        raise ConfigError(f"{who}: attention_mask has padding elsewhere than at the end of rows. Pad on the right")
    if len(ids) and (int(lengths.min()) < 2 or int(lengths.max()) > longest):
        raise ConfigError(
            f"{who}: rows have {int(lengths.min())} to {int(lengths.max())} tokens. They may have 2 to {longest}"
        )
    # Position i predicts label i + 1, and the last one nothing.
    targets = F.pad(tensors.get("labels", ids).cpu().long()[:, 1:], (0, 1), value=IGNORED)
    weights = F.pad(tensors.get("weights", torch.ones_like(ids)).cpu().float()[:, 1:], (0, 1))
    rows = []
    for row, length in enumerate(lengths.tolist()):
        targets_of_row = targets[row, :length].clone()
        targets_of_row[-1] = IGNORED  # the label that follows is padding
        values = {"weights": weights[row, :length]}
        rows.append(_make_row(ids[row, :length], targets_of_row, values, length - 1))
    return rows


def _make_row(
    ids: torch.Tensor, targets: torch.Tensor, values: Mapping[str, torch.Tensor], num_outputs: int
) -> UnpaddedRow:
    # With K targets, a position counts if any of them does.
    counts = (targets != IGNORED).view(len(targets), -1).any(1)  # (tokens,)
    return UnpaddedRow(ids, targets, values, counts.nonzero()[:, 0], num_outputs)


def _require_tensors(who: str, batch: Any) -> RowTensors:
    """Return a batch. Raise ConfigError unless it is tensors of one shape under valid names."""
    is_known = isinstance(batch, Mapping) and set(_KEYS).issuperset(batch)
    ids = batch.get("input_ids") if is_known else None
    if (
        not isinstance(ids, torch.Tensor)
        or ids.ndim != 2
        or any(not _is_plain(values) or values.shape != ids.shape for values in batch.values())
        or any(batch[key].dtype not in _INTEGERS for key in ("input_ids", "labels") if key in batch)
    ):
        raise ConfigError(
            f"{who}: the rows are not a dict of tensors of one shape (rows, tokens). Pass input_ids (integers), "
            "and optionally attention_mask, labels (integers) and weights; or a list of rows, each with input_ids "
            "(tokens,) and targets"
        )
    return cast(RowTensors, batch)


def _is_plain(values: object) -> bool:
    return isinstance(values, torch.Tensor) and not values.is_meta and values.layout is torch.strided


def _parse_list(who: str, rows: Sequence[Any], longest: int, keys: Collection[str] | None) -> list[UnpaddedRow]:
    parsed = []
    for number, row in enumerate(rows):
        is_row = isinstance(row, Mapping) and all(map(_is_plain, row.values()))
        ids, targets = (row.get("input_ids"), row.get("targets")) if is_row else (None, None)
        if (
            ids is None
            or targets is None
            or ids.ndim != 1
            or targets.ndim not in (1, 2)
            or len(targets) != len(ids)
            or not targets.numel()
            or ids.dtype not in _INTEGERS
            or targets.dtype not in _INTEGERS
        ):
            what = {key: tuple(values.shape) for key, values in row.items()} if is_row else type(row).__name__
            raise ConfigError(
                f"{who}: the rows are not a dict of tensors of one shape, or a list of such dicts: row {number} is "
                f"{what}. It needs input_ids (tokens,) and targets, (tokens,) or (tokens, K), tensors of integers"
            )
        if len(ids) > longest:
            raise ConfigError(f"{who}: row {number} has {len(ids)} tokens. It may have 1 to {longest}")
        # What remains are values of the loss. Their names are limited unless it is the caller's own.
        values = {key: row[key].cpu() for key in row if key not in ("input_ids", "targets")}
        for key, of_key in values.items():
            if keys is not None and key not in keys:
                raise ConfigError(f"{who}: row {number}: this loss takes no {key}. Pass {', '.join(keys)}")
            if key in FLOAT_KEYS and of_key.shape != targets.shape:
                raise ConfigError(
                    f"{who}: row {number}: {key} are {tuple(of_key.shape)}, and its targets "
                    f"{tuple(targets.shape)}. Pass one for each target"
                )
        floats = {key: of_key.float() if key in FLOAT_KEYS else of_key for key, of_key in values.items()}
        floats.setdefault("weights", torch.ones(targets.shape, dtype=torch.float32, device="cpu"))
        parsed.append(_make_row(ids.cpu().long(), targets.cpu().long(), floats, len(ids)))
    return parsed


_BY_LONGEST_ROW = ("dynamic", "longrope")


def require_base(model: nn.Module, ranks: int) -> PreTrainedModel:
    """Return a model that can be the base of many adapters.

    Raises:
        ConfigError: it cannot. The message has all reasons.
    """
    if hasattr(model, "peft_config") or not isinstance(model, PreTrainedModel):
        raise ConfigError(
            f"{type(model).__name__} is not a transformers model without adapters. Load the base by "
            "shardwise.from_pretrained without tuning="
        )
    # All reasons at once, so that a caller does not find them one by one.
    faults = [*_find_compiled(model), *_find_module_faults(model), *_find_config_faults(model)]
    _require_none(model, [*faults, *_find_sharding_faults(model, ranks)])
    return model


def require_not_compiled(model: nn.Module) -> None:
    """Raise ConfigError if the base of a bank has been compiled since, as :func:`require_base` does."""
    _require_none(model, list(_find_compiled(model)))


def _require_none(model: nn.Module, faults: Sequence[str]) -> None:
    if faults:
        raise ConfigError(
            f"{type(model).__name__} cannot be the base of many adapters:\n  " + "\n  ".join(faults[:20])
        )


def _find_compiled(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        if is_compiled_in_place(module):
            # A compiled graph is not guarded on hooks, so it would not see adapters that are added later.
            yield f"{canonical_name(name) or 'the model'} is compiled without adapters. Load it without compiling"


def _find_module_faults(model: PreTrainedModel) -> Iterator[str]:
    if model.get_output_embeddings() is None:
        yield f"{type(model).__name__} has no language model head. Use the class with the head (...ForCausalLM)"
    if getattr(model.config, "is_encoder_decoder", False):
        yield "it has an encoder, for which a bank has no rows. Use a causal language model"
    for name, module in model.named_modules():
        if normalizes_over_rows(module):
            yield f"{canonical_name(name)} is a {type(module).__name__}, which normalizes over all adapters' rows"
        # None, a text, or a dict by layer type.
        kinds = getattr(module, "rope_type", None)
        names = {str(kind) for kind in (kinds.values() if isinstance(kinds, dict) else [kinds])}
        if coupling := sorted(names.intersection(_BY_LONGEST_ROW)):
            yield (
                f"{canonical_name(name)} has {coupling[0]} rotary embeddings, which depend on the longest row of "
                "all adapters. Set another rope_type in the config"
            )


def _find_config_faults(model: nn.Module) -> Iterator[str]:
    # Of the model, and of its parts if it is multimodal.
    main: Any = model.config
    for config in (main, *(getattr(main, name, None) for name in getattr(main, "sub_configs", ()))):
        if getattr(config, "output_router_logits", False):
            yield (
                "config.output_router_logits is true, and a router's loss counts the tokens of all adapters. Set "
                "it to false"
            )
        for key in ("expert_capacity", "capacity_factor"):
            if value := getattr(config, key, None):
                yield f"config.{key}={value}: a full expert drops tokens of any adapter. Set it to None"


def _find_sharding_faults(model: nn.Module, ranks: int) -> Iterator[str]:
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            # One axis of shards, with or without one of replicas (HSDP). Two axes of shards, or a mesh of fewer
            # ranks, are another parallelism, in which several ranks compute the same rows.
            split = [placement for placement in parameter.placements if splitting_dim(placement) is not None]
            if len(split) > 1 or parameter.device_mesh.size() != ranks:
                yield (
                    f"{canonical_name(name)} is {parameter.placements} on a mesh of {parameter.device_mesh.size()} "
                    f"of {ranks} ranks, and every rank must have its own rows. Shard over all of them by FSDP2 "
                    "alone"
                )
                return


@contextmanager
def no_random_numbers(device: torch.device) -> Iterator[None]:
    """Check that torch's random generators have the same state after the block as before.

    Raises:
        TrainingError: the base has drawn random numbers.
    """
    before = _get_rng_states(device)
    yield
    if not all(map(torch.equal, before, _get_rng_states(device))):
        raise TrainingError(
            "the base has drawn random numbers (dropout in training mode, jitter of a router), which depend on the "
            "other adapters. Call model.eval(), or set them to 0. Adapters have their own dropout (lora_dropout)"
        )


def _get_rng_states(device: torch.device) -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    return states
