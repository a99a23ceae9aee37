"""Estimates the memory of a training run from its configuration."""

from dataclasses import replace
from typing import Any, Final

from shardwise.bank.passes import chunk_logits
from shardwise.core.estimate_report import Estimate
from shardwise.files.urls import HubOptions
from shardwise.loading.estimate import PlanOptions, plan
from shardwise.loading.estimate_arithmetic import BankSizes
from shardwise.models.lora.peft_private import comparable_text
from shardwise.models.tunings import Full, Lora
from shardwise.training.adapters_config import read_adapters
from shardwise.training.arguments import REWARDED
from shardwise.training.run_config import RunConfig
from shardwise.training.trl_objects import (
    base_options,
    build_tuning,
    has_reference,
    lora_config,
    model_options,
    parse,
    recompute_blocks,
)

_NOT_PLANNED: Final = frozenset({"options", "revision", "use_kernels", "liger_kernel_config"})
"""Options of a load that a plan does not have. Kernels do not run on tensors without memory."""

_ROWS: Final = {"dpo": 2, "reward": 2, "orpo": 2, "cpo": 2, "tpo": 3}
"""Rows of an example, where it has more than one: the chosen, the rejected, and the reference answer."""

_WHOLE_LOGITS: Final = ("orpo", "cpo", "tpo")
"""Methods whose trainers compute the logits of all tokens at once."""


def plan_run(config: RunConfig, ranks: int, placed: PlanOptions) -> Estimate:
    """Estimate a training run from its configuration, with TRL's defaults and rows of ``max_length`` tokens.

    A pair of answers is two rows, with TPO's reference three. Generation and the models that a training compares
    with or asks are not included, as a note states. Many LoRAs are estimated as a pass of ``tokens_per_pass``
    tokens of the largest of them, with the memory of all.

    Args:
        config: the configuration.
        ranks: number of ranks.
        placed: ``device`` and ``memory_bytes``.

    Collective: no.

    Raises:
        ConfigError: the configuration is rejected.
        ShardwiseError: as for :func:`~shardwise.loading.estimate.plan`.
    """
    if config.own.has_adapters:
        return _plan_bank(config, ranks, placed)
    arguments = parse(config, ranks)
    training = arguments.training
    rows_per_example = _ROWS.get(config.method, 1)
    if config.method == "tpo" and training.tpo_alpha == 0:  # without the reference answer
        rows_per_example = 2
    # First the options of the load, then those of the training, and last ``placed``.
    loaded: Any = model_options(arguments)
    options: PlanOptions = {key: value for key, value in loaded.items() if key not in _NOT_PLANNED}  # type: ignore[assignment]
    options |= {
        "hub": HubOptions(revision=arguments.model.model_revision),
        "tuning": (tuning := build_tuning(arguments)),
        "optim": training.optim.value,
        "per_device_train_batch_size": training.per_device_train_batch_size * rows_per_example,
        "gradient_accumulation_steps": training.gradient_accumulation_steps,
        "mixed_precision": "no",
    }
    if max_length := getattr(training, "max_length", None):
        options["max_length"] = max_length
    if training.gradient_checkpointing:
        options["sharding"] = recompute_blocks(options["sharding"], arguments)
    if training.bf16 or training.fp16:
        options["mixed_precision"] = "bf16" if training.bf16 else "fp16"
    options |= placed
    if isinstance(tuning, Full):
        options["trained_dtype"] = "unchanged"
    estimate = plan(arguments.model.model_name_or_path, ranks=ranks, **options)
    notes = []
    if config.method in (*REWARDED, "distillation"):
        notes.append("generation and the models that give rewards or teach are not included")
    if config.method in _WHOLE_LOGITS:
        notes.append("TRL computes the logits of all tokens at once, which are not included beyond one tile")
    if not arguments.model.use_peft and has_reference(config.method, training):
        notes.append("the reference model is not included: its weights and gathered groups are those of the model")
    # The plan counts rows. A batch of the configuration counts examples, of which a pair is one.
    step = estimate.training
    if step is not None and step.largest_batch is not None:
        step = replace(step, largest_batch=step.largest_batch // rows_per_example)
    return replace(estimate, notes=(*estimate.notes, *notes), training=step)


def _plan_bank(config: RunConfig, ranks: int, placed: PlanOptions) -> Estimate:
    """Estimate a training run of many LoRAs."""
    parsed = [parse(one, ranks) for one in read_adapters(config).values()]
    loaded: Any = base_options(parsed[0])
    options: PlanOptions = {key: value for key, value in loaded.items() if key not in _NOT_PLANNED}  # type: ignore[assignment]
    options |= {"hub": HubOptions(revision=parsed[0].model.model_revision), "device": placed["device"]}
    # Adapters are computed in the dtype of the base. Their matrices are counted in float32, by ``bank``.
    options["trained_dtype"] = "unchanged"
    # Trainable parameters of each LoRA. Those that differ only in what does not change their size are planned once.
    name = parsed[0].model.model_name_or_path
    sizes, tunings = dict[str, int](), dict[str, Lora]()
    adapters: list[tuple[str, int]] = []
    for arguments in parsed:
        lora = lora_config(arguments)
        lora.lora_alpha, lora.lora_dropout = 1, 0.0  # a bank computes masks again, and keeps none
        key = comparable_text(lora)
        if key not in sizes:
            options["tuning"] = tunings[key] = Lora(lora, placement="replicated")
            sizes[key] = plan(name, ranks=ranks, **options).trainable_parameters
        adapters.append((arguments.training.optim.value, sizes[key]))
    # A full pass: with 4096 tokens in a pass, and rows of up to 1500, it has two rows of 1500.
    tokens = config.own.tokens_per_pass
    length = min(max(arguments.training.max_length or tokens for arguments in parsed), tokens)
    options |= {
        "tuning": tunings[max(sizes, key=sizes.__getitem__)],
        "per_device_train_batch_size": tokens // length,
        "max_length": length,
        "bank": BankSizes(tuple(adapters), chunk_logits(placed["device"])),
    }
    estimate = plan(name, ranks=ranks, **options)
    total = sum(count for _, count in adapters)
    note = f"{len(adapters)} adapters; a pass has rows of the largest"
    assert estimate.training is not None
    training = replace(estimate.training, optim="+".join(dict.fromkeys(optim for optim, _ in adapters)))
    return replace(estimate, notes=(*estimate.notes, note), trainable_parameters=total, training=training)
