"""The plan of merging an adapter: the edits of the base's tensors, with the adapter tensors of each.

[Note: Names in an adapter] PEFT names a factor after its module in the model as it was trained:
``base_model.model.<module>.lora_A.weight``. If several parameters of one module (stacked experts) have adapters,
their wrappers are nested in the module's parameter order, and the names are ``<module>.lora_A``,
``<module>.base_layer.lora_A`` and so on from the last parameter to the first. An adapter from an older transformers
version may contain modules that are now part of a larger tensor, such as one expert. These still exist as tensors
in the hub's checkpoint, so the adapter is merged into them when the checkpoint is written.
"""

import enum
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from shardwise.core.errors import KeyMismatchError
from shardwise.core.expert_factors import ExpertFactors, are_swapped
from shardwise.core.expression import Expression, Shape, Stored
from shardwise.core.formatting import abbreviate
from shardwise.files.peft_adapter import LoraConfig
from shardwise.files.urls import shown

_LISTED = 20
_PREFIX = "base_model.model."
_FACTOR = re.compile(
    r"(?P<module>.+)\.(?P<matrix>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"(?:\.(?P<adapter>(?!weight$|bias$)[^.]+))?(?:\.(?P<kind>weight|bias))?"
)
_OF_A_COPY = ".modules_to_save.", ".original_module."
"""Parts of PEFT's names for the trained copy of a module, and for the module as it was."""


class WeightForm(enum.Enum):
    """The layout of a weight relative to ``lora_B @ lora_A``, which is (out, in)."""

    ROWS = "(out, in, ...)"
    COLUMNS = "(in, out)"
    EXPERTS = "(experts, out, in)"
    EXPERT_COLUMNS = "(experts, in, out)"

    @property
    def is_stacked(self) -> bool:
        return self in (WeightForm.EXPERTS, WeightForm.EXPERT_COLUMNS)

    @property
    def swapped(self) -> "WeightForm":
        """The layout of stacked experts with input and output swapped."""
        return WeightForm.EXPERT_COLUMNS if self is WeightForm.EXPERTS else WeightForm.EXPERTS

    def factors(self, shape: Shape, rank: int) -> tuple[Shape, Shape]:
        """Return the shapes of (lora_A, lora_B) for a weight of this shape."""
        match self:
            case WeightForm.ROWS:  # (8, 16), r=2: A (2, 16), B (8, 2). A convolution (8, 16, 3, 3): A (2, 16, 3, 3)
                return (rank, *shape[1:]), (shape[0], rank, *(1 for _ in shape[2:]))
            case WeightForm.COLUMNS:
                return (rank, shape[0]), (shape[1], rank)
            case WeightForm.EXPERTS:  # 4 experts (4, 8, 16), r=2: A (4 * 2, 16), B (8, 4 * 2)
                return (shape[0] * rank, shape[2]), (shape[1], shape[0] * rank)
            case WeightForm.EXPERT_COLUMNS:
                return (shape[0] * rank, shape[1]), (shape[2], shape[0] * rank)


@dataclass(frozen=True, slots=True)
class LowRank:
    """The addition of ``scaling * B @ A`` to a weight.

    With DoRA, the rows or columns of the sum are then rescaled to the magnitude.
    """

    module: str
    form: WeightForm
    rank: int
    scaling: float
    a: Expression
    b: Expression
    magnitude: Expression | None = None


@dataclass(frozen=True, slots=True)
class Replaced:
    """The replacement of a tensor by one of the adapter."""

    module: str
    leaf: Expression


Edit: TypeAlias = LowRank | Replaced


@dataclass(frozen=True)
class MergeTargets:
    """The parts of a base that an adapter may change.

    Attributes:
        tensors: shapes of the model's saved tensors, by each of their names.
        keys: shapes, by key, of the checkpoint's tensors that are not tensors of the model.
        parameters: names of each module's own parameters, in the order of the module.
        columns: modules whose weights are stored as (in, out).
        renamed: maps a name in a checkpoint to the model's name, or to None if the model has none.
    """

    tensors: Mapping[str, Shape]
    keys: Mapping[str, Shape]
    parameters: Mapping[str, Sequence[str]]
    columns: frozenset[str]
    renamed: Callable[[str], str | None]


@dataclass(frozen=True)
class MergePlan:
    """The edits of the model's tensors by name, and of the checkpoint's other tensors by key, replacements first.

    ``modules`` are the changed modules, under the adapter's names.
    """

    tensors: Mapping[str, tuple[Edit, ...]]
    keys: Mapping[str, tuple[Edit, ...]]
    modules: tuple[str, ...]

    def with_edits(self, edits: Mapping[str, Edit]) -> "MergePlan":
        """Return the plan with one more edit of each of these tensors."""
        tensors = {**self.tensors, **{name: (*self.tensors.get(name, ()), edit) for name, edit in edits.items()}}
        modules = dict.fromkeys([*self.modules, *(edit.module for edit in edits.values())])
        return replace(self, tensors=tensors, modules=tuple(modules))

    def with_tied(self, ties: Mapping[str, str]) -> "MergePlan":
        """Return the plan for a model that has separate tensors for ``ties``, target to source.

        They were one tensor when the adapter was trained, so a tensor that it stores for one of the names (that of
        a larger vocabulary) replaces all of them.
        """
        tensors = dict(self.tensors)
        # All names of one tied tensor. The first one with a replacement passes it on to those that have none.
        for source in dict.fromkeys(ties.values()):
            names = [source, *(target for target, other in ties.items() if other == source)]
            replacements: dict[str, list[Edit]] = {}
            for name in names:
                replacements[name] = [edit for edit in tensors.get(name, ()) if isinstance(edit, Replaced)]
            first = next(filter(None, replacements.values()), [])
            for name in names:
                if first and not replacements[name]:
                    tensors[name] = (*first, *tensors.get(name, ()))
        return replace(self, tensors=tensors)


_Matrices: TypeAlias = dict[str, Stored]
"""The tensors that belong to one module, by their names in PEFT."""


def plan_merge(
    config: LoraConfig, stored: Mapping[str, Stored], targets: MergeTargets, *, adapter_name: str, what: str
) -> MergePlan:
    """Match every tensor of an adapter with the tensor that it changes.

    Args:
        config: config of the adapter.
        stored: the adapter's tensors, by key.
        targets: the tensors of the base.
        adapter_name: name of the adapter to merge, if keys contain adapter names.
        what: description of the adapter and its base for the error.

    Raises:
        KeyMismatchError: tensors of the adapter do not fit the base. The error counts all, and lists up to 20 of
            each kind.
    """
    return _MergePlanner(config, stored, targets, adapter_name).plan(what)


def find_adapted_names(config: LoraConfig, stored: Mapping[str, Stored]) -> set[str]:
    """Return names of modules with factors, and of their targeted parameters: the config's patterns match these."""
    # Modules that factors belong to, and their parameters that target_parameters may select.
    factors = [match for key in stored if (match := _FACTOR.fullmatch(key.removeprefix(_PREFIX)))]
    modules = {_unwrap(match["module"])[0] for match in factors}
    targets = [item.rpartition(".") for item in config.target_parameters]
    parameters = {f"{module}.{name}" for module in modules for owner, _, name in targets if module.endswith(owner)}
    return modules | parameters


def find_unadapted(config: LoraConfig, targets: MergeTargets, plan: MergePlan) -> list[str]:
    """Return the weights of modules in the base that the config names as adapted, and that no edit changes."""
    ends = tuple(f".{name}" for name in config.adapted_names)
    named = [module for module in targets.parameters if f".{module}".endswith(ends)]
    weights = [f"{module}.weight" for module in named if "weight" in targets.parameters[module]]
    return [weight for weight in weights if weight not in plan.tensors]


def find_whole_tensors(stored: Mapping[str, Stored], *, adapter_name: str) -> dict[str, str]:
    """Return the model's names of tensors that are not factors, by their keys.

    With ``save_embedding_layers``, PEFT stores a copied embedding three times: as ``embed_tokens.weight``, which is
    what it loads, and as ``modules_to_save`` and ``original_module`` of its wrapper, which are left out here.
    """
    names: dict[str, str] = {}
    for key in stored:
        if _FACTOR.fullmatch(key.removeprefix(_PREFIX)):
            continue
        name = _strip_wrappers(key, adapter_name)
        is_repeated = _PREFIX + name in stored and any(part in key for part in _OF_A_COPY)
        if not is_repeated:
            names[key] = name
    return names


def group_factor_keys(stored: Mapping[str, Stored], *, adapter_name: str) -> dict[str, list[str]]:
    """Return the keys of the factors of each module, under the adapter's names."""
    keys: dict[str, list[str]] = {}
    for key in stored:
        match = _FACTOR.fullmatch(key.removeprefix(_PREFIX))
        if match and match["adapter"] in (None, adapter_name):
            keys.setdefault(_unwrap(match["module"])[0], []).append(key)
    return keys


def find_repeated_copies(stored: Mapping[str, Stored], *, adapter_name: str) -> dict[str, str]:
    """Return the keys of trained copies that are left out, with the key of the same tensor that is used."""
    copies = {key: _PREFIX + _strip_wrappers(key, adapter_name) for key in stored if _OF_A_COPY[0] in key}
    return {key: other for key, other in copies.items() if other in stored}


def _strip_wrappers(key: str, adapter_name: str) -> str:
    """Return the name in the model of an adapter tensor that is not a factor."""
    # "base_model.model.lm_head.modules_to_save.default.weight" is "lm_head.weight".
    name = key.removeprefix(_PREFIX)
    for wrapper in (f".modules_to_save.{adapter_name}.", *_OF_A_COPY, ".base_layer."):
        name = name.replace(wrapper, ".")
    return name


@dataclass
class _MergePlanner:
    config: LoraConfig
    stored: Mapping[str, Stored]
    targets: MergeTargets
    adapter_name: str
    faults: dict[str, list[str]] = field(default_factory=dict)
    tensors: dict[str, list[Edit]] = field(default_factory=dict)
    keys: dict[str, list[Edit]] = field(default_factory=dict)
    modules: dict[str, None] = field(default_factory=dict)
    sources: dict[tuple[type[Edit], str], str] = field(default_factory=dict)
    """The adapter's key for each kind of edit of a tensor of the base."""
    are_swapped: bool = False
    """Whether factors of stacked experts are those of an earlier PEFT.

    See [Note: Swapped factors] in ``core/expert_factors.py``.
    """

    def plan(self, what: str) -> MergePlan:
        # Factors are sorted before any is planned: whether their experts are swapped shows in all of them
        # together.
        factors: dict[str, _Matrices] = {}
        names = find_whole_tensors(self.stored, adapter_name=self.adapter_name)
        for key, leaf in self.stored.items():
            if match := _FACTOR.fullmatch(key.removeprefix(_PREFIX)):
                self.sort_factor(factors, key, leaf, match)
            elif key in names:
                self.replace(key, names[key], leaf)
        self.are_swapped = are_swapped(self.expert_factors(factors), self.config.peft_version, what)
        for module, matrices in factors.items():
            self.fold(module, matrices)
        if self.faults:
            raise KeyMismatchError(self.message(what))
        return MergePlan(
            {name: _replacements_first(edits) for name, edits in self.tensors.items()},
            {key: _replacements_first(edits) for key, edits in self.keys.items()},
            tuple(self.modules),
        )

    def fault(self, kind: str, sentence: str) -> None:
        self.faults.setdefault(kind, []).append(sentence)

    def message(self, what: str) -> str:
        lines = [f"{what}: the adapter does not fit the base"]
        for kind, sentences in self.faults.items():
            lines.append(f"  {kind}: {len(sentences)}")
            lines += [f"    {line}" for line in abbreviate(sentences, _LISTED)]
        remedy = "Merge it into the base that it was trained on, saved with the new head if it has one"
        return "\n".join([*lines, remedy])

    # Matching keys

    def sort_factor(self, factors: dict[str, _Matrices], key: str, leaf: Stored, match: re.Match[str]) -> None:
        name = match["matrix"]
        if match["adapter"] not in (None, self.adapter_name):
            self.fault("tensors that are not used", f"{shown(key)}: is of the adapter {shown(match['adapter'])}")
            return
        if match["kind"] == "bias":
            self.fault("tensors that are not used", f"{shown(key)}: lora_bias is not set")
            return
        matrices = factors.setdefault(match["module"], {})
        if name in matrices:
            self.fault("tensors that are stored twice", f"{shown(key)} and {shown(matrices[name].key)}")
        matrices[name] = leaf

    def replace(self, key: str, name: str, leaf: Stored) -> None:
        """Plan the edit of a tensor that is not a factor: a copied tensor of ``modules_to_save``, or a bias."""
        module = name.rpartition(".")[0]
        target = self.find(name)
        if target is None:
            self.fault("tensors that are not used", f"{shown(key)}: the base has no {shown(name)}")
        elif leaf.shape != target[2]:
            self.fault(
                "shapes that do not fit", f"{shown(key)}: {leaf.shape}, the base has {shown(name)} as {target[2]}"
            )
        else:
            self.add(target, module, Replaced(module, leaf), key)

    def expert_factors(self, factors: Mapping[str, _Matrices]) -> list[ExpertFactors]:
        """Return the shapes of all pairs of factors of stacked experts."""
        pairs: list[ExpertFactors] = []
        for name, matrices in factors.items():
            # Only factors of stacked experts, whose weight has three dimensions.
            weight = self.parameter(name)
            target = self.find(weight) if weight is not None and {"lora_A", "lora_B"} <= matrices.keys() else None
            if weight is None or target is None or len(target[2]) != 3:
                continue
            form = self.find_weight_form(target, is_parameter=True, is_embedding=False)
            expected = form.factors(target[2], self.config.rank(weight))
            stored = matrices["lora_A"].shape, matrices["lora_B"].shape
            pairs.append(ExpertFactors(stored, expected, target[2][0], form is WeightForm.EXPERT_COLUMNS))
        return pairs

    def parameter(self, name: str) -> str | None:
        """Return the parameter that factors under this PEFT name belong to, or None for those of a module."""
        # The wrapper of the last parameter is the outermost one, so depth 0 is the last parameter.
        module, depth = _unwrap(name)
        parameters = self.targeted(module)
        return f"{module}.{parameters[-1 - depth]}" if depth < len(parameters) else None

    def fold(self, name: str, matrices: _Matrices) -> None:
        """Plan the edits for the factors under this PEFT name."""
        # Factors of a targeted parameter, of too many wrappers, or of the module's own weight.
        module, depth = _unwrap(name)
        parameter = self.parameter(name)
        if parameter is not None:
            self.fold_low_rank(module, parameter, matrices, is_parameter=True)
        elif depth:
            self.fault(
                "tensors that are not used",
                f"{', '.join(shown(leaf.key) for leaf in matrices.values())}: target_parameters names "
                f"{len(self.targeted(module))} parameters of {shown(module)}",
            )
        else:
            self.fold_low_rank(module, f"{module}.weight", matrices, is_parameter=False)

    def targeted(self, module: str) -> list[str]:
        """Return the parameters of a module that ``target_parameters`` selects, in the order of the module."""
        patterns = self.config.target_parameters
        renamed = self.module_in_base(module, patterns)
        names = self.targets.parameters.get(renamed, ()) if renamed is not None else ()
        # A pattern is the end of a name, cut at a dot. The leading dots make the whole name such an end.
        ends = tuple(f".{item}" for item in patterns)
        return [name for name in names if f".{module}.{name}".endswith(ends)]

    def module_in_base(self, module: str, parameters: Sequence[str]) -> str | None:
        """Return the base's name of a module that has parameters of these names."""
        if module in self.targets.parameters:
            return module
        for short in dict.fromkeys(item.rpartition(".")[2] for item in parameters):
            name = self.targets.renamed(f"{module}.{short}")
            if name is not None:
                return name.rpartition(".")[0]
        return None

    def find(self, name: str) -> tuple[dict[str, list[Edit]], str, Shape] | None:
        """Find a tensor by its name or its renamed form. Return its edits, its name there and its shape."""
        targets = self.targets
        # First a tensor of the model, under its present name. Otherwise a tensor that only the checkpoint has.
        renamed = targets.renamed(name)
        if renamed is not None and renamed in targets.tensors:
            return self.tensors, renamed, targets.tensors[renamed]
        if name in targets.keys:
            return self.keys, name, targets.keys[name]
        return None

    def add(self, target: tuple[dict[str, list[Edit]], str, Shape], module: str, edit: Edit, key: str) -> None:
        edits, name, _ = target
        # One edit of each kind for a tensor. A second one would be applied on top of the first.
        first = self.sources.setdefault((type(edit), name), key)
        if first != key:
            self.fault("tensors that are stored twice", f"{shown(first)} and {shown(key)}")
        edits.setdefault(name, []).append(edit)
        self.modules[module] = None

    # Factors

    def fold_low_rank(self, module: str, weight: str, matrices: _Matrices, *, is_parameter: bool) -> None:
        # 1. The factors must be complete, and each must be there once.
        a = matrices.get("lora_A") or matrices.get("lora_embedding_A")
        b = matrices.get("lora_B") or matrices.get("lora_embedding_B")
        listed = ", ".join(shown(leaf.key) for leaf in matrices.values())
        if a is None or b is None:
            absent = "lora_A" if a is None else "lora_B"
            self.fault("tensors that are missing in the adapter", f"{absent} of {shown(module)}, beside {listed}")
            return
        for one, other in (("lora_A", "lora_embedding_A"), ("lora_B", "lora_embedding_B")):
            if one in matrices and other in matrices:
                self.fault(
                    "tensors that are stored twice", f"{shown(matrices[one].key)} and {shown(matrices[other].key)}"
                )
        # 2. The tensor that they change, and the layout in which it is stored.
        target = self.find(weight)
        if target is None:
            self.fault("modules that the base does not have", f"{shown(weight)}, wanted by {listed}")
            return
        pattern_name = weight if is_parameter else module
        rank = self.config.rank(pattern_name)
        form = self.find_weight_form(target, is_parameter=is_parameter, is_embedding="lora_embedding_A" in matrices)
        shape = target[2]
        if self.are_swapped and form.is_stacked:
            form = form.swapped
        if (
            len(shape) < 2
            or (form.is_stacked and len(shape) != 3)
            or (form is WeightForm.COLUMNS and len(shape) != 2)
        ):
            self.fault("shapes that do not fit", f"{listed}: the base has {shown(weight)} as {shape}")
            return
        # 3. Shapes follow from the weight, the rank and the layout. Nothing is inferred from the factors.
        expected = form.factors(shape, rank)
        for leaf, expected_shape in zip((a, b), expected, strict=True):
            if leaf.dtype.kind != "float":
                self.fault("factors that are not floating-point", f"{shown(leaf.key)}: {leaf.dtype.label}")
                return
            if leaf.shape != expected_shape:
                self.fault(
                    "shapes that do not fit",
                    f"{shown(leaf.key)}: {leaf.shape}, but {expected_shape} fits r={rank} and the base's "
                    f"{shown(weight)} of shape {shape}",
                )
                return
        magnitude = self.magnitude(module, shape[1 if form is WeightForm.COLUMNS else 0], matrices)
        scaling = self.config.scaling(pattern_name)
        self.add(target, pattern_name, LowRank(pattern_name, form, rank, scaling, a, b, magnitude), a.key)

    def find_weight_form(
        self, target: tuple[object, str, Shape], *, is_parameter: bool, is_embedding: bool
    ) -> WeightForm:
        _, name, shape = target
        keeps_columns = name.rpartition(".")[0] in self.targets.columns
        if is_parameter:
            if len(shape) != 3:
                return WeightForm.ROWS
            return WeightForm.EXPERT_COLUMNS if keeps_columns else WeightForm.EXPERTS
        return WeightForm.COLUMNS if is_embedding or keeps_columns else WeightForm.ROWS

    def magnitude(self, module: str, size: int, matrices: _Matrices) -> Stored | None:
        vector = matrices.get("lora_magnitude_vector")
        if vector is None:
            if self.config.use_dora:
                self.fault(
                    "tensors that are missing in the adapter",
                    f"lora_magnitude_vector of {shown(module)}, which use_dora promises",
                )
        elif not self.config.use_dora:
            self.fault("tensors that are not used", f"{shown(vector.key)}: use_dora is not set")
        # PEFT stores (out,), or for convolutions (1, out, 1, 1).
        elif sorted(vector.shape)[-1:] != [size] or any(other != 1 for other in sorted(vector.shape)[:-1]):
            self.fault("shapes that do not fit", f"{shown(vector.key)}: {vector.shape}, but ({size},) is wanted")
        return vector


def _unwrap(name: str) -> tuple[str, int]:
    """Return a module's name without wrappers, and the number of wrappers."""
    depth = 0
    while name.endswith(".base_layer"):
        name, depth = name.removesuffix(".base_layer"), depth + 1
    return name, depth


def _replacements_first(edits: Sequence[Edit]) -> tuple[Edit, ...]:
    return tuple(sorted(edits, key=lambda edit: not isinstance(edit, Replaced)))
