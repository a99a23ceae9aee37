"""Streams a sharded model's tensors, whole, one after the other."""

import contextlib
import itertools
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from shardwise.core.errors import ConfigError
from shardwise.core.tensors import Box
from shardwise.fsdp.named_tensors import TensorRef, build_layout, collect_tensors, unwrap
from shardwise.fsdp.torch_private import accelerator, accelerator_module, saved_dtype, to_torch
from shardwise.models import selection
from shardwise.models.four_bit import files as four_bit_files
from shardwise.models.revert import Output, revert
from shardwise.ranks.call_arguments import check_options, get_hints, get_world
from shardwise.ranks.timeouts import Timeouts
from shardwise.ranks.world import World
from shardwise.saving import prepare
from shardwise.saving.merged_shares import MergingShardSender, find_packed_rows
from shardwise.transfer.memory import get_model_device
from shardwise.transfer.move import ShardExchange, box_view
from shardwise.transfer.move_plan import Move, Round, full_on_ranks, plan_rounds
from shardwise.transfer.replicas import ShardSender, agree_on_shares
from shardwise.transfer.staging import upload_buffer

_SMALLEST_BUCKET_BYTES = 4096

Targets: TypeAlias = Literal["all_ranks", "first_rank"]


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """Settings of a stream. None of them changes the values.

    Attributes:
        bucket_bytes: bytes that a rank sends or receives at once. Larger tensors travel in several parts.
        device: device of the yielded tensors. None is the model's compute device.
        process_group: the ranks that iterate: all that hold a part of the model.
        timeouts: how long ranks wait for each other. None for the timeout of the process group, if it was given
            one.
    """

    bucket_bytes: int = 64 << 20
    device: torch.device | None = None
    process_group: dist.ProcessGroup | None = None
    timeouts: Timeouts | None = None

    def __post_init__(self) -> None:
        if self.bucket_bytes < _SMALLEST_BUCKET_BYTES:
            raise ConfigError(f"bucket_bytes={self.bucket_bytes} is less than {_SMALLEST_BUCKET_BYTES}")


def _gather_full(
    world: World,
    outputs: Mapping[str, Output],
    dtypes: Mapping[str, torch.dtype],
    sender: ShardSender,
    targets: range,
    refs: Sequence[TensorRef],
    device: torch.device | None,
    bucket_bytes: int,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors of the model, whole, on ``device`` (by default that of the model). Collective: yes.

    ``targets`` are the ranks that receive the values. The others pass meta as their device.
    """
    moves: list[Move] = []
    for key, item in outputs.items():
        target_boxes = full_on_ranks(targets, item.shape, world.size)
        moves.append(Move(key, item.expression, dtypes[key].itemsize, target_boxes))
    with world.collective("plan the rounds"):
        rounds = plan_rounds([moves], sender.shares, bucket_bytes)
        # The yielded tensors may be on another device.
        staging_device = get_model_device(refs, refs[0].local.device if refs else None)
        staging = upload_buffer(staging_device, bucket_bytes)
    shapes = {key: item.shape for key, item in outputs.items()}
    received = _ReceivedTensors(shapes, dtypes, device or staging_device)
    exchange = ShardExchange(world, rounds, sender.share, received.get_memory, dtypes, staging_device, staging)
    with contextlib.closing(exchange.run()) as arrivals:
        yield from received.completed_by(arrivals)


@dataclass(frozen=True)
class _ReceivedTensors:
    """Tensors that a rank receives block by block. Each is allocated when its first block is sent."""

    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]
    device: torch.device
    begun: dict[str, torch.Tensor] = field(default_factory=dict)

    def get_memory(self, key: str, box: Box) -> torch.Tensor:
        self.begun[key] = self.take(key)
        return box_view(self.begun[key], box)

    def take(self, key: str) -> torch.Tensor:
        if key in self.begun:
            return self.begun.pop(key)
        return torch.empty(self.shapes[key], dtype=self.dtypes[key], device=self.device)

    def completed_by(self, arrivals: Iterable[Round]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensors in order, each when its last block has arrived. Those without elements have no block."""
        waiting = iter(self.shapes)
        for block in itertools.chain.from_iterable(arrivals):
            # Blocks of a tensor arrive in row-major order, so the one at its last corner completes it.
            ends = (at + size for at, size in zip(block.box.offsets, block.box.sizes, strict=True))
            if tuple(ends) != self.shapes[block.key]:
                continue
            # Up to this tensor. The ones before it without elements have no block, and are yielded on the way.
            for key in waiting:
                yield key, self.take(key)
                if key == block.key:
                    break
        for key in waiting:
            yield key, self.take(key)


def _make_merging_sender(
    world: World, refs: Sequence[TensorRef], sender: ShardSender, adapted: selection.Adapted, options: StreamOptions
) -> MergingShardSender:
    """Return the sender of tensors with the adapter merged in. Every rank then holds the full adapter.

    Collective: yes.
    """
    layout, shares = build_layout(refs), sender.shares
    # The adapter is gathered first, by the same rounds as any tensors. Then each rank merges its own shares.
    factors = [name for pair in adapted.factors.values() for name in (pair.lora_A, pair.lora_B)]
    outputs = {name: Output.unchanged(name, layout.by_name[name]) for name in factors}
    dtypes = {name: to_torch(output.dtype) for name, output in outputs.items()}
    every_rank = range(world.size)
    matrices = dict(_gather_full(world, outputs, dtypes, sender, every_rank, refs, None, options.bucket_bytes))
    base_refs = {name: sender.refs[fqn] for name, fqn in adapted.inside.items()}
    with world.collective("plan packed rows"):
        packed = find_packed_rows(base_refs)
    # Shares of packed weights count bytes. Those of the outputs count values, two for each byte.
    base_shares = {name: shares[fqn] for name, fqn in adapted.inside.items() if fqn in shares}
    base_shares |= {name: tuple(map(rows.logical_boxes, base_shares[name])) for name, rows in packed.items()}
    return MergingShardSender(base_refs, base_shares, world.rank, adapted.factors, matrices, packed)


def _collect_to_merge(model: nn.Module) -> list[TensorRef]:
    refs = collect_tensors(model)
    four_bit_files.require_scales(refs)
    return refs


def _select_outputs(
    model: nn.Module,
    refs: list[TensorRef],
    names: prepare.WrittenNames,
    only: selection.Selection | selection.MergedAdapter,
    fqns: Mapping[str, str],
) -> tuple[Mapping[str, Output], selection.Adapted | None]:
    """Return the outputs. For a merged adapter, return also the model without it.

    Raises:
        ConfigError, KeyMismatchError: they cannot be streamed.
    """
    layout = build_layout(refs)
    if not isinstance(only, selection.MergedAdapter):
        prepare.require_hub_names(model, only or names, "Pass only=MergedAdapter(), only=AdapterOnly()")
        return prepare.build_outputs(model, only or names, refs, layout, fqns), None
    # The outputs are those of the base, as if PEFT had never wrapped it. 4-bit weights count as dequantized
    # ones.
    adapted = selection.without_adapter(model, [name for item in refs for name in item.names], only.adapter)
    layout = adapted.layout(four_bit_files.dequantize_layout(layout, refs))
    return revert(adapted.base, layout, internal_names=names == "internal"), adapted


def describe_tensors(
    model: nn.Module, names: prepare.WrittenNames, only: selection.MergedAdapter | None, dtype: torch.dtype | None
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return dtype and shape of the tensors that :func:`iter_hf_tensors` yields, by key and in its order.

    Nothing is sent.

    Raises:
        ConfigError, KeyMismatchError, ShardingError: as for going through them.
    """
    refs = prepare.collect_for_files(model, names, dtype) if only is None else _collect_to_merge(model)
    outputs, _ = _select_outputs(model, refs, names, only, {})
    return {key: (to_torch(saved_dtype(item.dtype, dtype)), item.shape) for key, item in outputs.items()}


@contextlib.contextmanager
def _report_exit() -> Iterator[None]:
    """Tell waiting ranks that the caller has left its loop."""
    try:
        yield
    except GeneratorExit:
        raise GeneratorExit("its loop over the tensors ended before the last one") from None


def _iter_on_stream(
    stream: Any, tensors: Generator[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors that are made on a stream, each ready on the caller's current stream."""
    module = accelerator_module(stream.device)
    try:
        while True:
            with module.stream(stream):
                pair = next(tensors, None)
            if pair is None:
                return
            tensor = pair[1]
            if tensor.device.type == stream.device.type:
                caller = module.current_stream(tensor.device)
                caller.wait_stream(stream)
                tensor.record_stream(caller)
            yield pair
            del pair, tensor  # so that the caller can free it before the next one is received
    finally:
        with module.stream(stream):  # the last all-to-all is waited for on it, before its memory is freed
            tensors.close()


def iter_hf_tensors(
    model: nn.Module,
    *,
    to: Targets = "all_ranks",
    names: prepare.WrittenNames = "hub",
    only: selection.Selection | selection.MergedAdapter = None,
    dtype: torch.dtype | None = None,
    options: StreamOptions = StreamOptions(),
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a model's tensors, whole, in the order in which transformers saves them.

    ::

        for key, tensor in shardwise.iter_hf_tensors(model):
            engine.load_weight(key, tensor)

    All ranks iterate in step, and may leave the loop early only after the same tensor. If the loop of one rank ends
    early, by an exception for example, the others raise, unless all later tensors have been sent. A rank that keeps
    the iterator in a variable has left the loop with its next call of shardwise. Parameters must not change
    meanwhile. The caller owns each tensor. It is ready on the caller's current stream.

    Collective: yes, from the first tensor to the last. Memory: two buckets, or one larger tensor and a bucket. If
    the ranks of a machine have the model on the CPU, that much for all of them together.

    Args:
        model: sharded or not, from transformers or not, with values on every rank, in the same state on every rank.
        to: ``"all_ranks"``, or ``"first_rank"``: the others iterate over the same keys and get tensors on meta.
        names: as the checkpoint has them, ``"hub"``, or the model's own, ``"internal"``.
        only: ``None``. For a PEFT model also ``AdapterOnly()``, an adapter under the names of PEFT's files, or
            ``MergedAdapter()``, the base with a LoRA of linear layers merged in, under the base's names. Every
            rank then holds the full adapter. Without ``only``, a PEFT model needs ``names="internal"``.
        dtype: of the floating-point tensors, also while they are sent. None keeps each tensor's own.
        options: bucket, device, process group, timeouts.

    Raises:
        ConfigError: the arguments cannot be honored.
        ShardingError: tensors have no values, or the ranks do not hold all of the model.
        KeyMismatchError: the checkpoint has tensors that are computed from the model's.
        CheckpointError: (or a subclass) the failure of one rank.
        RankMismatchError: the ranks have different models or arguments, or different values of parameters that
            several of them hold, or one has left its loop and is in another call.
        RankLostError: a rank has been lost, or has left its loop.

    Every error is the same on every rank.
    """
    tensors = _iter_tensors(model, to, names, only, dtype, options)
    kind = accelerator()
    if kind is None or not accelerator_module(kind).is_initialized():
        return tensors
    # At the call, because the body of a generator runs on the stream of whoever asks for a tensor, which may not
    # wait for the one that changes the model.
    return _iter_on_stream(accelerator_module(kind).current_stream(), tensors)


def _iter_tensors(
    model: nn.Module,
    to: Targets,
    names: prepare.WrittenNames,
    only: selection.Selection | selection.MergedAdapter,
    dtype: torch.dtype | None,
    options: StreamOptions,
) -> Generator[tuple[str, torch.Tensor]]:
    model = unwrap(model)
    with get_world(options, "iter_hf_tensors") as world:
        with world.collective("check the arguments"):
            choices = {"to": to, "names": names, "only": only, "options": options}
            check_options(get_hints(iter_hf_tensors), choices)
            dtype = prepare.resolve_dtype(dtype)
        # Everything on which the rounds depend. Ranks with other rounds would wait in other collectives.
        arguments = (to, names, only, str(dtype), options.bucket_bytes)
        world.require_equal(arguments, "the list of arguments (targets, names, selection, dtype, bucket)")
        # The tensors of the model, the outputs, and the source of their values.
        fqns: Mapping[str, str] = {}
        if isinstance(only, selection.MergedAdapter):
            with world.collective("collect the state"):
                refs = _collect_to_merge(model)
        else:
            refs, fqns = prepare.collect_selected(world, model, only or names, dtype)
        shares = agree_on_shares(world, refs).by_name
        sender = ShardSender({name: item for item in refs for name in item.names}, shares, world.rank)
        with world.collective("select outputs"):
            outputs, adapted = _select_outputs(model, refs, names, only, fqns)
        if adapted is not None:
            sender = _make_merging_sender(world, refs, sender, adapted, options)
        world.require_equal(list(outputs), "the list of keys")
        targets = range(1) if to == "first_rank" else range(world.size)
        dtypes = {key: to_torch(saved_dtype(output.dtype, dtype)) for key, output in outputs.items()}
        device = options.device if world.rank in targets else torch.device("meta")
        # Half a bucket: while one round travels, the caller has the tensors of the round before.
        tensors = _gather_full(world, outputs, dtypes, sender, targets, refs, device, options.bucket_bytes // 2)
        with _report_exit():
            yield from tensors
