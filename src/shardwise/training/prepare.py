"""A model and its tokenizer, made ready for training."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from shardwise.errors import ConfigError, StorageError
from shardwise.execution.ranks import this_device
from shardwise.execution.world import World
from shardwise.models.dtypes import to_torch
from shardwise.models.wrap import Sharding
from shardwise.report import LoadReport, SaveReport
from shardwise.tensors.dtypes import dtype_named
from shardwise.training.data import TrainData
from shardwise.training.options import TrainOptions
from shardwise.verbs.load import LoadOptions
from shardwise.verbs.pretrained import from_pretrained
from shardwise.verbs.reopen import verify
from shardwise.verbs.save import CompareWithMemory, SaveOptions, require_writable, save


def load_tokenizer(name_or_path: str) -> PreTrainedTokenizerBase:
    """The tokenizer that comes with a model.

    Collective: yes, over the default process group.

    Raises:
        ConfigError: there is none; the same on every rank.
    """

    def load() -> PreTrainedTokenizerBase:
        try:
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name_or_path)
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"{name_or_path}: its tokenizer cannot be loaded ({error})") from error
        # transformers makes one of nothing where a model comes without its tokenizer's files.
        if len(tokenizer) <= len(set(tokenizer.all_special_tokens)):
            raise ConfigError(f"{name_or_path}: its tokenizer has no vocabulary; is tokenizer.json missing?")
        return tokenizer

    return World.current().together(load)


def require_embeddings(model: PreTrainedModel, data: TrainData) -> None:
    """Refuse tokens that the model has no embedding for.

    Raises:
        ConfigError: naming the greatest of them.
    """
    embeddings: Any = model.get_input_embeddings()
    rows = embeddings.weight.shape[0]
    greatest = max(int(example.tokens.max()) for example in data.examples)
    if greatest >= rows:
        raise ConfigError(
            f"{data.path}: the tokenizer makes the token {greatest} of it, but {type(model).__name__} has "
            f"embeddings for the tokens 0 to {rows - 1} only; the tokenizer is another model's, or was extended"
        )


def load_model(name_or_path: str, options: TrainOptions) -> tuple[PreTrainedModel, LoadReport]:
    """The model with float32 weights, sharded over all ranks, computing in ``options.dtype``; and the report.

    Collective: yes, over the default process group.

    Raises:
        ShardwiseError: as :func:`~shardwise.verbs.pretrained.from_pretrained`.
    """
    compute_dtype = getattr(torch, options.dtype)
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    if compute_dtype is torch.float32:
        policy = MixedPrecisionPolicy()
    torch.manual_seed(options.seed + World.current().rank)  # for dropout, which is to differ between ranks
    return from_pretrained(
        name_or_path,
        dtype=torch.float32,
        sharding=Sharding(mp_policy=policy),
        options=LoadOptions(seed=options.seed, device=this_device(), progress=False),
        output_loading_info=True,
    )


def stored_dtype(report: LoadReport) -> torch.dtype | None:
    """The dtype from which most of a model's tensors were cast when it was loaded; None where most were not."""
    kinds = Counter(stored for stored, _ in report.cast.values())
    label, count = kinds.most_common(1)[0] if kinds else ("", 0)
    dtype = dtype_named(label)
    return to_torch(dtype) if dtype is not None and count > report.loaded / 2 else None


def require_place(directory: str) -> None:
    """Find out before the training that what is trained can be saved there. Collective: yes.

    Raises:
        StorageError: it cannot; the same on every rank.
    """
    World.current().from_first(lambda: require_writable(directory))


def keep(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    directory: str,
    *,
    dtype: torch.dtype | str | None = None,
    max_shard_size: str = "50GB",
) -> SaveReport:
    """Save a trained model with its tokenizer, compare it with memory, and open it again.

    Collective: yes, over the default process group.

    Raises:
        ShardwiseError: as :func:`~shardwise.verbs.save.save` and :func:`~shardwise.verbs.reopen.verify`.
    """
    report = save(
        model,
        directory,
        tokenizer=tokenizer,
        dtype=dtype,
        max_shard_size=max_shard_size,
        verify=CompareWithMemory(),
        options=SaveOptions(progress=False),
    )
    found = World.current().from_first(lambda: verify(directory))
    if not found.is_sound:
        raise StorageError(f"{directory}: what was saved is damaged already: {found.damaged[0]}; check the disk")
    return report
