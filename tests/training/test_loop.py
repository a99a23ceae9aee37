"""The loop: the same on one process and on two, with one micro-batch and with several."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import pytest
import torch
from tests.conftest import Worlds
from tests.quiet import quieten
from tests.training import tiny
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.errors import ConfigError, TrainingError
from shardwise.execution.ranks.world import World
from shardwise.models.replicated import average_replicated_gradients
from shardwise.models.wrapping import wrap
from shardwise.models.wrapping.policies import WholeModel
from shardwise.training.data.loader import step_loader
from shardwise.training.data.read_once import TrainData, read_data
from shardwise.training.loop import train
from shardwise.training.optimizing.gradients import clip_gradients
from shardwise.training.options import Ratio, Steps, TrainOptions
from shardwise.training.parts import parts_of
from shardwise.training.passes.forward import Forward
from shardwise.training.report import StepFacts
from shardwise.training.step import StepWork

SHAPES = {"one batch": (4, 1), "micro-batches": (1, 4)}
"""Rows of a micro-batch, over all ranks, and micro-batches."""

TOLERANCE = {"rtol": 1e-6, "atol": 1e-6}

Outcomes: TypeAlias = dict[tuple[str, str], dict[str, Any]]


class Scaled(nn.Module):
    """A language model of two layers, with a parameter that has no dimensions and so stays whole."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(260, 16)
        self.blocks = nn.ModuleList([ScaledBlock(), ScaledBlock()])
        self.head = nn.Linear(16, 260)

    def forward(self, input_ids: torch.Tensor, **_: Any) -> SimpleNamespace:
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return SimpleNamespace(logits=self.head(hidden))


class ScaledBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.scale * torch.tanh(self.linear(hidden))


def options_for(shape: str, size: int, **more: Any) -> TrainOptions:
    rows, micro_batches = SHAPES[shape]
    per_rank = max(1, rows // size)
    return TrainOptions(
        batch_size=per_rank,
        gradient_accumulation_steps=micro_batches * rows // (per_rank * size)
        if rows > 1
        else micro_batches // size,
        **{
            "learning_rate": 1e-4,
            "duration": Steps(5),
            "warmup": Ratio(0.2),
            "schedule": "linear",
            "weight_decay": 0.01,
            "max_grad_norm": 0.5,
            **more,
        },
    )


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def build(kind: str) -> nn.Module:
    """A model, sharded where there are ranks to shard it over."""
    model: nn.Module = Scaled() if kind == "scaled" else tiny.model()
    mesh = wrap.default_mesh()
    if mesh is not None:
        wrap.wrap(model, wrap.Sharding(mesh=mesh))
        average_replicated_gradients(model, mesh)
    return model


def outcome(kind: str, shape: str, data: TrainData) -> dict[str, Any]:
    """Gradients of the first step, as they are and clipped; then losses, norms and weights of a short training."""
    world = World.current()
    options = options_for(shape, world.size)
    model = build(kind)
    batches = next(iter(step_loader(data, options)))
    parameters = list(model.parameters())
    unlimited = replace(options, max_grad_norm=math.inf)
    StepWork(world=world, forward=Forward(model), parts=parts_of(unlimited, model, 1)).gradient(batches)
    gradients = {name: whole(value.grad) for name, value in model.named_parameters() if value.grad is not None}
    norm = clip_gradients(parameters, 0.5)
    clipped = {name: whole(value.grad) for name, value in model.named_parameters() if value.grad is not None}
    model.zero_grad()
    report = train(model, step_loader(data, options), options)
    return {
        "gradients": gradients,
        "norm": norm,
        "clipped": clipped,
        "losses": report.losses,
        "grad_norms": report.grad_norms,
        "tokens": [(step.tokens, step.supervised_tokens) for step in report.steps],
        "weights": {name: whole(value.detach()) for name, value in model.named_parameters()},
        "sharded": sum(isinstance(value, DTensor) for value in parameters),
    }


def all_outcomes(file: str) -> Outcomes:
    data = read_data(file, tiny.tokenizer(), max_length=64)
    return {(kind, shape): outcome(kind, shape, data) for kind in ("qwen3", "scaled") for shape in SHAPES}


def unreached(file: str) -> str:
    """The error for a model of one group, in whose output FSDP2 finds no tensors."""
    model, mesh = Scaled(), wrap.default_mesh()
    wrap.wrap(model, wrap.Sharding(mesh=mesh, wrap=WholeModel()))
    average_replicated_gradients(model.requires_grad_(False), mesh)
    model.head.requires_grad_(True)
    data = read_data(file, tiny.tokenizer(), max_length=64)
    options = options_for("one batch", 2)
    with pytest.raises(TrainingError) as caught:
        train(model, step_loader(data, options), options)
    return str(caught.value)


def on_rank(chats: str, good: str, bad: str) -> tuple[Outcomes, list[str], str]:
    """What is computed, what is read from a good file, and the error for a bad one."""
    quieten()
    tokenizer = tiny.tokenizer(tiny.FORGETFUL)
    texts = [tokenizer.decode(example.tokens) for example in read_data(good, tokenizer, max_length=64).examples]
    with pytest.raises(ConfigError) as caught:
        read_data(bad, tokenizer, max_length=64)
    return all_outcomes(chats), texts, str(caught.value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With eleven chats, so that the third step of an epoch takes three: one rank has none for its last turn."""
    folder = tmp_path_factory.mktemp("data")
    tiny.write_chats(folder / "chats.jsonl", 11)
    talks = [tiny.chat("Hi", f"Ho {n}") for n in range(5)]
    tiny.write_rows(folder / "good.jsonl", *talks)
    tiny.write_rows(folder / "bad.jsonl", *talks[:3], {**talks[0], "tools": [{"name": "f"}]}, talks[3])
    return folder


@pytest.fixture
def chats(folder: Path) -> Path:
    return folder / "chats.jsonl"


@pytest.fixture(scope="module")
def alone(folder: Path) -> Outcomes:
    return all_outcomes(str(folder / "chats.jsonl"))


@pytest.fixture(scope="module")
def world(folder: Path, worlds: Worlds) -> list[tuple[Outcomes, list[str], str]]:
    return worlds(2).run(on_rank, *(str(folder / f"{name}.jsonl") for name in ("chats", "good", "bad")))


@pytest.fixture
def on_two(world: list[tuple[Outcomes, list[str], str]]) -> list[Outcomes]:
    return [outcomes for outcomes, _, _ in world]


def require_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["tokens"] == expected["tokens"]
    for name in ("norm", "losses", "grad_norms", "gradients", "clipped", "weights"):
        torch.testing.assert_close(
            found[name], expected[name], **TOLERANCE, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("kind", ["qwen3", "scaled"])
def test_micro_batches_are_one_batch(alone: Outcomes, kind: str) -> None:
    require_same(alone[kind, "micro-batches"], alone[kind, "one batch"])


@pytest.mark.distributed
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["qwen3", "scaled"])
def test_two_ranks_are_one_process(
    alone: Outcomes,
    on_two: list[Outcomes],
    kind: str,
    shape: str,
) -> None:
    for found in on_two:
        require_same(found[kind, shape], alone[kind, "one batch"])


@pytest.mark.distributed
def test_the_models_are_sharded_and_keep_what_cannot_be(
    on_two: list[Outcomes],
) -> None:
    found = on_two[0]["scaled", "one batch"]
    assert found["sharded"] == len(found["weights"]) - 2


@pytest.mark.parametrize("kind", ["qwen3", "scaled"])
def test_the_gradient_is_clipped_as_torch_clips_it(alone: Outcomes, kind: str) -> None:
    found = alone[kind, "one batch"]
    parameters = []
    for gradient in found["gradients"].values():
        parameters.append(nn.Parameter(torch.zeros_like(gradient)))
        parameters[-1].grad = gradient.clone()
    norm = nn.utils.clip_grad_norm_(parameters, 0.5)
    assert float(norm) > 0.5
    torch.testing.assert_close(found["norm"], float(norm), **TOLERANCE)
    torch.testing.assert_close(list(found["clipped"].values()), [value.grad for value in parameters], **TOLERANCE)


def test_the_loss_is_that_of_transformers(chats: Path) -> None:
    data = read_data(chats, tiny.tokenizer(), max_length=64)
    options = TrainOptions(batch_size=11)
    model = tiny.model()
    [batch] = next(iter(step_loader(data, options)))
    with torch.no_grad():
        expected = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=batch.labels).loss
    report = train(model, step_loader(data, options), options)
    torch.testing.assert_close(report.losses[0], float(expected), rtol=0, atol=1e-5)


def test_the_report_and_those_told_of_each_step(chats: Path) -> None:
    data = read_data(chats, tiny.tokenizer(), max_length=64)
    options = options_for("one batch", 1, learning_rate=3e-3, duration=Steps(30))
    told: list[StepFacts] = []
    model = tiny.model().eval()
    report = train(model, step_loader(data, options), options, told.append)
    assert report.steps == tuple(told)
    assert [step.step for step in told] == list(range(1, 31))
    assert report.losses[-1] < report.losses[0] / 2
    assert [round(step.learning_rate, 6) for step in told[:3]] == [0, 0.0005, 0.001]
    assert report.to_dict()["steps"][0]["loss"] == report.losses[0]
    assert report.tokens > report.supervised_tokens > 0
    assert report.tokens_per_second > 0
    assert not model.training


def test_bfloat16_is_of_the_computation_only(chats: Path) -> None:
    data = read_data(chats, tiny.tokenizer(), max_length=64)
    options = options_for("one batch", 1, dtype="bfloat16")
    model = tiny.model()
    report = train(model, step_loader(data, options), options)
    exact = train(tiny.model(), step_loader(data, options), options_for("one batch", 1))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert report.losses[0] != exact.losses[0]
    assert report.losses[0] == pytest.approx(exact.losses[0], rel=0.02)


@pytest.mark.parametrize(("name", "poison"), [("loss", math.inf), ("gradient norm", math.nan)])
def test_what_is_no_number_stops_the_training(chats: Path, name: str, poison: float) -> None:
    data = read_data(chats, tiny.tokenizer(), max_length=64)
    options = options_for("one batch", 1)
    model = tiny.model()
    seen: dict[str, torch.Tensor] = {}

    def spoil(facts: StepFacts) -> None:
        if facts.step == 2:
            if name == "loss":
                with torch.no_grad():
                    model.model.norm.weight.fill_(poison)
            else:
                model.model.norm.weight.register_hook(lambda gradient: gradient * poison)
            seen.update({key: value.clone() for key, value in model.state_dict().items()})

    with pytest.raises(TrainingError, match=rf"^step 3: the {name} is .* those of step 2"):
        train(model, step_loader(data, options), options, spoil)
    torch.testing.assert_close(dict(model.state_dict()), seen, rtol=0, atol=0, equal_nan=True)


def test_a_model_that_is_frozen(chats: Path) -> None:
    data = read_data(chats, tiny.tokenizer(), max_length=64)
    with pytest.raises(ConfigError, match="no parameter of Qwen3ForCausalLM requires a gradient"):
        train(tiny.model().requires_grad_(False), step_loader(data, TrainOptions()), TrainOptions())


@pytest.mark.distributed
def test_steps_that_would_change_nothing_are_refused(worlds: Worlds, chats: Path) -> None:
    errors = worlds(2).run(unreached, str(chats))
    assert errors[0] == errors[1]
    assert "none of the 2 trained parameters of FSDPScaled has got a gradient" in errors[0]


def test_what_is_frozen_stays_as_it_is(chats: Path) -> None:
    data = read_data(chats, tiny.tokenizer(), max_length=64)
    options = options_for("one batch", 1)
    model, before = tiny.model(), tiny.model().state_dict()
    model.model.layers[0].requires_grad_(False)
    train(model, step_loader(data, options), options)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed
    assert not any(name.startswith("model.layers.0.") for name in changed)


@pytest.mark.distributed
def test_ranks_that_share_the_tokenising_have_all_rows(world: list[tuple[Outcomes, list[str], str]]) -> None:
    for _, texts, _ in world:
        assert [text.split("(thought)")[1] for text in texts] == [f"Ho {n}<|im_end|>\n" for n in range(5)]


@pytest.mark.distributed
def test_a_row_that_one_rank_refuses_is_refused_by_all(world: list[tuple[Outcomes, list[str], str]]) -> None:
    errors = [error for _, _, error in world]
    assert errors[0] == errors[1]
    assert "bad.jsonl: 1 row cannot be used\n  line 4: it has 'tools', of which the chat template" in errors[0]
