"""Keys of ``shardwise train`` that TRL does not have: defaults, help and checks."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias, get_args

TrainMethod: TypeAlias = Literal["sft", "dpo", "kto", "grpo", "reward"]
METHODS: Final[tuple[TrainMethod, ...]] = get_args(TrainMethod)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardwiseArguments:
    """Keys of a configuration that TRL does not have.

    Names, types, choices and ``least`` are checked by ``keys.find_faults``, as TRL's keys are. ``--help`` and the
    table in ``docs/train.md`` are made of the fields.
    """

    method: TrainMethod = field(
        default="sft",
        metadata={"help": "`sft`, `dpo`, `kto`, `grpo` or `reward`; also the first word on the command line"},
    )
    num_processes: int | None = field(
        default=None,
        metadata={
            "help": "as `--nproc-per-node`, by default that of `accelerate_config`; not under a launcher",
            "least": 1,
        },
    )
    accelerate_config: str | None = field(
        default=None,
        metadata={
            "help": "a file of accelerate, or the name of one that TRL ships (`fsdp2`); how the model is sharded"
        },
    )
    transformer_layer_cls_to_wrap: list[str] | None = field(
        default=None,
        metadata={"help": "classes of modules that are gathered together, by default the model's blocks"},
    )
    min_num_params: int | None = field(
        default=None, metadata={"help": "instead: modules with so many parameters are gathered together"}
    )
    dp_replicate_size: int = field(default=1, metadata={"help": "replicas of the sharded model (HSDP)", "least": 1})
    cpu_offload: bool = field(
        default=False, metadata={"help": "parameters, gradients and optimizer state stay in host memory"}
    )
    shard_adapters: bool = field(default=True, metadata={"help": "`false` keeps a LoRA whole on every rank"})
    trainable_layers: int = field(
        default=0, metadata={"help": "unless 0, train only so many of the last layers (negative: the first)"}
    )
    trainable_modules: list[str] | None = field(
        default=None, metadata={"help": "of these layers, train only modules with these names"}
    )
    extra_modules: list[str] | None = field(
        default=None, metadata={"help": "modules outside of the layers that are trained, too"}
    )
    interleave: list[float] | None = field(
        default=None, metadata={"help": "weights of `datasets`, which are mixed row by row; `fraction` is TRL's"}
    )
    tenants: dict[str, Any] | None = field(
        default=None, metadata={"help": "many LoRAs on one base: a mapping of names to keys"}
    )
    sweep: dict[str, Any] | None = field(
        default=None, metadata={"help": "many LoRAs, one for each combination: a mapping of keys to lists"}
    )
    tokens_per_pass: int = field(
        default=4096, metadata={"help": "with many LoRAs, tokens of a pass on one rank", "least": 1}
    )
    tokenizer_name_or_path: str | None = field(
        default=None,
        metadata={"help": "a folder or a name on the hub, for a model from a URL; by default the model's"},
    )
    early_stopping_patience: int | None = field(
        default=None,
        metadata={"help": "end after so many evaluations without a better one; needs `load_best_model_at_end`"},
    )
    env: dict[Any, Any] | None = field(default=None, metadata={"help": "environment variables of the training"})

    @property
    def has_tenants(self) -> bool:
        """True if many LoRAs are trained."""
        return self.tenants is not None or self.sweep is not None

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
        if self.interleave is not None:
            yield from _find_faults_of_weights(self.interleave, values.get("datasets") or ())
        for name, value in (self.env or {}).items():
            if not isinstance(name, str) or not name or "=" in name or "\0" in f"{name}{value}":
                yield f"env: {name!r} cannot be set to {value!r}. Write NAME: VALUE"


def _find_faults_of_weights(weights: Sequence[Any], datasets: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    are_positive = all(type(weight) in (int, float) and 0 < weight < math.inf for weight in weights)
    if not datasets:
        yield "interleave: needs datasets, whose weights it lists. Write datasets: [{path: ...}, ...]"
    elif len(weights) != len(datasets) or not are_positive:
        yield f"interleave: has {len(weights)} weights for {len(datasets)} datasets. Give each one above 0"
    elif any(entry.get("fraction") is not None for entry in datasets):
        yield "interleave: contradicts fraction of datasets. Remove one of them"
