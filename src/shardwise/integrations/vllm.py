"""Hands the weights of a sharded model to vLLM's engines.

[Note: Weights for vLLM] vLLM's engines load unsharded tensors one after the other, with the names and shapes
of the checkpoint, as ``iter_hf_tensors`` yields them. ``model.named_parameters()`` of a model that FSDP2 shards has
other names and shapes if transformers converts a checkpoint (stacked experts, fused projections), and those of
PEFT's layers if it is adapted. In the same process, an engine's model has ``load_weights``, which takes (name,
tensor) pairs. Across processes, vLLM's weight transfer (NCCL, CUDA IPC) takes a ``WeightSource`` from the trainer.
"""

import contextlib
import importlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import nn

from shardwise.core.errors import ConfigError
from shardwise.fsdp.named_tensors import unwrap
from shardwise.models.selection import MergedAdapter
from shardwise.ranks.call_arguments import get_world
from shardwise.saving.stream import StreamOptions, Targets, describe_tensors, iter_hf_tensors

LoadWeights: TypeAlias = Callable[[Iterable[tuple[str, torch.Tensor]]], object]


def weight_source(
    model: nn.Module,
    *,
    only: MergedAdapter | None = None,
    dtype: torch.dtype | None = None,
    to: Targets = "all_ranks",
    options: StreamOptions = StreamOptions(),  # noqa: B008
) -> Any:
    """Return a sharded model as vLLM's ``WeightSource``, for ``WeightTransferTrainerFactory.trainer_init``.

    Every pass yields the current tensors of the model. All ranks of the trainer iterate in step, as vLLM's engines
    do. Nothing is gathered for ``metadata``.

    Args:
        model: sharded or not, in the same state on every rank.
        only: ``None``, or ``MergedAdapter()``: the base with a LoRA merged in, under the base's names.
        dtype: of floating-point tensors. None keeps each tensor's dtype.
        to: ``"all_ranks"``, or ``"first_rank"`` if only rank 0 sends (NCCL). The others get tensors on meta.
        options: bucket, device, process group, timeouts.

    Raises:
        ConfigError: vLLM is not installed, or older than 0.33.
    """
    vllm: Any = _weight_transfer()

    # Defined here, because its base is imported only when it is used.
    class Source(vllm.WeightSource):  # type: ignore[misc]
        """The tensors of a sharded model."""

        @cached_property
        def metadata(self) -> list[Any]:
            tensors = describe_tensors(unwrap(model), "hub", only, dtype)
            return [vllm.ParamMeta(name, kind, shape) for name, (kind, shape) in tensors.items()]

        def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
            return iter_hf_tensors(model, to=to, only=only, dtype=dtype, options=options)

    return Source()


def _weight_transfer() -> Any:
    """Return vLLM's module for weight transfer, or raise ConfigError if it is missing."""
    try:
        # Both names are looked up, because a release may have the module without them.
        vllm: Any = importlib.import_module("vllm.distributed.weight_transfer.base")
        _ = vllm.WeightSource.iter_full, vllm.ParamMeta
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"vLLM's interface for weight updates (WeightSource, since 0.33) is not there ({error}). Install vllm, "
            "or load in its process with load_into"
        ) from error
    return vllm


def load_into(
    load_weights: LoadWeights,
    model: nn.Module,
    *,
    only: MergedAdapter | None = None,
    dtype: torch.dtype | None = None,
    options: StreamOptions = StreamOptions(),  # noqa: B008
) -> int:
    """Load a sharded model's tensors into an engine in the same process, on every rank. Return their number.

    ::

        load_into(engine_model.load_weights, model, only=MergedAdapter())

    Collective: yes. If an engine rejects a tensor on any rank, all ranks raise. The engines then have some new and
    some old weights, and must be loaded again.

    Args:
        load_weights: takes pairs of a name and a tensor, and must finish with each before the next, like the method
            of vLLM's models. It must consume all of them.
        model: sharded or not, in the same state on every rank.
        only: ``None``, or ``MergedAdapter()``: the base with a LoRA merged in, under the base's names.
        dtype: of floating-point tensors. None keeps each tensor's dtype.
        options: bucket, device, process group, timeouts.

    Raises:
        ConfigError: the engine stopped before the last tensor.
        CheckpointError: (or a subclass) as for :func:`~shardwise.saving.stream.iter_hf_tensors`.
    """
    tensors = iter_hf_tensors(model, only=only, dtype=dtype, options=options)
    counter = itertools.count()

    # One rank may have all of its tensors before another one fails, so all ranks agree on the outcome.
    with (
        get_world(options, "load_into") as world,
        world.collective("hand over weights"),
        contextlib.closing(tensors),  # type: ignore[type-var]
    ):
        # zip takes a tensor before a number, so at the end the next number is the count of tensors taken.
        load_weights(pair for pair, _ in zip(tensors, counter, strict=False))
        count, end = next(counter), object()
        if next(tensors, end) is not end:
            raise ConfigError(
                f"load_weights: took {count} tensors and left the rest. Pass a function that consumes all of them"
            )
        return count
