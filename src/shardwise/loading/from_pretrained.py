"""Brings up a transformers model: config, meta model, adapters, ties, wrapping, load."""

import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Unpack, cast, overload

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from shardwise.core.errors import ConfigError, RankMismatchError
from shardwise.core.machine import namespace_id
from shardwise.core.reports import LoadReport
from shardwise.files.checkpoint_index import CheckpointIndex, is_there, parse_object, without_wrappers
from shardwise.files.join_entries import merge_indexes
from shardwise.files.local_reader import CombinedReader, LocalReader, OpenStorage, open_storage
from shardwise.files.open_checkpoint import may_be_read
from shardwise.files.peft_adapter import ADAPTER_CONFIG, adapter_prefix, find_adapter_weights
from shardwise.files.storage import read_limited
from shardwise.files.stored_tensors import stored_tensors
from shardwise.files.urls import AdapterFiles, HubOptions, ModelFiles, is_url, shown, without_secrets
from shardwise.fsdp import wrap
from shardwise.fsdp.gradients import average_replicated_gradients
from shardwise.fsdp.wrap import Sharding
from shardwise.loading import double_quantization, meta_model
from shardwise.loading.load import execute_load, unite_sorted
from shardwise.loading.prepare import LoadOptions, LoadRequest, PreparedLoad, get_comparable_settings, prepare_load
from shardwise.loading.source import OpenSource, open_everywhere, read_index, resolve_everywhere
from shardwise.models import kernels, pretrained
from shardwise.models.lora import peft_private
from shardwise.models.lora.inject import StoredAdapter, Tuned
from shardwise.models.tunings import Full
from shardwise.ranks import call_arguments
from shardwise.ranks.world import Clock, World
from shardwise.transfer.read import ReadExecutor

_MAX_CONFIG_BYTES = 10_000_000
_LEFT_OUT = (
    f"{ADAPTER_CONFIG} beside the model: this adapter is not read. Merge it (shardwise merge-adapter) or, in "
    "Python, pass tuning=ExistingLora(...) with the folder"
)

_log = logging.getLogger(__name__)


def check_call(
    name_or_path: str | os.PathLike[str], keywords: meta_model.PretrainedOptions, *, asks_for_report: bool
) -> dict[str, str]:
    """Check the arguments of :func:`from_pretrained`. Return the settings that must be equal on all ranks.

    Raises:
        ConfigError: the name has the wrong type, or a report is requested for a model that is not loaded.
    """
    if not isinstance(name_or_path, (str, os.PathLike)):
        raise ConfigError(
            f"name_or_path is a {type(name_or_path).__name__}. Pass a directory, a hub id or a URL (readers go "
            "into shardwise.load)"
        )
    if asks_for_report and not keywords.get("load_weights", True):
        raise ConfigError(
            "output_loading_info=True: nothing is loaded with load_weights=False. Leave one of them out"
        )
    load_weights, sharding = keywords.get("load_weights", True), keywords.get("sharding", Sharding())
    if keywords.get("use_kernels", False):
        kernels.require_hub_kernels(load_weights=load_weights, is_compiled=sharding.compile is not False)
    return {
        # What may differ between ranks is left out: the path, the device, progress, timeouts.
        "the kind of name_or_path": "a URL" if is_url(name_or_path) else "a path or a hub id",
        **meta_model.comparable_model_settings(keywords),
        **{f"sharding.{name}": value for name, value in wrap.comparable_settings(sharding).items()},
        "tuning": type(keywords.get("tuning", Full())).__name__,
        "quantization": repr(keywords.get("quantization")),
        "load_weights": repr(load_weights),
        **get_comparable_settings(
            meta_model.get_consent(keywords), keywords.get("buffers", {}), keywords.get("options", LoadOptions())
        ),
    }


def build_and_load(
    world: World, name_or_path: str | os.PathLike[str], keywords: meta_model.PretrainedOptions, clock: Clock
) -> tuple[PreTrainedModel, LoadReport | None]:
    """Build a model on meta, wrap it and load it. Ranks have already compared their arguments.

    There is no report if nothing is loaded.

    Collective: yes.
    Memory, errors: as in :func:`~shardwise.loading.from_pretrained.from_pretrained`.
    """
    options = keywords.get("options", LoadOptions())
    with world.collective("build the mesh"):
        sharding = wrap.with_mesh(keywords.get("sharding", Sharding()), options.process_group)
    report = None
    with ExitStack() as stack:
        with clock.phase("index"):
            opened = open_model(world, name_or_path, keywords, stack)
        with clock.phase("plan"):
            # After open_model(), because a tuning may depend on the configs of stored adapters.
            with world.collective("describe the tuning"):
                tuning = meta_model.comparable_tuning(keywords, opened.adapters)
                left_out = not opened.adapters and (opened.directory / ADAPTER_CONFIG).is_file()
            world.require_equal(tuning, "what is tuned, and how,")
            built, pairs = build_together(world, opened, keywords)
            untied, already_read_bytes = decide_ties(world, built, pairs, opened.source, options)
            casts_to = None if sharding.mesh is None else sharding.mp_policy.param_dtype
            # Ties and adapters before fully_shard: it shards a shared parameter once, and puts the matrices of a
            # LoRA into the group of their block.
            with world.collective("prepare for training"):
                # First of all: [Note: Kernels before sharding] in models/kernels.py.
                liger, kind = keywords.get("liger_kernel_config"), type(built.model).__name__
                if liger is not None and not kernels.apply_liger(built.model, liger) and world.rank == 0:
                    _log.warning("%s: liger-kernel has no kernels for it. It runs without", kind)
                tuned = meta_model.prepare_for_training(
                    built, untied, keywords, adapters=opened.adapters, casts_to=casts_to
                )
                if left_out:
                    tuned = replace(tuned, notes=(_LEFT_OUT, *tuned.notes))
                    if world.rank == 0:
                        _log.warning("%s: %s", without_secrets(os.fspath(name_or_path)), _LEFT_OUT)
                if keywords.get("use_kernels", False):
                    kernels.require_whole_experts(tuned.base)
            with world.collective("wrap and shard"):
                wrap.prepare_blocks(tuned.base, sharding)
                if sharding.mesh is not None:
                    wrap.wrap(tuned.base, sharding, tuned.kept_whole)
                    wrap.mark_sharded(tuned.model, sharding.mesh)
                else:
                    wrap.warn_of_unused_dtypes(tuned.base, sharding.mp_policy)
        if keywords.get("load_weights", True):
            with clock.phase("plan"), world.collective("plan the load"):
                prepared = prepare_tuned(world, opened.source, tuned, keywords, already_read_bytes)
            report = execute_load(world, tuned.model, opened.source, prepared, clock)
            if keywords.get("use_kernels", False):
                with world.collective("load kernels of the hub"):
                    tuned.base.set_use_kernels(True)
        else:
            # Nothing is read, so no scales are nested after it.
            double_quantization.remove_scale_parameters(tuned.model)
            with call_arguments.comparing_arguments(world, "the config") as exchange:
                exchange.local = pretrained.get_settings(tuned.base)
    pretrained.record_conversions(tuned.base, built.transforms, is_distributed=opened.index.is_distributed)
    # Parameters on meta, too: their hooks go over to the ones that get memory.
    if sharding.mesh is not None:
        average_replicated_gradients(tuned.model, sharding.mesh)
    return cast(PreTrainedModel, tuned.model), report  # PEFT's model forwards attributes to it


def prepare_tuned(
    world: World,
    source: OpenSource,
    tuned: Tuned,
    keywords: meta_model.PretrainedOptions,
    already_read_bytes: int,
) -> PreparedLoad:
    """Plan the load of a model that has been wrapped, on this rank."""
    request = LoadRequest(
        bindings=double_quantization.add_scale_parameters(tuned.model, tuned.bindings),
        consent=meta_model.get_consent(keywords),
        buffers=keywords.get("buffers", {}),
        options=keywords.get("options", LoadOptions()),
        already_read_bytes=already_read_bytes,
        additions=tuned.additions,
        is_tuned="tuning" in keywords,
        notes=tuned.notes,
    )
    return prepare_load(world, tuned.model, source, request)


@dataclass(frozen=True)
class OpenModel:
    """Config and headers of a model that is to be loaded.

    Attributes:
        directory: the folder of the small files, or a file in it.
        config: config of the model.
        index: headers of the model's own files.
        source: reader of the model's files, and of the files of adapters to train.
        adapters: the adapters to train, by name.
    """

    directory: Path
    config: PreTrainedConfig
    index: CheckpointIndex
    source: OpenSource
    adapters: Mapping[str, StoredAdapter]


def open_model(
    world: World, name_or_path: str | os.PathLike[str], keywords: meta_model.PretrainedOptions, stack: ExitStack
) -> OpenModel:
    """Read the config and all headers. Readers are closed with ``stack``. Collective: yes."""
    hub = keywords.get("hub", HubOptions())
    files = ModelFiles(code=keywords.get("trust_remote_code", False))
    # Configs first: they tell the class, and the class which files it needs.
    name = os.fspath(name_or_path)
    is_remote = is_url(name_or_path)
    if is_remote:
        with world.broadcast("read the configs") as exchange:
            if world.rank == 0:
                exchange.local = _read_configs(name, hub)
                if files.code:
                    _require_no_code(name, exchange.local)
        with world.collective("write the configs"):
            # transformers reads the configs from a folder. The weights are never on disk.
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shardwise-")))
            for file, content in exchange.result.items():
                (directory / file).write_bytes(content)
    else:
        # A path, or a repository of which the files that every model needs are downloaded.
        directory = resolve_everywhere(world, name_or_path, hub, files)
    if files.code and world.size > 1:
        # transformers copies the code of the config and the model into a cache and imports it there. Two processes
        # must not write it at once, so one rank is the first of all that see the same files.
        is_first = world.is_first_at(namespace_id("mnt"))
        with world.collective("download the checkpoint's code"):
            if is_first:
                meta_model.get_model_class(directory, meta_model.load_config(directory, keywords), keywords)
    with world.collective("load the config"):
        config = meta_model.load_config(directory, keywords)
    config.name_or_path = without_secrets(name)
    # Some classes load further files. Only the config says so, and then they are downloaded, too.
    extra: tuple[str, ...] = getattr(type(config), "extra_files", ())
    if extra and not is_remote:
        directory = resolve_everywhere(world, name_or_path, hub, replace(files, extra=extra))
    storage = open_everywhere(world, name_or_path if is_remote else directory, hub, stack)
    weights_name = getattr(config, "transformers_weights", None)
    source = read_index(world, storage, weights_name=weights_name, extra=extra)
    # The adapters of the tuning join the index and the reader one by one. Names of their files have a prefix.
    adapters: dict[str, StoredAdapter] = {}
    joined = source
    for adapter, folder in keywords.get("tuning", Full()).folders().items():
        joined, stored = _join_adapter(world, joined, adapter, folder, keywords, stack)
        adapters[adapter] = replace(stored, notes=_list_other_base(stored, name))
    return OpenModel(directory, config, source.index, joined, adapters)


def _join_adapter(
    world: World,
    source: OpenSource,
    name: str,
    name_or_path: str | os.PathLike[str],
    keywords: meta_model.PretrainedOptions,
    stack: ExitStack,
) -> tuple[OpenSource, StoredAdapter]:
    """Join a checkpoint and the adapter that the tuning starts from. Collective: yes.

    Raises:
        FormatError: a file is not there.
        ConfigError: it is no LoRA, or PEFT cannot read its config.
    """
    # Another repository than the base's, with revisions and folders of its own.
    hub = replace(keywords.get("hub", HubOptions()), revision=None, subfolder="")
    folder = resolve_everywhere(world, name_or_path, hub, AdapterFiles())
    with world.collective("open the adapter"):
        file, config = find_adapter_weights(folder), peft_private.read_lora_config(folder)
        reader = stack.enter_context(LocalReader(folder))
    adapter_source = read_index(world, OpenStorage(reader, file))
    prefix = adapter_prefix(name)
    index, notes = without_wrappers(adapter_source.index)
    # One index and one reader for both, so that a load plans and reads them together. The prefix keeps their names
    # apart: both may have a model.safetensors.
    identities = {f"{prefix}/{file}": identity for file, identity in adapter_source.identities.items()}
    joined = replace(
        source,
        index=merge_indexes(source.index, index, prefix),
        notes=(*source.notes, *notes),
        reader=CombinedReader(source.reader, reader, prefix),
        identities={**source.identities, **identities},
    )
    # The adapter's tensors as leaves of the joined index, under the keys of its own file.
    stored = stored_tensors(joined.index).items()
    tensors = {key.removeprefix(f"{prefix}/"): item for key, item in stored if key.startswith(f"{prefix}/")}
    return joined, StoredAdapter(str(folder), config, tensors)


def _list_other_base(adapter: StoredAdapter, name: str) -> tuple[str, ...]:
    """Return a note if an adapter's config names another base. Names are compared without the folders around."""
    recorded = str(adapter.config.base_model_name_or_path or name)
    if Path(recorded).name == Path(name).name:
        return ()
    return (f"the adapter's config has the base {shown(recorded)}, and this is {shown(without_secrets(name))}",)


def _read_configs(url: str, hub: HubOptions) -> dict[str, bytes]:
    with open_storage(url, hub).reader as reader:
        # A refused access is an error of the one, and of the other means that it may not exist.
        names = ["config.json"] if is_there(reader, "config.json") else []
        names += ["generation_config.json"] if may_be_read(reader, "generation_config.json") else []
        return {name: read_limited(reader, name, _MAX_CONFIG_BYTES) for name in names}


def _require_no_code(url: str, contents: Mapping[str, bytes]) -> None:
    """Require that the model's code is in transformers, or on the hub ("repository--module.Class").

    Raises:
        ConfigError: it is beside the config.
    """
    what = f"config.json in {without_secrets(url)}"
    config = parse_object(contents.get("config.json", b"{}"), what=what, allow_constants=True)
    auto_map = config.get("auto_map")
    for auto, place in auto_map.items() if isinstance(auto_map, dict) else ():
        if auto.startswith(("AutoConfig", "AutoModel")) and "--" not in str(place):
            raise ConfigError(
                f"{without_secrets(url)}: contains its own model code ({place}), which is not read from a URL. "
                "Download it and pass its folder, or leave trust_remote_code out"
            )


def build_together(
    world: World, opened: OpenModel, keywords: meta_model.PretrainedOptions
) -> tuple[meta_model.MetaModel, list[tuple[str, str]]]:
    """Build on every rank. Return also the declared ties that are stored twice. Collective: yes."""
    with world.all_gather("build the model on meta") as exchange:
        built = meta_model.build_meta_model(
            opened.directory, opened.config, opened.index, keywords, keywords.get("resize_vocab")
        )
        exchange.local = built.ties_stored_twice()
    pairs: list[list[tuple[str, str]]] = exchange.result
    if mismatched := world.find_mismatched(pairs):
        raise RankMismatchError(
            f"the list of declared ties that are stored twice on rank {mismatched.text} is not that of rank "
            f"{world.global_ranks[0]}. Give every rank the same config and versions of transformers"
        )
    return built, pairs[0]


def decide_ties(
    world: World,
    built: meta_model.MetaModel,
    pairs: Sequence[tuple[str, str]],
    source: OpenSource,
    options: LoadOptions,
) -> tuple[set[str], int]:
    """Compare declared ties that are stored under both names. Return those that stay untied, and the bytes read.

    The equal ones are set as ``built.equal_ties``. Collective: yes.
    """
    if not pairs:
        return set(), 0
    # Declared ties that are stored under both names are tied only if their values are equal, as in
    # transformers.
    executor = ReadExecutor(source.reader, source.index, options.budget_bytes, world)
    with world.all_reduce("compare ties", unite_sorted) as exchange:
        exchange.local = meta_model.compare_ties(built, pairs, executor)
    untied = set(exchange.result)  # of any rank: each compares its own part of the rows
    built.equal_ties = frozenset({name for name, _ in pairs} - untied)
    return untied, executor.read_bytes


@overload
def from_pretrained(
    name_or_path: str | os.PathLike[str],
    *,
    output_loading_info: Literal[False] = False,
    **keywords: Unpack[meta_model.PretrainedOptions],
) -> PreTrainedModel: ...


@overload
def from_pretrained(
    name_or_path: str | os.PathLike[str],
    *,
    output_loading_info: Literal[True],
    **keywords: Unpack[meta_model.PretrainedOptions],
) -> tuple[PreTrainedModel, LoadReport]: ...


def from_pretrained(
    name_or_path: str | os.PathLike[str],
    *,
    output_loading_info: bool = False,
    **keywords: Unpack[meta_model.PretrainedOptions],
) -> PreTrainedModel | tuple[PreTrainedModel, LoadReport]:
    """Load a transformers model from a local directory, a hub id or a URL, sharded by FSDP2.

    Every rank builds the model on meta, ties the tensors that the checkpoint ties, wraps blocks with
    ``fully_shard`` over the mesh (default: all ranks of the default process group, or no sharding without a process
    group), and reads its own bytes. Returns the model in evaluation mode, as transformers does, or the model and
    the :class:`~shardwise.report.LoadReport` with ``output_loading_info=True``.

    Keyword arguments: see :class:`~shardwise.loading.meta_model.PretrainedOptions`,
    :class:`~shardwise.loading.meta_model.FilledOptions` and :class:`~shardwise.loading.meta_model.ModelOptions`.

    Collective: yes, over ``options.process_group`` (default: all ranks), whose ranks are those of the mesh.
    Memory: this rank's shards and ``options.budget_bytes``.

    Raises:
        ConfigError: the config or an argument cannot be honored.
        ShardingError: the wrap policy matches nothing, or the model cannot be sharded on the mesh. A mesh with
            other ranks than the group is an error where it is passed, without waiting for other ranks.
        KeyMismatchError, FormatError, StorageError, RankMismatchError: as for
            :func:`~shardwise.loading.load.load`.
    """
    clock = Clock()
    world = call_arguments.get_world(keywords.get("options", LoadOptions()), "from_pretrained")
    wrap.require_same_ranks(keywords.get("sharding"), world.group)
    with world:
        with world.collective("check the arguments"):
            keywords = meta_model.check_keywords("from_pretrained", keywords, meta_model.PretrainedOptions)
        with call_arguments.comparing_arguments(world) as exchange:
            exchange.local = check_call(name_or_path, keywords, asks_for_report=output_loading_info)
        # In the mode, parameters could not be trained, nor written to by other threads.
        with torch.inference_mode(False):
            model, report = build_and_load(world, name_or_path, keywords, clock)
    return (model, report) if output_loading_info and report is not None else model
