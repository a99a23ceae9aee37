"""Unexported names of PEFT, and properties of its layers that are not a public API. Used in this file only.

Checked with PEFT 0.20 and 0.21. PEFT is optional and slow to import, so functions import it when they are called.
A missing name is an error of an injection, or when it is used. ``tests/canary`` asserts the behavior of each name.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardwise.core.errors import ConfigError, find_private, private, require_private
from shardwise.core.untrusted import Pattern
from shardwise.files.checkpoint_index import parse_object
from shardwise.files.peft_adapter import (
    ADAPTER_CONFIG,
    CHANGES_THE_BASE,
    SAVE_AS_LORA,
    list_unknown_options,
    read_peft_version,
)
from shardwise.fsdp.gradients import count_data_parallel_ranks, require_synchronized
from shardwise.fsdp.named_tensors import local_tensor
from shardwise.fsdp.torch_private import original_class
from shardwise.models import pretrained
from shardwise.models.four_bit.layers import is_in_four_bits, patch_shapes
from shardwise.models.selection import MERGE_FILES

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel

_FREE_FIELDS = """
    task_type peft_type auto_mapping peft_version base_model_name_or_path revision r target_modules exclude_modules
    target_parameters layers_to_transform layers_pattern rank_pattern alpha_pattern modules_to_save lora_alpha
    lora_dropout fan_in_fan_out bias use_rslora use_dora lora_bias init_lora_weights ensure_weight_tying
    inference_mode megatron_core qalora_group_size runtime_config loftq_config corda_config eva_config
    lora_ga_config
"""
"""Fields of ``LoraConfig`` that may have any value. Others, and those of later versions, must have the default."""


def read_lora_config(folder: Path) -> LoraConfig:
    """Return the config of the adapter in a folder, with the version of PEFT that the file has.

    Raises:
        ConfigError: it is not the config of a LoRA, has options of a later version of PEFT, or PEFT cannot read it.
    """
    from peft import LoraConfig, PeftConfig
    from peft import __version__ as peft_version

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of options that PEFT does not know: checked below
            config = PeftConfig.from_pretrained(str(folder))
    except (OSError, TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{folder}: PEFT cannot read adapter_config.json, {error}") from error
    if not isinstance(config, LoraConfig):
        raise ConfigError(f"{folder}: is a {config.peft_type}. Only a LORA can be trained, pass one")
    file = folder / ADAPTER_CONFIG
    known = [field.name for field in dataclasses.fields(LoraConfig)]
    if unknown := list_unknown_options(parse_object(file.read_bytes(), what=str(file)), known):
        raise ConfigError(
            f"{file}: the adapter uses {', '.join(unknown)}, which PEFT {peft_version} does not know. Use the "
            "version of PEFT that made it"
        )
    config.peft_version = read_peft_version(file)
    return config


def lora_config(**settings: Any) -> LoraConfig:
    """Create the config of a LoRA.

    Raises:
        ConfigError: PEFT is not installed, or rejects the settings.
    """
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ConfigError("peft: is not installed. Run pip install 'shardwise[peft]'") from error
    try:
        return LoraConfig(**settings)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"LoraConfig: PEFT rejects the settings, {error}") from error


def comparable_text(config: LoraConfig) -> str:
    """Return a config as text that is equal in all processes, with sets sorted.

    Raises:
        ConfigError: it is not the config of a LoRA.
    """
    _require_lora(config)
    values = {name: sorted(value) if isinstance(value, set) else value for name, value in config.to_dict().items()}
    return repr(sorted(values.items(), key=itemgetter(0)))


def _require_lora(config: object) -> None:
    from peft import LoraConfig, PeftConfig

    if type(config) is not LoraConfig:
        what = f"the class {config.__name__}" if isinstance(config, type) else f"of type {type(config).__name__}"
        remedy = ""
        if isinstance(config, PeftConfig):
            remedy = ". For other kinds call peft.get_peft_model on the whole model, and shardwise.shard then"
        raise ConfigError(f"config: is {what}. Pass a peft.LoraConfig{remedy}")


def require_supported(config: LoraConfig, folder: str | None) -> None:
    """Reject settings that cannot be initialized on meta exactly as in PEFT.

    Args:
        config: the settings.
        folder: that of the adapter. None if it is new.

    Raises:
        ConfigError: the message has all such settings.
    """
    _require_lora(config)
    errors = []
    copied: object = config.modules_to_save
    if isinstance(copied, str):
        errors.append(f"modules_to_save={copied!r}: is not a list of names. Pass a list")
    # A field that is not known here may change what is adapted, unless it has its default.
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        default = field.default if field.default is not dataclasses.MISSING else None
        if field.name not in _FREE_FIELDS.split() and value != default and value not in (None, False, [], {}, ()):
            errors.append(f"{field.name}={value!r}: is not supported. Leave it out")
    init = config.init_lora_weights
    init_name = str(init).lower()
    why, remedy = "", "Pass True, False or 'gaussian'"
    if init_name.startswith(CHANGES_THE_BASE):
        why = "changes the base's weights"
        # With another value in its config, the adapter would be loaded on the base as it was before.
        remedy = SAVE_AS_LORA if folder else remedy
    elif init_name == "mica":
        why = "freezes lora_B, which would be trained here"
        remedy = "Use the adapter in PEFT" if folder else remedy
    elif folder is None and not isinstance(init, bool) and init_name != "gaussian":
        why = "needs full weights, or data"
    if why:
        errors.append(f"init_lora_weights={init!r}: {why}. {remedy}")
    if config.use_dora and folder is None and init is False:
        errors.append(f"init_lora_weights={init!r}: needs full products of matrices with use_dora. Pass True")
    if config.ensure_weight_tying:
        errors.append("ensure_weight_tying=True: ties adapters by views, which cannot be sharded. Leave it out")
    if errors:
        raise ConfigError(
            f"{folder or 'LoraConfig'}: is not supported on a sharded model.\n  " + "\n  ".join(errors)
        )


def inject(base: nn.Module, config: LoraConfig, adapter: str, *, is_new: bool) -> PeftModel:
    """Inject the modules of an adapter into ``base``, on meta. Return PEFT's model around it.

    ``config`` is copied. Its initialization is ignored unless the adapter ``is_new``.

    Raises:
        ConfigError: nothing matches, or PEFT rejects the config for this model.
    """
    from peft import __version__ as peft_version
    from peft import get_peft_model

    _require_names()
    peft_config: Any = copy.deepcopy(config)
    peft_config.inference_mode = False
    if not is_new:
        peft_config.init_lora_weights = True
    peft_config.peft_version = peft_version  # whose layout the tensors have from here on
    peft_config.base_model_name_or_path = base.__dict__.get("name_or_path") or None  # as get_peft_model sets it
    # A stored adapter's config may name modules in full, as rename_adapter writes it. PEFT must keep these.
    names = dict(base.named_modules())
    explicit = peft_config.target_modules if isinstance(peft_config.target_modules, set | list) else ()
    is_explicit = not is_new and bool(explicit) and all(name in names for name in explicit)
    quiet = warnings.catch_warnings()
    unconverted = _without_conversion() if is_explicit else nullcontext()
    # PEFT draws random values that are discarded. The random state is restored.
    with quiet, unconverted, pretrained.not_initializing(), torch.random.fork_rng(devices=[]), patch_shapes(base):
        warnings.simplefilter("ignore")  # rejected before, or in the report
        try:
            model: PeftModel = get_peft_model(base, peft_config, adapter_name=adapter, low_cpu_mem_usage=True)
        except Exception as error:  # the config is untrusted, and errors are of many kinds
            remedy = " Set lora_dropout=0.0" if "lora_dropout" in str(error) else ""
            raise ConfigError(f"{type(base).__name__}: PEFT cannot add this LoRA, {error}{remedy}") from error
    peft_config.init_lora_weights = config.init_lora_weights
    if is_explicit:
        peft_config.target_modules = set(explicit)  # of which PEFT keeps the shortest ends that tell them apart
    if tuple(map(int, peft_version.split(".")[:2])) < (0, 21):
        # It calls the model's forward directly, which bypasses FSDP2's hooks.
        model.base_model.forward = partial(_forward, model.base_model)  # a nested function could not be pickled
    for name, layer in layers(model):
        shown = name.removeprefix("base_model.model.")
        if _is_packed(layer) and hasattr(layer, "parameter_name"):
            if is_in_four_bits(layer.get_base_layer()):
                raise ConfigError(
                    f"target_parameters: the weight of {shown} is in four bits. Name the layer in target_modules"
                )
            layer._activate_lora = partial(_activate_deltas, layer)
        # transformers' linear routers (Llama 4, Phi-MoE) return several tensors. PEFT's layer takes a single one.
        kind = type(layer.get_base_layer()).__name__
        if is_new and kind.endswith("Router") and not hasattr(layer, "parameter_name"):
            raise ConfigError(
                f"{shown}: is a {kind}, for which PEFT has no forward pass. Name other target_modules, or pass "
                f"LoraConfig(exclude_modules=[{shown.rpartition('.')[2]!r}])"
            )
    tuner: Any = model.base_model
    tuner.merge_adapter = partial(_merge_in_place, tuner)
    tuner._unload_and_optionally_merge = partial(_unload, tuner)
    model.register_forward_pre_hook(partial(_require_synchronized, adapter))
    model.train(base.training)
    return model


_PATTERNS = {
    **dict.fromkeys(("target_modules", "exclude_modules"), "%s"),
    **dict.fromkeys(("rank_pattern", "alpha_pattern"), r"(.*\.)?(%s)$"),
    "modules_to_save": r"(^|.*\.)%s($|\..*)",
    "layers_pattern": r"(?:^|.*?\.)%s\.(?P<idx>\d+)\.",
}
"""Regular expressions that PEFT makes of what a config has, by its field. Lists of targets are names."""


def patterns(config: LoraConfig) -> Iterator[Pattern]:
    """Yield the regular expressions that PEFT will match with names of modules and parameters."""
    for field, form in _PATTERNS.items():
        value: object = getattr(config, field)
        if form == "%s" or isinstance(value, str):
            texts: Iterable[object] = [value]
        else:
            texts = value if isinstance(value, Iterable) else ()
        yield from (Pattern(field, text, form % text) for text in texts if isinstance(text, str))


def _without_conversion() -> AbstractContextManager[object]:
    """Keep PEFT from replacing names of modules in a config that are names of experts in transformers 4.

    It replaces the names of shared experts, and of the layers of dense blocks, too.
    """
    # Of the whole process: PEFT looks the function up in its module at each call.
    convert = find_private("peft.utils.transformers_weight_conversion:convert_peft_config_for_transformers")
    return mock.patch.object(*convert, return_value=None)


def _is_packed(layer: Any) -> bool:
    base = layer.get_base_layer()
    return is_in_four_bits(base) or getattr(layer, "parameter_name", None) in getattr(base, "packings", ())


@contextmanager
def _activate_deltas(layer: Any, adapters: Sequence[str]) -> Iterator[None]:
    """Replace ``ParamWrapper._activate_lora`` for stacked experts in four bits, whose weights are not changed."""
    experts, count = layer.get_base_layer(), layer.num_experts
    before = experts.deltas
    for name in adapters:
        if name in layer.lora_A:
            A, B = layer.lora_A[name].weight, layer.lora_B[name].weight
            first = A.reshape(count, -1, A.shape[1]).mT  # (experts * r, in) to (experts, in, r)
            second = B.reshape(len(B), -1, count).permute(2, 1, 0)  # (out, r * experts) to (experts, r, out)
            experts.deltas += ((layer.parameter_name, first, layer.scaling[name] * second),)
    try:
        yield
    finally:
        experts.deltas = before


def _merge_in_place(tuner: Any, adapter_names: list[str] | None = None, safe_merge: bool = False) -> None:  # noqa: FBT001, FBT002
    """Run ``BaseTuner.merge_adapter`` if it is possible in place."""
    _require_kept_weights(tuner, adapter_names, safe_merge=safe_merge)
    type(tuner).merge_adapter(tuner, adapter_names, safe_merge)


def _unload(tuner: Any, merge: bool = True, *args: Any, safe_merge: bool = False, **options: Any) -> Any:  # noqa: FBT001, FBT002
    """Run ``BaseTuner._unload_and_optionally_merge`` if it is possible."""
    if merge:
        _require_kept_weights(tuner, options.get("adapter_names"), safe_merge=safe_merge)
    group = next((name for name, layer in layers(tuner) if isinstance(layer, FSDPModule)), None)
    if group is not None:
        raise ConfigError(
            f"{group}: is an FSDP2 group of a layer and its adapter, and cannot be unloaded. {MERGE_FILES}"
        )
    return type(tuner)._unload_and_optionally_merge(tuner, merge, *args, safe_merge=safe_merge, **options)


def _require_kept_weights(tuner: Any, adapters: Sequence[str] | None, *, safe_merge: bool) -> None:
    """Reject merges that would replace a weight managed by FSDP2, which would keep using the old one.

    ``adapters`` are those to be merged; None: the active ones.

    Raises:
        ConfigError: the message has the first such layer.
    """
    for name, layer in layers(tuner):
        base = layer.get_base_layer()
        if _is_packed(layer):
            raise ConfigError(f"{name}: is in four bits, and cannot be merged into in place. {MERGE_FILES}")
        if not any(isinstance(each, DTensor) for each in base.parameters(recurse=False)):
            continue
        for adapter in layer.active_adapters if adapters is None else adapters:
            is_sharded = all(isinstance(getattr(*factor), DTensor) for factor in matrices(layer, adapter))
            if safe_merge or adapter in layer.lora_variant or not is_sharded:
                raise ConfigError(
                    f"{name}: is sharded, and {adapter!r} cannot be merged into it. Only a plain, sharded adapter "
                    f"can, without safe_merge. {MERGE_FILES}"
                )


def _require_synchronized(adapter: str, model: Any, _: object) -> None:
    """Reject a pass with gradients through an adapter that PEFT has added to a sharded model.

    A reference has none: it is frozen, or its pass is in ``torch.no_grad()``. PEFT's ``set_adapter`` cannot tell:
    TRL calls it for a reference, too.

    Raises:
        ConfigError: each rank would train matrices of its own. The message has their names.
    """
    if not torch.is_grad_enabled() or model.active_adapters == [adapter]:
        return
    require_synchronized(model, count_data_parallel_ranks(model))


def _require_names() -> None:
    require_private("peft.tuners.lora:LoraLayer", "get_base_layer reset_lora_parameters")
    private("peft.tuners.lora.layer:ParamWrapper._activate_lora")
    require_private("peft.tuners.tuners_utils:BaseTuner", "merge_adapter _unload_and_optionally_merge")


def _forward(tuner: Any, *args: Any, **keywords: Any) -> Any:
    """Run ``BaseTuner.forward`` of PEFT 0.21."""
    return tuner.model(*args, **keywords)


@dataclass(frozen=True, slots=True)
class AdaptedNames:
    """Names in the original base of adapted modules and parameters, and of copied modules."""

    modules: tuple[str, ...]
    parameters: tuple[str, ...]
    copied: tuple[str, ...]


def get_targets(model: PeftModel, adapter: str) -> AdaptedNames:
    """Return the names that the adapter targets or copies."""
    tuner: Any = model.base_model
    copied = tuple(name for name, module in model.get_base_model().named_modules() if _has_copy(module, adapter))
    return AdaptedNames(tuple(tuner.targeted_module_names), tuple(tuner.targeted_parameter_names), copied)


def _has_copy(module: nn.Module, adapter: str) -> bool:
    wrapper = private("peft.utils.other:ModulesToSaveWrapper")
    return isinstance(module, wrapper) and adapter in module.modules_to_save


def copies(model: PeftModel, adapter: str) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield (module, its trained copy) for every module in ``modules_to_save``."""
    for module in model.modules():
        if _has_copy(module, adapter):
            yield module.original_module, module.modules_to_save[adapter]  # type: ignore[misc,index]


def find_changes(model: PeftModel, adapter: str) -> list[list[bool]]:
    """Return for each layer with an adapter which of its factors are not zero, as far as this rank has them.

    And for each copied parameter whether it differs from the original. The adapter changes the model if all values
    of a list are true. Trained biases always count, because they stay if adapters are disabled.
    """
    changes = [[getattr(model.peft_config[adapter], "bias", "none") != "none"]]
    for _, layer in layers(model):
        changes.append(
            [bool(local_tensor(getattr(*factor)).any()) for factor in matrices(layer, adapter)] or [False]
        )
    for original, copied in copies(model, adapter):
        for before, after in zip(original.parameters(), copied.parameters(), strict=True):
            changes.append([not torch.equal(local_tensor(before), local_tensor(after).to(before.dtype))])
    return changes


def layers(model: PeftModel) -> Iterator[tuple[str, Any]]:
    """Yield the LoRA layers of a model, by name."""
    kind = private("peft.tuners.lora:LoraLayer")
    for name, module in model.named_modules():
        if isinstance(module, kind):
            yield name, module


def matrices(layer: Any, adapter: str) -> Iterator[tuple[nn.Module, str]]:
    """Yield (module, local name) for each parameter of an adapter in a LoRA layer, except magnitudes."""
    for attribute in ("lora_A", "lora_B"):
        if adapter in getattr(layer, attribute):
            module = getattr(layer, attribute)[adapter]
            yield from ((module, name) for name, _ in module.named_parameters(recurse=False))
    for attribute in ("lora_embedding_A", "lora_embedding_B"):
        if adapter in getattr(layer, attribute):
            yield getattr(layer, attribute), adapter


def magnitude(layer: Any, adapter: str) -> nn.Module | None:
    """Return the module that holds the magnitudes of DoRA as ``weight``."""
    vectors = layer.lora_magnitude_vector  # an nn.ModuleDict, which has no get
    module: nn.Module | None = vectors[adapter] if adapter in vectors else None  # noqa: SIM401
    return module


def rank_and_alpha(config: LoraConfig, module: str) -> tuple[int, float]:
    """Return ``r`` and ``lora_alpha`` of a module, which patterns may give it."""
    find_pattern = private("peft.utils.other:get_pattern_key")
    ranks, alphas = config.rank_pattern or {}, config.alpha_pattern or {}
    rank: int = ranks.get(find_pattern(list(ranks), module), config.r)
    alpha: float = alphas.get(find_pattern(list(alphas), module), config.lora_alpha)
    return rank, alpha


def scaling(config: LoraConfig, module: str, rank: int) -> float:
    """Return the factor of ``lora_B @ lora_A`` for a module whose matrices have this rank."""
    _, alpha = rank_and_alpha(config, module)
    return alpha / (math.sqrt(rank) if config.use_rslora else rank)


def expert_layers(model: PeftModel, adapter: str) -> Iterator[tuple[Any, Any, int, bool]]:
    """Yield (lora_A, lora_B, number of experts, ``is_transposed``) for parameters of stacked experts."""
    for _, layer in layers(model):
        if hasattr(layer, "parameter_name") and layer.num_experts > 1 and adapter in layer.lora_A:
            is_transposed = getattr(layer.get_base_layer(), "is_transposed", False) is True
            yield layer.lora_A[adapter], layer.lora_B[adapter], layer.num_experts, is_transposed


def has_row_norms(layer: Any) -> bool:
    """Return whether the magnitudes of DoRA are norms of rows of the stored weight."""
    base = layer.get_base_layer()
    return isinstance(base, nn.Linear) and not getattr(layer, "fan_in_fan_out", False)


def initialize(layer: Any, adapter: str, init: bool | str) -> None:  # noqa: FBT001 - as PEFT has it
    """Run PEFT's initializer for an adapter in a layer, on the existing tensors."""
    if init is not False:
        layer.reset_lora_parameters(adapter, init)
        return
    # PEFT keeps the values from the constructors of the modules.
    for attribute in ("lora_A", "lora_B"):
        if adapter in getattr(layer, attribute):
            getattr(layer, attribute)[adapter].reset_parameters()
    for attribute in ("lora_embedding_A", "lora_embedding_B"):
        if adapter in getattr(layer, attribute):
            nn.init.normal_(getattr(layer, attribute)[adapter])


def save_config(model: Any, adapter: str, folder: str) -> None:
    """Write ``adapter_config.json`` as PEFT's ``save_pretrained`` does, with names sorted."""
    config = copy.deepcopy(model.peft_config[adapter])
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    config.inference_mode = True
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = base.__dict__.get("name_or_path") or None
    for name in ("target_modules", "exclude_modules", "modules_to_save", "target_parameters"):
        value = getattr(config, name, None)
        if isinstance(value, (set, list, tuple)):
            setattr(config, name, sorted(value))
    mapping = None
    if config.task_type is None:
        kind = original_class(base)
        mapping = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
    config.save_pretrained(folder, auto_mapping_dict=mapping)


def moving_functions() -> list[str]:
    """Return the names of the functions by which PEFT moves a new adapter to the device of its layer.

    Their arguments are modules, including the layer with the adapter. Empty if PEFT is not installed.
    """
    if importlib.util.find_spec("peft") is None:
        return []
    return [
        "peft.tuners.tuners_utils:BaseTunerLayer._move_adapter_to_device_of_base_layer",
        "peft.tuners.lora.layer:ParamWrapper._move_adapter_to_device_of_base_layer",
        "peft.tuners.tuners_utils:BaseTuner._replace_module",
        "peft.tuners.lora.model:LoraModel._replace_module",
    ]


def find_adapter_layer(given: Iterable[object]) -> nn.Module | None:
    """Return the layer with adapters among the arguments of such a function."""
    kind = private("peft.tuners.tuners_utils:BaseTunerLayer")
    return next((item for item in given if isinstance(item, kind) and isinstance(item, nn.Module)), None)


def map_copied_names(model: nn.Module) -> dict[str, str]:
    """Map the names of parameters and buffers that PEFT copied for training to those of their originals."""
    if importlib.util.find_spec("peft") is None:
        return {}
    wrapper = private("peft.utils.other:ModulesToSaveWrapper")
    originals: dict[str, str] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, wrapper):
            by_adapter: Any = module.modules_to_save
            for adapter, copied in by_adapter.items():
                for name, _ in [*copied.named_parameters(), *copied.named_buffers()]:
                    originals[f"{prefix}.modules_to_save.{adapter}.{name}"] = f"{prefix}.original_module.{name}"
    return originals
