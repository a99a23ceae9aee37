"""Plans of whole trainings, against trainings: bytes of tensors, counted while they are trained."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.harness.world import run_world
from tests.models.on_fake_ranks import fake_rank
from tests.training import tiny
from tests.verbs.real_shapes import qwen3_235b
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3Config, Qwen3ForCausalLM

import shardwise
from shardwise.models.live_bytes import LiveBytes
from shardwise.models.view import local_tensor
from shardwise.training.configuration.config import config_of
from shardwise.training.configuration.config_values import (
    accumulation_of,
    loss_of,
    quantization_of,
    sharding_of,
    tuning_of,
)
from shardwise.training.data.batches import Batch
from shardwise.training.foretelling.foreseeing import plan_training
from shardwise.training.foretelling.memory_facts import MemoryFacts
from shardwise.training.foretelling.step_memory import Measured
from shardwise.training.loop import train
from shardwise.training.prepare import ModelRequest, load_model

ROWS, TOKENS = 3, 96
LORA = {"method": "lora", "r": 4, "target_modules": "all-linear"}
NF4 = {"tuning": LORA, "quantization": {"block_size": 32}}
NESTED = {"tuning": LORA, "quantization": {"block_size": 32, "scales": "nested"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny.write_model(tmp_path_factory.mktemp("foreseen") / "model"))


def configured(folder, **sections):
    values = {
        "model": {"name": folder},
        "data": {"train": "none.jsonl", "max_length": TOKENS},
        "output": {"directory": "none"},
        "checkpoints": {"every": None},
        **sections,
    }
    values["training"] = {"batch_size": ROWS, "max_steps": 2, **sections.get("training", {})}
    values["sharding"] = {"activation_checkpointing": False, "precision": "float32", **sections.get("sharding", {})}
    return config_of(values)


def step_of(config, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 260, (config.training.batch_size, TOKENS), generator=generator)
    mask, labels = torch.ones_like(ids), ids.clone()
    mask[-1, -4:], labels[-1, -4:] = 0, -100
    return [Batch(ids, mask, labels, ids.numel())] * config.training.gradient_accumulation_steps


class Turns(list):
    epochs_done = 0.0

    def name_rows(self, lines):
        return ""


class Seen(LiveBytes):
    """As it is, with numbers."""

    def answer(self, func, args, kwargs):
        return func(*args, **kwargs)


def bytes_held(tensors):
    storages = [local_tensor(value).untyped_storage() for value in tensors if isinstance(value, torch.Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def trained(config, watch=False):
    """(bytes of weights, gradients and state in the last step; the most that has been alive, if it is watched)."""
    model, _ = load_model(
        ModelRequest(
            config.model.name,
            config.options(),
            tuning_of(config.tuning),
            sharding_of(config.sharding, config.options()),
            quantization=quantization_of(config.quantization),
        )
    )
    held = []
    states = {}  # of each optimizer; Muon has AdamW beside it

    def look(optimizer, *_):
        states[id(optimizer)] = [value for state in optimizer.state.values() for value in state.values()]
        held.append(
            (
                bytes_held([*model.parameters(), *model.buffers()]),
                bytes_held([each.grad for each in model.parameters()]),
                bytes_held([value for values in states.values() for value in values]),
            )
        )

    hook = register_optimizer_step_post_hook(look)
    steps = Turns([step_of(config, seed) for seed in range(2)])
    keywords = {
        "loss": loss_of(config.training),
        "accumulation": accumulation_of(config.training, model, config.options(), "float32"),
    }
    known = [*model.parameters(), *model.buffers()]
    live = Seen(known)
    if watch:
        with live:
            train(model, steps, config.options(), **keywords)
    else:
        train(model, steps, config.options(), **keywords)
    hook.remove()
    return held[-1], bytes_held(known) + live.peak


def plan_of(config, **keywords):
    return plan_training(config, device="cpu", **keywords)


def held_in(plan):
    [step] = [phase for phase in plan.phases if phase.phase == "optimizer"]
    return tuple(step.host[term] for term in ("weights", "gradients", "optimizer state"))


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"tuning": LORA},
        {"tuning": {"method": "freeze", "trainable_layers": 1}},
        {"sharding": {"activation_checkpointing": True}},
        {"tuning": LORA, "sharding": {"activation_checkpointing": True}},
        {"training": {"loss_chunk_tokens": None}},
        {"training": {"gradient_accumulation_steps": 2}},
        {"training": {"batch_size": 1}},
        {"optimizer": {"name": "sgd"}},
        {"sharding": {"precision": "bfloat16"}},
        NF4,
        NESTED,
        {**NESTED, "sharding": {"activation_checkpointing": True, "precision": "bfloat16"}},
    ],
    ids=lambda sections: str(sections)[:60],
)
def test_one_process(folder, sections):
    config = configured(folder, **sections)
    held, peak = trained(config, watch=True)
    plan = plan_of(config, ranks=1)
    assert held_in(plan) == pytest.approx(held, rel=0.05, abs=300)
    # Of a model so small most is what a load stages with; here it is about steps.
    assert max(each.host_bytes for each in plan.phases if each.phase != "load") == pytest.approx(peak, rel=0.05)


def test_experts(tmp_path):
    """Of stacked experts, in float32 as on CPUs; one kind of block stands for all."""
    config = MixtralConfig(
        vocab_size=260,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
    )
    MixtralForCausalLM(config).save_pretrained(tmp_path)
    experts = configured(str(tmp_path))
    held, peak = trained(experts, watch=True)
    plan = plan_of(experts, ranks=1)
    assert held_in(plan) == pytest.approx(held, rel=0.05, abs=300)
    assert passes_in(plan) == pytest.approx(peak, rel=0.1)


def on_ranks(folder, cells):
    return [trained(configured(folder, **sections))[0] for sections in cells]


CELLS = [
    {},
    {"tuning": LORA},
    {"tuning": {**LORA, "placement": "replicated"}},
    {"sharding": {"precision": "bfloat16"}, "optimizer": {"name": "muon"}},
    NF4,
    NESTED,
]


@pytest.mark.distributed
@pytest.mark.parametrize(
    "ranks", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
)
def test_what_ranks_hold(folder, ranks):
    """Weights, gradients and the optimizer's state of each rank, over its plan."""
    for found in run_world(ranks, on_ranks, folder, CELLS):
        for sections, held in zip(CELLS, found, strict=True):
            plan = plan_of(configured(folder, **sections), ranks=ranks)
            assert held_in(plan) == pytest.approx(held, rel=0.05, abs=600), sections


def passes_in(plan):
    return max(phase.device_bytes + phase.host_bytes for phase in plan.phases if phase.phase != "load")


def test_more_ranks_and_less_trained_take_less(folder):
    two, eight = (plan_of(configured(folder), ranks=ranks) for ranks in (2, 8))
    lora = plan_of(configured(folder, tuning=LORA), ranks=2)
    again = plan_of(configured(folder, sharding={"activation_checkpointing": True}), ranks=2)
    assert held_in(eight) < held_in(two)
    assert held_in(lora)[1:] < held_in(two)[1:]
    assert passes_in(again) < passes_in(two)
    assert again.flops > two.flops
    assert len(eight.peaks) == 8
    assert eight.peaks[0].nbytes == eight.peak_bytes


def test_a_copy_for_checkpoints_is_there_all_the_time(folder):
    plain = plan_of(configured(folder, checkpoints={"every": 1}), ranks=2)
    copied = plan_of(configured(folder, checkpoints={"every": 1, "mode": "asynchronous"}), ranks=2)
    weights, _, state = held_in(plain)
    assert passes_in(copied) - passes_in(plain) == weights + state


def test_whole_gradients_stay_between_micro_batches(folder):
    """More than a rank's shards of them, unless they are dealt after each."""
    several = {"gradient_accumulation_steps": 2}
    whole = plan_of(configured(folder, training=several), ranks=4)
    dealt = plan_of(configured(folder, training={**several, "accumulate": "sharded_gradients"}), ranks=4)
    assert held_in(whole)[1] == pytest.approx(4 * held_in(dealt)[1], rel=0.05)
    assert any("sharded_gradients" in note for note in whole.notes)


def test_the_largest_batch_fits_and_the_next_does_not(folder):
    config = configured(folder)
    room = plan_of(config, ranks=2, memory_bytes=40 << 20).room
    assert room is not None
    assert room.largest_batch > ROWS
    assert not room.refusal
    fits = configured(folder, training={"batch_size": room.largest_batch})
    too_large = configured(folder, training={"batch_size": room.largest_batch + 1})
    assert plan_of(fits, ranks=2).peak_bytes <= 40 << 20 < plan_of(too_large, ranks=2).peak_bytes


def test_a_large_batch_is_on_the_line_of_smaller_ones(folder):
    """It is not run: a loss in chunks would be run for each of them. Beside one that is trained, without chunks."""
    many = configured(folder, training={"batch_size": 60, "loss_chunk_tokens": None})
    _, peak = trained(many, watch=True)
    assert plan_of(many, ranks=1).peak_bytes == pytest.approx(peak, rel=0.05)
    start = time.process_time()
    plan_of(configured(folder, training={"batch_size": 60_000}), ranks=1)
    assert time.process_time() - start < 20


def test_one_total_is_told(folder):
    plan = plan_of(configured(folder), ranks=1)
    assert "activations come on top" in str(plan.load)
    assert "activations come on top" not in str(plan), "they are in the plan of a training"
    assert "model       " in str(plan)


@pytest.mark.parametrize(
    ("needed", "ends"),
    [(90 << 20, "is not foreseen"), (20 << 20, "loss)"), (19 << 20, "loss)"), (1 << 30, "loss)")],
)
def test_what_was_needed_beside_what_was_foreseen(needed, ends):
    told = str(MemoryFacts(needed, 20 << 20, "loss"))
    assert told.startswith("memory: the first rank needed")
    assert told.endswith(ends)


def test_a_batch_that_never_fits_says_by_how_much_and_what_is_largest(folder):
    room = plan_of(configured(folder), ranks=1, memory_bytes=1 << 20).room
    assert room is not None
    assert room.largest_batch == 0
    least = plan_of(configured(folder, training={"batch_size": 1}), ranks=1).peak_bytes
    assert room.lacking_least_bytes == least - (1 << 20)
    assert "no batch fits into 1.00 MiB: one row lacks" in room.refusal
    assert f"most of it are {room.term} (" in room.refusal


def test_time_is_told_where_somebody_says_how_fast_it_computes(folder):
    unknown = plan_of(configured(folder), ranks=2)
    known = plan_of(configured(folder), ranks=2, flops_per_s=1e9, read_bytes_per_s=1e3)
    assert unknown.step_s is None
    assert "say --tflops" in str(unknown)
    assert known.step_s == pytest.approx(known.flops / 1e9)
    assert known.load_s == pytest.approx(known.load.read_bytes / 1e3)
    # 2 for each weight of a product and token forwards, 4 backwards; the head's products too, which is tied; and of
    # attention's two products 2 each for each two tokens, and five backwards.
    weights = sum(p.numel() for n, p in tiny.model().named_parameters() if p.ndim == 2)
    attention = 2 * 14 * ROWS * TOKENS**2 * 32
    assert known.flops == pytest.approx(6 * ROWS * TOKENS * weights + attention, rel=0.02)


def test_a_rate_is_measured_by_reading(folder):
    plan = plan_of(configured(folder), ranks=2, read_bytes_per_s=Measured())
    assert 1e3 < plan.read_bytes_per_s < 1e12
    assert plan.load_s == pytest.approx(plan.load.read_bytes / plan.read_bytes_per_s)


@pytest.mark.parametrize("name", ["memory_bytes", "flops_per_s", "read_bytes_per_s"])
@pytest.mark.parametrize("value", [0, -1, float("inf")])
def test_what_is_said_of_machines_is_a_positive_number(folder, name, value):
    with pytest.raises(shardwise.ConfigError, match=f"{name}={value}: it must be greater than 0"):
        plan_of(configured(folder), ranks=1, **{name: value})


def test_a_model_that_cannot_be_run_without_data_is_named(folder, monkeypatch):
    def fail(*args, **keywords):
        raise RuntimeError("data-dependent\nand more")

    monkeypatch.setattr("transformers.models.qwen3.modeling_qwen3.Qwen3MLP.forward", fail)
    with pytest.raises(
        shardwise.ConfigError, match=r"Qwen3ForCausalLM cannot be run without data.*data-dependent\)"
    ):
        plan_of(configured(folder), ranks=1)


@pytest.mark.parametrize(("ranks", "precision"), [(2, "float32"), (4, "float32"), (2, "bfloat16")])
def test_what_torch_itself_counts(tmp_path, ranks, precision):
    """FSDP2 on ranks that are not there, seen by torch's own tracker: without an optimizer, and with one row."""
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    (tracked,) = tracked_by_torch(config, ranks, precision).values()
    sections = {
        "training": {"batch_size": 1, "loss_chunk_tokens": None},
        "sharding": {"precision": precision, "activation_checkpointing": False},
    }
    plan = plan_training(configured(str(tmp_path), **sections), ranks=ranks)
    passes = {each.phase: each.device_bytes - each.device["optimizer state"] for each in plan.phases[1:4]}
    assert set(passes) == {"forward", "loss", "backward"}
    assert max(passes.values()) == pytest.approx(tracked["Total"], rel=0.03)


def tracked_by_torch(config, ranks, precision):
    dtype = getattr(torch, precision)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    with fake_rank(0, ranks):
        mesh = init_device_mesh("cpu", (ranks,))
        with FakeTensorMode():
            model = Qwen3ForCausalLM(config).train()
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh, mp_policy=policy)
            fully_shard(model, mesh=mesh, mp_policy=policy)
            tracker = FSDPMemTracker(model)
            tracker.track_inputs(())
            with tracker:
                ids = torch.zeros((1, TOKENS), dtype=torch.int64)
                logits = model(input_ids=ids, use_cache=False).logits.flatten(0, 1).float()
                loss = F.cross_entropy(logits, F.pad(ids[:, 1:], (0, 1)).flatten(), reduction="sum")
                del logits
                loss.backward()
            return tracker.get_tracker_snapshot("peak")


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_thousand_ranks_of_a_large_model(monkeypatch):
    """Beside the forecast of its load, which is planned by itself, it takes a second of a processor.

    What is alike is looked at once: one of 94 layers, and of each layer one of 128 experts.
    """
    from shardwise.engines.forecasting import foreseen
    from shardwise.layout import MeshShape
    from shardwise.models import traced_activations
    from shardwise.planning.forecasts import footprint
    from shardwise.storage.policies import LOCAL
    from shardwise.training.foretelling import foreseeing

    shapes = qwen3_235b()
    index = shapes.index()
    seconds = []

    def found(name, ranks, options):
        options = {**options, "model_class": shapes.model_class, "dtype": "bfloat16"}
        made = foreseen(Path("/nowhere"), shapes.config, index, MeshShape.flat(ranks), LOCAL, options)
        seconds.append(time.process_time())
        return made

    looked_at = {"copies": 0, "fakes": 0}
    copies_and_computed, fake = footprint.copies_and_computed, traced_activations._fake

    def counted_copies(*given):
        made = copies_and_computed(*given)
        looked_at["copies"] += len(made[0])
        return made

    def counted_fake(*given):
        looked_at["fakes"] += 1
        return fake(*given)

    monkeypatch.setattr(footprint, "copies_and_computed", counted_copies)
    monkeypatch.setattr(traced_activations, "_fake", counted_fake)
    monkeypatch.setattr(foreseeing, "foreseen_of", found)
    config = config_of(
        {
            "model": {"name": "none"},
            "data": {"train": "none.jsonl", "max_length": 4096},
            "output": {"directory": "none"},
            "training": {"batch_size": 1},
        }
    )
    plan = plan_training(config, ranks=1024, nodes=128)
    assert time.process_time() - seconds[0] < 5
    assert looked_at["copies"] < 20 * 1024
    assert looked_at["fakes"] < 40
    assert len(plan.peaks) == 1024
    assert 20 << 30 < plan.peak_bytes < 60 << 30
    # Of 22 billion active parameters: two for the pass, two for it once more, four backwards; and attention.
    assert 8 * 20e9 * 4096 < plan.flops < 12 * 25e9 * 4096
