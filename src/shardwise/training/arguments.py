"""Keys of ``shardwise train`` that TRL does not have: defaults, help and checks."""

# ruff: noqa: RUF009 - the defaults are made by a function

from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias, get_args

TrainMethod: TypeAlias = Literal[
    "sft", "dpo", "kto", "grpo", "rloo", "distillation", "reward", "orpo", "cpo", "tpo", "gmpo"
]
METHODS: Final[tuple[TrainMethod, ...]] = get_args(TrainMethod)

REWARDED: Final[tuple[TrainMethod, ...]] = ("grpo", "rloo", "gmpo")
"""Methods that train on rewards of sampled answers."""

SAMPLING: Final[tuple[TrainMethod, ...]] = (*REWARDED, "distillation")
"""Methods that train on sampled answers to prompts."""

AdapterMethod: TypeAlias = Literal["sft", "dpo"]
"""A method of which many adapters can be trained at once."""

_IGNORED_BY_MIXTURES: Final = ("datasets", "dataset_streaming", "streaming", "test_split_size")
"""TRL's keys that the rows of ``dataset_mixer`` and ``dataset_mixture`` do not follow."""


def _key(default: Any, text: str, *, at_least: int | None = None, excludes: tuple[str, ...] = ()) -> Any:
    """Declare a key.

    Args:
        default: its default.
        text: its help.
        at_least: its smallest number.
        excludes: other keys that cannot be set beside it.
    """
    return field(default=default, metadata={"help": text, "at_least": at_least, "excludes": excludes})


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardwiseArguments:
    """Keys of a configuration that TRL does not have.

    Each has its type, default, help and checks here, and former names in ``former_keys.py``. ``keys.find_faults``
    checks them as TRL's keys. ``--help`` and the table in ``docs/train.md`` are made of the fields.
    """

    method: TrainMethod = _key(
        "sft",
        "`sft`, `dpo`, `kto`, `grpo`, `rloo`, `distillation`, `reward`, `orpo`, `cpo`, `tpo`, `gmpo`; or as first "
        "word of the command",
    )
    num_processes: int | None = _key(
        None, "as `--nproc-per-node`; default: that of `accelerate_config`", at_least=1
    )
    accelerate_config: str | None = _key(None, "how to shard: a file of accelerate, or one of TRL's (`fsdp2`)")
    transformer_layer_cls_to_wrap: list[str] | None = _key(
        None, "modules gathered together; default: blocks", excludes=("accelerate_config",)
    )
    dp_replicate_size: int = _key(
        1,
        "replicas of the sharded model (HSDP); unless 1, ranks are a multiple, at least twice it",
        at_least=1,
        excludes=("accelerate_config",),
    )
    cpu_offload: bool = _key(
        False, "parameters, gradients, optimizer state in host memory", excludes=("accelerate_config",)
    )
    shard_adapters: bool = _key(True, "`false` keeps a LoRA whole on every rank")
    trainable_layers: int = _key(
        0, "unless 0, train only the last layers (negative: the first)", excludes=("use_peft",)
    )
    trainable_modules: list[str] | None = _key(
        None, "modules of these layers; default: all", excludes=("use_peft",)
    )
    extra_modules: list[str] | None = _key(None, "modules outside of layers to train, too", excludes=("use_peft",))
    adapters: dict[str, Any] | None = _key(None, "many LoRAs on one base: keys by name")
    sweep: dict[str, Any] | None = _key(None, "many LoRAs, one for each combination: lists by key")
    loss: AdapterMethod = _key("sft", "with many LoRAs, that of an adapter: `sft`, or `dpo` on pairs")
    tokens_per_pass: int = _key(4096, "with many LoRAs, tokens of a pass on one rank", at_least=1)
    tokenizer_name_or_path: str | None = _key(None, "for a model from a URL; default: the model's")
    config_overrides: dict[str, Any] | None = _key(
        None, "settings of the model's config, such as `rope_parameters`"
    )
    use_kernels: bool = _key(
        False,
        "layers by kernels of the hub, whose code is downloaded and run",
        excludes=("torch_compile", "torch_compile_backend", "torch_compile_mode"),  # each compiles
    )
    processor_kwargs: dict[str, Any] | None = _key(
        None, "settings of the processor of images, such as `max_pixels`"
    )
    chat_template: str | None = _key(
        None, "a template or its file; default: the model's", excludes=("chat_template_path",)
    )
    system_prompt: str | None = _key(None, "first message of each chat that has no system or developer message")
    dataset_prompt_column: str | None = _key(None, "column of prompts, each the text of a user's message")
    dataset_mixer: dict[str, Any] | None = _key(
        None,
        "datasets by name, each with the share of its training rows",
        excludes=(*_IGNORED_BY_MIXTURES, "dataset_mixture"),
    )
    dataset_splits: list[str] | None = _key(None, "splits of `dataset_mixer`: names with `train` or `test`")
    dataset_configs: list[Any] | None = _key(None, "configurations of `dataset_mixer`, in its order")
    dataset_mixture: dict[str, Any] | None = _key(
        None,
        "`datasets` of `id`, `config`, `split`, `columns`, `weight`; `seed`, `test_split_size`",
        excludes=_IGNORED_BY_MIXTURES,
    )
    eval_dataset_name: str | None = _key(None, "a dataset whose `dataset_test_split` is evaluated on")
    early_stopping_patience: int | None = _key(None, "end after so many evaluations without a better one")
    env: dict[Any, Any] | None = _key(None, "environment variables of the training")

    @property
    def has_adapters(self) -> bool:
        """True if many LoRAs are trained."""
        return self.adapters is not None or self.sweep is not None
