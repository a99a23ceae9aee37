"""A model and its tokenizer, made ready for training."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from shardwise.engines.load_options import LoadOptions
from shardwise.engines.opening import open_everywhere, read_index, resolve_everywhere
from shardwise.engines.pretrained_options import Later, PretrainedOptions
from shardwise.engines.save_options import CompareWithMemory
from shardwise.engines.saving import require_writable
from shardwise.engines.verifying import verify_files
from shardwise.errors import ConfigError, StorageError
from shardwise.execution.processes.launched import this_device
from shardwise.execution.ranks.world import World
from shardwise.models.four_bits.quantization import AsStored, FourBit
from shardwise.models.selection import has_adapters
from shardwise.models.torch_words import to_torch
from shardwise.models.wrapping.wrap import Sharding
from shardwise.report.load_report import LoadReport
from shardwise.report.save_report import SaveReport
from shardwise.storage.hub import commit_of
from shardwise.storage.names import HubOptions, is_local, is_url, local_place
from shardwise.storage.reading.opening import open_storage
from shardwise.tensors.dtypes import dtype_named
from shardwise.training.data.batches import BatchLayout, Flattened, Padded, flatten, pack
from shardwise.training.data.read_once import TrainData
from shardwise.training.generation import evaluating
from shardwise.training.options import TrainOptions
from shardwise.training.passes.forward import computing_in
from shardwise.training.texts.masking import Example
from shardwise.tuning.modes import Full, Tuning
from shardwise.verbs.pretrained import from_pretrained
from shardwise.verbs.save import save
from shardwise.verbs.save_adapter import save_adapter


def load_tokenizer(
    name_or_path: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """The tokenizer that comes with a model; ``revision`` and ``trust_remote_code`` as for the model itself.

    The first rank asks the hub once which commit is meant, before transformers asks again and again for each file.

    Collective: yes, over the default process group.

    Raises:
        ConfigError: there is none; the same on every rank.
        StorageError: there is no such folder; the hub knows no such repository, or is not to be reached, and the
            cache has none.
    """
    if not (is_local(name_or_path) or is_url(name_or_path)):
        named = HubOptions(revision=revision)
        revision = World.current().from_first(lambda: commit_of(name_or_path, named))

    def load() -> PreTrainedTokenizerBase:
        if is_local(
            name_or_path
        ):  # transformers takes a folder that is not there for a name of the hub, and asks it
            local_place(name_or_path, HubOptions())
        try:
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                name_or_path, revision=revision or "main", trust_remote_code=trust_remote_code
            )
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
    rows = embedding_rows(model)
    greatest = data.examples.greatest_token
    if greatest >= rows:
        raise ConfigError(
            f"{data.path}: the tokenizer makes the token {greatest} of it, but {type(model).__name__} has "
            f"embeddings for the tokens 0 to {rows - 1} only; the tokenizer is another model's, or was extended"
        )


def embedding_rows(model: PreTrainedModel) -> int:
    """How many tokens a model knows."""
    embeddings: Any = model.get_input_embeddings()
    return int(embeddings.weight.shape[0])


@dataclass(frozen=True)
class ModelRequest:
    """Which model is trained, and how.

    What is trained is in float32, what is frozen as it is stored. Where there are no ranks to shard it over, and
    so no policy that casts it on the way, all is in float32 if that is what is computed in.

    Attributes:
        name_or_path: a folder, an id of the hub, or a URL.
        options: of these the dtype that is computed in, and the seed.
        tuning: what is trained.
        sharding: None for all ranks in one axis.
        revision, trust_remote_code: of the hub's repository.
        vocab_size: how many tokens the model is to have; None for as many as it has.
        quantization: how the base is kept; None as its checkpoint has it.
    """

    name_or_path: str
    options: TrainOptions
    tuning: Tuning = field(default_factory=Full)
    sharding: Sharding | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    vocab_size: int | None = None
    quantization: FourBit | AsStored | None = None

    def keywords(self) -> PretrainedOptions:
        """Arguments of :func:`~shardwise.verbs.pretrained.from_pretrained`."""
        is_cast = World.current().size > 1 or self.options.dtype != "float32"
        policy = mixed_precision(self.options)
        keywords: PretrainedOptions = {
            "dtype": "auto" if is_cast else torch.float32,
            "tuning": self.tuning,
            "sharding": Sharding(mp_policy=policy) if self.sharding is None else self.sharding,
            "hub": HubOptions(revision=self.revision),
            "trust_remote_code": self.trust_remote_code,
            "options": LoadOptions(seed=self.options.seed, device=this_device()),
        }
        if self.vocab_size is not None:
            keywords["resize_vocab"] = self.vocab_size
        if self.quantization is not None:
            keywords["quantization"] = self.quantization
        return keywords


def load_model(request: ModelRequest) -> tuple[PreTrainedModel, LoadReport]:
    """The model with its weights, and the report.

    Collective: yes, over the default process group.

    Raises:
        ShardwiseError: as :func:`~shardwise.verbs.pretrained.from_pretrained`.
    """
    _seed_dropout(request.options)
    return from_pretrained(request.name_or_path, **request.keywords(), output_loading_info=True)


def build_model(request: ModelRequest) -> PreTrainedModel:
    """The model without its weights, on meta: a checkpoint is to bring them.

    Collective: yes, over the default process group.

    Raises:
        ShardwiseError: as :func:`~shardwise.verbs.pretrained.from_pretrained`.
    """
    _seed_dropout(request.options)
    keywords = request.keywords()
    keywords["weights"] = Later()
    return from_pretrained(request.name_or_path, **keywords)


def _seed_dropout(options: TrainOptions) -> None:
    """Dropout is to differ between ranks."""
    torch.manual_seed(options.seed + World.current().rank)


def mixed_precision(options: TrainOptions, reduce_dtype: torch.dtype = torch.float32) -> MixedPrecisionPolicy:
    """FSDP2's policy for what is computed in ``options.dtype``."""
    return MixedPrecisionPolicy(param_dtype=getattr(torch, options.dtype), reduce_dtype=reduce_dtype)


def set_attention(model: PreTrainedModel, implementation: str | None) -> None:
    """Have the model compute its attention so; None: as it is made to.

    Raises:
        ConfigError: it cannot, here.
    """
    if implementation is None:
        return

    def choose() -> None:
        try:
            model.set_attn_implementation(implementation)
        except (ValueError, ImportError, KeyError) as error:
            raise ConfigError(f"model.attn_implementation={implementation!r}: {error}") from error

    World.current().together(choose)


def require_blind_rows(model: PreTrainedModel, layout: BatchLayout, options: TrainOptions) -> None:
    """Refuse packing for a model in which what stands in one row of a pack is felt in the next.

    It is tried: two rows in a pack, and again with another first row. What the model says of the second must not
    change, or by less than a tenth of what a change within the second does to it (experts are computed in other
    batches, so that last digits may differ). See [Note: Packed rows] in :mod:`~shardwise.training.data.batches`.

    Collective: yes, over the default process group: three forward passes of two packs of sixteen tokens.

    Raises:
        ConfigError: the rows see each other.
    """
    if isinstance(layout, Padded):
        return
    embeddings: Any = model.get_input_embeddings()
    device = this_device()

    def said(first: int, second: int) -> torch.Tensor:
        members = [_row(first, embeddings.num_embeddings), _row(second, embeddings.num_embeddings)]
        # Two packs in a batch: what flash attention makes of positions depends on there being one.
        batch = flatten([*members, *members], 0) if isinstance(layout, Flattened) else pack([members, members], 0)
        logits: torch.Tensor = model(**batch.to(device).inputs(), use_cache=False).logits
        return logits[0, _PROBE_TOKENS : 2 * _PROBE_TOKENS].float()

    with evaluating(model), computing_in(model, device, options.dtype):
        usual = said(1, 2)
        leak = float((said(3, 2) - usual).abs().max())
        effect = float((said(1, 4) - usual)[1:].abs().max())

    def judge() -> None:
        if leak > 0.1 * effect:
            raise ConfigError(
                f"data.packing: {type(model).__name__} lets rows of a pack see each other (a change in one moved "
                f"the next by {leak:.2g}, one within it by {effect:.2g}), so that it would learn from what is not "
                "there; set data.packing=false, or another model.attn_implementation"
            )

    World.current().together(judge)


_PROBE_TOKENS = 8


def _row(seed: int, vocabulary: int) -> Example:
    """A row of the probe. All end alike, so that what differs is felt through attention alone."""
    tokens = np.random.default_rng(seed).integers(0, vocabulary, _PROBE_TOKENS)
    tokens[_PROBE_TOKENS // 2 :] = 0
    return Example.of(tokens.tolist(), [True] * _PROBE_TOKENS)


def stored_dtype(report: LoadReport) -> torch.dtype | None:
    """The dtype from which most of a model's tensors were cast when it was loaded; None where most were not."""
    kinds = Counter(stored for stored, _ in report.cast.values())
    label, count = kinds.most_common(1)[0] if kinds else ("", 0)
    dtype = dtype_named(label)
    return to_torch(dtype) if dtype is not None and count > report.loaded / 2 else None


def dtype_of_files(request: ModelRequest) -> torch.dtype | None:
    """The dtype in which most of a model's tensors are stored; None where that is none to compute in.

    Collective: yes, over the default process group. Reads headers alone.

    Raises:
        ShardwiseError: they cannot be read.
    """
    world = World.current()
    name, hub = request.name_or_path, HubOptions(revision=request.revision)
    place = name if is_url(name) else resolve_everywhere(world, name, hub)
    opened = open_everywhere(world, lambda: open_storage(place, hub))
    source = read_index(world, opened, LoadOptions().copies, LoadOptions().budget_bytes)
    with source.closing():
        kinds = Counter(tensor.dtype for tensor in source.index.tensors() if not source.index.is_scaled(tensor.key))
    if not kinds:
        return None
    dtype = to_torch(kinds.most_common(1)[0][0])
    return dtype if dtype.is_floating_point and dtype.itemsize >= 2 else None


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
    """Save a trained model, or its adapter alone, with the tokenizer, and compare it with memory.

    A model is opened again afterwards.

    Collective: yes, over the default process group.

    Raises:
        ShardwiseError: as :func:`~shardwise.verbs.save.save`, and
            :func:`~shardwise.engines.verifying.verify_files`.
    """
    compared = CompareWithMemory()
    if has_adapters(model):
        return save_adapter(model, directory, tokenizer=tokenizer, verify=compared)
    report = save(
        model,
        directory,
        tokenizer=tokenizer,
        dtype=dtype,
        max_shard_size=max_shard_size,
        verify=compared,
    )
    found = World.current().from_first(lambda: verify_files(directory))
    if not found.is_sound:
        damaged = [*found.damaged, *found.damaged_files]
        raise StorageError(f"{directory}: what was saved is damaged already: {damaged[0]}; check the disk")
    return report
