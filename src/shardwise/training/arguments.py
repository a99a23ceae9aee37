"""Keys of ``shardwise train`` that TRL does not have: defaults, help and checks."""

# ruff: noqa: RUF009 - the defaults are made by a function

from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias, get_args

TrainMethod: TypeAlias = Literal["sft", "dpo", "kto", "grpo", "reward"]
METHODS: Final[tuple[TrainMethod, ...]] = get_args(TrainMethod)


def _key(default: Any, text: str) -> Any:
    """Declare a key with its default and its help."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardwiseArguments:
    """Keys of a configuration that TRL does not have.

    Names, types and choices are checked by ``keys.find_faults``, as TRL's keys are. ``--help`` and the
    table in ``docs/train.md`` are made of the fields.
    """

    method: TrainMethod = _key("sft", "`sft`, `dpo`, `kto`, `grpo`, `reward`; or as first word of the command")
    num_processes: int | None = _key(None, "as `--nproc-per-node`; default: that of `accelerate_config`")
    accelerate_config: str | None = _key(None, "how to shard: a file of accelerate, or one of TRL's (`fsdp2`)")
    transformer_layer_cls_to_wrap: list[str] | None = _key(None, "modules gathered together; default: blocks")
    dp_replicate_size: int = _key(1, "replicas of the sharded model (HSDP)")
    cpu_offload: bool = _key(False, "parameters, gradients, optimizer state in host memory")
    shard_adapters: bool = _key(True, "`false` keeps a LoRA whole on every rank")
    trainable_layers: int = _key(0, "unless 0, train only the last layers (negative: the first)")
    trainable_modules: list[str] | None = _key(None, "modules of these layers; default: all")
    extra_modules: list[str] | None = _key(None, "modules outside of layers to train, too")
    adapters: dict[str, Any] | None = _key(None, "many LoRAs on one base: keys by name")
    sweep: dict[str, Any] | None = _key(None, "many LoRAs, one for each combination: lists by key")
    tokens_per_pass: int = _key(4096, "with many LoRAs, tokens of a pass on one rank")
    tokenizer_name_or_path: str | None = _key(None, "for a model from a URL; default: the model's")
    early_stopping_patience: int | None = _key(None, "end after so many evaluations without a better one")
    env: dict[Any, Any] | None = _key(None, "environment variables of the training")

    @property
    def has_adapters(self) -> bool:
        """True if many LoRAs are trained."""
        return self.adapters is not None or self.sweep is not None
