"""The transformers model of a load, built on meta, and the checkpoint's bindings for it."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from typing_extensions import TypedDict

from shardwise.core.consents import Consent, OnMissing, OnUnexpected
from shardwise.core.errors import ConfigError
from shardwise.core.expression import Bindings
from shardwise.core.formatting import comparable_text, in_bytes
from shardwise.core.layout import ModelLayout
from shardwise.core.tensors import DType
from shardwise.files.checkpoint_index import CheckpointIndex
from shardwise.files.open_checkpoint import find_form
from shardwise.files.stored_tensors import extra_tensors, stored_tensors
from shardwise.files.urls import HubOptions
from shardwise.fsdp.named_tensors import build_layout, collect_tensors
from shardwise.fsdp.torch_private import to_torch
from shardwise.fsdp.wrap import Sharding, TrainedDtype, require_trainable_dtype
from shardwise.loading import double_quantization
from shardwise.loading.audit import are_equal
from shardwise.loading.prepare import LoadOptions
from shardwise.models import build, pretrained
from shardwise.models.build import find_vocabulary_tensors, resize_vocabulary, set_vocab_size
from shardwise.models.four_bit.base import convert_base_to_four_bits
from shardwise.models.four_bit.config import Fp4, Mxfp4, Nf4, Quantization, from_transformers, is_mxfp4
from shardwise.models.initialize import BufferRules
from shardwise.models.lora.inject import StoredAdapter, Tuned
from shardwise.models.pretrained import bind
from shardwise.models.tunings import ExistingLora, Freeze, Full, Lora, Tuning, tune
from shardwise.ranks.call_arguments import check_options, get_hints, require_known
from shardwise.transfer.memory import gc_disabled
from shardwise.transfer.read import ReadExecutor

_SMALL_BUFFERS_BYTES = 1 << 30
"""Buffers of this size are accepted, however small the checkpoint is."""


class ModelOptions(TypedDict, total=False):
    """Options that choose the model to build from the checkpoint's config and keys.

    Each is optional. None means not given.

    Those of the second group are keywords of transformers' ``from_pretrained`` with the same meaning. Its other
    keywords are rejected, each with an alternative.

    Attributes:
        model_class: a model class or an Auto class. Default: the class named by the config. A class that takes a
            part of the config (a text model of a vision-language checkpoint) gets that part.
        config: a config to use instead of the checkpoint's.
        config_overrides: attributes of the checkpoint's config to replace.
        dtype: "auto" (the config's, else the stored one), or a floating dtype or its name.
        trust_remote_code: run model code that the checkpoint brings along.
        key_mapping: regex to replacement, applied to the checkpoint's keys before the model's own renames.
        hub: revision, cache and credentials of a hub repository. Its ``subfolder`` also applies to folders.

        torch_dtype: the old name of ``dtype``.
        attn_implementation: attention implementation ("sdpa", "eager", "flash_attention_2", ...), or a dict of them
            by part of the model.
        experts_implementation: how experts are computed.
        revision, cache_dir, token, local_files_only, subfolder: as in :class:`HubOptions`.
        low_cpu_mem_usage: no rank ever holds more than its shards, so True changes nothing, and False is refused.
    """

    model_class: Any
    config: PreTrainedConfig
    config_overrides: Mapping[str, Any]
    dtype: str | torch.dtype
    trust_remote_code: bool
    key_mapping: Mapping[str, str]
    hub: HubOptions

    torch_dtype: str | torch.dtype
    attn_implementation: str | dict[str, str]
    experts_implementation: str | dict[str, str]
    revision: str
    cache_dir: str
    token: str | bool
    local_files_only: bool
    subfolder: str
    low_cpu_mem_usage: bool


class FilledOptions(ModelOptions, total=False):
    """Options that choose what of a model is trained, and how it is wrapped and filled.

    Each is optional. The options of :class:`ModelOptions` are included.

    Attributes:
        tuning: the trained parameters: ``Full()``, ``Freeze(...)``, ``Lora(...)``, ``ExistingLora(...)``, or any
            other :class:`~shardwise.models.tunings.Tuning`. With a LoRA the model is PEFT's, and the transformers
            model inside it is sharded.
        trained_dtype: dtype of trained parameters. With ``tuning``, ``torch.float32`` by default, otherwise
            ``"unchanged"``. Frozen parameters keep the stored dtype.
        resize_vocab: number of tokens of the model. New rows of embedding and head are initialized by the model's
            class, as missing tensors are.
        quantization: keep the weights of linear layers in 4 bits: ``Nf4(...)`` or ``Fp4(...)``, packed while they
            are read. Only a LoRA is trained then. Linear layers stored by bitsandbytes stay in 4 bits by default.
            ``"as_stored"`` keeps experts in 4 bits as well, also MXFP4. ``"dequantize"`` dequantizes all.
        quantization_config: the same as a transformers config, ``BitsAndBytesConfig(load_in_4bit=True, ...)`` or
            ``Mxfp4Config(...)``.
        sharding: mesh, wrap policy, mixed precision and offload. See :class:`~shardwise.fsdp.wrap.Sharding`.
        buffers, on_missing, on_mismatched, on_unexpected: as for :func:`~shardwise.loading.load.load`.
    """

    tuning: Full | Freeze | Lora | ExistingLora | Tuning
    trained_dtype: TrainedDtype
    resize_vocab: int
    quantization: Quantization
    quantization_config: Any
    sharding: Sharding
    buffers: BufferRules
    on_missing: OnMissing
    on_mismatched: OnMissing
    on_unexpected: OnUnexpected


class PretrainedOptions(FilledOptions, total=False):
    """Keyword arguments of :func:`from_pretrained`, in addition to :class:`FilledOptions`.

    Each is optional.

    Attributes:
        load_weights: False leaves the model on meta, built, tied and sharded, for a run that restores its weights
            from a checkpoint (:meth:`Checkpointer.restore`).
        use_kernels: as in transformers, replace layers by kernels of the hub, code that is downloaded and run.
        liger_kernel_config: apply Liger's kernels, with these arguments of its function for the model's class.
        options: as for :func:`~shardwise.loading.load.load`.
    """

    load_weights: bool
    use_kernels: bool
    liger_kernel_config: Mapping[str, bool]
    options: LoadOptions


OptionsT = TypeVar("OptionsT", bound=ModelOptions)


def normalize_keywords(options: OptionsT) -> OptionsT:
    """Return options with transformers' keywords moved to ``dtype``, ``quantization`` and ``hub``.

    Raises:
        ConfigError: two of them contradict each other, or one cannot be honored.
    """
    # None counts as not given, as in the signatures of transformers.
    kwargs: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if "torch_dtype" in kwargs:
        torch_dtype = kwargs.pop("torch_dtype")
        dtype = kwargs.setdefault("dtype", torch_dtype)
        if str(dtype).removeprefix("torch.") != str(torch_dtype).removeprefix("torch."):
            raise ConfigError(
                f"dtype={dtype} and torch_dtype={torch_dtype}: these are two names of one argument. Pass dtype"
            )
    if isinstance(kwargs.get("dtype"), Mapping):
        raise ConfigError(
            f"dtype={kwargs['dtype']!r:.80}: a dtype for each part is not supported. Pass one for the whole model"
        )
    if kwargs.pop("low_cpu_mem_usage", True) is not True:
        raise ConfigError(
            "low_cpu_mem_usage=False: requests the full model in the memory of every rank, which is not supported. "
            "Leave it out"
        )
    if "quantization_config" in kwargs:
        # It stays in kwargs: module names of a transformers config may match nothing, those of Nf4(...) may not.
        quantization = from_transformers(kwargs["quantization_config"])
        if kwargs.setdefault("quantization", quantization) != quantization:
            raise ConfigError(
                f"quantization={kwargs['quantization']} and quantization_config: contradict each other. Pass "
                "quantization alone"
            )
    hub = kwargs.get("hub", HubOptions())
    for name in ("revision", "cache_dir", "token", "local_files_only", "subfolder"):
        if name in kwargs and isinstance(hub, HubOptions):  # any other type is rejected later
            value = kwargs.pop(name)
            if getattr(hub, name) not in (getattr(HubOptions(), name), value):
                raise ConfigError(f"{name}: is given twice, as a keyword and in hub=HubOptions(...). Pass one")
            hub = replace(hub, **{name: value})
    return cast(OptionsT, {**kwargs, "hub": hub})


def check_keywords(call: str, options: OptionsT, kind: type) -> OptionsT:
    """Check the keyword arguments of a call. Return them as :func:`normalize_keywords` does.

    ``kind`` declares the keywords that the call has.

    Raises:
        ConfigError: a keyword is unknown, has a value of the wrong type, or contradicts another.
    """
    require_known(call, options, kind)
    normalized = normalize_keywords(options)
    check_options(get_hints(kind), normalized)
    require_trainable(cast(FilledOptions, normalized))
    return normalized


def comparable_model_settings(options: ModelOptions) -> dict[str, str]:
    """Return the model options that must be equal on all ranks, as text. Configs are compared later."""
    hub = options.get("hub", HubOptions())
    attention, experts = "attn_implementation", "experts_implementation"
    kernels = ("use_kernels", "liger_kernel_config")
    plain = ("model_class", "dtype", "trust_remote_code", "key_mapping", attention, experts, *kernels)
    settings = {name: comparable_text(options[name]) for name in plain if name in options}  # type: ignore[literal-required]
    for name in ("revision", "subfolder"):
        settings[f"hub.{name}"] = repr(getattr(hub, name))
    return settings


@dataclass
class MetaModel:
    """A model on meta, and the checkpoint's bindings for it.

    Attributes:
        model: untied at first (:meth:`tie`), so that each stored name has a tensor of its own.
        transforms: conversions of transformers that the bindings were traced from.
        layout: of the untied model.
        bindings: expressions of the checkpoint for the model's tensors.
        equal_ties: names of tied tensors that are stored twice with equal values.
    """

    model: PreTrainedModel
    transforms: list[Any]
    layout: ModelLayout
    bindings: Bindings
    equal_ties: frozenset[str] = frozenset()

    def ties_stored_twice(self) -> list[tuple[str, str]]:
        """Return (name, other name) where both are stored and declared tied, so that their values are compared.

        Of all names tied to one source, the first that is stored (the source before its targets) is the other name
        of every pair, as in transformers' ``tie_weights``.
        """
        # Names by their source, the source first.
        groups: dict[str, list[str]] = {}
        for target, source in pretrained.get_declared_ties(self.model).items():
            groups.setdefault(source, [source]).append(target)
        pairs: list[tuple[str, str]] = []
        for names in groups.values():
            stored = [name for name in names if self.bindings.matched.get(name)]
            pairs += [(other, stored[0]) for other in stored[1:]]
        return sorted(pairs)

    def bindings_less_ties(self) -> Bindings:
        """Return the bindings without the second copies of tied tensors that are equal."""
        matched = {name: item for name, item in self.bindings.matched.items() if name not in self.equal_ties}
        return replace(self.bindings, matched=matched)

    def tie(self, untied: set[str]) -> None:
        """Tie the declared ties, except for ``untied``, on meta."""
        # Ties are made for the names that the checkpoint does not provide.
        saved = {name for tensor in self.layout.saved() for name in tensor.names}
        stored = set(self.bindings.matched) - self.equal_ties
        pretrained.tie(self.model, saved - stored, untied)


def compare_ties(built: MetaModel, pairs: Sequence[tuple[str, str]], executor: ReadExecutor) -> list[str]:
    """Return the first names of pairs whose stored values differ in this rank's part of the rows."""
    matched = built.bindings.matched
    differing: list[str] = []
    for name, other in pairs:
        dtype = built.layout.by_name[name].dtype  # values are compared as the model gets them
        if not are_equal(matched[name][0], matched[other][0], dtype, executor):
            differing.append(name)
    return differing


def load_config(directory: Path, options: ModelOptions) -> PreTrainedConfig:
    """Return a copy of the caller's config, or the checkpoint's config with the overrides applied."""
    config = options.get("config")
    overrides = options.get("config_overrides", {})
    if config is not None:
        if overrides:
            raise ConfigError(
                "config_overrides: changes the checkpoint's config, which config= replaces. Change that config"
            )
        # A copy: building changes the config, for example its quantization and its implementations.
        config = copy.deepcopy(config)
    else:
        config = build.read_config(
            _folder(directory),
            options.get("model_class"),
            trust_remote_code=options.get("trust_remote_code", False),
            overrides=overrides,
        )
    _remove_quantizer(config)
    build.set_implementations(config, options.get("attn_implementation"), options.get("experts_implementation"))
    return config


def _remove_quantizer(config: PreTrainedConfig) -> None:
    """Remove ``quantization_config`` from a config and its parts, to build the dequantized model.

    A ``quantization_config`` of bitsandbytes' 4 bits or of MXFP4 stays, because a model may be kept in these forms.

    Raises:
        ConfigError: the quantization method is not supported.
    """
    for section in pretrained.quantized_configs(config):
        content = section.quantization_config
        if not isinstance(content, Mapping):
            content = content.to_dict()
        if find_form(content).is_kept:
            section.quantization_config = dict(content)
        else:
            del section.quantization_config


def get_model_class(
    directory: Path, config: PreTrainedConfig, options: ModelOptions
) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    """Return the model class, and the config that it takes."""
    trust = options.get("trust_remote_code", False)
    return build.resolve_class(config, options.get("model_class"), _folder(directory), trust_remote_code=trust)


@gc_disabled()
def build_meta_model(
    directory: Path,
    config: PreTrainedConfig,
    index: CheckpointIndex,
    options: ModelOptions,
    vocab_size: int | None = None,
) -> MetaModel:
    """Build the model on meta, nothing tied yet, and bind the checkpoint's keys to it."""
    whole: Any = config
    model_class, config = get_model_class(directory, config, options)
    # As in read_config(): a part of the config gets the field of the whole.
    if hasattr(whole, "quantization_config") and not hasattr(config, "quantization_config"):
        config.quantization_config = whole.quantization_config
    if vocab_size is not None:
        set_vocab_size(config, vocab_size)
    # As transformers: the metadata of an index file names a dtype, the metadata of a single file does not.
    index_dtype = index.metadata.get("dtype") if index.layout.startswith("indexed") else None
    dtype = build.resolve_dtype(options.get("dtype", "auto"), config, _dtypes_in_order(index), index_dtype)
    model = build.build_on_meta(model_class, config, dtype, _folder(directory))
    # Buffers get memory when they are computed, also by a plan. An absurd config must not take all memory.
    nbytes = sum(buffer.nbytes for buffer in model.buffers())
    if nbytes > max(_SMALL_BUFFERS_BYTES, index.nbytes):
        raise ConfigError(
            f"{model_class.__name__}: its buffers take {in_bytes(nbytes)}, more than the weights in {directory}. "
            "Check its config"
        )
    transforms = pretrained.get_conversion_transforms(model, options.get("key_mapping"))
    return bind_checkpoint(model, index, dtype, transforms, vocab_size)


def bind_checkpoint(
    model: PreTrainedModel,
    index: CheckpointIndex,
    dtype: torch.dtype,
    transforms: list[Any],
    vocab_size: int | None = None,
) -> MetaModel:
    """Bind a checkpoint's keys to a model that has been built on meta in ``dtype``, nothing tied yet.

    Tensors that its class keeps in another dtype (``_keep_in_fp32_modules``) get this dtype.
    """
    # Layout of the untied model: each name that is declared tied is a tensor of its own here.
    tensors = collect_tensors(model)
    layout = build_layout(tensors)
    kept_dtype = pretrained.get_kept_dtypes(model, dtype)

    def get_dtype(name: str) -> torch.dtype:
        return kept_dtype(name) or to_torch(layout.by_name[name].dtype)

    bindings = bind(model, stored_tensors(index), layout, transforms, get_dtype, extra_tensors(index))
    if vocab_size is not None:
        bindings = resize_vocabulary(bindings, find_vocabulary_tensors(model, tensors), vocab_size)
    # After binding: the dtype of all results of a conversion follows the conversion's first result.
    build.keep_dtypes(model, dtype, bindings.primary)
    return MetaModel(model, transforms, layout, bindings)


def _dtypes_in_order(index: CheckpointIndex) -> list[DType]:
    """Return the stored dtypes in transformers' order: file by file, safetensors by key."""
    entries = sorted(
        index.entries.values(),
        key=lambda entry: (entry.file, entry.key if entry.file.endswith(".safetensors") else ""),
    )
    return [entry.dtype for entry in entries if entry.key not in index.extra]


def _folder(path: Path) -> Path:
    """Return the folder of a checkpoint, of which ``path`` may name a file."""
    return path if path.is_dir() else path.parent


def resolve_trained_dtype(options: FilledOptions) -> TrainedDtype:
    """Return the dtype of trained parameters: float32 by default where ``tuning`` is given."""
    default: TrainedDtype = torch.float32 if "tuning" in options else "unchanged"
    dtype = options.get("trained_dtype", default)
    require_trainable_dtype(dtype)
    return dtype


def comparable_tuning(options: FilledOptions, adapters: Mapping[str, StoredAdapter]) -> str:
    """Return the tuning options that must be equal on all ranks, as text."""
    tuning = options.get("tuning", Full())
    return repr((tuning.comparable_text(adapters), resolve_trained_dtype(options), options.get("resize_vocab")))


@gc_disabled()
def prepare_for_training(
    built: MetaModel,
    untied: set[str],
    options: FilledOptions,
    *,
    adapters: Mapping[str, StoredAdapter],
    casts_to: torch.dtype | None,
) -> Tuned:
    """Tie a model, and make it ready to be trained: on meta, before it is sharded.

    Args:
        built: the model, and the checkpoint's bindings for it.
        untied: names declared tied that stay untied.
        options: the call's options, which determine what is trained.
        adapters: adapters that the tuning starts from, by name.
        casts_to: the compute dtype of all modules, or None for the dtype of each parameter.
    """
    # In this order: ties decide which modules may be put into 4 bits, and a LoRA is added to the 4-bit layers.
    built.tie(untied)
    bindings, notes = convert_four_bit_base(built.model, built.bindings_less_ties(), options)
    tuned = tune(
        built.model,
        bindings,
        options.get("tuning", Full()),
        resolve_trained_dtype(options),
        adapters=adapters,
        casts_to=casts_to,
    )
    additions = replace(tuned.additions, nested=double_quantization.deferred_names(tuned.model))
    return replace(tuned, additions=additions, notes=(*notes, *tuned.notes))


def convert_four_bit_base(
    model: PreTrainedModel, bindings: Bindings, options: FilledOptions
) -> tuple[Bindings, tuple[str, ...]]:
    """Convert a base on meta to 4 bits, as the options request. Return the new bindings, and notes.

    Raises:
        ConfigError: nothing can be put into four bits, or a whole model in four bits is to be trained.
    """
    quantization = options.get("quantization")
    # Popped, so that a save writes it only if the model stays quantized.
    stored: Any = model.config.__dict__.pop("quantization_config", None)
    # "as_stored" requires a checkpoint in four bits, and keeps what it has in this form.
    keeps_experts = quantization == "as_stored"
    if keeps_experts and is_mxfp4(stored):
        return convert_base_to_four_bits(model, bindings, Mxfp4(), keeps_experts=True, config=stored)
    if keeps_experts and stored is None:
        raise ConfigError(
            "quantization='as_stored': the checkpoint is not stored in four bits by bitsandbytes, nor as MXFP4. "
            "Leave it out, or pass quantization=Nf4()"
        )
    if is_mxfp4(stored):
        stored = None  # dequantized by default
    # The default for linear layers of bitsandbytes is to stay as they are stored.
    is_stored = (quantization is None or keeps_experts) and stored is not None
    if is_stored:
        quantization = from_transformers(stored)
        require_trainable({**options, "quantization": quantization})
    if not isinstance(quantization, (Nf4, Fp4)):
        return bindings, ()
    has_bytes = any(item.dtype is DType.U8 for expressions in bindings.matched.values() for item in expressions)
    # Packed bytes can only be unpacked in the form in which they were saved.
    if has_bytes and stored is not None and (kind := _kind(from_transformers(stored))) != _kind(quantization):
        raise ConfigError(
            f"quantization={_kind(quantization)}: the checkpoint has bytes of {kind}, saved with names='internal'. "
            f"Pass {kind}, or leave it out"
        )
    return convert_base_to_four_bits(
        model,
        bindings,
        quantization,
        keeps_experts=keeps_experts,
        must_match=not is_stored,
        names_must_match=not is_stored and "quantization_config" not in options,
    )


def _kind(quantization: Quantization) -> str:
    return repr(quantization) if isinstance(quantization, str) else f"{type(quantization).__name__}(...)"


def require_trainable(options: FilledOptions) -> None:
    """Raise ConfigError if the tuning is a Full or Freeze of a 4-bit base."""
    tuning = options.get("tuning")
    if options.get("quantization") not in (None, "dequantize") and isinstance(tuning, (Full, Freeze)):
        raise ConfigError(
            f"tuning={type(tuning).__name__}(...): trains weights of the base, and quantization="
            f"{_kind(options['quantization'])} keeps them in four bits. Pass tuning=Lora(...), or leave out "
            "quantization"
        )


def get_consent(options: FilledOptions) -> Consent:
    """Return the consents of a call's options."""
    return Consent(
        options.get("on_missing", "error"),
        options.get("on_mismatched", "error"),
        options.get("on_unexpected", "error"),
    )
