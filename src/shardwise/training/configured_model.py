"""The model and the tokenizer that a configuration names."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from shardwise.models.wrapping.wrap import Sharding
from shardwise.training.configuration.config_sections import ModelSection, TrainConfig
from shardwise.training.configuration.config_values import quantization_of
from shardwise.training.prepare import ModelRequest, load_tokenizer
from shardwise.tuning.modes import Full, Tuning


def tokenizer_of(section: ModelSection) -> PreTrainedTokenizerBase:
    """Its own, or the one that comes with the model, of the model's revision.

    Collective: yes, over the default process group.

    Raises:
        ShardwiseError: as :func:`~shardwise.training.prepare.load_tokenizer`.
    """
    return load_tokenizer(
        section.tokenizer or section.name,
        revision=None if section.tokenizer else section.revision,
        trust_remote_code=section.trust_remote_code,
    )


def request_of(
    config: TrainConfig,
    tokenizer: PreTrainedTokenizerBase,
    sharding: Sharding,
    tuning: Tuning = Full(),  # noqa: B008 - frozen
) -> ModelRequest:
    """Which model is trained, and how; ``sharding`` and ``tuning`` as the configuration says, on these ranks."""
    section = config.model
    return ModelRequest(
        section.name,
        config.options(),
        tuning,
        sharding,
        revision=section.revision,
        trust_remote_code=section.trust_remote_code,
        vocab_size=len(tokenizer) if section.resize_vocab == "tokenizer" else section.resize_vocab,
        quantization=quantization_of(config.quantization),
    )
