"""A training from its configuration: what is made ready, in which order, and what is written where."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from shardwise.errors import StorageError
from shardwise.execution.world import World
from shardwise.report import LoadReport, SaveReport
from shardwise.training.checkpoints import Checkpointing, NoCheckpoints
from shardwise.training.config import TrainConfig
from shardwise.training.configured import row_layout, sharding_of
from shardwise.training.data import (
    Malformed,
    RefuseRows,
    SkipRows,
    StepLoader,
    TrainData,
    evaluation_batches,
    read_data,
    step_loader,
)
from shardwise.training.loop import Evaluating, Evaluation, NoEvaluation, train
from shardwise.training.metrics import MetricsFile, Trackers, available_trackers
from shardwise.training.prepare import (
    keep,
    load_model,
    load_tokenizer,
    require_blind_rows,
    require_embeddings,
    require_place,
    set_attention,
    stored_dtype,
)
from shardwise.training.report import EvaluationFacts, Facts, TrainReport
from shardwise.training.sources import DataName
from shardwise.training.stopping import StopRequest


@dataclass(frozen=True)
class Session:
    """All that a training needs, read and in its place.

    In the output folder there are ``config.yaml``, ``metrics.jsonl``, ``checkpoints/``, the model as it is at the
    end in ``last/``, and as it was when the evaluation was best in ``best/``.
    """

    config: TrainConfig
    rank: int
    tokenizer: PreTrainedTokenizerBase
    data: TrainData
    held_out: TrainData | None
    model: PreTrainedModel
    loaded: LoadReport
    steps: StepLoader

    @classmethod
    def begin(cls, config: TrainConfig) -> Session:
        """Read everything, cheap things that may be refused first. Collective: yes, over the default process group.

        Raises:
            ShardwiseError: something cannot be had as configured; the same on every rank.
        """
        world = World.current()
        world.require_equal(config.model_dump(), "the configuration")
        options = config.options()
        output = Path(config.output.directory)
        require_place(str(output / "last"))
        world.from_first(lambda: sorted(available_trackers(config.log.trackers)))
        sharding = world.together(lambda: sharding_of(config.sharding, options))
        tokenizer = load_tokenizer(config.model.name)
        name = DataName(config.data.train, config.data.split, config.data.subset)
        malformed: Malformed = SkipRows() if config.data.on_malformed == "skip" else RefuseRows()
        data = read_data(name, tokenizer, max_length=config.data.max_length, malformed=malformed)
        held_out = None
        if config.evaluation.data is not None:
            name = DataName(config.evaluation.data, config.evaluation.split, config.evaluation.subset)
            held_out = read_data(name, tokenizer, max_length=config.data.max_length, malformed=malformed)
        model, loaded = load_model(
            config.model.name,
            options,
            sharding=sharding,
            revision=config.model.revision,
            trust_remote_code=config.model.trust_remote_code,
        )
        set_attention(model, config.model.attn_implementation)
        for found in (data, held_out):
            if found is not None:
                require_embeddings(model, found)
        layout = row_layout(config.data, config.model.attn_implementation)
        require_blind_rows(model, layout)
        world.from_first(lambda: _write_config(config, output))
        return cls(config, world.rank, tokenizer, data, held_out, model, loaded, step_loader(data, options, layout))

    @property
    def output(self) -> Path:
        return Path(self.config.output.directory)

    def train(self, on_facts: Callable[[Facts], object], stop: StopRequest) -> TrainReport:
        """Train, with metrics and trackers kept on the first rank. Collective: yes.

        Raises:
            TrainingError, ConfigError: as :func:`~shardwise.training.loop.train`.
            StorageError: metrics cannot be written.
        """
        listeners: list[MetricsFile | Trackers] = World.current().together(self._listeners)

        def tell(facts: Facts) -> None:
            on_facts(facts)
            for listener in listeners:
                listener.tell(facts)

        try:
            return train(
                self.model,
                self.steps,
                self.config.options(),
                tell,
                evaluation=self._evaluation(),
                checkpoints=self._checkpoints(),
                stop=stop,
            )
        finally:
            for listener in listeners:
                listener.close()

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
                self.held_out, self.steps.batches.layout, section.batch_size or self.config.training.batch_size
            ),
            section.every,
            self._keep_best if section.keep_best else lambda facts: None,
        )

    def _checkpoints(self) -> Checkpointing:
        return NoCheckpoints()

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
            dtype=section.dtype or stored_dtype(self.loaded),
            max_shard_size=section.max_shard_size,
        )


def _write_config(config: TrainConfig, output: Path) -> None:
    """Write down what was asked for, with every default; replaced in one go."""
    fresh = output / "config.yaml.new"
    try:
        fresh.write_text(config.to_yaml(), "utf-8")
        fresh.replace(output / "config.yaml")
    except OSError as error:
        raise StorageError(f"{fresh}: it cannot be written ({error.strerror or error})") from error
