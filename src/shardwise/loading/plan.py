"""The plan of a load: one fill for every tensor, within the user's consents, or one error with all faults."""

import hashlib
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Final, TypeAlias

from shardwise.core.computed import computes
from shardwise.core.consents import Consent, allows, describe_faults
from shardwise.core.errors import KeyMismatchError
from shardwise.core.expression import Bindings, Expression, get_stored_key, iter_leaves, iter_stored_leaves
from shardwise.core.layout import ModelLayout, Origin, TensorKind, TensorLayout
from shardwise.core.tensors import DType, casts_safely
from shardwise.files.checkpoint_index import (
    CheckpointIndex,
    is_quantization_key,
    iter_entry_keys,
    packed_names,
    scale_names,
)

_CODES = (DType.F8_E4M3, DType.F8_E5M2, DType.I8, DType.U8)
"""Dtypes of quantized values, which mean nothing without their scales."""

REMEDIES: Final = {
    "mismatched": "on_mismatched=Initialize(only=...) for tensors that may be initialized",
    "missing": "on_missing=Initialize(only=...) for the missing ones",
    "unexpected": "on_unexpected=Ignore(only=...) for keys that may be left unread",
    "ambiguous": "a checkpoint that stores each tensor once",
    "quantized": "a checkpoint whose config.json has the quantization_config of these codes",
    "conversion": "a checkpoint in the layout this version of transformers knows",
    "uninitialized": "a checkpoint that stores them, as neither _init_weights nor reset_parameters sets them "
    "(a new adapter: from_pretrained(..., tuning=Lora(config)), not get_peft_model)",
    "uncomputable": "buffers=... with a callable that computes them",
    "unread": "a checkpoint of this model",
}
"""Advice by kind of fault."""

OF_AN_ADAPTER: Final = ".lora_"
"""Part of the keys of a LoRA's matrices in PEFT's models."""


@dataclass(frozen=True, slots=True)
class FromCheckpoint:
    """A fill with elements of the checkpoint, cast to the tensor's dtype."""

    expression: Expression


@dataclass(frozen=True, slots=True)
class Tie:
    """A fill for a tied weight, which shares the storage of another name that has a fill of its own."""

    source: str


@dataclass(frozen=True, slots=True)
class Init:
    """A fill with values initialized from (seed, FQN) by the tensor's ``origin``."""

    origin: Origin


@dataclass(frozen=True, slots=True)
class Recompute:
    """A fill for a non-persistent buffer, which its ``origin`` computes again."""

    origin: Origin


@dataclass(frozen=True, slots=True)
class Keep:
    """A fill for a non-persistent buffer that already has its value."""


Fill: TypeAlias = FromCheckpoint | Tie | Init | Recompute | Keep


@dataclass(frozen=True, slots=True)
class ModelRules:
    """Regexes of names that a model class allows to be missing or unexpected.

    They are searched for in names of tensors, and in checkpoint keys both as stored and as renamed.
    """

    ignore_missing: tuple[str, ...] = ()
    ignore_unexpected: tuple[str, ...] = ()

    def allows_missing(self, name: str) -> bool:
        return any(re.search(pattern, name) for pattern in self.ignore_missing)

    def allows_unexpected(self, name: str) -> bool:
        return any(re.search(pattern, name) for pattern in self.ignore_unexpected)


@dataclass(frozen=True)
class LoadPlan:
    """Every name of the model with its fill, equal on all ranks except for the boxes inside ``layout``."""

    layout: ModelLayout
    fills: Mapping[str, Fill]
    ignored_keys: tuple[str, ...] = ()
    missing_keys: tuple[str, ...] = ()
    unexpected_keys: tuple[str, ...] = ()
    mismatched_keys: tuple[str, ...] = ()
    duplicates: Mapping[str, tuple[Expression, ...]] = field(default_factory=dict)
    """Further expressions for a tensor that several names share: stored twice, and so required to be equal."""

    def reads(self) -> dict[str, FromCheckpoint]:
        return {name: fill for name, fill in self.fills.items() if isinstance(fill, FromCheckpoint)}

    def names(self, kind: type[Fill]) -> tuple[str, ...]:
        """Return the names with this kind of fill, in the order of the modules."""
        return tuple(name for name, fill in self.fills.items() if isinstance(fill, kind))

    def not_loaded(self, index: CheckpointIndex) -> tuple[str, ...]:
        """Return the ignored contents of the checkpoint, without the extra tensors that the model does load."""
        loaded = {get_stored_key(read.expression) for read in self.reads().values()} & index.extra
        return tuple(name for name in index.ignored if name not in loaded)

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """A digest per name of what must agree on all ranks: the tensor and its fill, without boxes."""
        return {name: self._fingerprint(name, fill) for name, fill in self.fills.items()}

    @cached_property
    def digest(self) -> str:
        """One digest of all fingerprints, sorted by name, and of the names in ``duplicates``.

        They are sorted because modules may register tensors in the order of a set.
        """
        facts = (sorted(self.fingerprints.items()), sorted(self.duplicates))
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    def _fingerprint(self, name: str, fill: Fill) -> str:
        tensor = self.layout.by_name[name]
        facts = (tensor.names, tensor.shape, tensor.dtype.label, tensor.kind.value, tensor.placement, repr(fill))
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def plan_load(
    index: CheckpointIndex,
    layout: ModelLayout,
    bindings: Bindings,
    rules: ModelRules,
    consent: Consent,
    base_names: Mapping[str, str] = MappingProxyType({}),
    remedies: Mapping[str, str] = REMEDIES,
) -> LoadPlan:
    """Determine the fill of every tensor.

    ``base_names`` maps tensors to the names to which ``rules`` and ``consent`` apply, if these differ from their
    own names. ``remedies`` are the advice of the error, by kind of fault.

    Raises:
        KeyMismatchError: there are missing, unexpected, mismatched, ambiguous or uncomputable tensors. The error
            lists all of them.
    """
    return _LoadPlanner(index, layout, bindings, rules, consent, base_names, remedies).plan()


@dataclass
class _LoadPlanner:
    """The state of one :func:`plan_load`: the fills and the faults found so far."""

    index: CheckpointIndex
    layout: ModelLayout
    bindings: Bindings
    rules: ModelRules
    consent: Consent
    base_names: Mapping[str, str]
    remedies: Mapping[str, str]
    fills: dict[str, Fill] = field(default_factory=dict)
    duplicates: dict[str, tuple[Expression, ...]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    faults: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.scaled_keys: set[str] = set()  # codes that the index composes with their scales
        for key, item in self.index.composed.items():
            if self.index.is_scaled(key):
                self.scaled_keys.update(iter_entry_keys(item.composition))
        self.names_unmatched = set(self.bindings.unmatched.values())
        self.failed_names = {name for names in self.bindings.errors.values() for name in names}

    def fault(self, kind: str, sentence: str) -> None:
        self.faults.setdefault(kind, []).append(sentence)

    def plan(self) -> LoadPlan:
        for sentence in self.bindings.errors:
            self.fault("conversion", sentence)
        for tensor in self.layout.tensors:
            if tensor.kind is TensorKind.NON_PERSISTENT_BUFFER:
                self.fills[tensor.fqn] = self.recompute(tensor)
            else:
                self.fills[tensor.fqn] = self.fill(tensor)
            for alias in tensor.names[1:]:
                self.fills[alias] = Tie(tensor.fqn)
        # After the fills: once a fill has reported codes without scales, the keys of the scales are not reported
        # again.
        self.check_unexpected()
        # Consents that leave out a checkpoint of other names would give a model of random values.
        advice = self.find_advice()
        of_base = [fill for name, fill in self.fills.items() if OF_AN_ADAPTER not in name]
        reads = any(isinstance(fill, FromCheckpoint) for fill in of_base)
        if advice and self.missing and self.unexpected and not reads and "missing" not in self.faults:
            self.fault("unread", "none of the checkpoint's tensors has a name of the model's")
        # In the order of REMEDIES, whatever the order in which they were found.
        if self.faults:
            ordered = {kind: self.faults[kind] for kind in REMEDIES if kind in self.faults}
            head = f"the checkpoint {self.index.root} does not fit the model"
            raise KeyMismatchError(describe_faults(head, ordered, self.choose_remedies(advice)))
        return LoadPlan(
            layout=self.layout,
            fills=self.fills,
            ignored_keys=tuple(self.ignored),
            missing_keys=tuple(self.missing),
            unexpected_keys=tuple(self.unexpected),
            mismatched_keys=tuple(self.mismatched),
            duplicates=self.duplicates,
        )

    def find_advice(self) -> str:
        """Return what to pass if the missing tensors are stored with an adapter or a prefix, or ""."""
        lacking = {self.base_name(name) for name in (*self.missing, *self.faults.get("missing", ()))}
        keys = self.bindings.unmatched.keys()
        if not lacking or not self.remedies:  # a caller that gives no advice
            return ""
        if any(OF_AN_ADAPTER in key for key in keys):
            return (
                "the weights of the model alone: the keys with lora_ are those of a PEFT model "
                "(load_accelerate_model(model, folder, only=AdapterOnly()), then save_adapter, writes the adapter)"
            )
        if self.remedies["missing"] != REMEDIES["missing"]:  # a merge, which takes no key_mapping
            return ""
        num_saved = sum(item.kind.is_saved and OF_AN_ADAPTER not in item.fqn for item in self.layout.tensors)
        # {"net.": 21} with keys net.norm.weight, ... and a model that lacks norm.weight, ...
        in_keys = Counter(prefix for key in keys for prefix in _prefixes_before(key, lacking))
        in_names = Counter(prefix for name in lacking for prefix in _prefixes_before(name, keys))
        for prefixes, regex, replacement in ((in_keys, "^{}", ""), (in_names, "^", "{}")):
            for prefix, count in prefixes.most_common(1):
                # Half of the model: other heads have similar names, which are not its own. Not all of it: some
                # tensors are made of several keys, as stacked experts are.
                if 2 * count >= num_saved:
                    old, new = regex.format(re.escape(prefix)), replacement.format(prefix)
                    return (
                        f'key_mapping={{r"{old}": "{new}"}}, as the names differ by {prefix} (files: renamed '
                        f"by shardwise merge-weights --key-mapping '{old}' '{new}')"
                    )
        return ""

    def choose_remedies(self, advice: str) -> Mapping[str, str]:
        """Return ``remedies``, with the advice of :meth:`find_advice` for missing tensors if there is one."""
        if not advice:
            return self.remedies
        others = {kind: remedy for kind, remedy in self.remedies.items() if kind != "unexpected"}
        return {**others, "missing": advice, "unread": advice}

    def fill(self, tensor: TensorLayout) -> Fill:
        """Return the fill of a parameter or a persistent buffer. Faults are collected, and a fill is returned."""
        sources: list[Expression] = []
        for name in tensor.names:
            stored = self.bindings.matched.get(name, ())
            if len(stored) > 1:
                keys = ", ".join(_keys(item) for item in stored)
                self.fault("ambiguous", f"{name}: stored more than once, as {keys}")
            sources += stored[:1]
        # A shared tensor may be stored under each of its names. One is read, the others are compared with it.
        if not sources:
            return self.fill_missing(tensor)
        for source in sources:
            kind, reason = "quantized", self.missing_scale_reason(tensor, source)
            if reason is None:
                kind, reason = "mismatched", self.mismatch_reason(tensor, source)
            if reason is not None:
                if allows(self.consent.mismatched, self.base_name(tensor.fqn)):
                    self.mismatched.append(tensor.fqn)
                    return self.init(tensor)
                self.fault(kind, f"{tensor.fqn}: {reason}")
                return FromCheckpoint(source)
        if len(sources) > 1:
            self.duplicates[tensor.fqn] = tuple(sources[1:])
        return FromCheckpoint(sources[0])

    def base_name(self, name: str) -> str:
        """Return the name of a tensor in the user's options and in the model class."""
        return self.base_names.get(name, name)

    def fill_missing(self, tensor: TensorLayout) -> Fill:
        if tensor.origin is Origin.TUNING:
            return Init(tensor.origin)
        # Consent for one of its names is enough. What the class allows to be missing is not reported.
        for name in map(self.base_name, tensor.names):
            if self.rules.allows_missing(name):
                return self.init(tensor)
            if allows(self.consent.missing, name):
                self.missing.append(tensor.fqn)
                return self.init(tensor)
        # A tensor whose conversion failed is missing for this reason, which is listed.
        if not self.failed_names.intersection(tensor.names):
            codes = [key for name in tensor.names for key in packed_names(name) if key in self.names_unmatched]
            if codes:
                self.fault("quantized", f"{tensor.fqn}: stored as codes, in {codes[0]}")
            else:
                self.fault("missing", tensor.fqn)
        return Init(tensor.origin)

    def init(self, tensor: TensorLayout) -> Fill:
        """Return the fill of a tensor that the model initializes, or a fault if it does not."""
        if tensor.origin in (Origin.NOWHERE, Origin.AS_IT_IS):
            self.fault("uninitialized", f"{tensor.fqn}: nothing initializes it")
        return Init(tensor.origin)

    def recompute(self, tensor: TensorLayout) -> Fill:
        """Return the fill of a non-persistent buffer."""
        if tensor.origin is Origin.AS_IT_IS:
            return Keep()
        if tensor.origin is Origin.NOWHERE:
            self.fault("uncomputable", f"{tensor.fqn}: a non-persistent buffer on meta that nothing computes")
        return Recompute(tensor.origin)

    def missing_scale_reason(self, tensor: TensorLayout, source: Expression) -> str | None:
        """Return the reason why the stored values are codes without scales, or None if they are plain values.

        Values that were saved in a narrow dtype without quantization have no scales in the checkpoint, and no
        quantization config.
        """
        # Integers into integers, such as packed weights: codes are what the model wants.
        if tensor.dtype.kind != "float" and not computes(source):
            return None
        for leaf in iter_stored_leaves(source):
            if leaf.dtype in _CODES and leaf.key not in self.scaled_keys:
                scale = next((key for key in scale_names(leaf.key) if key in self.bindings.unmatched), None)
                stored = f"stored in {leaf.dtype.label}"
                if leaf.key not in tensor.names:
                    stored += f" as {leaf.key}"
                if scale is not None:
                    return f"{stored}, and its scales, {scale}, would not be read"
                if self.index.quantized and leaf.dtype is not tensor.dtype:
                    return f"{stored} without scales, and the checkpoint is quantized ({self.index.quantized})"
        return None

    def mismatch_reason(self, tensor: TensorLayout, source: Expression) -> str | None:
        """Return the reason why an expression cannot fill a tensor, or None if it can."""
        if source.shape != tensor.shape:
            return f"stored {self.describe(source)}, model has {tensor.shape}"
        for leaf in iter_stored_leaves(source):
            # Elements of less than a byte have no addresses.
            if leaf.dtype.bits % 8:
                return f"stored as {leaf.dtype.label}, which cannot be loaded without its quantizer"
        if any(not casts_safely(leaf.dtype, tensor.dtype) for leaf in iter_leaves(source)):
            return f"stored {self.describe(source)}, model has {tensor.dtype.label}"
        return None

    def describe(self, source: Expression) -> str:
        key = get_stored_key(source)
        if key is None:
            return f"{source.shape} as {source}"
        file = self.index.entries[key].file
        return f"{source.shape} {source.dtype.label} in {file}" + (f" as {key}" if key else "")

    def check_unexpected(self) -> None:
        # Keys that no tensor has matched, with the names that they were renamed to.
        for key, name in self.bindings.unmatched.items():
            if self.rules.allows_unexpected(name) or self.rules.allows_unexpected(key):
                self.ignored.append(key)
            elif allows(self.consent.unexpected, key):
                self.unexpected.append(key)
                self.ignored.append(key)
            # The keys of scales would repeat a fault that names their codes.
            elif "quantized" not in self.faults or not is_quantization_key(name):
                renamed = f" (renamed to {name})" if name != key else ""
                if name.endswith("_extra_state"):
                    renamed += " (extra state of a module, which cannot be loaded yet)"
                self.fault("unexpected", f"{key}{renamed}")


def _prefixes_before(name: str, names: Collection[str]) -> list[str]:
    """Return the prefixes of a name, with their dot, without which it is one of ``names``."""
    stops = [stop + 1 for stop, letter in enumerate(name) if letter == "."]
    return [name[:stop] for stop in stops if name[stop:] in names]


def _keys(expression: Expression) -> str:
    keys = list(dict.fromkeys(leaf.key for leaf in iter_stored_leaves(expression)))
    return keys[0] if len(keys) == 1 else f"{keys[0]} and {len(keys) - 1} more"
