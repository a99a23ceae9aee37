"""Identity of the base that an adapter was trained on: its config, and fingerprints of samples of its values.

[Note: The identity of a base] A checkpoint of an adapter does not hold the base. It records the config without keys
that change between loads, and fingerprints of samples: the first 16 x 16 elements (256 of a vector) of at most 256
frozen parameters, chosen by name. A fingerprint is a sum over elements, so each rank sums over its own shard, and
the total is the same for any number of ranks and any sharding. Elements on several ranks are counted once. Names
and shapes of all parameters are compared by a digest in the checkpoint's header. Buffers and other adapters are not
part of a base. Codes of nested scales are left out, because their last bit depends on the machine.
"""

import hashlib
import heapq
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final, Self, TypeAlias

import numpy as np
import torch
from torch import nn

from shardwise.core.consents import allows
from shardwise.core.errors import FormatError, RankMismatchError
from shardwise.core.layout import TensorKind, locate_box
from shardwise.core.tensors import Box, numel
from shardwise.fsdp.named_tensors import TensorRef, local_boxes, local_tensor, strided_view
from shardwise.models.four_bit.layers import SCALES
from shardwise.transfer.fingerprints import MODULUS, word_weights
from shardwise.transfer.matching import OnFault

_MAX_TENSORS: Final = 256
_CORNER: Final = 16
_MAX_SHOWN: Final = 5
_SAMPLE: Final = re.compile(r"[a-z0-9_]{1,32} [0-9a-f]{16}")
_INTEGER_BY_SIZE: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_IGNORED_KEYS: Final = re.compile(
    r"_.*|output_.*|.*_token_id|.*_coef|.*drop.*|initializer_.*|transformers_version|(torch_)?dtype|name_or_path"
    r"|architectures|auto_map|use_cache|return_dict|id2label|label2id|problem_type|quantization_config|torchscript"
    r"|tokenizer_class|gradient_checkpointing|chunk_size_feed_forward|loss_type|task_specific_params|pruned_heads"
)
"""Keys of a config about its origin, its loading or its training."""

ALLOW_OTHER_BASE: Final = (
    "Load the base that it was trained on, or pass on_other_base=Ignore() to continue with this one."
)
"""Advice for a base that is refused."""


@dataclass(frozen=True, slots=True)
class BaseIdentity:
    """Identity of a base in addition to the names and shapes of its parameters. Plain data, the same on every rank.

    Attributes:
        config: the model's config as JSON. Empty if it has none.
        samples: "dtype fingerprint" of each sampled parameter, by FQN.
    """

    config: Mapping[str, Any]
    samples: Mapping[str, str]

    @classmethod
    def from_dict(cls, values: object, what: str) -> Self:
        """Return an identity from JSON. ``what`` names its file.

        Raises:
            FormatError: the JSON is not an identity.
        """
        match values:
            case {"config": dict() as config, "samples": dict() as samples} if all(
                isinstance(text, str) and _SAMPLE.fullmatch(text) for text in samples.values()
            ):
                return cls(config, samples)
        raise FormatError(f"{what}: has no valid identity of the base model. Restore another checkpoint")


@dataclass(frozen=True, slots=True)
class BaseMatch:
    """A comparison of two bases.

    Attributes:
        refused: sentences on differences that are not allowed.
        summary: the outcome as a sentence, for a report.
    """

    refused: tuple[str, ...] = ()
    summary: str = ""


def compare_bases(
    saved: BaseIdentity, current: BaseIdentity, on_other_base: OnFault, *, are_shapes_same: bool
) -> BaseMatch:
    """Compare the base of a checkpoint with the current one.

    ``on_other_base`` may allow "config", "shapes" and "values". Keys that only one config has, as another version
    of transformers does, and values in another dtype are not compared.
    """
    pairs: dict[str, tuple[list[str], list[str]]] = {}  # [dtype, fingerprint] as saved, and now
    for name in sorted(saved.samples.keys() & current.samples.keys()):
        pairs[name] = saved.samples[name].split(), current.samples[name].split()
    # A cast changes every fingerprint, so those of such tensors are not compared.
    cast = {name: (old[0], new[0]) for name, (old, new) in pairs.items() if old[0] != new[0]}
    differences: dict[str, str] = {}
    notes: list[str] = []
    if settings := list(_list_differences(saved.config, current.config)):
        differences["config"] = _join_first(settings, "; ")
    if not are_shapes_same:
        # Samples of tensors of another shape are of other elements, so their fingerprints say nothing.
        dtypes = [f"{name} was {old}, is {new}" for name, (old, new) in cast.items()]
        differences["shapes"] = "frozen parameters have other names or shapes"
        differences["shapes"] += f": {_join_first(dtypes, '; ')}" if dtypes else ""
    else:
        if values := [name for name, (old, new) in pairs.items() if name not in cast and old != new]:
            shown = _join_first(values, ", ")
            differences["values"] = f"of {len(pairs)} tensors sampled, {len(values)} differ: {shown}"
        notes.append(f"samples of {len(pairs) - len(cast)} tensors compared")
        if cast:
            old, new = next(iter(cast.values()))
            notes.append(f"values of {len(cast)} not compared: their dtype was {old}, and is {new}")
    refused = tuple(f"{what}: {text}" for what, text in differences.items() if not allows(on_other_base, what))
    verdict = f"another, as allowed ({'; '.join(differences.values())})" if differences else "nothing differs"
    return BaseMatch(refused, "; ".join([verdict, *notes]))


def _join_first(items: Sequence[str], separator: str) -> str:
    more = [f"and {len(items) - _MAX_SHOWN} more"] if len(items) > _MAX_SHOWN else []
    return separator.join([*items[:_MAX_SHOWN], *more])


def _list_differences(saved: Mapping[str, Any], current: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key in sorted(saved.keys() & current.keys()):
        old, new = saved[key], current[key]
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _list_differences(old, new, f"{prefix}{key}.")
        elif old != new:
            yield f"{prefix}{key} was {old!r:.80}, is {new!r:.80}"


# The current base


def base_config(model: nn.Module) -> dict[str, Any]:
    """Return the model's config as JSON, without keys that do not describe the base. Empty without a config."""
    config: Any = getattr(model, "config", None)
    values = config.to_dict() if callable(getattr(config, "to_dict", None)) else config
    if not isinstance(values, Mapping):
        return {}
    text = json.dumps(dict(values), default=lambda value: type(value).__name__, skipkeys=True)
    return _base_settings(json.loads(text, parse_constant=str))  # JSON elsewhere has no infinite numbers


def _base_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for key, value in config.items():
        if not _IGNORED_KEYS.fullmatch(key):
            settings[key] = _base_settings(value) if isinstance(value, dict) else value
    return settings


def select_base(tensors: Sequence[TensorRef], stored: Mapping[str, object]) -> list[TensorRef]:
    """Return the parameters that a checkpoint with these tensors does not store."""
    base: list[TensorRef] = []
    for item in tensors:
        if item.kind is not TensorKind.PARAMETER or item.fqn in stored:
            continue
        # A second adapter, such as a reference, is not part of the base.
        if "lora_" in item.fqn or ".modules_to_save." in item.fqn:
            continue
        # Codes of nested scales: see [Note: The identity of a base].
        if any(slot.name == SCALES and getattr(slot.module, "is_nested", False) for slot in item.slots):
            continue
        base.append(item)
    return base


Fingerprints: TypeAlias = dict[tuple[str, tuple[int, ...], tuple[int, ...]], int]
"""Fingerprints of samples by FQN, offsets and sizes: not by boxes, which are slow to pickle."""


@dataclass(frozen=True, slots=True)
class BaseSamples:
    """Config of a base, and samples of its values on this rank, valid as long as its tensors are.

    Attributes:
        config: its config, of :func:`base_config`.
        dtypes: dtypes of the sampled tensors, by FQN.
        numels: numbers of elements sampled of each.
        local: the sampled elements that this rank holds, as integers, and the weights of their fingerprints.
    """

    config: Mapping[str, Any]
    dtypes: Mapping[str, str]
    numels: Mapping[str, int]
    local: Mapping[tuple[str, Box], tuple[torch.Tensor, Any]]

    @classmethod
    def select(cls, model: nn.Module, base: Sequence[TensorRef]) -> Self:
        """Choose samples. Collective: no."""
        # By digests of their names: the same tensors on every rank and in every run, from all parts of a model.
        chosen = heapq.nsmallest(
            _MAX_TENSORS,
            (item for item in base if item.tensor.numel() and item.tensor.element_size() in _INTEGER_BY_SIZE),
            key=lambda item: hashlib.sha256(item.fqn.encode()).digest(),
        )
        chosen.sort(key=attrgetter("fqn"))
        numels: dict[str, int] = {}
        local: dict[tuple[str, Box], tuple[torch.Tensor, Any]] = {}
        for item in chosen:
            shape = item.tensor.shape
            limit = _CORNER if len(shape) > 1 else _CORNER**2
            # A parameter (8, 4096, 64) is sampled as (1, 16, 16), a vector (4096,) as (256,).
            sizes = (*(1 for _ in shape[:-2]), *(min(size, limit) for size in shape[-2:]))
            corner = Box((0,) * len(sizes), sizes)
            numels[item.fqn] = corner.numel
            # Of each element of the corner, wherever it is: a rank sums those that it has.
            weights = word_weights()[: corner.numel].reshape(sizes)
            shards = () if item.tensor.is_meta else local_boxes(item.tensor, item.fqn)
            for shard in shards:
                if box := shard.box.intersect(corner):
                    slices = tuple(slice(a, a + size) for a, size in zip(box.offsets, box.sizes, strict=True))
                    view = strided_view(local_tensor(item.tensor), locate_box(box, shards))
                    local[item.fqn, box] = view.view(_INTEGER_BY_SIZE[view.element_size()]), weights[slices]
        dtypes = {item.fqn: str(item.tensor.dtype).removeprefix("torch.") for item in chosen}
        return cls(base_config(model), dtypes, numels, local)

    def fingerprints(self) -> Fingerprints:
        """Return the fingerprints of the samples on this rank, for :meth:`identity`. Collective: no."""
        kinds: dict[tuple[object, ...], list[tuple[str, Box]]] = {}
        for key, (view, _) in self.local.items():
            kinds.setdefault((view.shape, view.dtype, view.device), []).append(key)
        fingerprints: Fingerprints = {}
        for keys in kinds.values():  # samples of one shape at once: few kernels, and one copy to the host
            # (samples, elements of each)
            words = torch.stack([self.local[key][0] for key in keys]).reshape(len(keys), -1).cpu().numpy()
            weights = np.stack([self.local[key][1] for key in keys]).reshape(words.shape)
            # As unsigned words, in sums that wrap around: arithmetic modulo 2**64.
            totals = np.add.reduce(words.view(f"<u{words.itemsize}").astype(np.uint64) * weights, axis=1)
            for (name, box), total in zip(keys, totals.tolist(), strict=True):
                fingerprints[name, box.offsets, box.sizes] = total
        return fingerprints

    def identity(self, by_rank: Sequence[Fingerprints]) -> BaseIdentity:
        """Return the identity of a base from the fingerprints of all ranks. Collective: no.

        Raises:
            RankMismatchError: ranks have different bases.
        """
        by_box: Fingerprints = {}
        for fingerprints in by_rank:
            by_box |= fingerprints  # boxes of replicas are equal, and count once
        totals, numels = dict.fromkeys(self.dtypes, 0), dict.fromkeys(self.dtypes, 0)
        for (name, _, sizes), total in by_box.items():
            if name not in totals:
                raise RankMismatchError("frozen parameters are not the same on all ranks. Load one base on all")
            totals[name] = (totals[name] + total) % MODULUS
            numels[name] += numel(sizes)
        samples: dict[str, str] = {}
        for name, dtype in self.dtypes.items():
            # Elements on meta are on no rank. A sample that lacks some is left out.
            if numels[name] == self.numels[name]:
                samples[name] = f"{dtype} {totals[name]:016x}"
        return BaseIdentity(self.config, samples)
