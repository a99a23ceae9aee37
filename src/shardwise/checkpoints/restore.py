"""A checkpoint brought back: opened and checked, compared with what there is, and then put where it belongs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.checkpoints import folder, randomness
from shardwise.checkpoints.facts import FACTS, Facts
from shardwise.checkpoints.modes import AtStep, CheckpointerOptions, Which
from shardwise.checkpoints.state import Looked, Stateful, TrainState, adapter_settings, in_words, look
from shardwise.checkpoints.state import Path as Keys
from shardwise.conversion import Bindings, Expression
from shardwise.errors import CoverageError, FormatError, PlacementError, StorageError
from shardwise.execution.garbage import collected_later
from shardwise.execution.place import Destination, Placer, arrange
from shardwise.execution.progress import ProgressBar
from shardwise.execution.supply import require_alike_models
from shardwise.execution.torch_out import loaded
from shardwise.execution.world import World
from shardwise.formats import CheckpointIndex
from shardwise.formats.checkpoint_index import open_state
from shardwise.formats.distributed import METADATA, Place, parse_metadata
from shardwise.models import wrap
from shardwise.models.dtypes import in_memory, to_torch
from shardwise.models.optimizer_state import Given, read
from shardwise.models.rebind import Key
from shardwise.models.selection import Selection
from shardwise.models.view import Held, local_boxes, local_tensor, look_inside
from shardwise.planning import Consent, stored_tensors
from shardwise.planning.matching import Brought, Tolerance
from shardwise.planning.matching import in_words as faults_in_words
from shardwise.report import RestoreReport
from shardwise.storage import LocalReader
from shardwise.tensors import Box
from shardwise.verbs.load import Clock, LoadOptions, LoadRequest, OpenSource, carry_out
from shardwise.verbs.optimizer_state import Fitting, Ours, fit

_MAX_FACTS_BYTES = 64 << 20


@dataclass(frozen=True)
class Opened:
    """A complete checkpoint whose files have been looked at. The same on every rank."""

    folder: Path
    facts: Facts
    index: CheckpointIndex
    objects: Mapping[Keys, Place]
    shapes: Mapping[Keys, tuple[int, ...]]

    @property
    def model(self) -> dict[str, str]:
        """The key of each tensor of the model, by FQN."""
        return {path[1]: ".".join(path) for path in self.shapes if path[0] == "model"}

    @property
    def parts(self) -> set[str]:
        """What it has beside the model."""
        found = {path[0] for path in [*self.objects, *self.shapes]} - {"model", "optimizer"}
        return found | ({"optimizers"} if ("optimizer", "param_groups") in self.objects else set())


def resolve(root: Path, which: Which) -> int:
    """The step of the checkpoint that is asked for.

    Raises:
        StorageError: there is none that is complete.
    """
    steps = folder.steps_in(root)
    if isinstance(which, AtStep):
        if which.step in steps:
            return which.step
        there = f"there are {', '.join(map(str, steps))}" if steps else "there is none"
        half = " (one was begun there, and never completed)" if which.step in folder.leftovers_in(root) else ""
        half = " (one is there that no Checkpointer saved)" if which.step in folder.foreign_in(root) else half
        raise StorageError(f"{root}: no complete checkpoint of step {which.step}{half}; {there}")
    if not steps:
        left, foreign = folder.leftovers_in(root), folder.foreign_in(root)
        half = f"; step {left[-1]} was begun and never completed" if left else ""
        half += f"; that of step {foreign[-1]} was not saved by a Checkpointer" if foreign else ""
        raise StorageError(f"{root}: no complete checkpoint{half}; start the training anew, or pass another folder")
    return steps[-1]


@collected_later()
def open_checkpoint(root: Path, step: int) -> Opened:
    """Read what a checkpoint says of itself, and see that its files are those it tells of. Runs no pickle.

    Raises:
        FormatError: the files contradict each other or their formats.
        StorageError: a file cannot be read.
    """
    place = root / folder.name_of(step)
    with LocalReader(place) as reader:
        facts = Facts.from_bytes(_small(reader, FACTS, _MAX_FACTS_BYTES), f"{place}/{FACTS}")
        if facts.step != step:
            raise FormatError(f"{place}/{FACTS}: tells of step {facts.step}; the folder was renamed or mixed up")
        content = reader.read(METADATA, 0, reader.size(METADATA))
        if hashlib.sha256(content).hexdigest() != facts.metadata_sha256:
            raise FormatError(
                f"{place}/{METADATA}: is not the one that {FACTS} tells of; the folder mixes two checkpoints, or "
                "is damaged: restore another one"
            )
        for file, nbytes in facts.files.items():
            _require_size(reader, place, file, nbytes)
        metadata = parse_metadata(content, "", what=f"{place}/{METADATA}")
        index = open_state(reader)
        if strange := sorted(index.files.keys() - facts.files.keys()):
            raise FormatError(f"{place}/{METADATA}: names {strange[0]}, which {FACTS} does not; it is damaged")
    shapes = {path: tensor.shape for path, tensor in metadata.tensors.items()}
    if odd := [path for path in [*shapes, *metadata.objects] if not _is_known(path)]:
        raise FormatError(f"{place}/{METADATA}: has {'.'.join(odd[0])}, which no checkpoint of shardwise has")
    return Opened(place, facts, index, metadata.objects, shapes)


def _is_known(path: Keys) -> bool:
    match path:
        case ("model", _) | ("optimizer", "state", _, _) | ("optimizer", "param_groups"):
            return True
        case ("schedulers",) | ("scaler",) | ("rng", _) | ("data", _):
            return True
        case _:
            return False


def _small(reader: LocalReader, file: str, most: int) -> bytes:
    nbytes = reader.size(file)
    if nbytes > most:
        raise FormatError(f"{reader.root}/{file}: has {nbytes} bytes, {most} is the limit")
    return reader.read(file, 0, nbytes)


def _require_size(reader: LocalReader, place: Path, file: str, nbytes: int) -> None:
    try:
        found = reader.size(file)
    except StorageError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise FormatError(
                f"{place}/{file}: is missing; copy it there too, or restore another checkpoint"
            ) from error
        raise
    if found != nbytes:
        raise FormatError(
            f"{place}/{file}: has {found} bytes, and {nbytes} were written; it is damaged: copy it again, or "
            "restore another checkpoint"
        )


@torch.no_grad()
def restore(
    world: World,
    root: Path,
    state: TrainState,
    which: Which,
    only: Selection,
    tolerance: Tolerance,
    options: CheckpointerOptions,
) -> RestoreReport:
    """Put a checkpoint where it belongs. Collective: yes."""
    clock = Clock()
    with clock.phase("open"):
        step = world.from_first(lambda: resolve(root, which))
        opened = world.from_first(lambda: open_checkpoint(root, step))
        reader = world.together(lambda: LocalReader(opened.folder))
    with reader, ProgressBar("Restoring", world, 0, enabled=False) as bar, torch.device("cpu"):
        placer = Placer(reader, opened.index, options.budget_bytes, bar, world)
        with clock.phase("plan"):
            looked = world.together(lambda: look(state, only))
            require_alike_models(world, looked.held, looked.bounds)
            common = world.from_first(lambda: _common(reader, opened))
            own = world.together(lambda: _own(reader, opened, world))
            fits = world.together(lambda: compare(opened, looked, state, only, common, world.size, tolerance))
            ours = Ours.of(looked.held, looked.bounds)
            fitting = None
            if "optimizers" in fits.parts:
                fitting = _fit_optimizers(world, opened, placer, ours, common, tolerance)
        with clock.phase("read"):
            model = {key: looked.stored[fqn].tensor for fqn, key in fits.model.items()}
            if any(item.tensor.is_meta for item in looked.held):
                placer.read_bytes += _bring_up(world, opened, reader, looked, fits, options)
                ours = _bound_again(looked)
                model = {}
            targets = world.together(lambda: {} if fitting is None else fitting.targets(ours))
            state_keys = {_key_of_state(key): target for key, target in targets.items()}
            world.together(lambda: _place(placer, opened, {**model, **state_keys}))
        with clock.phase("finish"):
            afresh = world.together(lambda: [] if fitting is None else fitting.bind(ours, targets))
            told = world.together(lambda: _finish(opened, state, fits, common, own, world))
        return RestoreReport(
            rank=world.rank,
            world_size=world.size,
            directory=str(opened.folder),
            step=step,
            saved_by=opened.facts.world_size,
            user=opened.facts.user,
            restored=tuple(part for part in _PARTS if part in fits.parts),
            model=tuple(fits.model),
            optimizers=tuple(key.label for key in targets),
            not_stored=tuple(item.fqn for item in looked.held if _is_left_out(item, looked)),
            missing=(*fits.missing, *(fitting.missing if fitting else ())),
            unexpected=(*fits.unexpected, *(fitting.unexpected if fitting else ())),
            mismatched=(*fits.mismatched, *(fitting.matched.mismatched if fitting else ())),
            afresh=tuple(afresh),
            cast=fitting.matched.cast if fitting else {},
            rng=told["rng"],
            data=told["data"],
            read_bytes=placer.read_bytes,
            seconds=clock.seconds,
        )


_PARTS = ("model", "optimizers", "schedulers", "scaler", "data", "rng")


def _is_left_out(item: Held, looked: Looked) -> bool:
    return item.kind.is_saved and item.fqn not in looked.stored


def _key_of_state(key: Key) -> str:
    return f"optimizer.state.{key.parameter}.{key.entry}"


# What is no tensor


def _common(reader: LocalReader, opened: Opened) -> dict[Keys, Any]:
    """The values that are the same for all ranks, and the first rank's generators of random numbers."""
    is_wanted = {"optimizer", "schedulers", "scaler"}
    paths = [path for path in opened.objects if path[0] in is_wanted or path == ("rng", "rank_0")]
    return {path: _value(reader, opened, path) for path in paths}


def _own(reader: LocalReader, opened: Opened, world: World) -> dict[str, Any]:
    """This rank's position in the data, and its generators, where they are for it."""
    found: dict[str, Any] = {}
    is_same_size = opened.facts.world_size == world.size
    if is_same_size:
        found["rng"] = _value(reader, opened, ("rng", f"rank_{world.rank}"))
    if opened.facts.data == "one" or (opened.facts.data == "each" and is_same_size):
        rank = 0 if opened.facts.data == "one" else world.rank
        found["data"] = _value(reader, opened, ("data", f"rank_{rank}"))
    return found


def _value(reader: LocalReader, opened: Opened, path: Keys) -> Any:
    what = f"{'.'.join(path)} in {opened.folder}"
    place = opened.objects.get(path)
    if place is None:
        raise FormatError(f"{what}: is missing; the checkpoint is damaged, restore another one")
    return loaded(reader.read(place.file, place.bytes.start, place.bytes.stop), what)


# What fits


@dataclass(frozen=True, slots=True)
class Fits:
    """What of a checkpoint goes where. ``model`` has keys by FQN; ``parts`` are those to restore."""

    model: Mapping[str, str]
    parts: frozenset[str]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[str, ...]


@collected_later()
def compare(
    opened: Opened,
    looked: Looked,
    state: TrainState,
    only: Selection,
    common: Mapping[Keys, Any],
    world_size: int,
    tolerance: Tolerance,
) -> Fits:
    """Compare all but the optimizers' state with what there is.

    Raises:
        CoverageError: the checkpoint is of another kind of tuning, or does not fit; all faults at once.
    """
    _require_same_tuning(opened, looked, only)
    faults = _Faults(tolerance)
    model = _compare_model(opened, looked, faults)
    wanted = {"rng"}
    wanted |= {"optimizers"} if state.all_optimizers else set()
    wanted |= {"schedulers"} if state.all_schedulers else set()
    wanted |= {"scaler"} if state.scaler is not None else set()
    wanted |= {"data"} if state.data is not None else set()
    for part in sorted(wanted - opened.parts):
        faults.missing(part, part)
    for part in sorted(opened.parts - wanted):
        faults.unexpected(part, part)
    kept = wanted & opened.parts
    if "schedulers" in kept and (why := _unlike(state.all_schedulers, common["schedulers",])):
        faults.mismatched("schedulers", f"schedulers: {why}")
        kept.discard("schedulers")
    if "data" in kept and opened.facts.data == "each" and opened.facts.world_size != world_size:
        saved = opened.facts.world_size
        faults.mismatched("data", f"data: a position for each of {saved} ranks, and now there are {world_size}")
        kept.discard("data")
    faults.check(f"{opened.folder} does not fit:")
    return Fits(
        model,
        frozenset({"model", *kept}),
        tuple(faults.told["missing"]),
        tuple(faults.told["unexpected"]),
        tuple(faults.told["mismatched"]),
    )


class _Faults:
    """What does not fit, told or not tolerated."""

    def __init__(self, tolerance: Tolerance) -> None:
        self._tolerance = tolerance
        self.told: dict[str, list[str]] = {"mismatched": [], "missing": [], "unexpected": []}
        self._refused: dict[str, list[str]] = {"mismatched": [], "missing": [], "unexpected": []}

    def missing(self, name: str, sentence: str) -> None:
        self._add("missing", name, sentence, is_tolerated=self._tolerance.missing.covers(name))

    def unexpected(self, name: str, sentence: str) -> None:
        self._add("unexpected", name, sentence, is_tolerated=self._tolerance.unexpected.covers(name))

    def mismatched(self, name: str, sentence: str) -> None:
        self._add("mismatched", name, sentence, is_tolerated=self._tolerance.mismatched.covers(name))

    def _add(self, kind: str, name: str, sentence: str, *, is_tolerated: bool) -> None:
        self.told[kind].append(name)
        if not is_tolerated:
            self._refused[kind].append(sentence)

    def check(self, head: str) -> None:
        if any(self._refused.values()):
            raise CoverageError(faults_in_words(head, self._refused))


def _require_same_tuning(opened: Opened, looked: Looked, only: Selection) -> None:
    facts, here = opened.facts, in_words(only)
    if facts.holds != here:
        raise CoverageError(
            f"{opened.folder}: holds {facts.holds}, and this run checkpoints {here}; give the checkpointer the "
            "`only` with which it was saved, and tune the model alike"
        )
    settings = adapter_settings(looked.model, only)
    if settings is not None and facts.adapter is not None and settings != facts.adapter:
        names = sorted(
            name for name in {*settings, *facts.adapter} if settings.get(name) != facts.adapter.get(name)
        )
        shown = "; ".join(f"{name} was {facts.adapter.get(name)!r}, is {settings.get(name)!r}" for name in names)
        raise CoverageError(
            f"{opened.folder}: holds an adapter of another config: {shown}; make the adapter as it was made before"
        )
    if here != "everything" and facts.others != looked.others:
        raise CoverageError(
            f"{opened.folder}: belongs to another base model: names or shapes of what is not stored (the base) are "
            "not those of this model; load the base that the adapter was trained on"
        )


def _compare_model(opened: Opened, looked: Looked, faults: _Faults) -> dict[str, str]:
    """The key of every tensor that gets values, by FQN."""
    keys = opened.model
    stored = {item.key: item for item in opened.index.tensors()}
    found: dict[str, str] = {}
    known: set[str] = set()
    for fqn, item in looked.stored.items():
        known.update(item.names)
        name = next((name for name in item.names if name in keys), None)
        if name is None:
            faults.missing(fqn, fqn)
            continue
        tensor = stored[keys[name]]
        if tensor.shape != tuple(item.tensor.shape) or tensor.dtype is not in_memory(item.tensor.dtype):
            here = f"{tuple(item.tensor.shape)} {in_memory(item.tensor.dtype).label}"
            faults.mismatched(fqn, f"{fqn}: stored {tensor.shape} {tensor.dtype.label}, the model has {here}")
            continue
        found[fqn] = keys[name]
    for name in keys:
        if name not in known:
            faults.unexpected(name, name)
    several = {fqn: [name for name in item.names if name in keys] for fqn, item in looked.stored.items()}
    for fqn, names in several.items():
        if len(names) > 1:
            faults.mismatched(fqn, f"{fqn}: one tensor in the model, and {len(names)} stored: {', '.join(names)}")
            found.pop(fqn, None)
    return found


def _unlike(schedulers: Sequence[Stateful], stored: Any) -> str | None:
    """Why states are not those of such schedulers."""
    if not isinstance(stored, list) or len(stored) != len(schedulers):
        return f"{len(stored) if isinstance(stored, list) else 'no list'} stored, there are {len(schedulers)}"
    for scheduler, told in zip(schedulers, stored, strict=True):
        here = scheduler.state_dict()
        if not isinstance(told, dict) or told.keys() != here.keys():
            return f"what is stored is not of a {type(scheduler).__name__}"
    return None


def _fit_optimizers(
    world: World,
    opened: Opened,
    placer: Placer,
    ours: Ours,
    common: Mapping[Keys, Any],
    tolerance: Tolerance,
) -> Fitting:
    """Which state of the checkpoint goes where in the optimizers. Collective: yes."""
    given = world.together(lambda: _given(opened, placer, ours, common))
    told = {
        name: Brought(tuple(tensor.shape), in_memory(tensor.dtype), (Box.whole(tuple(tensor.shape)),))
        for name, tensor in given.tensors.items()
    }
    return fit(world, ours, given, [told] + [{}] * (world.size - 1), tolerance)


@collected_later()
def _given(opened: Opened, placer: Placer, ours: Ours, common: Mapping[Keys, Any]) -> Given:
    """The state of the optimizers: numbers as they are, tensors without values."""
    values: dict[str, dict[str, Any]] = {}
    for path, value in common.items():
        if path[:2] == ("optimizer", "state"):
            values.setdefault(path[2], {})[path[3]] = value
    expressions = stored_tensors(opened.index)
    numbers: list[tuple[Keys, Expression]] = []
    for path, shape in opened.shapes.items():
        if path[0] == "model":
            continue
        expression = expressions[".".join(path)]
        if Box.whole(shape).numel == 1:
            numbers.append((path, expression))
        else:
            dtype = _dtype_of(opened, path)
            values.setdefault(path[2], {})[path[3]] = torch.empty(shape, dtype=dtype, device="meta")
    wanted = [(item, Box.whole(item.shape), _dtype_of(opened, path)) for path, item in numbers]
    for (path, _), value in zip(numbers, placer.values_of(wanted), strict=True):
        values.setdefault(path[2], {})[path[3]] = value
    groups = common["optimizer", "param_groups"]
    return read({"state": values, "param_groups": groups}, ours.first_names, ours.shapes)


def _dtype_of(opened: Opened, path: Keys) -> torch.dtype:
    key = ".".join(path)
    index = opened.index
    return to_torch(index.composed[key].dtype if key in index.composed else index.entries[key].dtype)


# Into the model and the optimizers


def _place(placer: Placer, opened: Opened, wanted: Mapping[str, torch.Tensor]) -> None:
    """Read tensors, by key, into this rank's memory, and see that nothing of them is left out."""
    expressions = stored_tensors(opened.index)
    items = [
        Destination(key, expressions[key], local_boxes(tensor, key), tensor.dtype, local_tensor(tensor).device)
        for key, tensor in wanted.items()
    ]
    arrangement = arrange(items, opened.index, placer.reader.policy, placer.budget_bytes, placer.world.place)
    before = dict(placer.written)
    placer.place(arrangement, [local_tensor(wanted[item.fqn]) for item in arrangement.destinations])
    for item in items:
        held = sum(part.box.numel for part in item.boxes)
        count = placer.written.get(item.fqn, 0) - before.get(item.fqn, 0)
        if count != held:
            raise CoverageError(f"{item.fqn}: {count} of {held} elements were read; the model is not whole now")


def _bring_up(
    world: World, opened: Opened, reader: LocalReader, looked: Looked, fits: Fits, options: CheckpointerOptions
) -> int:
    """Give a model on meta memory and values, as a load does; the bytes read. Collective: yes."""
    model = looked.model
    expressions = stored_tensors(opened.index)

    def ask() -> LoadRequest:
        hollow = [item.fqn for item in looked.held if item.tensor.is_meta and item.kind.is_saved]
        absent = [fqn for fqn in hollow if fqn not in fits.model]
        if absent:
            raise PlacementError(
                f"{len(absent)} tensors of the model, such as {absent[0]}, are on meta, and the checkpoint does "
                "not hold them; bring the model up with its weights first"
            )
        offers = {fqn: (expressions[key],) for fqn, key in fits.model.items()}
        load = LoadOptions(
            budget_bytes=options.budget_bytes,
            progress=False,
            process_group=options.process_group,
            patience=options.patience,
        )
        return LoadRequest(Bindings(offers), Consent(), {}, load)

    source = OpenSource(opened.index, reader, {}, is_own=False)
    report = carry_out(world, model, source, ask, Clock())
    mesh = next((p.device_mesh for p in model.parameters() if isinstance(p, DTensor)), None)
    if mesh is not None:
        wrap.average_replicated_gradients(model, mesh)
    return report.read_bytes


def _bound_again(looked: Looked) -> Ours:
    """The optimizers hold the parameters that took the place of those on meta."""
    held = look_inside(looked.model)
    parameters = {item.fqn: item.tensor for item in held if isinstance(item.tensor, nn.Parameter)}
    for bound in looked.bounds:
        tensors, scalars = dict(bound.tensors), dict(bound.scalars)
        bound.unbind()
        bound.rebind(parameters, tensors, scalars)
        bound.tensors = tensors
    return Ours.of(held, looked.bounds)


def _finish(
    opened: Opened,
    state: TrainState,
    fits: Fits,
    common: Mapping[Keys, Any],
    own: Mapping[str, Any],
    world: World,
) -> dict[str, str]:
    """Everything but tensors; what became of the generators and of the position in the data, in words."""
    facts = opened.facts
    if "schedulers" in fits.parts:
        for scheduler, told in zip(state.all_schedulers, common["schedulers",], strict=True):
            scheduler.load_state_dict(told)
    if "scaler" in fits.parts and state.scaler is not None:
        state.scaler.load_state_dict(common["scaler",])
    data = ""
    if "data" in fits.parts and state.data is not None:
        state.data.load_state_dict(own["data"])
        data = "one position for all ranks" if facts.data == "one" else "each rank's own position"
    if "rng" not in fits.parts:
        return {"rng": "", "data": data}
    what = f"{opened.folder}: rng"
    if "rng" in own:
        lacking = randomness.put_back(own["rng"], what)
        rng = "every rank goes on with its own numbers"
    else:
        lacking = randomness.draw_anew(common["rng", "rank_0"], facts.alike, world.rank, world.size, what)
        alike = f"{', '.join(facts.alike)}: as saved, alike on all ranks; others: " if facts.alike else ""
        rng = f"{alike}seeded anew for {world.size} ranks in place of {facts.world_size}"
    return {"rng": rng + (f"; not on this machine: {', '.join(lacking)}" if lacking else ""), "data": data}
