"""``shardwise train``'s configuration: its sections. What a key may be is said once, here, as types.

Longer than other files, since it is one list: all keys, in the order that ``shardwise train --keys`` tells them in.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from omegaconf import OmegaConf
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from shardwise.training.configuration.config_types import (
    BelowOne,
    Count,
    Finite,
    Float,
    Fraction,
    NamesOrPattern,
    NotNegative,
    Often,
    OneOrMore,
    Positive,
    Several,
    Share,
    Size,
    Words,
)
from shardwise.training.options import Epochs, NamedOptimizer, Ratio, Schedule, Steps, TrainOptions


class Section(BaseModel):
    """Keys with values of exactly their types; others are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ModelSection(Section):
    """Which model. ``name`` is a folder, an id of the hub, or a URL.

    ``tokenizer`` is a folder or an id of the hub; null: the tokenizer that comes with the model.

    ``resize_vocab`` is how many tokens it is to have; ``tokenizer``: as many as that knows.
    """

    name: Words
    revision: Words | None = None
    tokenizer: Words | None = None
    attn_implementation: Words | None = None
    trust_remote_code: bool = False
    resize_vocab: Count | Literal["tokenizer"] | None = None


class FullTuning(Section):
    """All parameters are trained."""

    method: Literal["full"] = "full"


class FreezeTuning(Section):
    """Some layers, and modules outside of them, are trained; the fields are those of ``shardwise.Freeze``."""

    method: Literal["freeze"]
    trainable_layers: int = 0
    trainable_modules: Several = []
    extra_modules: Several = []

    @model_validator(mode="after")
    def _something(self) -> FreezeTuning:
        if self.trainable_modules and not self.trainable_layers:
            raise ValueError("trainable_modules are inside of trainable_layers, of which there are none")
        if not self.trainable_layers and not self.extra_modules:
            raise ValueError("say what is trained: trainable_layers (the last n; -n: the first) or extra_modules")
        return self


class LoraTuning(Section):
    """A LoRA is trained; names and defaults are those of ``peft.LoraConfig``, whose other keys go into ``options``.

    ``adapter`` is a folder with an adapter to go on from, which has a config of its own.
    """

    method: Literal["lora"]
    r: Count = 8
    lora_alpha: Count = 8
    lora_dropout: BelowOne = 0.0
    target_modules: NamesOrPattern | None = None
    target_parameters: Several | None = None
    modules_to_save: Several | None = None
    use_rslora: bool = False
    use_dora: bool = False
    options: dict[str, Any] = {}
    adapter: Words | None = None
    placement: Literal["in_blocks", "replicated"] = "in_blocks"

    @model_validator(mode="after")
    def _one_config(self) -> LoraTuning:
        others = [
            name
            for name, field in type(self).model_fields.items()
            if name not in ("method", "adapter", "placement") and getattr(self, name) != field.default
        ]
        if self.adapter is not None and others:
            raise ValueError(f"adapter has a config of its own, so that {', '.join(others)} cannot be given")
        return self


class QuantizationSection(Section):
    """The base is kept in four bits, as ``shardwise.options.Nf4`` says it; ``nf4`` alone is ``form: nf4``.

    ``scales: nested`` is double quantisation. ``stored`` alone is ``shardwise.options.AsStored``.
    """

    form: Literal["nf4", "fp4", "stored"] = "nf4"
    block_size: Literal[32, 64, 128, 256, 512, 1024, 2048, 4096] = 64
    scales: Literal["plain", "nested"] = "plain"
    compute_dtype: Float | None = None
    stay: Several = []

    @model_validator(mode="before")
    @classmethod
    def _form_alone(cls, value: Any) -> Any:
        return {"form": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _stored_alone(self) -> QuantizationSection:
        if self.form == "stored" and (others := sorted(self.model_fields_set - {"form"})):
            raise ValueError(
                f"form: stored takes what the checkpoint has, so that {', '.join(others)} cannot be given"
            )
        return self


TuningSection: TypeAlias = Annotated[FullTuning | FreezeTuning | LoraTuning, Field(discriminator="method")]


Layout: TypeAlias = Literal["messages", "sharegpt", "alpaca", "completion", "text"]


class DataSetSection(Section):
    """One data set of several; ``weight`` is its share of the rows of an epoch, against those of the others.

    What is null is as it is in the section around.
    """

    path: Words
    split: Words | None = None
    subset: Words | None = None
    layout: Layout | None = None
    columns: dict[str, Words] | None = None
    weight: Finite | None = None


class DataSection(Section):
    """What is learned.

    ``train`` is a file (JSON lines or an array, Parquet, Arrow, CSV), a pattern of such, a folder, or a data set of
    the hub; or a list of these. ``split`` and ``subset`` are for the latter two. ``layout`` says what rows look
    like, ``columns`` which of their names stand for ours. ``packing`` puts rows together to ``max_length`` tokens.
    ``validation_fraction`` of the rows are not learned but evaluated.

    Tokens are kept in ``cache_dir`` (null: of this user), up to ``cache_size``; ``cache`` tells how files are known
    again. ``processes`` of each machine tokenise (null: as many as it has processors).

    With ``streaming`` rows are read while they are trained on, and shuffled ``shuffle_buffer`` at a time.

    ``chat_template`` is a path to a Jinja file, or the name of one of the tokenizer's templates; null: the
    tokenizer's own. ``learn``: all answers of a chat, the last one, or all as the whole chat
    has them.
    """

    train: Words | Annotated[list[Words | DataSetSection], Field(min_length=1)]
    split: Words = "train"
    subset: Words | None = None
    layout: Layout | None = None
    columns: dict[str, Words] = {}
    validation_fraction: Share | None = None
    cache: Literal["stat", "content", "never"] = "stat"
    cache_dir: Words | None = None
    cache_size: Size = "50GB"
    processes: Count | None = None
    streaming: bool = False
    shuffle_buffer: Count = 10_000
    max_length: Annotated[int, Field(ge=2)] = 2048
    packing: bool = False
    on_malformed: Literal["refuse", "skip"] = "refuse"
    chat_template: Words | None = None
    learn: Literal["all", "last", "as_read"] = "all"

    @model_validator(mode="after")
    def _knows_its_rows(self) -> DataSection:
        if self.streaming and self.validation_fraction is not None:
            raise ValueError("validation_fraction is of rows that are known beforehand; give evaluation.data")
        return self


class OptimizerSection(Section):
    """Which optimizer, and what is done to gradients before it.

    ``name`` is one of ours, or the path of a class; one outside of ``torch.optim`` is imported by ``allow_import``
    alone, since that runs its code. ``options`` are further arguments of the class; betas and eps null: its own.
    ``lora_plus_ratio`` times the rate is that of a LoRA's B matrices.
    """

    name: Words = "adamw"
    learning_rate: Finite = 1e-5
    weight_decay: NotNegative = 0.0
    beta1: BelowOne | None = None
    beta2: BelowOne | None = None
    eps: Finite | None = None
    max_grad_norm: Positive = 1.0
    lora_plus_ratio: Finite | None = None
    options: dict[str, Any] = {}
    allow_import: bool = False

    def named(self) -> NamedOptimizer:
        """Which it is."""
        return NamedOptimizer(self.name, self.options, self.lora_plus_ratio, may_import=self.allow_import)

    @property
    def betas(self) -> tuple[float, float] | None:
        """Those that are given; one alone has the usual other one beside it."""
        if self.beta1 is None and self.beta2 is None:
            return None
        return 0.9 if self.beta1 is None else self.beta1, 0.999 if self.beta2 is None else self.beta2


class ScheduleSection(Section):
    """What becomes of the learning rate, by transformers' schedule of this name.

    The warm-up is a share of all steps, or a number of them; ``options`` are further arguments of that schedule.
    """

    name: Schedule = "cosine"
    warmup_ratio: Fraction | None = None
    warmup_steps: Annotated[int, Field(ge=0)] | None = None
    options: dict[str, Any] = {}

    @model_validator(mode="after")
    def _one_warmup(self) -> ScheduleSection:
        if self.warmup_ratio is not None and self.warmup_steps is not None:
            raise ValueError("warmup_ratio and warmup_steps both say how long the warm-up is; give one of them")
        return self


class TrainingSection(Section):
    """How long, in which steps. Batch sizes are rows (packs, with packing) of each rank.

    ``accumulate``: ``auto`` keeps whole gradients between micro-batches where there is memory for them.
    ``loss_chunk_tokens``: logits are computed for so many tokens at a time; null: for all of a batch at once.
    """

    epochs: Count | None = None
    max_steps: Count | None = None
    batch_size: Count = 4
    gradient_accumulation_steps: Count = 1
    accumulate: Literal["auto", "whole_gradients", "sharded_gradients"] = "auto"
    loss_chunk_tokens: Count | None = 512
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0

    @model_validator(mode="after")
    def _one_duration(self) -> TrainingSection:
        if self.epochs is not None and self.max_steps is not None:
            raise ValueError("epochs and max_steps both say how long to train; give one of them")
        return self


WrapNames: TypeAlias = Literal["automatic", "model_plan", "no_split_modules", "module_list", "whole_model"]


class WrapSection(Section):
    """Groups are the modules of these classes, or the innermost ones with at least so many elements."""

    classes: OneOrMore | None = None
    min_parameters: Count | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> WrapSection:
        if (self.classes is None) == (self.min_parameters is None):
            raise ValueError("give one of classes and min_parameters")
        return self


def _summed_in(dtype: str) -> str:
    if dtype == "float16":
        raise ValueError("sums over ranks leave the range of float16; it must be 'float32' or 'bfloat16'")
    return dtype


class ShardingSection(Section):
    """How ranks share the work.

    ``precision`` is what forward and backward compute in; ``replicas`` makes as many copies of the sharded model
    (HSDP). ``activation_checkpointing``: true for every block, n for every n-th. ``auto`` is bfloat16, and every
    block, on accelerators; float32, and none, on CPUs.
    """

    wrap: WrapNames | WrapSection = "automatic"
    precision: Literal["auto"] | Float = "auto"
    reduce_dtype: Annotated[Float, AfterValidator(_summed_in)] = "float32"
    reshard_after_forward: bool | Count = True
    offload: Literal["none", "cpu"] = "none"
    activation_checkpointing: bool | Count | Literal["auto"] = "auto"
    compile: bool = False
    replicas: Count = 1


class CheckpointSection(Section):
    """Checkpoints to go on from: every so many steps or each epoch, and whenever the training is stopped.

    ``every`` null: only then. ``resume``: ``auto`` goes on from the latest of the output folder, if there is one;
    ``never`` wants none to be there; a path is a checkpoint folder of another training. ``optimizer_settings``:
    whose learning rate, decay and betas a training that goes on has. ``on_other_base``: whether an adapter may
    go on on another base than it was saved with.
    """

    every: Often | None = "epoch"
    keep: Count = 3
    mode: Literal["synchronous", "asynchronous"] = "synchronous"
    resume: Literal["auto", "never"] | Words = "auto"
    optimizer_settings: Literal["checkpoint", "config"] = "checkpoint"
    on_other_base: Literal["refuse", "ignore"] = "refuse"


class EvaluationSection(Section):
    """Loss and perplexity on rows that are not learned, every so many steps or each epoch (null: at the end only).

    ``patience``: the training ends after as many evaluations in a row of which none was better, by more than
    ``min_delta``, than the best before them.
    """

    data: Words | None = None
    split: Words = "test"
    subset: Words | None = None
    layout: Layout | None = None
    columns: dict[str, Words] = {}
    every: Often | None = None
    batch_size: Count | None = None
    keep_best: bool = True
    patience: Count | None = None
    min_delta: NotNegative = 0.0

    @model_validator(mode="after")
    def _counts_something(self) -> EvaluationSection:
        if self.patience is not None and self.every is None:
            raise ValueError(
                "patience counts evaluations, and there is one at the end only; say every so many steps"
            )
        return self


class LogSection(Section):
    """Lines on the console, and accelerate's trackers (``tensorboard``, ``wandb``, ...) beside metrics.jsonl."""

    every: Count = 10
    trackers: Several = []
    project: Words = "shardwise"
    tracker_options: dict[str, dict[str, Any]] = {}


class OutputSection(Section):
    """Where everything is written.

    ``dtype`` is that of saved weights; null means that of the model's files. What another run has left in the
    folder stays, and this one is refused, unless it may ``overwrite`` it. ``push_to_hub`` is a repository that
    what is saved at the end is copied to, which is made (``private``, if so) if it is not there.
    """

    directory: Words
    dtype: Float | None = None
    max_shard_size: Size = "50GB"
    overwrite: bool = False
    push_to_hub: Words | None = None
    private: bool = False


class TrainConfig(Section):
    """A whole training."""

    model: ModelSection
    data: DataSection
    output: OutputSection
    tuning: TuningSection = FullTuning()
    quantization: QuantizationSection | None = None
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    training: TrainingSection = Field(TrainingSection(), validate_default=True)
    sharding: ShardingSection = ShardingSection()
    checkpoints: CheckpointSection = CheckpointSection()
    evaluation: EvaluationSection = EvaluationSection()
    log: LogSection = LogSection()
    observe: bool | Annotated[int, Field(ge=1, le=100)] = False
    """Whether memory and phases of each rank are written down; a number: samples a second."""

    @field_validator("quantization")
    @classmethod
    def _is_frozen(
        cls, quantization: QuantizationSection | None, others: ValidationInfo
    ) -> QuantizationSection | None:
        if quantization is not None and not isinstance(others.data.get("tuning", LoraTuning), LoraTuning):
            raise ValueError("weights in four bits are not trained; tuning.method is lora on such a base")
        return quantization

    @field_validator("training")
    @classmethod
    def _ends(cls, training: TrainingSection, others: ValidationInfo) -> TrainingSection:
        data = others.data.get("data")
        if isinstance(data, DataSection) and data.streaming and training.max_steps is None:
            raise ValueError("max_steps must be given with data.streaming, since nobody knows how long an epoch is")
        return training

    @field_validator("evaluation")
    @classmethod
    def _has_data(cls, evaluation: EvaluationSection, others: ValidationInfo) -> EvaluationSection:
        data = others.data.get("data")
        is_split = isinstance(data, DataSection) and data.validation_fraction is not None
        if is_split and evaluation.data is not None:
            raise ValueError("data and data.validation_fraction both say what is evaluated; give one of them")
        if evaluation.every is not None and evaluation.data is None and not is_split and data is not None:
            raise ValueError("every says how often, but data does not say on what")
        return evaluation

    def options(self) -> TrainOptions:
        """What the loop and a step need to know; ``sharding.precision`` auto is that of CPUs."""
        training, schedule, optimizer = self.training, self.schedule, self.optimizer
        precision = self.sharding.precision
        return TrainOptions(
            learning_rate=optimizer.learning_rate,
            duration=Epochs(training.epochs or 1) if training.max_steps is None else Steps(training.max_steps),
            batch_size=training.batch_size,
            gradient_accumulation_steps=training.gradient_accumulation_steps,
            warmup=(
                Ratio(schedule.warmup_ratio or 0.0)
                if schedule.warmup_steps is None
                else Steps(schedule.warmup_steps)
            ),
            schedule=schedule.name,
            schedule_options=schedule.options,
            weight_decay=optimizer.weight_decay,
            betas=optimizer.betas,
            eps=optimizer.eps,
            optimizer=optimizer.named(),
            max_grad_norm=optimizer.max_grad_norm,
            max_length=self.data.max_length,
            seed=training.seed,
            dtype="float32" if precision == "auto" else precision,
            log_every=self.log.every,
        )

    def to_yaml(self) -> str:
        """Every key with its value."""
        return as_yaml(self.model_dump())


def as_yaml(values: Mapping[str, Any]) -> str:
    """Plain values for a file: what looks like an interpolation in them is none, and is read so again."""
    return OmegaConf.to_yaml(OmegaConf.create(_escaped(dict(values))))


def _escaped(value: Any) -> Any:
    match value:
        case str():
            return _INTERPOLATION.sub(lambda found: 2 * found[1] + "\\${", value)
        case dict():
            return {name: _escaped(each) for name, each in value.items()}
        case list():
            return [_escaped(each) for each in value]
        case _:
            return value


_INTERPOLATION = re.compile(r"(\\*)\$\{")
