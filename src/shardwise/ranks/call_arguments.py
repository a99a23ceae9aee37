"""Checks the arguments of a call against their annotations, and between ranks."""

import dataclasses
import functools
import logging
import os
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch
import torch.distributed as dist

from shardwise.core.errors import ConfigError, RankMismatchError, unknown_keyword
from shardwise.ranks.world import Exchange, MismatchedRanks, World, repr_digest

_log = logging.getLogger(__name__)

_WITH_WHOLE_MODELS = ("from_pretrained", "load", "shard")
"""Calls that leave each process a whole model of its own if there is no process group."""

_OTHER_KINDS = ("torch.distributed.", "torch.nn.modules.module")
"""Modules of further classes whose arguments are checked."""

_SHARDED = "Pass sharding=Sharding(mesh=...), and start one process for each device (torchrun)"
_OFFLOADED = "Pass sharding=Sharding(offload_policy=CPUOffloadPolicy()). Nothing is offloaded to disk"
_OWN_MODEL = "Build the model with transformers, and pass it to shardwise.load"
_INSTEAD: Mapping[str, str] = {
    **dict.fromkeys(("device_map", "device_mesh", "distributed_config"), _SHARDED),
    **dict.fromkeys(("cpu_offload", "offload_buffers", "offload_folder", "offload_state_dict"), _OFFLOADED),
    **dict.fromkeys(("fusion_config", "tp_plan", "tp_size"), _OWN_MODEL),
    "kernel_config": "Call model.set_use_kernels(True, kernel_config) on the result",
    "add_pooling_layer": 'Leave it out, and pass on_missing=Initialize(only=("*pooler.*",)) if it is not stored',
    "compile": "Pass sharding=Sharding(compile=True)",
    "gguf_file": "GGUF is not supported. Convert it to safetensors",
    "gradient_checkpointing": "Pass sharding=Sharding(activation_checkpointing=True)",
    "ignore_mismatched_sizes": 'Pass on_mismatched=Initialize(only=("score.*",)), with the names',
    "load_in_4bit": "Pass quantization=Nf4()",
    "load_in_8bit": "8-bit weights are not supported. Pass quantization=Nf4()",
    "max_memory": "Leave it out. Each rank holds only its own shards, which shardwise.plan estimates",
    "peft_config": "Pass tuning=Lora(config)",
    "state_dict": "Build the model, and pass the state to shardwise.set_model_state_dict",
    "use_auth_token": "Pass token",
    **dict.fromkeys(("force_download", "generation_config", "code_revision"), "It is not supported. Leave it out"),
    "variant": "Pass the path of the file or of the index, such as model.fp16.safetensors, in place of the folder",
    "use_safetensors": "Leave it out. safetensors are preferred to .bin files, whose pickle is not executed",
}
"""Keywords of transformers, TRL and FSDP that ``from_pretrained`` does not have, and what to do instead."""


def require_known(call: str, given: Mapping[str, object], kind: type) -> None:
    """Reject keywords that a call does not have. Those of transformers with value None are allowed.

    Args:
        call: name of the public function.
        given: the keywords.
        kind: declaration of the keywords that the call has.

    Raises:
        ConfigError: an unknown keyword. The message has the alternative, or the nearest keyword.
    """
    known = get_hints(kind)
    for name, value in given.items():
        if name not in known and not (name in _INSTEAD and value is None):
            raise unknown_keyword(call, name, known, _INSTEAD)


def check_options(hints: Mapping[str, Any], given: Mapping[str, Any], inside: str = "") -> None:
    """Reject values that do not fit their annotations, nested ones included.

    Args:
        hints: the annotation of each name.
        given: the values.
        inside: prefix of the argument names, for messages.

    Raises:
        ConfigError: an argument has the wrong type. The message has the expected one.
    """
    for name, value in given.items():
        kinds, choices = _get_allowed(hints.get(name, Any))
        where = f"{inside}.{name}" if inside else name
        # First the words of a Literal, then the classes, then the fields of options within options.
        if isinstance(value, str) and value in choices:
            continue
        if choices and (isinstance(value, str) or not kinds):
            classes: list[str] = []
            for kind in kinds:
                if kind is torch.dtype:
                    classes.append("a dtype such as torch.float32")
                elif kind is not types.NoneType:
                    names = f"names=({value!r:.80},)" if "names" in get_hints(kind) else "..."
                    classes.append(f"{kind.__name__}({names})")
            known = [*map(repr, choices), *classes]
            raise ConfigError(f"{where}={value!r:.80} is not known. Pass one of {', '.join(known)}.")
        if kinds and not _is_instance(value, kinds):
            raise ConfigError(_type_error(where, value, kinds))
        if dataclasses.is_dataclass(value) and not isinstance(value, type) and _is_ours(type(value)):
            attributes = {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
            check_options(get_hints(type(value)), attributes, where)


@functools.cache
def get_hints(described: Any) -> Mapping[str, Any]:
    """Return the annotations of a function or class.

    Empty if they refer to names imported for type checkers only.
    """
    try:
        return get_type_hints(described)
    except NameError:
        return {}


@functools.cache
def _warn_of_missing_group(world_size: str) -> None:
    """Warn, once a process, that a launcher has started several processes which do not know of each other."""
    if world_size.isdecimal() and int(world_size) > 1:
        _log.warning(
            "WORLD_SIZE=%s: there are several processes and no process group, so each has a whole model of its "
            "own. Call torch.distributed.init_process_group() before the model is loaded or sharded",
            world_size,
        )


def get_world(options: object, call: str) -> World:
    """Return the ranks of the options, or the default ones if the options have the wrong type.

    ``call`` is the public name of the call.
    """
    if call in _WITH_WHOLE_MODELS and not dist.is_initialized():
        _warn_of_missing_group(os.environ.get("WORLD_SIZE", ""))  # noqa: TID251 - of the launcher
    if not _is_ours(type(options)):
        return World.current(call=call)
    return World.current(getattr(options, "process_group", None), getattr(options, "timeouts", None), call=call)


@contextmanager
def comparing_arguments(world: World, what: str = "the list of arguments") -> Iterator[Exchange]:
    """Check the arguments of a call on every rank in a block, and that they are the same on all. Collective: yes.

    The block sets ``local`` to the arguments that ranks must have in common, as text by name. ``what`` names them
    all in the message.

    Raises:
        ShardwiseError: the same on every rank, if the block raised it on any.
        RankMismatchError: ranks have different arguments. The message has their names and values.
    """
    with world.all_reduce("check the arguments", world.find_mismatched) as exchange:
        yield exchange
        settings: Mapping[str, str] = exchange.local
        exchange.local = repr_digest(sorted(settings.items()))
    mismatched: MismatchedRanks | None = exchange.result
    if mismatched is not None:
        raise make_mismatch_error(world, mismatched, find_differences(world, mismatched, settings), what)


def make_mismatch_error(
    world: World,
    mismatched: MismatchedRanks,
    pairs: Mapping[str, tuple[object, object]],
    what: str = "the list of arguments",
) -> RankMismatchError:
    """Return the error for arguments that differ, by name with the values of rank 0 and of the first other rank."""
    shown: list[str] = []
    for name, (first, other) in pairs.items():
        values = f"{other} against {first}"
        shown.append(f"{name} ({values:.500})")
    return RankMismatchError(
        f"{what} on rank {mismatched.text} is not that of rank {world.global_ranks[0]}: {', '.join(shown)}. "
        "Give every rank the same"
    )


def find_differences(
    world: World, mismatched: MismatchedRanks, local: Mapping[str, object]
) -> dict[str, tuple[object, object]]:
    """Return by name the values of rank 0 and of the first other rank, if they differ. Collective: yes."""
    # All ranks take part, but only the two that are compared send anything.
    is_compared = world.rank in (0, mismatched.first)
    values = world.all_gather_object(local if is_compared else {})
    return pair_differences(values[0], values[mismatched.first])


def pair_differences(first: Mapping[str, object], other: Mapping[str, object]) -> dict[str, tuple[object, object]]:
    """Return by name the values that differ."""
    # In the order of the settings: later ones may differ because of the first.
    pairs = {name: (first.get(name, "left out"), other.get(name, "left out")) for name in {**first, **other}}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _get_allowed(hint: Any) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    """Return the classes and the strings that an annotation allows. No classes if none of them is checked."""
    # For example Nf4 | Literal["auto"] | None has the classes Nf4 and NoneType, and the choice "auto". Of str | int
    # nothing is checked: only annotations with a class of shardwise or of torch are.
    members = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    kinds: list[Any] = []
    choices: list[str] = []
    for member in members:
        if get_origin(member) is Literal:
            choices += get_args(member)
        else:
            kinds.append(types.NoneType if member is None else get_origin(member) or member)
    if not all(isinstance(kind, type) for kind in kinds) or not any(map(_is_strict, kinds)):
        kinds = []
    return tuple(kinds), tuple(choices)


def _is_instance(value: object, kinds: tuple[Any, ...]) -> bool:
    if isinstance(value, type) and type not in kinds:  # a class has the attributes of a protocol, too
        return False
    return isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))


def _is_strict(kind: type) -> bool:
    return _is_ours(kind) or kind in (torch.device, torch.dtype) or kind.__module__.startswith(_OTHER_KINDS)


def _is_ours(kind: type) -> bool:
    return kind.__module__.startswith("shardwise.")


def _type_error(name: str, value: object, kinds: tuple[Any, ...]) -> str:
    names = [kind.__name__ for kind in kinds if kind is not types.NoneType]
    # "lora" and a LoraConfig both mean Lora: the class whose name begins the text comes first.
    text = value if isinstance(value, str) else type(value).__name__
    names.sort(key=lambda kind: not text.lower().startswith(kind.lower()))
    meant, last = " or ".join(names), name.rpartition(".")[2]
    if isinstance(value, type):
        return f"{name} is the class {value.__name__}. Pass an object of it: {last}={value.__name__}(...)"
    kind_name = type(value).__name__
    config = f"{kind_name}(...)" if kind_name.startswith(names[0]) else "..."  # a LoraConfig goes into Lora
    return f"{name} is {value!r:.80}, of type {kind_name}. Pass {meant}, as in {last}={names[0]}({config})"
