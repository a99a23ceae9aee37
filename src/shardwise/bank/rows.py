"""Checks of the rows of adapters and of the base, and the plan of forward passes.

[Note: Own lengths] An adapter's rows are padded to its own longest row on all ranks, rounded up to a multiple,
never to another adapter's. Adapters with equal padded lengths share a pass through the base. So the shapes of an
adapter do not depend on other adapters, and products have enough rows that their rounding does not either (with
fewer than 16 rows it would).

[Note: What couples rows] Nearly all of a transformer computes each row of a batch independently. Exceptions:
normalization over the batch, rotary embeddings whose frequencies depend on the longest row (dynamic, longrope),
losses and capacities of routers, which count all tokens, and draws from torch's random generator, which depend on
the number of rows.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from shardwise.core.errors import ConfigError, RankMismatchError, TrainingError
from shardwise.fsdp.named_tensors import canonical
from shardwise.fsdp.torch_private import is_compiled_in_place, normalizes_over_rows, splitting_dim

IGNORED: Final = -100
"""The label of tokens that are not supervised."""

RowTensors: TypeAlias = Mapping[str, torch.Tensor]
"""``input_ids`` (rows, tokens); optionally ``attention_mask``, ``labels`` (not shifted, -100 for tokens without
supervision; default: all tokens) and ``weights`` of the labels, all of that shape."""

_KEYS = ("input_ids", "attention_mask", "labels", "weights")
_INTEGERS = (torch.int64, torch.int32)


@dataclass(frozen=True, slots=True)
class UnpaddedRow:
    """One row without padding, on the CPU: (tokens,) each."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor


def parse_batch(
    who: str, batch: RowTensors, *, vocab_size: int, longest: int, may_have_weights: bool = True
) -> list[UnpaddedRow]:
    """Return the rows of a batch without padding.

    Args:
        who: the adapter, for errors.
        batch: see :data:`RowTensors`. It may have no rows.
        vocab_size: size of the vocabulary.
        longest: maximum number of tokens in a row.
        may_have_weights: whether the adapter's loss has weights.

    Raises:
        ConfigError: the batch is invalid. The message has the reason.
    """
    ids = _require_tensors(who, batch)
    if "weights" in batch and not may_have_weights:
        raise ConfigError(f"{who}: weights need reduction='sum'. The mean over tokens has none")
    ids = ids.cpu().long()  # (rows, tokens), as all others
    mask = batch.get("attention_mask", torch.ones_like(ids)).cpu() != 0
    lengths = mask.sum(1)  # (rows,)
    # A row with its padding at the end has ones exactly before its length: [1, 1, 0], and not [0, 1, 1].
    if not mask.equal(torch.arange(ids.shape[1]) < lengths.unsqueeze(1)):
        raise ConfigError(f"{who}: attention_mask has padding elsewhere than at the end of rows. Pad on the right")
    if len(ids) and (int(lengths.min()) < 2 or int(lengths.max()) > longest):
        raise ConfigError(
            f"{who}: rows have {int(lengths.min())} to {int(lengths.max())} tokens. They may have 2 to {longest}"
        )
    labels = batch.get("labels", ids).cpu().long()
    weights = batch.get("weights", torch.ones(ids.shape)).cpu().float()
    for key, values in (("input_ids", ids), ("labels", labels.masked_fill(labels == IGNORED, 0))):
        low, high = values[mask].aminmax() if len(ids) else (0, 0)
        if low < 0 or high >= vocab_size:
            raise ConfigError(f"{who}: {key} are from {int(low)} to {int(high)}. The model has {vocab_size} tokens")
    if not bool(weights[mask].isfinite().all()):
        raise ConfigError(f"{who}: weights are not all finite")
    return [
        UnpaddedRow(ids[row, :length], labels[row, :length], weights[row, :length])
        for row, length in enumerate(lengths.tolist())
    ]


def _require_tensors(who: str, batch: Any) -> torch.Tensor:
    """Return the token ids of a batch. Raise ConfigError unless it is tensors of one shape under valid names."""
    is_known = isinstance(batch, Mapping) and set(_KEYS).issuperset(batch)
    ids = batch.get("input_ids") if is_known else None
    if (
        not isinstance(ids, torch.Tensor)
        or ids.ndim != 2
        or any(not isinstance(values, torch.Tensor) or values.shape != ids.shape for values in batch.values())
        or any(values.is_meta or values.layout is not torch.strided for values in batch.values())
        or any(batch[key].dtype not in _INTEGERS for key in ("input_ids", "labels") if key in batch)
    ):
        raise ConfigError(
            f"{who}: the rows are not a dict of tensors of one shape (rows, tokens). Pass input_ids (integers), "
            "and optionally attention_mask, labels (integers) and weights"
        )
    return ids


@dataclass(frozen=True, slots=True)
class RowCounts:
    """Counts of the rows of one entry of a call, on one rank or on all. ``rows`` are numbers of rows by rank."""

    name: str | None
    rows: tuple[int, ...]
    longest: int
    num_supervised_tokens: int


def summarize_rows(name: str | None, rows: Sequence[UnpaddedRow]) -> RowCounts:
    learned = sum(int((row.labels[1:] != IGNORED).sum()) for row in rows)
    return RowCounts(name, (len(rows),), max((len(row.input_ids) for row in rows), default=0), learned)


def combine_counts(counts: Sequence[Sequence[RowCounts]], global_ranks: Sequence[int]) -> list[RowCounts]:
    """Combine the counts of all ranks, entry by entry.

    Two ranks with 2 rows and 1 row of "ada", of up to 7 and 40 tokens with 9 and 30 labels, have
    ``RowCounts("ada", (2, 1), 40, 39)``.

    Args:
        counts: the counts of each rank, with numbers of rows of that rank alone.
        global_ranks: the ranks in the default group, for errors.

    Raises:
        RankMismatchError: ranks name different adapters, or in another order.
    """
    names = [[entry.name for entry in counts_of_rank] for counts_of_rank in counts]
    for rank, names_of_rank in zip(global_ranks, names, strict=True):
        if names_of_rank != names[0]:
            raise RankMismatchError(
                f"rank {rank} has rows of {names_of_rank}, and rank {global_ranks[0]} of {names[0]}. Name the same "
                "adapters in the same order on every rank, if needed with a batch of no rows"
            )
    combined = []
    for entries in zip(*counts, strict=True):
        rows = tuple(entry.rows[0] for entry in entries)
        longest = max(entry.longest for entry in entries)
        combined.append(RowCounts(entries[0].name, rows, longest, sum(e.num_supervised_tokens for e in entries)))
    return combined


@dataclass(frozen=True, slots=True)
class PassPlan:
    """A pass through the base: the padded length of its rows, and the numbers of its entries of the call."""

    tokens: int
    entries: tuple[int, ...]


def plan_passes(
    counts: Sequence[RowCounts], ranks: Mapping[str, int], *, multiple: int, longest: int
) -> list[PassPlan]:
    """Plan passes for the entries that have rows on any rank, equal on every rank. See [Note: Own lengths].

    Entries of equal LoRA rank are adjacent, so that they can be computed by one product. Those without an adapter
    come last.

    Example: with ``multiple=64``, entries "a" (rank 8, up to 7 tokens), "b" (rank 4, 65 tokens), None (3 tokens)
    and "c" (rank 4, 60 tokens) have the passes ``PassPlan(64, (3, 0, 2))`` and ``PassPlan(128, (1,))``.

    Args:
        counts: the entries of a call.
        ranks: LoRA ranks by adapter.
        multiple: lengths are rounded up to a multiple of it.
        longest: maximum number of tokens in a row, padding included.
    """
    entries_by_length: dict[int, list[tuple[bool, int, int]]] = {}
    for number, entry in enumerate(counts):
        if sum(entry.rows):
            tokens = min(math.ceil(entry.longest / multiple) * multiple, longest)
            key = entry.name is None, ranks.get(entry.name or "", 0), number  # in the order of the pass
            entries_by_length.setdefault(tokens, []).append(key)
    return [
        PassPlan(tokens, tuple(number for *_, number in sorted(keys)))
        for tokens, keys in sorted(entries_by_length.items())
    ]


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
    faults = [*_find_module_faults(model), *_find_config_faults(model), *_find_sharding_faults(model, ranks)]
    if faults:
        raise ConfigError(
            f"{type(model).__name__} cannot be the base of many adapters:\n  " + "\n  ".join(faults[:20])
        )
    return model


def _find_module_faults(model: PreTrainedModel) -> Iterator[str]:
    if model.get_output_embeddings() is None:
        yield f"{type(model).__name__} has no language model head. Use the class with the head (...ForCausalLM)"
    if getattr(model.config, "is_encoder_decoder", False):
        yield "it has an encoder, for which a bank has no rows. Use a causal language model"
    for name, module in model.named_modules():
        if is_compiled_in_place(module):
            # A compiled graph is not guarded on hooks, so it would not see adapters that are added later.
            yield f"{canonical(name) or 'the model'} is compiled without adapters. Load it without compiling"
        if normalizes_over_rows(module):
            yield f"{canonical(name)} is a {type(module).__name__}, which normalizes over all adapters' rows"
        kinds = getattr(module, "rope_type", None)
        names = {str(kind) for kind in (kinds.values() if isinstance(kinds, dict) else [kinds])}
        if coupling := sorted(names.intersection(_BY_LONGEST_ROW)):
            yield (
                f"{canonical(name)} has {coupling[0]} rotary embeddings, which depend on the longest row of all "
                "adapters. Set another rope_type in the config"
            )


def _find_config_faults(model: nn.Module) -> Iterator[str]:
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
            split = [placement for placement in parameter.placements if splitting_dim(placement) is not None]
            if len(split) > 1 or parameter.device_mesh.size() != ranks:
                yield (
                    f"{canonical(name)} is {parameter.placements} on a mesh of {parameter.device_mesh.size()} of "
                    f"{ranks} ranks, and every rank must have its own rows. Shard over all of them by FSDP2 alone"
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
