"""Keys of ``shardwise train`` that TRL does not have: defaults, help and checks."""

# ruff: noqa: RUF009 - the defaults are made by a function

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias, get_args

TrainMethod: TypeAlias = Literal["sft", "dpo", "kto", "grpo", "reward"]
METHODS: Final[tuple[TrainMethod, ...]] = get_args(TrainMethod)


def _key(default: Any, text: str, *, least: int | None = None) -> Any:
    """Declare a key with its default, its help, and the least number that it may be."""
    return field(default=default, metadata={"help": text, "least": least})


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardwiseArguments:
    """Keys of a configuration that TRL does not have.

    Names, types, choices and ``least`` are checked by ``keys.find_faults``, as TRL's keys are. ``--help`` and the
    table in ``docs/train.md`` are made of the fields.
    """

    method: TrainMethod = _key("sft", "`sft`, `dpo`, `kto`, `grpo`, `reward`; or as first word of the command")
    num_processes: int | None = _key(None, "as `--nproc-per-node`; default: that of `accelerate_config`", least=1)
    accelerate_config: str | None = _key(None, "how to shard: a file of accelerate, or one of TRL's (`fsdp2`)")
    transformer_layer_cls_to_wrap: list[str] | None = _key(None, "modules gathered together; default: blocks")
    min_num_params: int | None = _key(None, "gather modules with so many parameters together")
    dp_replicate_size: int = _key(1, "replicas of the sharded model (HSDP)", least=1)
    cpu_offload: bool = _key(False, "parameters, gradients, optimizer state in host memory")
    shard_adapters: bool = _key(True, "`false` keeps a LoRA whole on every rank")
    trainable_layers: int = _key(0, "unless 0, train only the last layers (negative: the first)")
    trainable_modules: list[str] | None = _key(None, "modules of these layers; default: all")
    extra_modules: list[str] | None = _key(None, "modules outside of layers to train, too")
    adapters: dict[str, Any] | None = _key(None, "many LoRAs on one base: keys by name")
    sweep: dict[str, Any] | None = _key(None, "many LoRAs, one for each combination: lists by key")
    tokens_per_pass: int = _key(4096, "with many LoRAs, tokens of a pass on one rank", least=1)
    tokenizer_name_or_path: str | None = _key(None, "for a model from a URL; default: the model's")
    early_stopping_patience: int | None = _key(None, "end after so many evaluations without a better one")
    env: dict[Any, Any] | None = _key(None, "environment variables of the training")

    @property
    def has_adapters(self) -> bool:
        """True if many LoRAs are trained."""
        return self.adapters is not None or self.sweep is not None

    def find_faults(self, values: Mapping[str, Any]) -> Iterator[str]:
        """Yield keys that contradict each other or TRL's, and values that cannot be used.

        Args:
            values: TRL's keys that are set.
        """
        if self.accelerate_config:
            for key in ("transformer_layer_cls_to_wrap", "min_num_params", "cpu_offload"):
                if getattr(self, key):
                    yield f"{key}: contradicts accelerate_config. Remove one of them"
        if values.get("use_peft"):
            for key in ("trainable_layers", "trainable_modules", "extra_modules"):
                if getattr(self, key):
                    yield f"{key}: contradicts use_peft. Remove one of them"
        if self.early_stopping_patience and not values.get("load_best_model_at_end"):
            yield "early_stopping_patience: needs load_best_model_at_end and eval_strategy. Set them"
        for name, value in (self.env or {}).items():
            if not isinstance(name, str) or not name or "=" in name or "\0" in f"{name}{value}":
                yield f"env: {name!r} cannot be set to {value!r}. Write NAME: VALUE"
