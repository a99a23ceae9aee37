"""Identity of the base that an adapter was trained on: its config, and samples of its values.

[Note: The identity of a base] A checkpoint of an adapter does not hold the base. It records the config without
fields that change between loads, and fingerprints of samples: the first 16 x 16 elements (256 of a vector) of at
most 256 frozen parameters, chosen by name. A fingerprint is a sum over elements, so each rank adds up those of its
own shard, and the sum is the same for any number of ranks and any sharding. Elements on several ranks are counted
once. Names and shapes of all parameters are compared by a digest that the callers keep. Buffers, and other
adapters, are not part of a base. Codes of nested scales are left out: their last bit depends on the machine.
"""

import hashlib
import heapq
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import Any, Final, Self

import numpy as np
import torch
from torch import nn

from shardwise.errors import FormatError, RankMismatchError
from shardwise.layout import TensorKind, place_of
from shardwise.models.four_bit_layers import SCALES
from shardwise.models.view import TensorRef, local_boxes, local_tensor, strided_view
from shardwise.planning.fingerprints import MODULUS, lane_weights
from shardwise.planning.load_plan import allows
from shardwise.planning.matching import OnFault
from shardwise.tensors import Box

_MOST_TENSORS: Final = 256


_CORNER: Final = 16


_SHOWN: Final = 5


_SAMPLE: Final = re.compile(r"[a-z0-9_]{1,32} [0-9a-f]{16}")


_WORDS_BY_SIZE: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


_NOT_OF_A_BASE: Final = re.compile(
    r"_.*|output_.*|.*_token_id|.*_coef|.*drop.*|initializer_.*|transformers_version|(torch_)?dtype|name_or_path"
    r"|architectures|auto_map|use_cache|return_dict|id2label|label2id|problem_type|quantization_config|torchscript"
    r"|tokenizer_class|gradient_checkpointing|chunk_size_feed_forward|loss_type|task_specific_params|pruned_heads"
)
"""Keys of configs that say where a model came from, how it is loaded, or how it is trained."""


ALLOW_OTHER_BASE: Final = (
    "Load the base that it was trained on, or pass on_other_base=Ignore() (in a configuration "
    "checkpoints.on_other_base=ignore) to continue with this one."
)
"""What to do about a base that was refused."""


@dataclass(frozen=True, slots=True)
class BaseIdentity:
    """Identity of a base in addition to the names and shapes of its parameters. Plain data, the same on every rank.

    Attributes:
        config: of the model, as JSON. Empty if it has none.
        samples: "dtype fingerprint" of sampled parameters, by FQN.
    """

    config: Mapping[str, Any]
    samples: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Return the identity as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: object, what: str) -> Self:
        """Raises FormatError if it is not an identity. ``what`` names its place."""
        if isinstance(values, dict) and values.keys() == {"config", "samples"}:
            config, samples = values["config"], values["samples"]
            if isinstance(config, dict) and isinstance(samples, dict):
                texts = [text for text in samples.values() if isinstance(text, str) and _SAMPLE.fullmatch(text)]
                if len(texts) == len(samples):
                    return cls(config, samples)
        raise FormatError(f"{what}: holds no identity of a base. It is corrupt. Take another checkpoint")


@dataclass(frozen=True, slots=True)
class BaseMatch:
    """A comparison of two bases.

    Attributes:
        refused: sentences on differences that are not allowed.
        told: the outcome as a sentence, for a report.
    """

    refused: tuple[str, ...] = ()
    told: str = ""


def compare_bases(
    there: BaseIdentity | None, here: BaseIdentity, on_other_base: OnFault, *, are_shapes_same: bool
) -> BaseMatch:
    """Compare the base of a checkpoint (None: not recorded) with the current one.

    ``on_other_base`` may allow "config", "shapes" and "values". Settings that only one config has, as another
    version of transformers does, and values in another dtype, are not compared.
    """
    found: dict[str, str] = {}
    notes: list[str] = []
    if there is None:
        notes.append("config and values not compared: the checkpoint does not record them")
    elif settings := list(_differing(there.config, here.config, "")):
        found["config"] = _few(settings, "; ")
    if not are_shapes_same:
        odd = [] if there is None else _odd_kinds(there, here)
        found["shapes"] = "frozen parameters have other names or shapes" + (f": {_few(odd, '; ')}" if odd else "")
    elif there is not None:
        pairs = {name: (text, here.samples[name]) for name, text in there.samples.items() if name in here.samples}
        cast = {name: pair for name, pair in pairs.items() if pair[0].split()[0] != pair[1].split()[0]}
        if values := [name for name, (one, other) in pairs.items() if name not in cast and one != other]:
            found["values"] = f"of {len(pairs)} tensors sampled, {len(values)} differ: {_few(sorted(values), ', ')}"
        notes.append(f"samples of {len(pairs) - len(cast)} tensors compared")
        if cast:
            was, now = (text.split()[0] for text in next(iter(cast.values())))
            notes.append(f"values of {len(cast)} not compared: their dtype was {was}, and is {now}")
    refused = tuple(f"{what}: {text}" for what, text in found.items() if not allows(on_other_base, what))
    verdict = f"another, as allowed ({'; '.join(found.values())})" if found else "nothing differs"
    return BaseMatch(refused, "; ".join([verdict, *notes]))


def _few(items: Sequence[str], between: str) -> str:
    return between.join(items[:_SHOWN]) + (f"{between}and {len(items) - _SHOWN} more" if items[_SHOWN:] else "")


def _differing(there: Mapping[str, Any], here: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key in sorted(there.keys() & here.keys()):
        one, other = there[key], here[key]
        if isinstance(one, dict) and isinstance(other, dict):
            yield from _differing(one, other, f"{prefix}{key}.")
        elif one != other:
            yield f"{prefix}{key} was {one!r:.80}, is {other!r:.80}"


def _odd_kinds(there: BaseIdentity, here: BaseIdentity) -> list[str]:
    """Sampled parameters of other dtypes, which a base has that is in four bits."""
    kinds = [{name: text.split()[0] for name, text in own.samples.items()} for own in (there, here)]
    return [
        f"{name} was {kinds[0][name]}, is {kinds[1][name]}"
        for name in sorted(kinds[0].keys() & kinds[1].keys())
        if kinds[0][name] != kinds[1][name]
    ]


# The base that is there


def base_config(model: nn.Module) -> dict[str, Any]:
    """Return the model's config as JSON, without fields that do not describe the base. Empty without a config."""
    config: Any = getattr(model, "config", None)
    told = config.to_dict() if callable(getattr(config, "to_dict", None)) else config
    if not isinstance(told, Mapping):
        return {}
    text = json.dumps(dict(told), default=lambda value: type(value).__name__, skipkeys=True)
    plain = json.loads(text, parse_constant=str)  # JSON of others has no infinite numbers
    return dict(_of_the_base(plain))


def _of_the_base(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _of_the_base(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if not _NOT_OF_A_BASE.fullmatch(key)
    }


def base_of(held: Sequence[TensorRef], stored: Mapping[str, object]) -> list[TensorRef]:
    """The parameters that a checkpoint of these tensors takes for granted."""
    return [
        item
        for item in held
        if item.kind is TensorKind.PARAMETER
        and item.fqn not in stored
        and "lora_" not in item.fqn  # a second adapter, such as a reference, is no part of the base
        and ".modules_to_save." not in item.fqn
        and not any(slot.name == SCALES and getattr(slot.module, "is_nested", False) for slot in item.slots)
    ]


@dataclass(frozen=True, slots=True)
class BaseSamples:
    """Samples of a base's values on this rank, valid as long as the tensors are.

    Attributes:
        kinds: the dtypes of sampled tensors, by FQN.
    """

    kinds: Mapping[str, str]
    _numels: Mapping[str, int]
    _parts: Mapping[tuple[str, Box], tuple[torch.Tensor, Any]]
    """The elements that this rank holds, and their weights."""

    @classmethod
    def of(cls, base: Sequence[TensorRef]) -> Self:
        """Choose samples. Collective: no."""
        chosen = heapq.nsmallest(
            _MOST_TENSORS,
            (item for item in base if item.tensor.numel() and item.tensor.element_size() in _WORDS_BY_SIZE),
            key=lambda item: hashlib.sha256(item.fqn.encode()).digest(),
        )
        chosen.sort(key=attrgetter("fqn"))
        numels: dict[str, int] = {}
        parts: dict[tuple[str, Box], tuple[torch.Tensor, Any]] = {}
        for item in chosen:
            shape = item.tensor.shape
            most = _CORNER if len(shape) > 1 else _CORNER**2
            sizes = (*(1 for _ in shape[:-2]), *(min(size, most) for size in shape[-2:]))
            corner = Box((0,) * len(sizes), sizes)
            numels[item.fqn] = corner.numel
            weights = lane_weights()[: corner.numel].reshape(sizes)
            held = () if item.tensor.is_meta else local_boxes(item.tensor, item.fqn)
            for part in held:
                if box := part.box.intersect(corner):
                    at = tuple(slice(a, a + size) for a, size in zip(box.offsets, box.sizes, strict=True))
                    view = strided_view(local_tensor(item.tensor), place_of(box, held))
                    parts[item.fqn, box] = view, weights[at]
        kinds = {item.fqn: str(item.tensor.dtype).removeprefix("torch.") for item in chosen}
        return cls(kinds, numels, parts)

    def taken(self) -> dict[tuple[str, Box], int]:
        """Return the fingerprints of the samples on this rank, for :meth:`identity`. Collective: no."""
        found: dict[tuple[str, Box], int] = {}
        for part, (view, weights) in self._parts.items():
            words = view.detach().reshape(-1).view(_WORDS_BY_SIZE[view.element_size()]).cpu().numpy()
            unsigned = words.view(f"<u{words.itemsize}").astype(np.uint64)
            found[part] = int(np.add.reduce(unsigned * weights.reshape(-1)))
        return found

    def identity(self, model: nn.Module, taken: Sequence[Mapping[tuple[str, Box], int]]) -> BaseIdentity:
        """Return the identity of a model from the samples of all ranks. Collective: no.

        Raises:
            RankMismatchError: ranks have different bases.
        """
        together = {part: total for own in taken for part, total in own.items()}  # replicas count once
        totals, numels = dict.fromkeys(self.kinds, 0), dict.fromkeys(self.kinds, 0)
        for (name, box), total in together.items():
            if name not in totals:
                raise RankMismatchError("frozen parameters are not the same on all ranks. Load one base on all")
            totals[name] = (totals[name] + total) % MODULUS
            numels[name] += box.numel
        samples = {
            name: f"{kind} {totals[name]:016x}"
            for name, kind in self.kinds.items()
            if numels[name] == self._numels[name]  # else some are nowhere
        }
        return BaseIdentity(base_config(model), samples)
