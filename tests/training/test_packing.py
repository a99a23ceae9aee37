"""Packed rows: each in one pack, and blind to the others."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.training import tiny
from torch import nn
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, MistralConfig, MistralForCausalLM, PreTrainedModel

from shardwise.errors import ConfigError
from shardwise.execution.ranks.world import World
from shardwise.training.data.batches import (
    IGNORED,
    BatchLayout,
    Flattened,
    Packed,
    Padded,
    evaluation_batches,
    flatten,
    pack,
    pack_rows,
)
from shardwise.training.data.loader import step_loader
from shardwise.training.data.read_once import TrainData, read_data
from shardwise.training.evaluation_rows import evaluate
from shardwise.training.loop import train
from shardwise.training.options import Epochs, TrainOptions
from shardwise.training.passes.forward import Forward
from shardwise.training.prepare import require_blind_rows
from shardwise.training.texts.masking import Example


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> TrainData:
    chats = tiny.write_chats(tmp_path_factory.mktemp("data") / "chats.jsonl", 9)
    return read_data(chats, tiny.tokenizer(), max_length=64)


def mistral(**more: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    return MistralForCausalLM(
        MistralConfig(
            vocab_size=260, num_key_value_heads=1, sliding_window=8, initializer_range=0.1, **sizes, **more
        )
    )


def gemma() -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    return Gemma3ForCausalLM(
        Gemma3TextConfig(vocab_size=260, num_key_value_heads=1, head_dim=16, sliding_window=8, **sizes)
    )


@given(
    lengths=st.lists(st.integers(min_value=1, max_value=20), max_size=60),
    capacity=st.integers(min_value=20, max_value=50),
)
def test_every_row_is_in_one_pack_that_holds_it(lengths: list[int], capacity: int) -> None:
    packs = pack_rows(lengths, capacity)
    assert sorted(chain.from_iterable(packs)) == list(range(len(lengths)))
    loads = [sum(lengths[row] for row in pack) for pack in packs]
    assert all(0 < load <= capacity for load in loads)
    assert sum(load <= capacity // 2 for load in loads) <= 1  # two of these would have been one


def test_packs_leave_little_room() -> None:
    assert pack_rows([5, 3, 7, 2, 3], 10) == [[0, 3, 4], [1, 2]]


def examples(*texts: str) -> list[Example]:
    return [Example.of(tokens, [True] * len(tokens)) for tokens in (list(text.encode()) for text in texts)]


def test_a_pack_begins_anew_with_each_row() -> None:
    batch = pack([examples("abc", "de"), examples("f")], pad_token_id=0)
    assert batch.attention_mask is None
    assert batch.input_ids.tolist() == [[97, 98, 99, 100, 101], [102, 0, 0, 0, 0]]
    assert batch.position_ids is not None
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]]
    assert batch.labels.tolist() == [[IGNORED, 98, 99, IGNORED, 101], [IGNORED] * 5]
    assert (batch.tokens, batch.supervised_tokens) == (6, 3)
    empty = pack([], pad_token_id=0)
    assert (empty.input_ids.shape, empty.supervised_tokens) == ((1, 1), 0)


def test_flash_attention_is_told_where_rows_begin() -> None:
    batch = flatten(examples("abc", "de", "f"), pad_token_id=0)
    inputs = batch.inputs()
    assert inputs["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0]]
    assert inputs["cu_seq_lens_q"].tolist() == inputs["cu_seq_lens_k"].tolist() == [0, 3, 5, 6]
    assert inputs["cu_seq_lens_q"].dtype == torch.int32
    assert inputs["max_length_q"] == inputs["max_length_k"] == 3
    assert inputs["attention_mask"] is None
    assert flatten([], pad_token_id=0).inputs()["cu_seq_lens_q"].tolist() == [0, 1]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("build", [tiny.model, mistral, gemma])
@pytest.mark.parametrize("layout", [Packed(100), Flattened(100)])
def test_the_loss_of_packed_rows_is_that_of_the_rows(
    data: TrainData, build: Any, attention: str, layout: BatchLayout
) -> None:
    model = build()
    model.set_attn_implementation(attention)
    world, forward = World.current(), Forward(model)
    expected = evaluate(world, forward, evaluation_batches(data, Padded(), 1))
    batches = evaluation_batches(data, layout, 2)
    assert max(len(batch.lines) for batch in batches) > 2
    found = evaluate(world, forward, batches)
    assert found == (pytest.approx(expected[0], abs=1e-6), expected[1])


def test_gradients_of_packed_rows_are_those_of_the_rows(data: TrainData) -> None:
    weights = []
    for layout, batch_size in ((Padded(), 9), (Packed(100), 9)):
        options = TrainOptions(batch_size=batch_size, duration=Epochs(2), learning_rate=1e-4)
        model = tiny.model()
        report = train(model, step_loader(data, options, layout), options)
        assert len(report.steps) == 2
        weights.append(dict(model.state_dict()))
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("layout", [Packed(100), Flattened(100)])
def test_a_model_whose_rows_are_blind_is_taken(layout: BatchLayout) -> None:
    for build in (tiny.model, mistral, gemma):
        model = build().train()
        require_blind_rows(model, layout, TrainOptions())
        assert model.training


def test_the_probe_computes_as_the_training_does() -> None:
    """Alone, what is frozen stays in its dtype beside what is trained, in float32; autocast lets them meet."""
    model = tiny.model()
    model.model.layers[0].to(torch.bfloat16)
    require_blind_rows(model, Packed(100), TrainOptions(dtype="bfloat16"))
    with pytest.raises(RuntimeError, match="dtype"):
        require_blind_rows(model, Packed(100), TrainOptions())


class Running(nn.Module):
    """Each token is told the mean of all before it, whatever the positions say."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, 8)
        self.head = nn.Linear(8, 50)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def forward(self, input_ids: torch.Tensor, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=self.head(self.embedding(input_ids).cumsum(1)))


def test_a_model_whose_rows_see_each_other_is_refused() -> None:
    with pytest.raises(ConfigError, match="data.packing: Running lets rows of a pack see each other"):
        require_blind_rows(Running(), Packed(100), TrainOptions())  # type: ignore[arg-type]
    require_blind_rows(Running(), Padded(), TrainOptions())  # type: ignore[arg-type]


class OneRow(Running):
    """Rows are blind to each other where there is one pack in a batch, as with flash attention."""

    def forward(self, input_ids: torch.Tensor, **keywords: Any) -> SimpleNamespace:
        if len(input_ids) > 1:
            return super().forward(input_ids, **keywords)
        hidden = self.embedding(input_ids).unflatten(1, (-1, input_ids.shape[1] // 2)).cumsum(2)
        return SimpleNamespace(logits=self.head(hidden.flatten(1, 2)))


def test_several_packs_in_a_batch_are_tried() -> None:
    with pytest.raises(ConfigError, match="data.packing: OneRow lets rows"):
        require_blind_rows(OneRow(), Packed(100), TrainOptions())  # type: ignore[arg-type]


def test_packs_are_the_rows_of_steps(data: TrainData, tmp_path: Path) -> None:
    options = TrainOptions(batch_size=1, gradient_accumulation_steps=2)
    loader = step_loader(data, options, Packed(100))
    steps = list(loader)
    assert len(steps) == len(loader) == -(-len(pack_rows(data.examples.lengths, 100)) // 2)
    lines = sorted(line for batches in steps for batch in batches for line in batch.lines)
    assert lines == list(range(1, 10))
