"""A training from its configuration: what is made ready, in which order, and what is written where."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from shardwise.checkpoints.checkpointer import Checkpointer
from shardwise.checkpoints.modes import Asynchronous, KeepLast, Synchronous
from shardwise.errors import ConfigError, RankLostError, StorageError
from shardwise.execution.moving.group_gather import gather_in_windows
from shardwise.execution.processes.launched import this_device
from shardwise.execution.ranks.world import World
from shardwise.models.pretrained import attention_of
from shardwise.models.selection import Everything, Selection
from shardwise.report.load_report import LoadReport
from shardwise.report.save_report import SaveReport
from shardwise.training.batches import evaluation_batches
from shardwise.training.chat_options import ChatOptions, Learn
from shardwise.training.checkpoints import Checkpoints, KeptInFolders
from shardwise.training.config_sections import TrainConfig
from shardwise.training.config_values import (
    accumulation_of,
    loss_of,
    name_of_evaluation,
    names_of_data,
    reading_of,
    row_layout,
    sharding_of,
    tuning_of,
)
from shardwise.training.data import (
    HeldOut,
    RefuseRows,
    RowsAsked,
    SkipRows,
    TrainData,
    read_and_hold_out,
    read_names,
)
from shardwise.training.evaluation_rows import Evaluating, Evaluation, NoEvaluation
from shardwise.training.loader import StepLoader, step_loader
from shardwise.training.loop import train
from shardwise.training.metrics import MetricsFile, Trackers, available_trackers
from shardwise.training.prepare import (
    ModelRequest,
    build_model,
    dtype_of_files,
    embedding_rows,
    keep,
    load_model,
    load_tokenizer,
    require_blind_rows,
    require_embeddings,
    require_place,
    set_attention,
    stored_dtype,
)
from shardwise.training.report import EvaluationFacts, Event, TrainReport
from shardwise.training.sources import DataName, names_of
from shardwise.training.stopping import StopRequest
from shardwise.training.streamed import StreamLoader, stream_loader


@dataclass(frozen=True)
class Session:
    """All that a training needs, read and in its place.

    In the output folder there are ``config.yaml``, ``metrics.jsonl``, ``checkpoints/``, the model as it is at the
    end in ``last/``, and as it was when the evaluation was best in ``best/``.
    """

    config: TrainConfig
    rank: int
    size: int
    tokenizer: PreTrainedTokenizerBase
    data: TrainData | None
    """None where it is read while it is trained on."""
    held_out: TrainData | None
    model: PreTrainedModel
    loaded: LoadReport | None
    """None where all weights come from a checkpoint."""
    stored: torch.dtype | None
    """The dtype of most of the model's files, where it is another than in memory."""
    steps: StepLoader | StreamLoader
    keeper: KeptInFolders

    @classmethod
    def begin(cls, config: TrainConfig, cache_root: Path | None = None) -> Session:
        """Read everything, cheap things that may be refused first. Collective: yes, over the default process group.

        ``cache_root`` is where tokens are kept where ``data.cache_dir`` does not say; None: nowhere.

        Raises:
            ShardwiseError: something cannot be had as configured; the same on every rank.
        """
        world = World.current()
        world.require_equal(config.model_dump(), "the configuration")
        options = config.options()
        output = Path(config.output.directory)
        require_place(str(output / "last"))
        world.from_first(lambda: sorted(available_trackers(config.log.trackers)))
        tuning = world.together(lambda: tuning_of(config.tuning))
        keeper = _keeper(config, output, tuning.saves())
        sharding = sharding_of(config.sharding, options)
        tokenizer = load_tokenizer(
            config.model.tokenizer or config.model.name,
            revision=None if config.model.tokenizer else config.model.revision,
            trust_remote_code=config.model.trust_remote_code,
        )
        data: TrainData | None = None
        if config.data.streaming:
            held_out = _looked_at(config, _what_is_read(config, tokenizer, cache_root)[1])
        else:
            data, held_out = read_rows(config, tokenizer, cache_root)
        request = ModelRequest(
            config.model.name,
            options,
            tuning,
            sharding,
            revision=config.model.revision,
            trust_remote_code=config.model.trust_remote_code,
            vocab_size=len(tokenizer) if config.model.resize_vocab == "tokenizer" else config.model.resize_vocab,
        )
        # A checkpoint of an adapter does not hold the base; any other one holds all that there is.
        if keeper.source is None or tuning.saves() != Everything():
            model, loaded = load_model(request)
            stored = stored_dtype(loaded)
        else:
            model, loaded = build_model(request), None
            stored = dtype_of_files(request)
        set_attention(model, config.model.attn_implementation)
        for found in (data, held_out):
            if found is not None:
                require_embeddings(model, found)
        layout = row_layout(config.data, attention_of(model))
        steps: StepLoader | StreamLoader
        if data is None:
            names, how = _what_is_read(config, tokenizer, cache_root)
            steps = stream_loader(names, how, options, layout, buffer_rows=config.data.shuffle_buffer)
            steps.vocabulary = embedding_rows(model)
        else:
            steps = step_loader(data, options, layout)
        return cls(config, world.rank, world.size, tokenizer, data, held_out, model, loaded, stored, steps, keeper)

    @property
    def output(self) -> Path:
        return Path(self.config.output.directory)

    def train(
        self,
        on_facts: Callable[[Event], object],
        stop: StopRequest,
        when_stuck: Callable[[RankLostError], object] = lambda error: None,
    ) -> TrainReport:
        """Train, with metrics and trackers kept on the first rank. Collective: yes.

        Raises:
            TrainingError, ConfigError: as :func:`~shardwise.training.loop.train`.
            StorageError: metrics cannot be written.
            RankLostError: a rank is lost, or has run out of memory; ``when_stuck`` as of the loop.
        """
        if this_device().type == "cpu":
            gather_in_windows(self.model, World.current())
        listeners: list[MetricsFile | Trackers] = World.current().together(self._listeners)

        def tell(facts: Event) -> None:
            on_facts(facts)
            for listener in listeners:
                listener.tell(facts)

        def close() -> None:
            for listener in listeners:
                listener.close()

        try:
            trained = train(
                self.model,
                self.steps,
                self.config.options(),
                tell,
                loss=loss_of(self.config.training),
                accumulation=accumulation_of(self.config.training),
                when_ready=self._begin_writing,
                evaluation=self._evaluation(),
                checkpoints=Checkpoints(self.keeper, self.config.checkpoints.every),
                stop=stop,
                when_stuck=when_stuck,
            )
        except BaseException:  # which other ranks may know nothing of
            with contextlib.suppress(Exception):
                close()
            raise
        World.current().together(close)
        return trained

    def _begin_writing(self) -> None:
        """Nothing is written before all that may be refused has been looked at. Collective: yes."""
        require_blind_rows(self.model, self.steps.layout, self.config.options())
        World.current().from_first(lambda: write_config(self.config, self.output))

    def _listeners(self) -> list[MetricsFile | Trackers]:
        if self.rank != 0:
            return []
        log = self.config.log
        return [
            MetricsFile(self.output / "metrics.jsonl"),
            Trackers(
                log.trackers, self.output / "trackers", log.project, self.config.model_dump(), log.tracker_options
            ),
        ]

    def _evaluation(self) -> Evaluating:
        section = self.config.evaluation
        if self.held_out is None:
            return NoEvaluation()
        return Evaluation(
            evaluation_batches(
                self.held_out, self.steps.layout, section.batch_size or self.config.training.batch_size
            ),
            section.every,
            self._keep_best if section.keep_best else lambda facts: None,
        )

    def _keep_best(self, _facts: EvaluationFacts) -> None:
        self._save("best")

    def save_last(self) -> SaveReport:
        """Save the model as it is, with its tokenizer. Collective: yes.

        Raises:
            ShardwiseError: as :func:`~shardwise.training.prepare.keep`.
        """
        return self._save("last")

    def _save(self, name: str) -> SaveReport:
        section = self.config.output
        return keep(
            self.model,
            self.tokenizer,
            str(self.output / name),
            dtype=section.dtype or self.stored,
            max_shard_size=section.max_shard_size,
        )


def read_rows(
    config: TrainConfig, tokenizer: PreTrainedTokenizerBase, cache_root: Path | None = None
) -> tuple[TrainData, TrainData | None]:
    """What is learned, and what is only looked at. Collective: yes.

    ``cache_root`` is where tokens are kept where the configuration does not say; None: nowhere.
    """
    names, how = _what_is_read(config, tokenizer, cache_root)
    if config.data.validation_fraction is not None:
        return read_and_hold_out(names, how, HeldOut(config.data.validation_fraction, config.training.seed))
    return read_names(names, how), _looked_at(config, how)


def _what_is_read(
    config: TrainConfig, tokenizer: PreTrainedTokenizerBase, cache_root: Path | None
) -> tuple[list[DataName], RowsAsked]:
    section = config.data

    def settle() -> tuple[list[DataName], RowsAsked]:
        malformed = SkipRows() if section.on_malformed == "skip" else RefuseRows()
        chats = ChatOptions(section.chat_template, Learn(section.learn))
        reading = reading_of(section, cache_root)
        return names_of(names_of_data(section)), RowsAsked(tokenizer, section.max_length, malformed, chats, reading)

    return World.current().together(settle)


def _looked_at(config: TrainConfig, how: RowsAsked) -> TrainData | None:
    """What is only looked at, where that is data of its own. Collective: yes."""
    name = World.current().together(lambda: name_of_evaluation(config.evaluation))
    return None if name is None else read_names([name], how)


def _keeper(config: TrainConfig, output: Path, only: Selection) -> KeptInFolders:
    """Where states are kept, of which tensors, and whence this training goes on. Collective: yes.

    Raises:
        ConfigError: there is a checkpoint that is not to be gone on from.
        StorageError: there is none where one should be.
    """
    section = config.checkpoints
    mode = Asynchronous() if section.mode == "asynchronous" else Synchronous()
    own = World.current().together(
        lambda: Checkpointer(output / "checkpoints", keep=KeepLast(section.keep), mode=mode, only=only)
    )
    step = own.latest()
    if step is not None and section.resume == "never":
        raise ConfigError(
            f"checkpoints.resume='never', but {own.directory} has a checkpoint of step {step}; "
            "resume=auto goes on from it, and another output.directory begins anew"
        )
    if step is not None or section.resume in ("auto", "never"):
        return KeptInFolders(own, own if step is not None else None)
    other = World.current().together(lambda: Checkpointer(section.resume, only=only))
    if other.latest() is None:
        raise StorageError(f"checkpoints.resume={section.resume!r}: there is no complete checkpoint in this folder")
    return KeptInFolders(own, other)


class Written(Protocol):
    """A configuration that can be written down."""

    def to_yaml(self) -> str: ...


def write_config(config: Written, output: Path) -> None:
    """Write down what was asked for, with every default; replaced in one go."""
    fresh = output / "config.yaml.new"
    try:
        output.mkdir(parents=True, exist_ok=True)
        fresh.write_text(config.to_yaml(), "utf-8")
        fresh.replace(output / "config.yaml")
    except OSError as error:
        raise StorageError(f"{fresh}: it cannot be written ({error.strerror or error})") from error
