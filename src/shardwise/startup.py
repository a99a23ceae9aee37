"""Compares several ways to bring up a model for training: memory, seconds, and the values of the model.

[Note: Growth] The level of a rank is its first sample, after everything was imported. Its growth is memory of its
own or shared (RssAnon, RssShmem) over that level; the growth of the machine is the largest sum over its ranks at
one moment. Pages of mapped files belong to the kernel, which takes them back; they are reported apart.

[Note: Arms] Each is written as a careful user writes it, in the form that costs it least. If rank 0 alone loads,
the others have their model on meta from the beginning and open no file; ``from_pretrained`` of transformers, with
accelerate's environment alone, has them read everything. ``fsdp2_prepare_model`` is called as
``Accelerator.prepare`` calls it: ``Accelerator`` itself offers FSDP on accelerators only.
"""

import contextlib
import gc
import importlib.util
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise import pictures
from shardwise.engines.bringing_up import from_pretrained
from shardwise.engines.load_plan import LoadOptions
from shardwise.engines.observe import observe
from shardwise.errors import ConfigError, FormatError, ShardwiseError, StorageError
from shardwise.execution.memory import host_memory, memory_of
from shardwise.execution.processes import RanksLateError, this_device
from shardwise.formats.contract import CheckpointIndex
from shardwise.formats.opening import open_checkpoint
from shardwise.models.view import local_tensor, raw_bytes
from shardwise.observing import phase
from shardwise.planning.fingerprints import fingerprint
from shardwise.report.names import in_bytes
from shardwise.storage.remote import resolve

OURS = "shardwise"
PHASES = LOAD, WRAP, OPTIMIZER = "load", "wrap", "optimizer"

SLACK_BYTES = 32 << 20
"""Growth that our arm may have on each rank, over its shards and its budget."""

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_BLOCK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Arm:
    """One way: a phrase, what carries it out (model_dir, dtype), and the ranks that hold the whole model once."""

    does: str
    bring_up: Callable[[str, str], Any]
    holders: str = ""


def _missing(arm: str) -> str:
    """Return why an arm cannot run here; "" if it can."""
    if arm.startswith("accelerate") and importlib.util.find_spec("accelerate") is None:
        return "accelerate is not installed; pip install 'shardwise[accelerate]'"
    return ""


@dataclass(frozen=True)
class ArmOnRank:
    """Bytes of a rank in the end, the budget that a load of ours has, and fingerprints of whole tensors."""

    host_bytes: int
    budget_bytes: int
    values: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class StartupOptions:
    """The model (a folder, or a repository of the hub), the ranks, and the arms ("" for all, else with commas).

    ``out`` is a new or empty folder. ``limit`` are seconds that an arm may take, with the start of its ranks.
    """

    model: str
    ranks: int
    out: Path
    arms: str = ""
    dtype: str = "float32"
    limit: float = 1800.0


@dataclass(frozen=True)
class ArmRun:
    """The run of an arm.

    Attributes:
        folder: of the run.
        seconds: from the first rank's beginning of loading to the last one's end of wrapping.
        phases: seconds of each phase, on the rank where it took longest.
        growth_bytes: of all ranks of the machine together, at the worst moment.
        fullest_bytes: of the rank that grew most.
        mapped_bytes: growth of mapped files, all ranks together, at the worst moment.
        device_bytes: the most in tensors of one accelerator.
        limit_bytes: growth that our arm may have: shards, and for each rank the budget and some slack.
        values: fingerprints by name.
    """

    arm: str
    folder: str
    seconds: float
    phases: Mapping[str, float]
    growth_bytes: int
    fullest_bytes: int
    mapped_bytes: int
    device_bytes: int
    limit_bytes: int = 0
    values: Mapping[str, str] = field(default_factory=dict, repr=False)
    panel: pictures.Panel | None = field(default=None, repr=False)


@dataclass(frozen=True)
class StartupResult:
    """The runs by arm, the reasons of arms that did not run, and the files of the report."""

    model: str
    ranks: int
    dtype: str
    runs: Mapping[str, ArmRun]
    not_run: Mapping[str, str]
    files: Sequence[str] = ()

    @property
    def holds(self) -> bool:
        """Whether our arm has kept its limit."""
        ours = self.runs.get(OURS)
        return ours is None or ours.growth_bytes <= ours.limit_bytes

    def verdict(self, arm: str) -> str:
        """Return "same" if an arm has made the model that ours, or the first arm, has made."""
        first, own = next(iter(self.runs.values())).values, self.runs[arm].values
        names = [*{**first, **own}]
        different = [name for name in names if own.get(name) != first.get(name) or not own[name]]
        return f"{len(different)} of {len(names)} differ, as {different[0]}" if different else "same"

    def table(self) -> pictures.Table:
        """Return the arms in rows: seconds and memory."""
        names = ["growth_bytes", "fullest_bytes", "mapped_bytes"]
        head = ["arm", "seconds", "growth", "fullest rank", "mapped files"]
        if any(run.device_bytes for run in self.runs.values()):
            names, head = [*names, "device_bytes"], [*head, "device"]
        rows = [
            (arm, f"{run.seconds:.2f}", *(in_bytes(getattr(run, name)) for name in names), self.verdict(arm))
            for arm, run in self.runs.items()
        ]
        return pictures.Table("Ways to bring up a model", (*head, "values"), rows)

    def notes(self) -> list[str]:
        """Return what the table does not have: arms that did not run, and the limit."""
        found = [f"{arm} did not run: {reason}" for arm, reason in self.not_run.items()]
        if (ours := self.runs.get(OURS)) is not None:
            growth, limit = in_bytes(ours.growth_bytes), in_bytes(ours.limit_bytes)
            verdict = "holds" if self.holds else "DOES NOT HOLD"
            found.append(f"limit of {OURS}: {growth} of {limit} (shards, a budget and 32 MiB a rank), {verdict}")
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, without fingerprints."""
        arms = {
            arm: {**asdict(replace(run, values={}, panel=None)), "values": self.verdict(arm)}
            for arm, run in self.runs.items()
        }
        place = {"model": self.model, "ranks": self.ranks, "dtype": self.dtype}
        return {**place, "arms": arms, "not_run": dict(self.not_run), "holds": self.holds, "files": [*self.files]}


def compare_startup(
    options: StartupOptions, start: Callable[..., list[ArmOnRank]], tell: Callable[[str], None]
) -> StartupResult:
    """Run the arms, and write runs, figures, and the report into the folder.

    ``start(size, arm, model, dtype, folder, timeout_s=...)`` brings up a model by an arm on fresh ranks and returns
    what they have; ``tell`` gets lines for the console.

    Raises:
        ShardwiseError: there is no such model or arm, the folder is in use, or our arm, or all, have failed.
    """
    names = _arms_named(options.arms)
    place = resolve(options.model)
    index = open_checkpoint(place)
    _create_empty(options.out)
    _read_once(place)
    reasons = {name: _missing(name) or _lack_of_room(name, index, options) for name in names}
    not_run = {name: reason for name, reason in reasons.items() if reason}
    runs: dict[str, ArmRun] = {}
    for name in [name for name in names if name not in not_run]:
        tell(f"{name}: {ARMS[name].does}")
        try:
            runs[name] = _run_arm(name, place, options, start)
        except ShardwiseError as error:
            if name == OURS:
                raise
            not_run[name] = str(error).strip().rpartition("\n")[2]
            tell(f"{name}: {not_run[name]}")
    if not runs:
        raise ConfigError(f"no arm could run ({'; '.join(f'{name}: {why}' for name, why in not_run.items())})")
    result = StartupResult(options.model, options.ranks, options.dtype, runs, not_run)
    try:
        (options.out / "startup.json").write_text(json.dumps(result.to_dict(), indent=1) + "\n")
    except OSError as error:
        raise StorageError(f"{options.out}: it cannot be written ({error.strerror or error}); make room") from error
    return replace(result, files=_draw(options.out, result, tell))


def _arms_named(text: str) -> list[str]:
    """Return the arms of a list with commas, in their usual order.

    Raises:
        ConfigError: one does not exist, or lacks a package.
    """
    names = [name.strip() for name in text.split(",")] if text else list(ARMS)
    if unknown := [name for name in names if name not in ARMS]:
        raise ConfigError(f"--arms={text!r}: there is no {unknown[0]!r}, but {', '.join(ARMS)}")
    for name in names:
        if text and (reason := _missing(name)):
            raise ConfigError(f"--arms={text!r}: {name} cannot run here: {reason}")
    return [name for name in ARMS if name in names]


def _lack_of_room(arm: str, index: CheckpointIndex, options: StartupOptions) -> str:
    """Return why an arm does not fit on this machine; "" if it does.

    Values that are wanted as they are stored stay in mapped files, which take no memory from anybody.
    """
    tensors = index.tensors()
    numbers = sum(tensor.nbytes // max(tensor.dtype.itemsize, 1) for tensor in tensors)
    wanted_bytes = numbers * _ITEM_BYTES.get(options.dtype, 0)
    if wanted_bytes in (0, sum(tensor.nbytes for tensor in tensors)):
        return ""
    holders = ARMS[arm].holders
    # Of all ranks at once: whole models, shards, and tensors that are sent whole.
    needed = {"": 1, "rank 0": 3, "every rank": options.ranks + 1}[holders] * wanted_bytes
    free = host_memory()
    if free is None or needed <= free:
        return ""
    return f"{holders} holds the whole model: {in_bytes(needed)} in all, and {in_bytes(free)} are free"


def _create_empty(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        used = next(out.iterdir(), None)
    except OSError as error:
        raise StorageError(f"--out={out}: it cannot be created ({error.strerror or error})") from error
    if used is not None:
        raise StorageError(f"--out={out}: it has {used.name} in it. Name a new or an empty folder.")


def _read_once(place: Path) -> None:
    """Read the files, so that the first arm finds them in the page cache as the others do."""
    for path in [place] if place.is_file() else sorted(place.iterdir()):
        with contextlib.suppress(OSError):
            if path.is_file():
                with path.open("rb", buffering=0) as file:
                    while file.read(_BLOCK_BYTES):
                        pass


def _run_arm(name: str, place: Path, options: StartupOptions, start: Callable[..., list[ArmOnRank]]) -> ArmRun:
    """Run an arm on fresh ranks.

    Raises:
        ShardwiseError: a rank failed, or they took too long.
    """
    folder = options.out / name
    try:
        ranks = start(options.ranks, name, str(place), options.dtype, str(folder), timeout_s=options.limit)
    except RanksLateError as error:
        raise ConfigError(f"{name} was ended: {error}; --limit gives more") from error
    limit_bytes = sum(rank.host_bytes + rank.budget_bytes + SLACK_BYTES for rank in ranks)
    return replace(arm_run(name, pictures.read_run(folder)), limit_bytes=limit_bytes, values=_agreed_values(ranks))


def _agreed_values(ranks: Sequence[ArmOnRank]) -> dict[str, str]:
    """Return fingerprints by name; "" for a tensor of which ranks have different values."""
    found: dict[str, str] = {}
    for rank in ranks:
        for name, value in rank.values.items():
            found[name] = value if found.get(name, value) == value else ""
    return found


def _draw(out: Path, result: StartupResult, tell: Callable[[str], None]) -> list[str]:
    """Draw all arms, and the report; returns the files.

    Nothing is lost where matplotlib is not installed, or there is no room: the figures are written by now.
    """
    table, runs = result.table(), result.runs.values()
    try:
        picture = pictures.draw_panels([run.panel for run in runs if run.panel is not None])
        section = pictures.PageSection(table.title, {"startup.png": picture}, [table], result.notes())
        pictures.draw_report([Path(run.folder) for run in runs], out / "report", [section])
        (out / "startup.png").write_bytes(picture)
    except (ShardwiseError, OSError) as error:
        tell(f"there is no picture, and no report: {error}")
        return []
    return [str(out / "startup.png"), str(out / "report" / "report.html")]


# Figures


def arm_run(arm: str, record: pictures.RunRecord) -> ArmRun:
    """Return what a run took, by the records of its ranks.

    Raises:
        FormatError: a rank has left no samples, or not all phases.
    """
    spans = [_outer_phases(record, rank) for rank in record.ranks]
    begin, end = min(each[LOAD].start for each in spans), max(each[WRAP].stop for each in spans)
    time = np.unique(np.concatenate([rank.samples["t"] for rank in record.ranks]))
    own = [_growth(rank, time, rank.host_kib) for rank in record.ranks]
    mapped = [_growth(rank, time, rank.samples["file"]) for rank in record.ranks]
    growth_bytes, seconds = _most_bytes(sum(own)), end - begin
    stops = [max(each[name].stop for each in spans) - begin for name in PHASES]
    title = f"{arm}\n{seconds:.1f} s, at most {growth_bytes / 2**30:.2f} GiB"
    shown = {name: (start, stop) for name, start, stop in zip(PHASES, [0.0, *stops], stops, strict=False)}
    return ArmRun(
        arm,
        str(record.path),
        seconds,
        {name: max(each[name].stop - each[name].start for each in spans) for name in PHASES},
        growth_bytes,
        max(map(_most_bytes, own)),
        _most_bytes(sum(mapped)),
        int(max(rank.peak_kib("allocated") for rank in record.ranks)) << 10,
        panel=pictures.Panel(title, time - begin, [np.maximum(kib, 0) / 2**20 for kib in own], shown),
    )


def _outer_phases(record: pictures.RunRecord, rank: pictures.RankRecord) -> dict[str, pictures.PhaseSpan]:
    found = {span.path[0]: span for span in rank.phases if len(span.path) == 1 and span.thread == 0}
    if not found.keys() >= set(PHASES) or not rank.is_closed:
        raise FormatError(f"{record.path}: rank {rank.rank} was not observed to its end")
    return found


def _growth(rank: pictures.RankRecord, time: pictures.Floats, kib: pictures.Floats) -> pictures.Floats:
    """Return KiB over the first sample at these moments; before and after its own samples the nearest counts."""
    grown: pictures.Floats = np.interp(time, rank.samples["t"], kib - kib[0])
    return grown


def _most_bytes(kib: Any) -> int:
    return int(kib.max(initial=0.0)) << 10


_SAMPLES_PER_SECOND = 100.0
_PAGE_BYTES = 4096


def bring_up(arm: str, model_dir: str, dtype: str, run_dir: str) -> ArmOnRank:
    """Bring up a model and an optimizer by this arm, observed into ``run_dir``. Collective: yes.

    Every page of every shard is written to in the phase of the optimizer, as its first step will: until then a
    loader may have left values in a mapped file.
    """
    warnings.simplefilter("ignore")
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    _on_meta(model_dir, dtype)  # imports what this model needs
    gc.collect()
    dist.barrier()
    with observe(run_dir, samples_per_second=_SAMPLES_PER_SECOND):
        model = ARMS[arm].bring_up(model_dir, dtype)
        with phase(OPTIMIZER):
            torch.optim.AdamW(model.parameters(), lr=1e-5)
            _write_to_pages(model)
    host_bytes = sum(tensor.nbytes for tensor in _local_tensors(model) if tensor.device.type == "cpu")
    return ArmOnRank(host_bytes, LoadOptions().budget_bytes, _fingerprints(model))


def _write_to_pages(model: nn.Module) -> None:
    """Write to one byte of each page of this rank's tensors on the host, without changing it."""
    for tensor in _local_tensors(model):
        if tensor.device.type == "cpu" and tensor.is_contiguous():
            flat = raw_bytes(tensor)
            flat[::_PAGE_BYTES].bitwise_xor_(0)
            flat[-1:].bitwise_xor_(0)


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from [*model.named_parameters(), *model.named_buffers()]


def _local_tensors(model: nn.Module) -> list[torch.Tensor]:
    """Return what this rank has of each parameter and buffer, each once, without empty ones."""
    local = [local_tensor(tensor) for _, tensor in _named_tensors(model)]
    return list({tensor.data_ptr(): tensor for tensor in local if tensor.numel()}.values())


def _fingerprints(model: nn.Module) -> dict[str, str]:
    """Return fingerprints of whole tensors: of sharded ones on rank 0. Collective: yes."""
    found = {}
    for name, tensor in _named_tensors(model):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if dist.get_rank() == 0 or not isinstance(tensor, DTensor):
            data = raw_bytes(whole.detach().contiguous().cpu())
            found[name] = f"{fingerprint(memory_of(data), 0):016x}"
    return found


# The arms


def _shardwise(model_dir: str, dtype: str) -> Any:
    with phase(LOAD):
        model = from_pretrained(model_dir, dtype=dtype)
    with phase(WRAP):  # loading has sharded it
        return model


def _native(model_dir: str, dtype: str) -> Any:
    with phase(LOAD):
        model = _whole(model_dir, dtype)
    with phase(WRAP):
        return _wrap(model)


def _native_efficient(model_dir: str, dtype: str) -> Any:
    with phase(LOAD):
        model = _on_meta(model_dir, dtype)
        values: dict[str, Any] = {}
        buffers: dict[str, torch.Tensor] = {}
        if dist.get_rank() == 0:
            whole = _whole(model_dir, dtype)
            buffers = dict(whole.named_buffers())
            names = {*dict(whole.named_parameters()), *buffers}  # a tied parameter once
            values = {name: tensor for name, tensor in whole.state_dict().items() if name in names}
            del whole
    with phase(WRAP):
        _wrap(model)
        # Not strict: a tied head is the embedding's parameter.
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
        set_model_state_dict(model, values, options=options)
        model.tie_weights()
        _broadcast_buffers(model, buffers)
        return model


def _accelerate(model_dir: str, dtype: str) -> Any:
    with phase(LOAD):
        model = _whole(model_dir, dtype)
    with phase(WRAP):
        return _prepare(model, is_efficient=False)


def _accelerate_efficient(model_dir: str, dtype: str) -> Any:
    with phase(LOAD):
        model = _on_meta(model_dir, dtype) if dist.get_rank() else _whole(model_dir, dtype)
        _broadcast_buffers(model, {} if dist.get_rank() else dict(model.named_buffers()))
    with phase(WRAP):
        return _prepare(model, is_efficient=True)


def _transformers(model_dir: str, dtype: str) -> Any:
    from transformers import DistributedConfig

    with phase(LOAD):
        config = DistributedConfig(fsdp_size=dist.get_world_size())
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype, distributed_config=config)
    with phase(WRAP):
        return model


def _on_meta(model_dir: str, dtype: str) -> Any:
    """Return the model without values, in the dtype that is asked for."""
    config = AutoConfig.from_pretrained(model_dir)
    wanted = (config.dtype or torch.float32) if dtype == "auto" else getattr(torch, dtype)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=wanted).eval()


def _whole(model_dir: str, dtype: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype)


def _wrap(model: Any) -> Any:
    """Shard the blocks that the model's class names, and the rest."""
    blocks = set(model._no_split_modules or ())
    mesh = init_device_mesh(this_device().type, (dist.get_world_size(),))
    for module in [*model.modules()]:
        if type(module).__name__ in blocks:
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _broadcast_buffers(model: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Give buffers that are on meta on some rank, which are in no state dict, the values of rank 0."""
    device = this_device()
    on_meta: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(on_meta, [name for name, buffer in model.named_buffers() if buffer.is_meta])
    wanted = {name for names in on_meta for name in names}
    for name, buffer in [*model.named_buffers()]:
        if name in wanted:
            owner, _, attribute = name.rpartition(".")
            value = values[name].to(device) if name in values else torch.empty_like(buffer, device=device)
            dist.broadcast(value, src=0)
            model.get_submodule(owner)._buffers[attribute] = value


def _prepare(model: Any, *, is_efficient: bool) -> Any:
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        cpu_ram_efficient_loading=is_efficient,
        auto_wrap_policy="transformer_based_wrap",
        reshard_after_forward=True,
    )
    accelerator: Any = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        mixed_precision="no",
        is_main_process=dist.get_rank() == 0,
        device=this_device(),
    )
    return fsdp2_prepare_model(accelerator, model)


ARMS: Mapping[str, Arm] = {
    OURS: Arm("each rank reads its own bytes", _shardwise),
    "native": Arm("every rank loads all, then fully_shard", _native, "every rank"),
    "native-efficient": Arm("rank 0 loads, set_model_state_dict broadcasts", _native_efficient, "rank 0"),
    "accelerate": Arm("every rank loads all, then FSDP2 by accelerate", _accelerate, "every rank"),
    "accelerate-efficient": Arm(
        "rank 0 loads, accelerate broadcasts (cpu_ram_efficient_loading)", _accelerate_efficient, "rank 0"
    ),
    "transformers": Arm("from_pretrained(distributed_config=...)", _transformers),
}
