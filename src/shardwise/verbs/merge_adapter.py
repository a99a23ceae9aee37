"""``merge_adapter``: a LoRA folded into its base, in bounded memory."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Unpack

from shardwise.engines import offline
from shardwise.engines.merging_adapter import (
    ADAPTER,
    about_ties,
    adapter_folder,
    merge_targets,
    merged_tensors,
    open_for_merging,
    pulled_apart,
    require_effect,
    without_effect,
)
from shardwise.engines.outline import ModelOptions, config_of
from shardwise.engines.save_options import in_bytes_of
from shardwise.execution.reading.outgoing import Outgoing
from shardwise.execution.writing.sink import WrittenTensors
from shardwise.formats.checkpoint_index import beside
from shardwise.layout import TensorKind
from shardwise.models import transformers_compat as compat
from shardwise.planning.loads.stored import stored_tensors
from shardwise.planning.saves.merge_plan import plan_merge
from shardwise.report.merge_report import MergeAdapterReport
from shardwise.storage.hub import HubOptions, resolve
from shardwise.storage.reading.beside import Beside
from shardwise.storage.reading.opening import open_storage

DEFAULT_ADAPTER_NAME = "default"


MAX_SHARD_SIZE = "50GB"
"""As in ``save_pretrained`` of transformers 5."""


def merge_adapter(
    base: str | os.PathLike[str],
    adapter: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    adapter_name: str = DEFAULT_ADAPTER_NAME,
    max_shard_size: int | str = MAX_SHARD_SIZE,
    **options: Unpack[ModelOptions],
) -> MergeAdapterReport:
    """Fold a LoRA adapter of PEFT into its base and write the outcome as the hub has it.

    Block by block: a box of the base is read, ``scaling * B @ A`` added in float32 to what of it the adapter
    changes, and the sum rounded once ([Note: One rounding]).

    Args:
        base: a folder, or a hub id in the cache.
        adapter: a folder of PEFT's with ``adapter_config.json``, or a hub id in the cache.
        out: a folder, made where it is not there. A model in it is replaced once all is written.
        adapter_name: of an adapter in a folder of its own inside ``adapter``, or in the names of its tensors.
        max_shard_size: as in ``"5GB"``: of one file's tensors.

    Keyword arguments: see :class:`~shardwise.engines.outline.ModelOptions`; the outcome has their ``dtype``.

    Collective: no.
    Memory: about half a GiB beyond what importing torch and transformers takes, however large the model is.

    Raises:
        ConfigError: an argument cannot be honoured, or an adapter of this kind cannot be merged.
        CoverageError: adapter and base do not fit, naming each tensor; or merging would change nothing.
        FormatError, StorageError: a file contradicts its format, or cannot be read or written.

    Where it raises, a model that was in ``out`` before is there still.
    """
    start = time.perf_counter()
    in_cache = HubOptions(local_files_only=True)
    base_folder, target = resolve(base, in_cache, download=False), Path(out)
    lora_folder = adapter_folder(resolve(adapter, in_cache, download=False), adapter_name)
    offline.require_other_folder(target, [base_folder, lora_folder])
    max_shard_bytes = in_bytes_of(max_shard_size)
    folder = base_folder if base_folder.is_dir() else base_folder.parent
    with ExitStack() as stack:
        lora = stack.enter_context(open_for_merging(lora_folder))
        config = config_of(folder, options)
        opened = open_storage(base_folder)
        reader = stack.enter_context(opened.reader)
        index = offline.index_of(opened, config)
        placer = stack.enter_context(offline.placer_of(reader, index))
        source = offline.read_source(
            folder, config, index, placer, options, lambda built: pulled_apart(built, lora, adapter_name)
        )
        compat.record_conversions(source.built.model, source.built.transforms)
        outputs = source.revert()
        plan = plan_merge(
            lora.config,
            lora.tensors,
            merge_targets(source, outputs),
            adapter_name=adapter_name,
            what=f"{lora_folder} and {base_folder}",
        )
        require_effect(plan, lora, lora_folder)
        changed: set[str] = set()
        joined = beside(index, lora.index, ADAPTER)
        both = stack.enter_context(offline.placer_of(Beside(reader, lora.reader, ADAPTER), joined))
        outgoing = Outgoing(merged_tensors(source, outputs, plan, stored_tensors(joined), changed), both)
        dtype = options.get("dtype", "auto")
        written_dtype = None if dtype == "auto" else str(dtype).removeprefix("torch.")
        untied = bool(offline.ties_undone(source))
        companions = offline.companions_of(folder, lora_folder)
        companions["config.json"] = offline.config_content(folder, dtype=written_dtype, untied=untied)
        writer = stack.enter_context(offline.writer_to(target))

        def check(_: WrittenTensors) -> None:
            if not changed:
                raise without_effect(lora_folder, plan)

        streamed, names = offline.write_out(
            writer,
            outgoing,
            sum(tensor.numel for tensor in source.layout.tensors if tensor.kind is TensorKind.PARAMETER),
            max_shard_bytes=max_shard_bytes,
            companions=companions,
            check=check,
            label="Merging",
        )
        offline.write_templates(target, offline.templates_of([lora_folder, folder]))
    return MergeAdapterReport(
        base=str(base_folder),
        adapter=str(lora_folder),
        out=str(target),
        model_class=type(source.built.model).__name__,
        dtype=str(config.dtype).removeprefix("torch."),
        modules=len(plan.modules),
        unchanged=tuple(name for name in plan.modules if name not in changed),
        tensors=len(streamed.fingerprints),
        nbytes=streamed.nbytes,
        files=names,
        companions=tuple(sorted(companions)),
        notes=(*source.notes, *about_ties(source, plan), *offline.ties_undone(source)),
        seconds=time.perf_counter() - start,
    )
