"""A training from its configuration: what is made ready, in which order, and what is written where."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from shardwise.errors import RankLostError, StorageError
from shardwise.execution.moving.group_gather import gather_in_windows
from shardwise.execution.processes.launched import this_device
from shardwise.execution.ranks.world import World
from shardwise.models.pretrained import attention_of
from shardwise.models.selection import Everything
from shardwise.report.load_report import LoadReport
from shardwise.report.save_report import SaveReport
from shardwise.training.checkpoints import Checkpoints, KeptInFolders
from shardwise.training.configuration.config_sections import TrainConfig
from shardwise.training.configuration.config_values import (
    accumulation_of,
    ending_of,
    every_of,
    loss_of,
    name_of_evaluation,
    names_of_data,
    reading_of,
    resolved,
    row_layout,
    settings_of_resumed,
    sharding_of,
    tuning_of,
)
from shardwise.training.configured_model import request_of, tokenizer_of
from shardwise.training.data.batches import evaluation_batches
from shardwise.training.data.loader import StepLoader, step_loader
from shardwise.training.data.read_once import (
    HeldOut,
    RefuseRows,
    RowsAsked,
    SkipRows,
    TrainData,
    read_and_hold_out,
    read_names,
)
from shardwise.training.data.sources import DataName, names_of
from shardwise.training.data.streamed import StreamLoader, stream_loader
from shardwise.training.evaluation_rows import Evaluating, Evaluation, NoEvaluation
from shardwise.training.loop import train
from shardwise.training.metrics import MetricsFile, RunLog, Trackers, available_trackers
from shardwise.training.optimizing.optimizer_trial import require_optimizer
from shardwise.training.options import TrainOptions
from shardwise.training.passes.forward import SHARDED_FOR_LACK_OF_MEMORY, Accumulation, ShardedGradients
from shardwise.training.prepare import (
    build_model,
    dtype_of_files,
    embedding_rows,
    keep,
    load_model,
    require_blind_rows,
    require_embeddings,
    require_place,
    set_attention,
    stored_dtype,
)
from shardwise.training.pushing import Pushed, push, require_pushable
from shardwise.training.report import EvaluationFacts, Event, TrainReport
from shardwise.training.resuming import dated, kept_in, preview_of, require_same_data, require_same_kind
from shardwise.training.stopping import StopRequest
from shardwise.training.texts.chat_script import ChatOptions, Learn


@dataclass(frozen=True)
class Session:
    """All that a training needs, read and in its place.

    In the output folder there are ``config.yaml``, ``metrics.jsonl``, ``checkpoints/``, the model as it is at the
    end in ``last/``, and as it was when the evaluation was best in ``best/``.
    """

    config: TrainConfig
    """In which what depends on where it runs has been decided."""
    asked: TrainConfig
    """As it was given: it decides anew where it goes on."""
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
        asked, config = config, resolved(config, this_device())
        options = config.options()
        output = Path(config.output.directory)
        require_place(str(output / "last"))
        world.from_first(lambda: _require_services(config))
        tuning = world.together(lambda: tuning_of(config.tuning))
        keeper = kept_in(asked, output, tuning.saves())
        before = preview_of(keeper)
        if before is not None:
            world.together(lambda: require_same_kind(before, config, tuning))
        keeper, day = dated(keeper, before)
        require_optimizer(options)
        sharding = sharding_of(config.sharding, options)
        tokenizer = tokenizer_of(config.model)
        asking = _RowsOf(config, tokenizer, cache_root, day)
        data: TrainData | None = None
        if config.data.streaming:
            held_out = asking.looked_at(asking.named()[1])
        else:
            rows = asking.read()
            if before is not None:
                world.together(lambda: require_same_data(before, config, rows[0]))
            data, held_out = rows
        request = request_of(config, tokenizer, sharding, tuning)
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
        steps = asking.steps(model, data, options)
        place = (world.rank, world.size)
        return cls(config, asked, *place, tokenizer, data, held_out, model, loaded, stored, steps, keeper)

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
        log: RunLog | None = World.current().together(lambda: self._log(on_facts))
        section, options = self.config.checkpoints, self.config.options()
        summed_in = self.config.sharding.reduce_dtype
        accumulation = accumulation_of(self.config.training, self.model, options, summed_in)

        def close() -> None:
            if log is not None:
                log.close()

        try:
            trained = train(
                self.model,
                self.steps,
                options,
                on_facts if log is None else log.tell,
                loss=loss_of(self.config.training),
                accumulation=accumulation,
                when_ready=self._begin_writing,
                evaluation=self._evaluation(),
                checkpoints=Checkpoints(self.keeper, every_of(section.every), settings_of_resumed(section)),
                stop=stop,
                when_stuck=when_stuck,
                remarks=self._remarks(accumulation),
            )
        except BaseException:  # which other ranks may know nothing of
            with contextlib.suppress(Exception):
                close()
            raise
        World.current().together(close)
        return trained

    def _remarks(self, accumulation: Accumulation) -> list[str]:
        """What has been decided for this training where it was left open."""
        is_chosen = self.config.training.accumulate == "auto" and isinstance(accumulation, ShardedGradients)
        return [SHARDED_FOR_LACK_OF_MEMORY] if is_chosen else []

    def _begin_writing(self) -> None:
        """Nothing is written before all that may be refused has been looked at. Collective: yes."""
        require_blind_rows(self.model, self.steps.layout, self.config.options())
        World.current().from_first(lambda: write_config(self.asked, self.output))

    def _log(self, on_facts: Callable[[Event], object]) -> RunLog | None:
        """What is kept of this run; nothing but on the first rank."""
        if self.rank != 0:
            return None
        log = self.config.log

        def trackers(complain: Callable[[str], object]) -> Trackers:
            folder, shown = self.output / "trackers", self.config.model_dump()
            return Trackers(log.trackers, folder, log.project, shown, log.tracker_options, complain)

        return RunLog(on_facts, MetricsFile(self.output / "metrics.jsonl"), trackers)

    def _evaluation(self) -> Evaluating:
        section = self.config.evaluation
        if self.held_out is None:
            return NoEvaluation()
        return Evaluation(
            evaluation_batches(
                self.held_out, self.steps.layout, section.batch_size or self.config.training.batch_size
            ),
            every_of(section.every),
            self._keep_best if section.keep_best else lambda facts: None,
            ending_of(section),
        )

    def _keep_best(self, _facts: EvaluationFacts) -> None:
        self._save("best")

    def save_last(self) -> SaveReport:
        """Save the model as it is, with its tokenizer. Collective: yes.

        Raises:
            ShardwiseError: as :func:`~shardwise.training.prepare.keep`.
        """
        return self._save("last")

    def push(self) -> Pushed | None:
        """Copy what :meth:`save_last` saved to the hub, where that is asked for; what became of it.

        A copy that fails is told, and raises nothing. Collective: yes.
        """
        section = self.config.output
        if section.push_to_hub is None:
            return None
        repository, private = section.push_to_hub, section.private
        return World.current().from_first(lambda: push(self.output / "last", repository, private=private))

    def _save(self, name: str) -> SaveReport:
        section = self.config.output
        return keep(
            self.model,
            self.tokenizer,
            str(self.output / name),
            dtype=section.dtype or self.stored,
            max_shard_size=section.max_shard_size,
        )


def _require_services(config: TrainConfig) -> None:
    """Refuse trackers and a hub that cannot be told."""
    available_trackers(config.log.trackers)
    if config.output.push_to_hub is not None:
        require_pushable(config.output.push_to_hub)


def read_rows(
    config: TrainConfig,
    tokenizer: PreTrainedTokenizerBase,
    cache_root: Path | None = None,
    day: datetime.date | None = None,
) -> tuple[TrainData, TrainData | None]:
    """What is learned, and what is only looked at. Collective: yes.

    ``cache_root`` is where tokens are kept where the configuration does not say; None: nowhere. ``day`` is the one
    that templates are told; None for today's.
    """
    return _RowsOf(config, tokenizer, cache_root, day).read()


@dataclass(frozen=True)
class _RowsOf:
    """The rows that a configuration names, as a tokenizer has them."""

    config: TrainConfig
    tokenizer: PreTrainedTokenizerBase
    cache_root: Path | None
    day: datetime.date | None

    def read(self) -> tuple[TrainData, TrainData | None]:
        """What is learned, and what is only looked at. Collective: yes."""
        names, how = self.named()
        if self.config.data.validation_fraction is not None:
            held_out = HeldOut(self.config.data.validation_fraction, self.config.training.seed)
            return read_and_hold_out(names, how, held_out)
        return read_names(names, how), self.looked_at(how)

    def named(self) -> tuple[list[DataName], RowsAsked]:
        """Where they are, and how they are read. Collective: yes."""
        section = self.config.data

        def settle() -> tuple[list[DataName], RowsAsked]:
            malformed = SkipRows() if section.on_malformed == "skip" else RefuseRows()
            chats = ChatOptions(section.chat_template, Learn(section.learn), self.day)
            reading = reading_of(section, self.cache_root)
            how = RowsAsked(self.tokenizer, section.max_length, malformed, chats, reading)
            return names_of(names_of_data(section)), how

        return World.current().together(settle)

    def looked_at(self, how: RowsAsked) -> TrainData | None:
        """What is only looked at, where that is data of its own. Collective: yes."""
        name = World.current().together(lambda: name_of_evaluation(self.config.evaluation))
        return None if name is None else read_names([name], how)

    def steps(
        self, model: PreTrainedModel, data: TrainData | None, options: TrainOptions
    ) -> StepLoader | StreamLoader:
        """What a model is trained on, step by step: rows that were read, or, where there are none, a stream."""
        layout = row_layout(self.config.data, attention_of(model))
        if data is not None:
            return step_loader(data, options, layout)
        steps = stream_loader(*self.named(), options, layout, buffer_rows=self.config.data.shuffle_buffer)
        steps.vocabulary = embedding_rows(model)
        return steps


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
