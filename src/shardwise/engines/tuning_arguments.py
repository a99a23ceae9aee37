"""Settles from arguments what of a model is trained: the same for a load and for its plan."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from shardwise.conversion import Bindings
from shardwise.engines.load_fill import forms_of
from shardwise.engines.outline import ModelOptions, Outline
from shardwise.errors import ConfigError
from shardwise.execution.memory.garbage import collected_later
from shardwise.formats.peft_adapter import ADAPTER_CONFIG
from shardwise.models.additions import ResizeVocab
from shardwise.models.four_bits.four_bit_base import put_base_into_four_bits
from shardwise.models.four_bits.quantization import (
    AsStored,
    Fp4,
    Mxfp4,
    Nf4,
    Quantization,
    is_mxfp4,
    of_transformers,
)
from shardwise.models.trained_dtype import AsItIs, TrainedDtype, Upcast
from shardwise.tensors import DType
from shardwise.tuning import configs
from shardwise.tuning.lora import Adapter, let_merge_in_four_bits
from shardwise.tuning.modes import AnyTuning, ExistingLora, Freeze, Full, Lora, Tuning
from shardwise.tuning.ready_model import Tuned
from shardwise.tuning.tune import tune

if TYPE_CHECKING:
    from peft import LoraConfig


class TunedOptions(ModelOptions, total=False):
    """Which model is built, and what of it is trained. Each is optional; also those of :class:`ModelOptions`.

    Attributes:
        tuning: what is trained: ``Full()``, ``Freeze(...)``, ``Lora(...)`` or ``ExistingLora(...)``, or any other
            :class:`~shardwise.tuning.modes.Tuning`; with a LoRA
            the model is PEFT's, and the model of transformers inside it is sharded.
        trained: the dtype of what is trained; with ``tuning``, ``Upcast()`` (float32) by default, else
            ``AsItIs()``. What is frozen stays as it is stored.
        resize_vocab: how many tokens the model is to have, or a
            :class:`~shardwise.models.additions.ResizeVocab`, which tells how new ones begin.
        quantization: the weights of linear layers are kept in four bits: ``Nf4(...)`` or ``Fp4(...)``, packed while
            they are read; what is trained is a LoRA then. Linear layers that bitsandbytes has stored so stay so by
            default; with ``AsStored()`` experts that are stored so do, too, also as MXFP4. ``AsNumbers()`` makes
            numbers of all.
        quantization_config: the same as transformers says it, a ``BitsAndBytesConfig(load_in_4bit=True, ...)`` or
            an ``Mxfp4Config(...)``.
    """

    tuning: AnyTuning
    trained: TrainedDtype
    resize_vocab: int | ResizeVocab
    quantization: Quantization
    quantization_config: Any


def resizing(options: TunedOptions) -> ResizeVocab | None:
    """How the vocabulary is resized, if it is."""
    wanted = options.get("resize_vocab")
    return ResizeVocab(wanted) if isinstance(wanted, int) else wanted


def trained_dtype(options: TunedOptions) -> TrainedDtype:
    """The dtype of what is trained."""
    return options.get("trained", Upcast() if "tuning" in options else AsItIs())


def alike(options: TunedOptions, adapters: Mapping[str, Adapter]) -> str:
    """What of the options ranks must have in common, in words."""
    tuning = options.get("tuning", Full())
    return repr((tuning.in_words(adapters), trained_dtype(options), resizing(options)))


@collected_later()
def made_ready(
    built: Outline,
    untied: set[str],
    options: TunedOptions,
    *,
    adapters: Mapping[str, Adapter],
    casts_to: torch.dtype | None,
) -> Tuned:
    """Tie a model, and make it ready to be trained: on meta, before it is sharded.

    Args:
        built: the model, and what the checkpoint offers for it.
        untied: names declared tied that stay untied.
        options: what is trained.
        adapters: by name, those that the tuning starts from.
        casts_to: the dtype in which everything computes; None for each parameter's own.
    """
    built.tie(untied)
    bindings, notes = base_in_four_bits(built.model, built.bindings_less_ties(), options)
    tuned = tune(
        built.model,
        bindings,
        options.get("tuning", Full()),
        trained_dtype(options),
        adapters=adapters,
        casts_to=casts_to,
    )
    additions = replace(tuned.additions, nested=forms_of(tuned.model).made_later(tuned.model))
    return replace(tuned, additions=additions, notes=(*notes, *tuned.notes))


def base_in_four_bits(
    model: PreTrainedModel, bindings: Bindings, options: TunedOptions
) -> tuple[Bindings, tuple[str, ...]]:
    """Put a base on meta into four bits, as the options ask for; what the checkpoint offers then, and notes.

    Raises:
        ConfigError: nothing can be put into four bits, or a whole model in four bits is to be trained.
    """
    wanted = options.get("quantization")
    stored: Any = model.config.__dict__.pop("quantization_config", None)
    keeps_experts = isinstance(wanted, AsStored)
    if keeps_experts and is_mxfp4(stored):
        let_merge_in_four_bits()
        return put_base_into_four_bits(model, bindings, Mxfp4(), keeps_experts=True, config=stored)
    if keeps_experts and stored is None:
        raise ConfigError(
            "quantization=AsStored(): the checkpoint is not stored in four bits by bitsandbytes, nor as MXFP4; "
            "leave it out, or pass quantization=Nf4()"
        )
    if is_mxfp4(stored):
        stored = None  # numbers, unless these are asked for
    is_stored = (wanted is None or keeps_experts) and stored is not None
    if is_stored:
        wanted = of_transformers(stored)
        require_trainable({**options, "quantization": wanted})
    if not isinstance(wanted, (Nf4, Fp4)):
        return bindings, ()
    has_bytes = any(item.dtype is DType.U8 for claims in bindings.offers.values() for item in claims)
    if has_bytes and stored is not None and (kind := type(of_transformers(stored))) is not type(wanted):
        raise ConfigError(
            f"quantization={type(wanted).__name__}(...): the checkpoint has bytes of {kind.__name__}(...), as "
            "InternalNames() have written them; pass that, or leave it out"
        )
    let_merge_in_four_bits()
    return put_base_into_four_bits(model, bindings, wanted, keeps_experts=keeps_experts, must_match=not is_stored)


def require_trainable(options: TunedOptions) -> None:
    """Raises ConfigError where what is to be trained is in four bits."""
    tuning = options.get("tuning")
    if isinstance(options.get("quantization"), (Nf4, Fp4, AsStored)) and isinstance(tuning, (Full, Freeze)):
        raise ConfigError(
            f"tuning={type(tuning).__name__}(...) trains weights of the base, and quantization="
            f"{type(options['quantization']).__name__}(...) keeps them in four bits, which are not trained; pass "
            "tuning=Lora(...), or leave quantization out"
        )


def tuning_named(text: str) -> Tuning:
    """A tuning from words, as the command line has it.

    ``full``; ``freeze=N`` with ``,modules=A+B`` and ``,extra=A+B``; ``lora=R`` with ``,alpha=X`` and
    ``,targets=A+B`` (default ``all-linear``); or a folder with an ``adapter_config.json``.

    Raises:
        ConfigError: the text is none of these, with the nearest that is.
    """
    if (Path(text) / ADAPTER_CONFIG).is_file():
        return ExistingLora(text)
    first, *rest = text.split(",")
    kind, _, value = first.partition("=")
    known: dict[str, tuple[str, ...]] = {"full": (), "freeze": ("modules", "extra"), "lora": ("alpha", "targets")}
    settings = dict(part.partition("=")[::2] for part in rest)
    near = difflib.get_close_matches(kind, known, n=1, cutoff=0.0)[0]
    if kind not in known:
        raise ConfigError(
            f"there is no tuning {text!r}; did you mean {near}? There are full, freeze=N, lora=R, and folders with "
            f"an {ADAPTER_CONFIG}"
        )
    if unknown := sorted(settings.keys() - set(known[kind])):
        listed = ", ".join(known[kind]) or "none"
        raise ConfigError(f"tuning {text!r}: {kind} has no {', '.join(unknown)}; its settings are: {listed}")
    if kind == "full":
        return Full()
    if kind == "freeze":
        names = {name: tuple(filter(None, settings.get(name, "").split("+"))) for name in known[kind]}
        return Freeze(_number(value or "0", text), names["modules"], names["extra"])
    return Lora(_lora_config(_number(value, text), settings, text))


def _lora_config(rank: int, settings: dict[str, str], text: str) -> LoraConfig:
    targets = settings.get("targets", "all-linear")
    return configs.lora_config(
        r=rank,
        lora_alpha=_number(settings.get("alpha", str(rank)), text),
        target_modules=targets if targets == "all-linear" else targets.split("+"),
    )


def _number(value: str, text: str) -> int:
    try:
        return int(value)
    except ValueError as error:
        raise ConfigError(f"tuning {text!r}: {value!r} is not a number, as in freeze=2 or lora=16") from error
