"""``shardwise train``'s configuration: its sections, and how a YAML file and overrides become one value.

What a key may be is said once, here, as types. A file and its overrides are merged first and looked at
afterwards, so that every fault is named at once, with its path, before anything else is read.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from shardwise.errors import ConfigError
from shardwise.training.options import Epochs, Precision, Ratio, Schedule, Steps, TrainOptions

Count: TypeAlias = Annotated[int, Field(ge=1)]
Fraction: TypeAlias = Annotated[float, Field(ge=0, le=1)]
NotNegative: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive: TypeAlias = Annotated[float, Field(gt=0)]
Finite: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Words: TypeAlias = Annotated[str, Field(min_length=1)]


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
    trainable_modules: list[Words] = []
    extra_modules: list[Words] = []

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
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    target_modules: list[Words] | Words | None = None
    target_parameters: list[Words] | None = None
    modules_to_save: list[Words] | None = None
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


TuningSection: TypeAlias = Annotated[FullTuning | FreezeTuning | LoraTuning, Field(discriminator="method")]


class DataSection(Section):
    """What is learned.

    ``train`` is a file of JSON lines or Parquet, a folder, or a data set of the hub; ``split`` and ``subset`` are
    for the latter two. ``packing`` puts rows together to ``max_length`` tokens.
    """

    train: Words
    split: Words = "train"
    subset: Words | None = None
    max_length: Annotated[int, Field(ge=2)] = 2048
    packing: bool = False
    on_malformed: Literal["refuse", "skip"] = "refuse"


class OptimizerSection(Section):
    """AdamW, and what is done to gradients before it."""

    learning_rate: Finite = 1e-5
    weight_decay: NotNegative = 0.0
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    eps: Finite = 1e-8
    max_grad_norm: Positive = 1.0


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

    ``loss_chunk_tokens``: logits are computed for so many tokens at a time; null: for all of a batch at once.
    """

    epochs: Count | None = None
    max_steps: Count | None = None
    batch_size: Count = 4
    gradient_accumulation_steps: Count = 1
    accumulate: Literal["whole_gradients", "sharded_gradients"] = "whole_gradients"
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

    classes: Annotated[list[Words], Field(min_length=1)] | None = None
    min_parameters: Count | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> WrapSection:
        if (self.classes is None) == (self.min_parameters is None):
            raise ValueError("give one of classes and min_parameters")
        return self


class ShardingSection(Section):
    """How ranks share the work.

    ``precision`` is what forward and backward compute in; ``replicas`` makes as many copies of the sharded model
    (HSDP). ``activation_checkpointing``: true for every block, n for every n-th.
    """

    wrap: WrapNames | WrapSection = "automatic"
    precision: Precision = "float32"
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    reshard_after_forward: bool | Count = True
    offload: Literal["none", "cpu"] = "none"
    activation_checkpointing: bool | Count = False
    compile: bool = False
    replicas: Count = 1


class CheckpointSection(Section):
    """Checkpoints to go on from: every so many steps, and whenever the training is stopped.

    ``every`` null: only then. ``resume``: ``auto`` goes on from the latest of the output folder, if there is one;
    ``never`` wants none to be there; a path is a checkpoint folder of another training.
    """

    every: Count | None = None
    keep: Count = 3
    mode: Literal["synchronous", "asynchronous"] = "synchronous"
    resume: Literal["auto", "never"] | Words = "auto"


class EvaluationSection(Section):
    """Loss and perplexity on rows that are not learned, every so many steps (null: at the end only)."""

    data: Words | None = None
    split: Words = "test"
    subset: Words | None = None
    every: Count | None = None
    batch_size: Count | None = None
    keep_best: bool = True

    @model_validator(mode="after")
    def _has_data(self) -> EvaluationSection:
        if self.every is not None and self.data is None:
            raise ValueError("every says how often, but data does not say on what")
        return self


class LogSection(Section):
    """Lines on the console, and accelerate's trackers (``tensorboard``, ``wandb``, ...) beside metrics.jsonl."""

    every: Count = 10
    trackers: list[Words] = []
    project: Words = "shardwise"
    tracker_options: dict[str, dict[str, Any]] = {}


class OutputSection(Section):
    """Where everything is written.

    ``dtype`` is that of saved weights; null means that of the model's files.
    """

    directory: Words
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    max_shard_size: Words = "50GB"


class TrainConfig(Section):
    """A whole training."""

    model: ModelSection
    data: DataSection
    output: OutputSection
    tuning: TuningSection = FullTuning()
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    training: TrainingSection = TrainingSection()
    sharding: ShardingSection = ShardingSection()
    checkpoints: CheckpointSection = CheckpointSection()
    evaluation: EvaluationSection = EvaluationSection()
    log: LogSection = LogSection()

    def options(self) -> TrainOptions:
        """What the loop and a step need to know."""
        training, schedule, optimizer = self.training, self.schedule, self.optimizer
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
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.eps,
            max_grad_norm=optimizer.max_grad_norm,
            max_length=self.data.max_length,
            seed=training.seed,
            dtype=self.sharding.precision,
            log_every=self.log.every,
        )

    def to_yaml(self) -> str:
        """Every key with its value."""
        return OmegaConf.to_yaml(OmegaConf.create(self.model_dump()))


_SHORT = {"model": "name", "tuning": "method", "data": "train", "output": "directory", "schedule": "name"}
"""Sections that may be given as the value of one of their keys: ``model: Qwen/Qwen3-0.6B``."""


def read_config(file: str | None, overrides: Sequence[str] = ()) -> TrainConfig:
    """A YAML file and ``key=value`` overrides, merged; the later override counts.

    Raises:
        ConfigError: the file cannot be read; or naming every key that is unknown, missing or wrong.
    """
    told = file or "the configuration"
    merged: Any = OmegaConf.create()
    try:
        if file is not None:
            merged = OmegaConf.load(file)
            if not isinstance(merged, DictConfig):
                raise ConfigError(f"{file}: it is a list, not keys with values")
            merged = _in_full(merged)
        for override in overrides:
            key, separator, _ = override.partition("=")
            if not separator or not key.strip("."):
                raise ConfigError(
                    f"{override!r}: overrides are written key=value, such as optimizer.learning_rate=1e-4"
                )
            merged = OmegaConf.merge(merged, _in_full(OmegaConf.from_dotlist([override])))
        value = OmegaConf.to_container(merged, resolve=True)
    except OSError as error:
        raise ConfigError(f"{file}: the configuration cannot be read ({error.strerror or error})") from error
    except (
        OmegaConfBaseException,
        yaml.YAMLError,
        ValueError,
        RecursionError,
    ) as error:
        raise ConfigError(f"{told}: the configuration cannot be read ({error})") from error
    return config_of(value, told)


def config_of(value: object, told: str = "the configuration") -> TrainConfig:
    """Plain values as a configuration.

    Raises:
        ConfigError: naming every key that is unknown, missing or wrong.
    """
    try:
        return TrainConfig.model_validate(value)
    except ValidationError as error:
        faults: dict[str, list[str]] = {}
        for fault in error.errors(include_url=False):
            path, wanted = _explained(dict(fault))
            if wanted not in (known := faults.setdefault(path, [])):
                known.append(wanted)
        # Where a key may be a word or a section, and the section has a fault, that it is no word is not the news.
        near = [path for path in faults if not any(other.startswith(f"{path}.") for other in faults)]
        lines = [f"  {path}: {', or '.join(faults[path])}" for path in near]
        raise ConfigError("\n".join([f"{told}: the training cannot be set up so", *lines])) from error


def _in_full(config: DictConfig) -> DictConfig:
    """With sections where one of their keys was given for them."""
    whole: Any = OmegaConf.to_container(config, resolve=False)
    for section, key in _SHORT.items():
        if isinstance(whole.get(section), str):
            whole[section] = {key: whole[section]}
    expanded: DictConfig = OmegaConf.create(whole)
    return expanded


def _explained(fault: Mapping[str, Any]) -> tuple[str, str]:
    """The path of the key that a fault of pydantic's is about, and what is wrong or wanted."""
    keys, at = _keys_of(fault["loc"], is_unknown=fault["type"] == "extra_forbidden")
    path = ".".join(keys) or "the whole"
    value = fault["input"]
    shown = path if isinstance(value, dict | list) else f"{path}={value!r}"
    match fault["type"]:
        case "extra_forbidden":
            near = _nearest(keys, at)
            return path, "no such key" + (f"; did you mean {near}?" if near else "")
        case "missing":
            return path, "it must be given"
        case "invalid_key":
            return path, "no such key"
        case "union_tag_invalid":
            return f"{path}.method={fault['ctx']['tag']!r}", f"it must be one of {fault['ctx']['expected_tags']}"
        case "union_tag_not_found":
            return f"{path}.method", "it must be given: full, freeze or lora"
        case "model_type" | "model_attributes_type":
            known = ", ".join(at.model_fields) if at is not None else ""
            return shown, f"it must be keys with values{f', of {known}' if known else ''}"
        case "value_error":
            return path, str(fault["ctx"]["error"])
        case _:
            message = str(fault["msg"]).replace("Input should be", "it must be")
            return shown, message[:1].lower() + message[1:]


def _keys_of(loc: Sequence[str | int], *, is_unknown: bool) -> tuple[list[str], type[Section] | None]:
    """The keys among pydantic's location, without the branches of unions, and the section the last one is in.

    Where the last key is itself a section, it is that one.
    """
    keys: list[str] = []
    sections: list[type[Section]] = [TrainConfig]
    for number, part in enumerate(loc):
        if isinstance(part, int):
            keys[-1:] = [f"{keys[-1]}[{part}]" if keys else str(part)]
            continue
        found = [section for section in sections if part in section.model_fields]
        if found:
            keys.append(part)
            sections = list(_sections(found[0].model_fields[part].annotation))
        elif tagged := [s for s in sections if s.__name__ == part or _tag(s) == part]:
            sections = tagged
        elif is_unknown and number == len(loc) - 1:
            keys.append(part)
    return keys, sections[0] if len(sections) == 1 else None


def _sections(annotation: Any) -> Iterator[type[Section]]:
    """The sections that a key's type allows."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    elif get_origin(annotation) in (Union, UnionType, Annotated):
        for member in get_args(annotation):
            yield from _sections(member)


def _tag(section: type[Section]) -> str | None:
    field = section.model_fields.get("method")
    return None if field is None else str(get_args(field.annotation)[0])


def _nearest(keys: Sequence[str], section: type[Section] | None) -> str | None:
    """The key most likely meant: of the same section, else of the same name in another, else the nearest."""
    before, last = ".".join(keys[:-1]), _OTHER_NAMES.get(keys[-1], keys[-1])
    if section is not None and (near := difflib.get_close_matches(last, section.model_fields, 1, 0.7)):
        return f"{before}.{near[0]}" if before else near[0]
    paths = list(known_keys())
    same = [path for path in paths if path.rpartition(".")[2] == last]
    return next(iter(same or difflib.get_close_matches(".".join(keys), paths, 1, 0.7)), None)


_OTHER_NAMES = {
    "finetuning_type": "method",
    "lora_r": "r",
    "lora_rank": "r",
    "lora_target_modules": "target_modules",
    "lr": "learning_rate",
    "lr_scheduler_type": "schedule",
    "max_seq_length": "max_length",
    "model_name_or_path": "model",
    "num_train_epochs": "epochs",
    "output_dir": "output",
    "per_device_train_batch_size": "batch_size",
    "report_to": "trackers",
    "resume_from_checkpoint": "resume",
    "sequence_len": "max_length",
}
"""What other trainers call our keys."""


def known_keys(section: type[Section] = TrainConfig, prefix: str = "") -> Iterator[str]:
    """The paths of all keys."""
    for name, field in section.model_fields.items():
        yield f"{prefix}{name}"
        for inner in _sections(field.annotation):
            yield from known_keys(inner, f"{prefix}{name}.")
