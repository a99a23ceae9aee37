"""vLLM: the weights of a sharded model into its engines, and whether it would serve an adapter.

[Note: What vLLM asks for] Its engines load tensors under the names and in the shapes of the checkpoint, whole,
one after the other: what :func:`~shardwise.verbs.stream.iter_hf_tensors` goes through. ``model.named_parameters()``
of a model that FSDP2 shards has other names and shapes where transformers converts a checkpoint (stacked experts,
fused projections), and those of PEFT's layers where it is adapted. In one process an engine's model has
``load_weights``, which takes pairs of a name and a tensor. Over its interface for weight updates (NCCL, CUDA IPC)
the trainer's side takes a ``WeightSource``.
"""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from shardwise.engines.save_options import HubNames
from shardwise.engines.streaming import StreamOptions, Targets, tensors_to_come
from shardwise.errors import ConfigError, FormatError
from shardwise.execution.ranks.world import World
from shardwise.formats.peft_adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from shardwise.formats.safetensors_header import read_header
from shardwise.formats.strict_json import parse_object
from shardwise.models.lora_weights import MergedAdapter
from shardwise.models.selection import Everything
from shardwise.models.view import without_compile
from shardwise.planning.states.sources import EveryRank
from shardwise.storage.reading.local import LocalReader
from shardwise.verbs.stream import iter_hf_tensors

LoadWeights: TypeAlias = Callable[[Iterable[tuple[str, torch.Tensor]]], object]


@dataclass(frozen=True)
class _SentWeights:
    """A model's tensors, as often as they are asked for."""

    model: nn.Module
    only: Everything | MergedAdapter
    dtype: torch.dtype | None
    to: Targets
    options: StreamOptions

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter_hf_tensors(self.model, to=self.to, only=self.only, dtype=self.dtype, options=self.options)

    def metadata(self, made: Callable[..., Any]) -> list[Any]:
        """``made`` of name, dtype and shape, for each."""
        found = tensors_to_come(without_compile(self.model), HubNames(), self.only, self.dtype)
        return [made(name, dtype, shape) for name, (dtype, shape) in found.items()]


def weight_source(
    model: nn.Module,
    *,
    only: Everything | MergedAdapter = Everything(),  # noqa: B008 - frozen
    dtype: torch.dtype | None = None,
    to: Targets = EveryRank(),  # noqa: B008
    options: StreamOptions = StreamOptions(),  # noqa: B008
) -> Any:
    """A sharded model as vLLM's ``WeightSource``, for ``WeightTransferTrainerFactory.trainer_init``.

    Every pass goes through the tensors as the model has them then; every rank of the trainer makes it, in step, as
    vLLM's engines do. Nothing is gathered for ``metadata``.

    Args:
        model: sharded or not; in the same state on every rank.
        only: ``Everything()``; or ``MergedAdapter()``: the base with a LoRA merged in, under the base's names.
        dtype: of floating-point tensors; None leaves every tensor its own.
        to: ``EveryRank()``; or ``FirstRank()`` where the first rank alone sends (NCCL): others get tensors on meta.
        options: bucket, device, process group, patience.

    Raises:
        ConfigError: vLLM is not installed, or its weight updates have another interface than is known.
    """
    weights = _SentWeights(model, only, dtype, to, options)
    vllm: Any = _weight_transfer()
    meta = vllm.ParamMeta

    if isinstance(vars(vllm.WeightSource).get("metadata"), property):  # as of 0.33

        class Source(vllm.WeightSource):  # type: ignore[misc]
            """A model that is sharded here."""

            @cached_property
            def metadata(self) -> list[Any]:
                return weights.metadata(meta)

            def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
                return weights.tensors()

        return Source()

    class OlderSource(vllm.WeightSource):  # type: ignore[misc]
        """A model that is sharded here, for vLLM before 0.33."""

        def metadata(self) -> list[Any]:
            return weights.metadata(meta)

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            return weights.tensors()

    return OlderSource()


def _weight_transfer() -> Any:
    """vLLM's interface for weight updates."""
    try:
        vllm: Any = importlib.import_module("vllm.distributed.weight_transfer.base")
        _ = vllm.WeightSource, vllm.ParamMeta
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"vLLM's interface for weight updates (WeightSource, since 0.29) is not there ({error}); install vllm, "
            "or load in its process with load_into"
        ) from error
    return vllm


def load_into(
    load_weights: LoadWeights,
    model: nn.Module,
    *,
    only: Everything | MergedAdapter = Everything(),  # noqa: B008 - frozen
    dtype: torch.dtype | None = None,
    options: StreamOptions = StreamOptions(),  # noqa: B008
) -> int:
    """Hand a sharded model's tensors to an engine in the same process, on every rank; how many there were.

    ::

        load_into(engine_model.load_weights, model, only=MergedAdapter())

    Collective: yes. Where the engine refuses one on any rank, all of them raise. It then has some of the new
    weights and some of the old, and must be loaded again.

    Args:
        load_weights: takes pairs of a name and a tensor, each of which it must be done with before the next: what
            vLLM's models call so. It goes through all of them.
        model: sharded or not; in the same state on every rank.
        only: ``Everything()``; or ``MergedAdapter()``: the base with a LoRA merged in, under the base's names.
        dtype: of floating-point tensors; None leaves every tensor its own.
        options: bucket, device, process group, patience.

    Raises:
        ConfigError: the engine stopped before the last tensor.
        CheckpointError: (or a subclass) as for :func:`~shardwise.verbs.stream.iter_hf_tensors`.
    """
    handed = 0

    def counted() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal handed
        for pair in tensors:
            handed += 1
            yield pair

    tensors = iter_hf_tensors(model, only=only, dtype=dtype, options=options)

    def hand_over() -> None:
        ended = object()
        with contextlib.closing(tensors):  # type: ignore[type-var]
            load_weights(counted())
            if next(tensors, ended) is not ended:
                raise ConfigError(
                    f"the engine took {handed} tensors and left the rest; hand in a load_weights that goes through "
                    "all of them"
                )

    # A rank may have got all that it wants of the others before one of them fails.
    with World.current(options.process_group, options.patience, call="load_into") as world:
        world.together(hand_over)
    return handed


# Adapters

_SAVED_WHOLE = ("classifier", "score")
_PLAIN_BEGINNINGS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")
"""Ways to initialise a LoRA that leave the base as it is."""

_NOT_SERVED = {
    "use_dora": "DoRA",
    "lora_bias": "a bias of LoRA's (lora_bias)",
    "alora_invocation_tokens": "activated LoRA",
    "layer_replication": "layer_replication",
    "use_bdlora": "block-diagonal LoRA",
    "use_qalora": "QALoRA",
}
_MATRIX = re.compile(r"(?P<module>.+)\.(lora_(?P<part>[AB])\.weight|lora_embedding_(?P<table>[AB]))")
_OF_BASE = (".embed_tokens.base_layer.weight", ".lm_head.base_layer.weight")


def adapter_faults(folder: str | Path, *, max_lora_rank: int = 16) -> tuple[str, ...]:
    """Why vLLM would not serve an adapter in PEFT's layout; nothing where it would.

    The rules are those of vLLM 0.33 (``vllm/lora/peft_helper.py``, ``lora_model.py``), without its model: whether
    that has all the modules, only the engine knows.

    Args:
        folder: with ``adapter_config.json`` and ``adapter_model.safetensors``.
        max_lora_rank: as the engine is started with; vLLM's default is 16.

    Raises:
        FormatError: it is no such folder, or a file is damaged.
    """
    place = Path(folder)
    try:
        config = parse_object((place / ADAPTER_CONFIG).read_bytes(), what=str(place / ADAPTER_CONFIG))
    except OSError as error:
        raise FormatError(f"{place}: there is no {ADAPTER_CONFIG}; pass the folder of an adapter") from error
    file = ADAPTER_WEIGHTS[0]
    if not (place / file).is_file():
        raise FormatError(f"{place}: there is no {file}; save the adapter as safetensors")
    with LocalReader(place) as reader:
        header = read_header(reader, file)
    return (*config_faults(config, max_lora_rank=max_lora_rank), *_faults_of_names(config, header.entries))


def config_faults(config: Mapping[str, Any], *, max_lora_rank: int = 16) -> tuple[str, ...]:
    """The same of a LoRA's config alone (``LoraConfig(...).to_dict()``): before anything is trained."""
    faults = [f"it says no {name}" for name in ("r", "lora_alpha", "target_modules") if name not in config]
    faults += [f"it uses {what}" for name, what in _NOT_SERVED.items() if config.get(name)]
    whole = [name for name in config.get("modules_to_save") or () if name not in _SAVED_WHOLE]
    if whole:
        faults.append(f"{', '.join(whole)}: trained whole (modules_to_save), which only a classifier may be")
    if config.get("bias", "none") != "none":
        faults.append(f"bias is {config['bias']!r}: biases of the base are trained")
    begun = config.get("init_lora_weights", True)
    if isinstance(begun, str) and begun.lower() not in _PLAIN_BEGINNINGS:
        faults.append(f"init_lora_weights is {begun!r}, which changes the base")
    ranks = [config.get("r"), *(config.get("rank_pattern") or {}).values()]
    known = [rank for rank in ranks if isinstance(rank, int)]
    if any(rank <= 0 for rank in known):
        faults.append("a rank is not positive")
    if known and max(known) > max_lora_rank:
        faults.append(f"rank {max(known)} is more than max_lora_rank={max_lora_rank}; start the engine with more")
    return tuple(faults)


def _faults_of_names(config: Mapping[str, Any], entries: Sequence[Any]) -> list[str]:
    faults: list[str] = []
    halves: dict[str, set[str]] = {}
    whole = tuple(name for name in config.get("modules_to_save") or () if name in _SAVED_WHOLE)
    for entry in entries:
        name = entry.key.removeprefix("base_model.model.")
        if name.endswith(_OF_BASE):
            continue
        if found := _MATRIX.fullmatch(name):
            halves.setdefault(found["module"], set()).add(found["part"] or found["table"])
        elif not re.fullmatch(r"(.+\.)?(score|classifier)\.(weight|bias)", name) or not whole:
            faults.append(f"{entry.key} is no matrix of a LoRA")
    faults += [f"{module} has only one of its two matrices" for module, parts in halves.items() if len(parts) < 2]
    return faults
