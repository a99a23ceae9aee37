"""Tiny random models of every architecture in the installed transformers.

A loader is only trustworthy when it has been tried on every architecture, and a test cannot download
hundreds of checkpoints. This module makes them: it takes the default configuration of an architecture,
shrinks it until the model has about a hundred thousand parameters, builds the model on the CPU and fills
every stored tensor with random values, distinct from each other, so that a weight which lands in the wrong
place is always seen.

    for specimen in causal_lm_specimens():
        model = build(specimen)
        save_original(model, directory)      # as on the hub: reverse conversion, several files
        save_internal(model, directory)      # the model's own state_dict names

How a configuration is shrunk (`tiny_config`), in this order:

1. ``SIZES`` and ``LISTS`` map field names to small values. They are applied to the default instance of the
   configuration class and to its sub-configurations. Features that are off by default (0, None, -1) stay off,
   and what a configuration derives from its other fields it derives again.
2. Lists with one entry per layer (``layer_types``, ``mlp_layer_types``, ...) are cut to the fewest layers
   that still show each entry, and the layer count follows.
3. Token ids are moved into the small vocabulary, and the lists inside rotary parameters get fitting lengths.
4. ``OVERRIDES`` holds what remains: a few fields for each architecture with rules of its own.

What transformers itself cannot do is listed in ``KNOWN_UPSTREAM``, ``NOT_BUILT`` and ``PREFIXES_UNSUPPORTED``.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import importlib
import json
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

MAX_PARAMETERS = 3_000_000


class CannotShrink(Exception):
    """No tiny configuration of an architecture could be made."""


@dataclass(frozen=True)
class Specimen:
    """One architecture of the zoo: a configuration (``model_type``) and the model class built from it."""

    name: str
    model_type: str
    class_name: str
    family: str  # "causal-lm" | "vision-language" | "encoder" | "other"


# --------------------------------------------------------------------------------------------- small values

VOCAB = 112
HEADS = 4
LAYERS = 2
EXPERTS = 4


_DATA = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
SIZES: dict[str, int] = {name: size for size, names in _DATA["sizes"].items() for name in names.split()}
LISTS: dict[str, list[int]] = _DATA["lists"]
TOWER_SIZES: dict[str, int] = _DATA["tower_sizes"]
DEFAULTS: dict[str, dict[str, Any]] = _DATA["defaults"]
OVERRIDES: dict[str, dict[str, Any]] = _DATA["overrides"]
KNOWN_UPSTREAM: dict[str, str] = _DATA["known_upstream"]
NOT_BUILT: dict[str, str] = _DATA["not_built"]
PREFIXES_UNSUPPORTED: set[str] = set(_DATA["prefixes_unsupported"])
"""Explained in ``zoo.yaml``."""

# Fields that a configuration derives from others when they are None, and that are set here nevertheless.
FREE_WHEN_DERIVED = {"num_key_value_heads", "head_dim", "num_kv_heads"}

# Lists that have one entry per layer even where no field holds the number of layers.
PER_LAYER_NAMES = ("layer_types", "layers_block_type", "mlp_layer_types", "attn_layers")

# ------------------------------------------------------------------------------------------- configurations


def _stored(config: PreTrainedConfig, name: str) -> Any:
    """A configuration's own value, also where the values of its layers differ."""
    return vars(config).get(type(config).attribute_map.get(name, name))


def _default_of(field: dataclasses.Field) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None


def _layer_lists(config: PreTrainedConfig) -> dict[str, list]:
    """The lists of a configuration that have one entry per layer."""
    count = getattr(config, "num_hidden_layers", 0)
    lists = {}
    for field in dataclasses.fields(config):
        value = _stored(config, field.name)
        if isinstance(value, (list, tuple)) and field.name not in LISTS and not field.name.startswith("mtp_"):
            per_layer = len(value) == count > LAYERS or field.name in PER_LAYER_NAMES
            if value and per_layer and list(value) != list(range(len(value))):
                lists[field.name] = list(value)
    return lists


def _representative_layers(lists: dict[str, list]) -> list[int]:
    """Indices of the fewest layers (at least two) that show each entry of each list."""
    count = min(map(len, lists.values()))
    wanted = {(name, repr(entry)) for name, entries in lists.items() for entry in entries[:count]}
    chosen: list[int] = []
    while wanted or len(chosen) < min(LAYERS, count):
        rest = [i for i in range(count) if i not in chosen]
        gain = {i: sum((name, repr(entries[i])) in wanted for name, entries in lists.items()) for i in rest}
        best = max(rest, key=lambda i: gain[i])
        chosen.append(best)
        wanted -= {(name, repr(entries[best])) for name, entries in lists.items()}
    return sorted(chosen)


def _is_tower(key: str) -> bool:
    return any(word in key for word in ("vision", "audio", "visual", "image", "speech", "sam_"))


def _shrunk_fields(config: PreTrainedConfig, key: str) -> dict[str, Any]:
    """Constructor arguments of a small configuration like the given default one."""
    from transformers import PreTrainedConfig

    sizes = SIZES | TOWER_SIZES if _is_tower(key) else SIZES
    if _stored(config, "kv_lora_rank"):  # latent attention: no grouped heads; `head_dim` is the rotary part
        sizes = sizes | {"num_key_value_heads": HEADS, "head_dim": SIZES["qk_rope_head_dim"]}
    token_ids = iter(range(VOCAB - 2, 8, -1))
    arguments: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        name, value, default = field.name, _stored(config, field.name), _default_of(field)
        if isinstance(value, PreTrainedConfig):
            arguments[name] = shrink(value, parent=config.model_type, key=name)
        elif isinstance(value, bool) or not field.init:
            continue
        elif name.endswith(("token_id", "token_index")):
            if isinstance(value, int) and value >= VOCAB - 40:
                arguments[name] = next(token_ids)
            elif isinstance(value, (list, tuple)):
                arguments[name] = [next(token_ids) for _ in value]
        elif isinstance(value, (list, tuple)) and name in LISTS:
            arguments[name] = list(LISTS[name])
        elif default is None:
            if name in FREE_WHEN_DERIVED and not (name == "head_dim" and _stored(config, "kv_lora_rank")):
                arguments[name] = sizes[name]
        elif isinstance(value, int) and value > 0 and name in sizes:
            arguments[name] = sizes[name]
        elif value != default:
            arguments[name] = value
    if _stored(config, "depths") and _stored(config, "_out_indices"):
        arguments["out_indices"] = list(_stored(config, "_out_indices"))
    return arguments | _shrunk_layer_lists(config, sizes)


def _shrunk_layer_lists(config: PreTrainedConfig, sizes: dict[str, int]) -> dict[str, Any]:
    """The per-layer lists cut to representative layers, and the number of layers that this leaves."""
    lists = _layer_lists(config)
    if not lists:
        return {}
    layers = _representative_layers(lists)
    arguments: dict[str, Any] = {}
    for name, entries in lists.items():
        kept = [entries[i] for i in layers]
        arguments[name] = [sizes.get(name, e) if type(e) is int and e > 1 else e for e in kept]
    count_field = type(config).attribute_map.get("num_hidden_layers", "num_hidden_layers")
    if count_field in {field.name for field in dataclasses.fields(config)}:
        arguments[count_field] = len(layers)
    return arguments


def _repair_rope(config: PreTrainedConfig) -> None:
    """Give the lists inside rotary parameters the lengths that the small heads need."""
    rope = _stored(config, "rope_parameters")
    hidden, heads = _stored(config, "hidden_size"), _stored(config, "num_attention_heads")
    if not isinstance(rope, dict) or not hidden or not heads:
        return
    head_dim = _stored(config, "head_dim") or hidden // heads
    for parameters in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        half = int(head_dim * parameters.get("partial_rotary_factor", 1.0)) // 2
        if parameters.get("mrope_section") and sum(parameters["mrope_section"]) != half:
            third = half // 3
            parameters["mrope_section"] = [half - 2 * third, third, third]
        for name in ("short_factor", "long_factor"):
            if parameters.get(name):
                parameters[name] = parameters[name][:1] * half


def shrink(config: PreTrainedConfig, *, parent: str = "", key: str = "") -> PreTrainedConfig:
    """A small configuration of the same class; ``key`` is its field in the ``parent`` model_type, if any."""
    overrides = OVERRIDES.get(config.model_type, {}) | OVERRIDES.get(f"{parent}.{key}", {})
    small = type(config)(**_shrunk_fields(config, key) | copy.deepcopy(overrides))
    _repair_rope(small)
    return small


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """No log lines, progress bars or warnings from transformers inside; its settings are restored after."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def model_class(specimen: Specimen) -> type[PreTrainedModel]:
    """The class of a specimen, imported now."""
    import transformers
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    if hasattr(transformers, specimen.class_name):
        return getattr(transformers, specimen.class_name)
    package = f"transformers.models.{model_type_to_module_name(specimen.model_type)}"
    module = importlib.import_module(f"{package}.modeling_{package.rpartition('.')[2]}")
    return getattr(module, specimen.class_name)


def tiny_config(specimen: Specimen) -> PreTrainedConfig:
    """The small configuration to build a specimen from; raises `CannotShrink` where there is none."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    with silenced():
        try:
            config_class = CONFIG_MAPPING[specimen.model_type]
            config = shrink(config_class(**copy.deepcopy(DEFAULTS.get(specimen.model_type, {}))))
            wanted = model_class(specimen).config_class
            if isinstance(config, wanted):
                return config
            # a class for one part of a composite model, such as the language model of a vision-language one
            return next((part for part in vars(config).values() if isinstance(part, wanted)), config)
        except Exception as error:
            raise CannotShrink(f"{specimen.name}: {type(error).__name__}: {error}") from error


# --------------------------------------------------------------------------------------------------- models


def build(
    specimen: Specimen, *, dtype: torch.dtype = torch.float32, seed: int = 0, config: PreTrainedConfig | None = None
) -> PreTrainedModel:
    """A CPU model whose stored tensors hold distinct random values, fixed by the seed and the tensors' names.

    In 16-bit types distinct values may round to the same one.
    Raises `CannotShrink` for what `NOT_BUILT` lists and for models above ``MAX_PARAMETERS``.
    """
    config = tiny_config(specimen) if config is None else config
    outline = meta_model(specimen, dtype=dtype, config=config)
    size = sum(parameter.numel() for parameter in outline.parameters())
    if size > MAX_PARAMETERS:
        raise CannotShrink(f"{specimen.name}: {size:,} parameters")
    with silenced():
        model = model_class(specimen)._from_config(config, dtype=dtype)
    fill(model, seed=seed)
    return model.eval()


def meta_model(
    specimen: Specimen, *, dtype: torch.dtype = torch.float32, config: PreTrainedConfig | None = None
) -> PreTrainedModel:
    """The same model without storage, on the meta device."""
    config = tiny_config(specimen) if config is None else config
    with silenced(), torch.device("meta"):
        try:
            return model_class(specimen)._from_config(config, dtype=dtype)
        except Exception as error:
            raise CannotShrink(f"{specimen.name}: {type(error).__name__}: {error}") from error


# Integer buffers of indices, and what they index: token -> expert tables.
INDEX_TABLES = {"tid2eid": EXPERTS}


@torch.no_grad()
def fill(model: PreTrainedModel, *, seed: int = 0) -> None:
    """Random values into all that a checkpoint of the model stores; tied tensors are filled once."""
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        tensor.copy_(_random_like(name, tensor, generator))


def _random_like(name: str, tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if tensor.is_floating_point():
        # Evenly spaced in (-0.2, 0.2), in random order: no two values of a tensor are equal in float32.
        offset = torch.rand((), generator=generator, dtype=torch.float64)
        order = torch.randperm(tensor.numel(), generator=generator).reshape(tensor.shape)
        noise = (order + offset) / max(tensor.numel(), 1) * 0.4 - 0.2
        return noise + 1.0 if tensor.ndim == 1 and name.endswith("weight") else noise
    if not tensor.ndim:  # a counter
        return torch.randint(1, 2**31, (), generator=generator)
    table_size = INDEX_TABLES.get(name.rpartition(".")[2])
    if table_size is not None or not tensor.any():
        return torch.randint(0, table_size or 2, tensor.shape, generator=generator)
    # Sizes or offsets: between half of what the model itself put there and all of it, which stays valid.
    fraction = torch.rand(tensor.shape, generator=generator, dtype=torch.float64) / 2 + 0.5
    return (tensor * fraction).ceil()


def sample_inputs(model: PreTrainedModel, *, batch: int = 2, length: int = 8) -> dict[str, torch.Tensor]:
    """Inputs of a causal language model with which ``model(**inputs)`` runs."""
    generator = torch.Generator().manual_seed(0)
    rows = batch
    if model.config.model_type.startswith("musicgen"):  # one row for each codebook of each sample
        rows = batch * model.config.num_codebooks
    ids = torch.randint(3, VOCAB // 2, (rows, length), generator=generator)  # below all special tokens
    return {"input_ids": ids, "attention_mask": torch.ones(batch, length, dtype=torch.long)}


# ------------------------------------------------------------------------------------------------ checkpoints


def save_original(
    model: PreTrainedModel, directory: Path, *, max_shard_size: str = "100KB", prefixes: bool = False
) -> Path:
    """A checkpoint as on the hub: names and layout before conversion, several files with an index. The directory.

    A model that was not loaded from a checkpoint is saved without the prefixes that loading removes
    (``PrefixChange``, such as ``language_model.`` of Qwen3.5). ``prefixes`` puts them back, as on the hub.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    fresh = "_weight_conversions" not in vars(model)
    if prefixes and fresh:
        model._weight_conversions = get_model_conversion_mapping(model, add_legacy=False)
    with silenced():
        model.save_pretrained(directory, max_shard_size=max_shard_size)
    if prefixes and fresh:
        del model._weight_conversions
    return directory


def save_internal(model: PreTrainedModel, directory: str | Path, *, files: int = 2) -> None:
    """A checkpoint under the model's own names, tied tensors once, in ``files`` files with an index."""
    from safetensors.torch import save_file

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    with silenced():
        model.config.save_pretrained(directory)
    tensors: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor.detach().clone().contiguous()
    names = sorted(tensors)
    per_file = math.ceil(len(names) / files)
    weight_map: dict[str, str] = {}
    for number in range(files):
        part = names[number * per_file : (number + 1) * per_file]
        filename = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        save_file({name: tensors[name] for name in part}, directory / filename, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, filename)
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


# --------------------------------------------------------------------------------------------------- the zoo


def causal_lm(name: str) -> PreTrainedModel:
    """One of these, built."""
    return build(next(specimen for specimen in causal_lm_specimens() if specimen.name == name))


def causal_lm_specimens() -> list[Specimen]:
    """Every causal language model of the installed transformers, by name."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    specimens = []
    for model_type, class_name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        class_names = [class_name] if isinstance(class_name, str) else list(class_name)
        specimens.append(Specimen(model_type, model_type, class_names[0], "causal-lm"))
    return sorted(specimens, key=lambda specimen: specimen.name)


REPRESENTATIVE: tuple[str, ...] = tuple(_DATA["representative"])


def representative_specimens() -> list[Specimen]:
    """Those of `REPRESENTATIVE` that the installed transformers has."""
    return [s for s in causal_lm_specimens() + converter_specimens() if s.name in REPRESENTATIVE]


# Where to look for the class of a model_type, best first: what people load, then the bare model.
_TASKS = """
    IMAGE_TEXT_TO_TEXT MULTIMODAL_LM SEQ_TO_SEQ_CAUSAL_LM SPEECH_SEQ_2_SEQ TEXT_TO_WAVEFORM MASKED_LM
    OBJECT_DETECTION UNIVERSAL_SEGMENTATION SEMANTIC_SEGMENTATION VIDEO_CLASSIFICATION IMAGE_CLASSIFICATION
    TIME_SERIES_PREDICTION PRETRAINING DECISION
"""
HEAD_MAPPINGS = [*(f"MODEL_FOR_{task}_MAPPING_NAMES" for task in _TASKS.split()), "MODEL_MAPPING_NAMES"]
# Classes that the automatic mappings name for a model_type, but that do not load its checkpoints.
MISLEADING_HEADS = {
    ("shieldgemma2", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES"),
    ("shieldgemma2", "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES"),
}
FAMILY_OF_MAPPING = {
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES": "vision-language",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES": "encoder",
    "MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES": "encoder",
    "MODEL_FOR_IMAGE_MAPPING_NAMES": "encoder",
}


def _class_names(mapping: dict[str, Any], model_type: str) -> list[str]:
    names = mapping.get(model_type, [])
    return [names] if isinstance(names, str) else list(names)


def registry_keys() -> list[str]:
    """The keys (model types and class names) of transformers' registry of weight conversions."""
    from transformers import conversion_mapping

    conversion_mapping.get_checkpoint_conversion_mapping("")  # builds the cache
    return sorted(conversion_mapping._checkpoint_conversion_mapping_cache)


def _specimen_of_key(key: str, mappings: dict[str, dict[str, Any]]) -> Specimen | None:
    """The model in which a registry key is met first: a head class of a model_type, or the class itself."""
    import transformers

    for name in HEAD_MAPPINGS:
        if (key, name) in MISLEADING_HEADS:
            continue
        for class_name in _class_names(mappings.get(name, {}), key)[:1]:
            return Specimen(f"{key}:{class_name}", key, class_name, _family(mappings, key, class_name))
    for mapping in reversed(mappings.values()):
        for model_type in mapping:
            if key in _class_names(mapping, model_type):
                return Specimen(f"{model_type}:{key}", model_type, key, _family(mappings, model_type, key))
    config_class = getattr(getattr(transformers, key, None), "config_class", None)
    if config_class is None:
        return None  # no class of its own: part of another model
    return Specimen(f"{config_class.model_type}:{key}", config_class.model_type, key, "other")


def _family(mappings: dict[str, dict[str, Any]], model_type: str, class_name: str) -> str:
    for name, family in FAMILY_OF_MAPPING.items():
        if class_name in _class_names(mappings.get(name, {}), model_type):
            return family
    return "other"


def converter_specimens() -> list[Specimen]:
    """A model for each key of the conversion registry that names no causal language model, by name.

    Keys of parts without a class of their own in the automatic mappings are met in the model that holds them.
    """
    from transformers.models.auto import modeling_auto

    mappings = {
        name: mapping
        for name, mapping in vars(modeling_auto).items()
        if name.endswith("_MAPPING_NAMES") and name.startswith("MODEL_")
    }
    causal = {specimen.model_type: specimen.class_name for specimen in causal_lm_specimens()}
    specimens: set[Specimen] = set()
    with silenced():
        for key in registry_keys():
            specimen = _specimen_of_key(key, mappings)
            if specimen is None or causal.get(specimen.model_type) == specimen.class_name:
                continue
            if key not in causal or specimen.family == "vision-language":
                specimens.add(specimen)
    return sorted(specimens, key=lambda specimen: specimen.name)
