"""Memory of trainings against cells that were measured, and the arithmetic of states."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.harness.checkpoints import SHAPES, smaller
from peft import LoraConfig
from tests.loading.real_shapes import forecast_of
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from transformers import Qwen3Config, Qwen3ForCausalLM

from shardwise import Full, Lora, Sharding
from shardwise.core.errors import ConfigError
from shardwise.core.estimate_report import Estimate
from shardwise.core.layout import MeshShape
from shardwise.core.tensors import DType
from shardwise.files.checkpoint_index import CheckpointIndex, TensorEntry
from shardwise.loading import estimate
from shardwise.models.build import build_on_meta
from shardwise.models.four_bit.config import Nf4

NOWHERE = Path("/nowhere")
RECORD = Path(__file__).parents[2] / "benchmarks/results/training-memory-2026-11-23.json"
SMALL = SHAPES["qwen3-36m"]
LOW = smaller("qwen3-low", **{**SMALL.config, "num_hidden_layers": 2})
# Blocks in the middle of the last two are not traced.
DEEPER = {
    name: smaller(name, **{**SMALL.config, "num_hidden_layers": blocks})
    for name, blocks in (("three", 3), ("four", 4), ("nine", 9))
}
SIZES = {**DEEPER, "low": LOW, "36m": SMALL, "0.6b": SHAPES["qwen3-0.6b"], "1.7b": SHAPES["qwen3-1.7b"]}
LORA = Lora(LoraConfig(r=16, lora_alpha=16, target_modules="all-linear"))


FAST = ("36m-lora-keep-1-2-512",)


def recorded() -> list[Any]:
    """The latest measurement of each cell whose allocator gave memory back."""
    rows: dict[str, Any] = {}
    for run in json.loads(RECORD.read_text())["runs"]:
        for row in run["rows"]:
            cell = row["cell"]
            is_with_heap = run["heap"] or (cell["model"] == "0.6b" and run["date"] < "2026-11-23T06:00")
            if cell["model"] != "demo" and not is_with_heap:
                rows["-".join(map(str, cell.values()))] = (cell, row["measured"])
    cells: list[Any] = []
    for name, row in rows.items():
        if name == "0.6b-lora-again-1-1-128":  # of one row; there is one of two
            continue
        # A cell of two ranks says nothing that those of one and of four do not say.
        if "-2-2-" in name and {name.replace("-2-2-", f"-{ranks}-2-") for ranks in (1, 4)} <= rows.keys():
            continue
        cells.append(pytest.param(*row, id=name, marks=() if name in FAST else pytest.mark.slow))
    return cells


def config_of(model: str) -> Qwen3Config:
    values = {
        key: value for key, value in SIZES[model].config.items() if key not in ("architectures", "model_type")
    }
    return Qwen3Config(**values, dtype=torch.bfloat16)


@cache
def index_of(name: str) -> CheckpointIndex:
    config = config_of(name)
    model = build_on_meta(Qwen3ForCausalLM, config, torch.bfloat16, NOWHERE)
    entries, at = {}, 0
    for name, value in model.state_dict().items():
        if name != "lm_head.weight":
            entries[name] = TensorEntry(name, DType.BF16, tuple(value.shape), "file", at, at + 2 * value.numel())
            at += 2 * value.numel()
    return CheckpointIndex("/nowhere", {"file": at}, entries, {}, "single")


def planned(model: str, ranks: int, **options: Any) -> Estimate:
    given: Any = {"model_class": Qwen3ForCausalLM, "device": "cpu", **options}
    return forecast_of(config_of(model), index_of(model), MeshShape.flat(ranks), **given)


def windows(made: Estimate, ranks: int) -> int:
    """Shared memory in which ranks of the recorded trainings gathered, and a buffer that was kept."""
    if ranks == 1:
        return 0
    sizes = [group.gathered_bytes for group in made.groups]
    return 2 * ranks * min(max(sizes) // ranks, 16 << 20) + max(size for size in sizes if size <= 256 << 20)


@pytest.mark.parametrize(("cell", "measured"), recorded())
def test_recorded_trainings(
    monkeypatch: pytest.MonkeyPatch, cell: dict[str, Any], measured: dict[str, int]
) -> None:
    """Peaks within a tenth, and 64 MiB for libraries; states within a hundredth."""
    monkeypatch.setattr(
        estimate.estimate_arithmetic,
        "trl_logits_bytes",
        lambda tokens, head: 12 * min(tokens, 512) * head.vocab_size,
    )
    is_nested, ranks = "nested" in cell["trained"], cell["ranks"]
    options: dict[str, Any] = {
        "dtype": "float32" if ranks == 1 else "auto",
        "tuning": Full() if "full" in cell["trained"] else LORA,
        "optim": "sgd" if "sgd" in cell["trained"] else "adamw_torch",
        "per_device_train_batch_size": cell["rows"],
        "max_length": cell["tokens"],
        "gradient_checkpointing": cell["keeps"] == "again",
    }
    if "nf4" in cell["trained"]:
        options["quantization"] = Nf4(double_quant=bool(is_nested))
    if ranks > 1:
        options["sharding"] = Sharding(mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32))
    made = planned(cell["model"], ranks, **options)
    training = made.training
    assert training is not None
    peak = training.worst("cpu").bytes_on("cpu") + windows(made, ranks)
    assert 0.9 * peak <= measured["peak"] <= 1.1 * peak + (64 << 20)
    held = training.weight_bytes + training.gradient_bytes + training.optimizer_bytes[0]
    assert held == pytest.approx(measured["held"], rel=0.01)


@pytest.mark.parametrize(
    ("optim", "nbytes"),
    [
        ("adamw_torch", 8),
        ("adamw_torch_8bit", 2),
        ("adafactor", 0),
        ("paged_lion_32bit", 4),
        ("rmsprop_bnb_8bit", 1),
    ],
)
def test_optimizer_states(optim: str, nbytes: float) -> None:
    made = planned("36m", 3, dtype="float32", tuning=Full(), optim=optim)
    assert made.training is not None
    assert sum(made.training.optimizer_bytes) == pytest.approx(nbytes * made.parameters, rel=0.05, abs=1 << 20)


@pytest.mark.slow
def test_offload_moves_states_to_the_host() -> None:
    step: Any = {"per_device_train_batch_size": 1, "max_length": 64, "tuning": Full(), "device": "cuda"}
    plain = planned("36m", 2, **step).training
    moved = planned("36m", 2, **step, sharding=Sharding(offload_policy=CPUOffloadPolicy())).training
    assert plain is not None
    assert moved is not None
    for here, there in zip(plain.phases, moved.phases, strict=True):
        states = here.device["weights"] + here.device["optimizer"] + here.device.get("gradients", 0)
        assert not here.host
        assert there.bytes_on("cpu") >= states - there.device["weights"]  # buffers
        assert "activations" not in there.host


@pytest.mark.parametrize(("optim", "is_known"), [("ademamix", False), ("paged_adamw_8bit", True)])
def test_a_plan_says_whose_states_it_does_not_know(optim: str, is_known: bool) -> None:
    note = f"{optim}: its states are not known, and counted as those of AdamW"
    assert (note not in planned("low", 1, tuning=Full(), optim=optim).notes) == is_known


def test_offload_leaves_whole_adapters_on_the_device() -> None:
    """In float32, with gradients and two moments."""
    adapter = Lora(LoraConfig(r=16, target_modules="all-linear"), placement="replicated")
    offload = Sharding(offload_policy=CPUOffloadPolicy())
    made = planned("low", 2, tuning=adapter, device="cuda", optim="adamw_torch", sharding=offload)
    assert made.training is not None
    *_, last = made.training.phases
    assert last.device["weights"] == made.ranks[0].device_bytes
    assert last.device["gradients"] == 4 * made.trainable_parameters
    assert last.device["optimizer"] == 8 * made.trainable_parameters
    assert last.device["optimizer step"] == 4 * made.trainable_parameters
    assert last.host.keys() == {"weights"}


def test_one_rank_gathers_and_offloads_on_an_accelerator_only() -> None:
    step: Any = {"tuning": Full(), "per_device_train_batch_size": 1, "max_length": 64, "dtype": "float32"}
    mixed = Sharding(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    here, there, cast = (
        planned("low", 1, **step, **more).training
        for more in ({}, {"device": "cuda"}, {"device": "cuda", "sharding": mixed})
    )
    assert here and there and cast  # noqa: PT018
    assert not any(phase.host.get("gathered groups") for phase in here.phases)
    assert there.phases[0].device["gathered groups"] > 0
    assert cast.phases[1].device["activations"] < there.phases[1].device["activations"]
    offload = Sharding(offload_policy=CPUOffloadPolicy())
    moved = planned("low", 1, tuning=Full(), device="cuda", sharding=offload).training
    assert moved is not None
    assert moved.phases[-1].host["weights"] > 0
    with pytest.raises(ConfigError, match="offload_policy: one rank on the CPU is not sharded"):
        planned("low", 1, tuning=Full(), sharding=offload)


def test_checkpointing_and_accumulation() -> None:
    step: Any = {"per_device_train_batch_size": 2, "max_length": 256, "tuning": Full()}
    plain, again, summed = (
        planned("36m", 2, **step, **more).training
        for more in ({}, {"gradient_checkpointing": True}, {"gradient_accumulation_steps": 4})
    )
    assert plain and again and summed  # noqa: PT018
    activations = [phase.host["activations"] for phase in (plain.phases[1], again.phases[1])]
    assert activations[1] < activations[0] / 5
    assert summed.phases[1].host["gradients"] == summed.gradient_bytes


def test_the_largest_batch_fits_and_one_more_row_does_not() -> None:
    limit = 2 << 30
    step: Any = {"max_length": 512, "tuning": LORA}
    made = planned("low", 2, **step, per_device_train_batch_size=3, memory_bytes=limit)
    assert made.training is not None
    most = made.training.largest_batch
    assert most is not None
    assert made.verdict(limit).endswith(f"on a rank, largest batch {most}")
    peaks = [planned("low", 2, **step, per_device_train_batch_size=rows).peak_bytes for rows in (most, most + 1)]
    assert peaks[0] <= limit < peaks[1]
    assert planned("low", 2, **step, per_device_train_batch_size=3).training.largest_batch is None  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("tuning", "recomputed"), [(Full(), False), (LORA, True)], ids=["full-kept", "lora-recomputed"]
)
def test_each_further_block_takes_as_much_memory(tuning: Any, recomputed: bool) -> None:
    """Of two and three blocks all are traced, of nine those that differ."""
    step: Any = {"per_device_train_batch_size": 2, "max_length": 64, "tuning": tuning}
    activations = []
    for model in ("low", "three", "four", "nine"):
        training = planned(model, 2, **step, gradient_checkpointing=recomputed).training
        assert training is not None
        activations.append([phase.host.get("activations", 0) for phase in training.phases])
    for two, three, four, nine in zip(*activations, strict=True):
        assert four - three == three - two
        assert nine - four == 5 * (three - two)
    assert activations[3][1] > activations[0][1]
