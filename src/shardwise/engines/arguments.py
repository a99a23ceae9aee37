"""Checks a call's arguments: of the kind that is meant, and the same on all ranks."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import torch

from shardwise.errors import ConfigError, DisagreementError
from shardwise.execution.ranks.messages import OddRanks, digest_of
from shardwise.execution.ranks.world import World
from shardwise.report.names import shown_ranks

T = TypeVar("T")

_OTHER_KINDS = ("torch.distributed.", "torch.nn.modules.module")
"""Modules of kinds that are not ours, and without which nothing can be done; beside torch's own few."""

_SHARDED = "pass sharding=Sharding(mesh=...), and start one process for each device (torchrun)"
_PLANNED = "each rank holds its own shards alone, and shardwise.plan tells how much that is; leave it out"
_QUANTISED = "pass quantization=Nf4()"
_INSTEAD: Mapping[str, str] = {
    "adapter_kwargs": "pass tuning=ExistingLora(folder)",
    "adapter_name": "pass tuning=ExistingLora(folder, adapter=name)",
    "allow_all_kernels": "build the model with transformers, and pass it to shardwise.load",
    "code_revision": "pass revision=...: code and weights are taken from one commit",
    "device_map": _SHARDED,
    "device_mesh": "pass sharding=Sharding(mesh=...)",
    "disable_mmap": "files are read, not mapped; leave it out",
    "distributed_config": "pass sharding=Sharding(mesh=...)",
    "force_download": "remove the repository from the cache (hf cache delete)",
    "from_flax": "convert the weights to safetensors with transformers first",
    "from_tf": "convert the weights to safetensors with transformers first",
    "fusion_config": "build the model with transformers, and pass it to shardwise.load",
    "generation_config": "set model.generation_config afterwards",
    "gguf_file": "convert the file to safetensors with transformers first",
    "ignore_mismatched_sizes": 'pass on_mismatched=Initialize(only=("score.*",)), with the names',
    "kernel_config": "build the model with transformers, and pass it to shardwise.load",
    "load_in_4bit": _QUANTISED,
    "load_in_8bit": "weights in 8 bits are not known here; pass quantization=Nf4()",
    "max_memory": _PLANNED,
    "mirror": "set HF_ENDPOINT",
    "offload_buffers": "pass sharding=Sharding(offload_policy=CPUOffloadPolicy())",
    "offload_folder": "pass sharding=Sharding(offload_policy=CPUOffloadPolicy()); nothing is offloaded to disk",
    "offload_state_dict": _PLANNED,
    "proxies": "set HTTPS_PROXY",
    "state_dict": "build the model, and pass the state to shardwise.set_model_state",
    "tp_plan": "apply it to the model yourself, then fully_shard, and call shardwise.load",
    "tp_size": "apply tensor parallelism yourself, then fully_shard, and call shardwise.load",
    "tqdm_class": "pass options=LoadOptions(progress=False) to have no bar",
    "use_kernels": "build the model with transformers, and pass it to shardwise.load",
    "use_safetensors": "safetensors files are taken where there are any; name another file by its path",
    "weights_only": "no pickle is ever run; leave it out",
}
"""Keywords of transformers' ``from_pretrained`` that mean nothing here, and what to do."""


def require_known(call: str, given: Mapping[str, object], known: Iterable[str]) -> None:
    """Raise for a keyword that a call does not know, as Python does; transformers' own may be there, and None.

    Raises:
        TypeError: naming it, and the nearest there is.
        ConfigError: it is one of transformers' that means nothing here: with what to do instead.
    """
    names = sorted(known)
    strange = [
        name for name, value in given.items() if name not in names and not (name in _INSTEAD and value is None)
    ]
    for name in strange:
        if name not in _INSTEAD:
            near = difflib.get_close_matches(name, names, n=1)
            remedy = f"did you mean {near[0]!r}?" if near else "attributes of the config go into config_overrides"
            raise TypeError(f"{call}() got an unexpected keyword argument {name!r}; {remedy}")
    if strange:
        raise ConfigError(f"{call}() has no {strange[0]}, which transformers knows: {_INSTEAD[strange[0]]}")


def require_meant(hints: Mapping[str, Any], given: Mapping[str, Any], inside: str = "") -> None:
    """Raise for a value that is of another kind than is meant, where one of ours is meant; also inside of ours.

    Args:
        hints: the annotation of each name.
        given: the values.
        inside: what the names are attributes of, for messages.

    Raises:
        ConfigError: naming the argument, and what is meant.
    """
    for name, value in given.items():
        kinds = _kinds(hints.get(name, Any))
        where = f"{inside}.{name}" if inside else name
        if kinds and not _is_of(value, kinds):
            raise ConfigError(_not_meant(where, value, kinds))
        if dataclasses.is_dataclass(value) and not isinstance(value, type) and _is_ours(type(value)):
            attributes = {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
            require_meant(hints_of(type(value)), attributes, where)


@functools.cache
def hints_of(described: Any) -> Mapping[str, Any]:
    """The annotations of a function or class; none where they name what is imported for type checkers only."""
    try:
        return get_type_hints(described)
    except NameError:
        return {}


def world_of(options: object, call: str) -> World:
    """The ranks that options name; where these are of another kind, which will be told, the default ones.

    ``call`` is what users call what the ranks do.
    """
    if not _is_ours(type(options)):
        return World.current(call=call)
    return World.current(getattr(options, "process_group", None), getattr(options, "patience", None), call=call)


def agree_on_call(world: World, check: Callable[[], tuple[T, Mapping[str, str]]]) -> T:
    """Look at a call on every rank: what it comes to. Collective: yes.

    Args:
        world: the ranks.
        check: what the call comes to, and the arguments that ranks must have in common, in words, by name.

    Raises:
        TypeError, ConfigError: the same on every rank, when ``check`` raised it on any.
        DisagreementError: ranks ask for different things.
    """
    found: list[tuple[T, Mapping[str, str]]] = []
    failure: Exception | None = None
    try:
        found.append(check())
    except (TypeError, ConfigError) as error:
        failure = error
    words = found[0][1] if found else {}
    looked = world.all_reduce(lambda: (_fault(failure), digest_of(sorted(words.items()))), _looked_at)
    if isinstance(looked, _ArgumentFault):
        raise (TypeError if looked.is_type_error else ConfigError)(looked.text) from failure
    if looked is not None:
        world.all_reduce(lambda: dict(words), _refuse_difference)
    return found[0][0]


@dataclass(frozen=True, slots=True)
class _ArgumentFault:
    """What is wrong with the arguments of a rank."""

    is_type_error: bool
    text: str


def _fault(failure: Exception | None) -> _ArgumentFault | None:
    return None if failure is None else _ArgumentFault(isinstance(failure, TypeError), str(failure))


def _looked_at(told: Sequence[tuple[_ArgumentFault | None, bytes]]) -> _ArgumentFault | OddRanks | None:
    """The first rank's fault of those that found one; else the ranks that ask for something else."""
    faults = [(rank, fault) for rank, (fault, _) in enumerate(told) if fault is not None]
    if not faults:
        return OddRanks.among([digest for _, digest in told])
    rank, fault = faults[0]
    return fault if len(faults) == len(told) else replace(fault, text=f"rank {rank}: {fault.text}")


def _refuse_difference(told: Sequence[Mapping[str, str]]) -> None:
    first = told[0]
    names = dict.fromkeys(name for words in told for name in words)
    name = next(name for name in names if any(words.get(name) != first.get(name) for words in told))
    ranks = [rank for rank, words in enumerate(told) if words.get(name) != first.get(name)]
    values = f"{told[ranks[0]].get(name, 'left out')} against {first.get(name, 'left out')}"
    raise DisagreementError(
        f"{name} on rank {shown_ranks(ranks)} is not that of rank 0 ({values:.500}); give every rank the same"
    )


def in_words(value: object) -> str:
    """A value as ranks may compare it: without addresses of memory."""
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        return f"{value.__module__}.{value.__qualname__}"
    return repr(value)


def _kinds(hint: Any) -> tuple[Any, ...]:
    """The classes that an annotation allows; none where it does not name one of ours, or cannot be looked at."""
    parts = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    kinds = tuple(types.NoneType if part is None else get_origin(part) or part for part in parts)
    if not all(isinstance(kind, type) for kind in kinds) or not any(_is_meant_strictly(kind) for kind in kinds):
        return ()
    return kinds


def _is_of(value: object, kinds: tuple[Any, ...]) -> bool:
    if isinstance(value, type) and type not in kinds:  # a class has what a protocol asks of its objects
        return False
    return isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))


def _is_meant_strictly(kind: type) -> bool:
    return _is_ours(kind) or kind in (torch.device, torch.dtype) or kind.__module__.startswith(_OTHER_KINDS)


def _is_ours(kind: type) -> bool:
    return kind.__module__.startswith("shardwise.")


def _not_meant(name: str, value: object, kinds: tuple[Any, ...]) -> str:
    names = [kind.__name__ for kind in kinds if kind is not types.NoneType]
    meant = f"{', '.join(names[:-1])} or {names[-1]}" if len(names) > 1 else names[0]
    if isinstance(value, type) and any(kind in value.__mro__ for kind in kinds):
        last = name.rpartition(".")[2]
        return f"{name} is the class {value.__name__}; pass an object of it: {last}={value.__name__}(...)"
    if isinstance(value, functools.partial):
        what = f"a functools.partial of {getattr(value.func, '__name__', value.func)}"
    elif isinstance(value, type):
        what = f"the class {value.__name__}"
    elif isinstance(value, (bool, str, int, float, tuple, list, set, dict, frozenset)):
        what = f"{value!r:.80}, {_a(type(value).__name__)}"
    elif callable(value):
        what = f"a function, {getattr(value, '__name__', type(value).__name__)}"
    else:
        what = _a(type(value).__name__)
    example = 'Classes(names=("LlamaDecoderLayer",))' if "Classes" in names else f"{names[0]}(...)"
    return f"{name} is {what}; what is meant is {meant}, as in {name.rpartition('.')[2]}={example}"


def _a(noun: str) -> str:
    return f"an {noun}" if noun[0] in "AEIOaeio" else f"a {noun}"
