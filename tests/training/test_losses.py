"""The loss from a few logits at a time: the same, and there are never more of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.training import stepping
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwise.errors import ConfigError, TrainingError
from shardwise.execution.ranks.world import World
from shardwise.training.data.batches import IGNORED, Batch
from shardwise.training.generation import evaluating
from shardwise.training.passes.losses import (
    ChunkedLogits,
    LossInChunks,
    WholeLogits,
    chunked_cross_entropy,
    prepare_loss,
)

ROWS, WIDTH, WORDS, CHUNK = 23, 8, 50, 4


class Largest(TorchDispatchMode):
    """The size of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.numel = max(self.numel, leaf.numel())
        return result


def given(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, nn.Linear]:
    torch.manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH).to(dtype).requires_grad_()
    return hidden, torch.randint(0, WORDS, (ROWS,)), nn.Linear(WIDTH, WORDS).to(dtype)


def both(
    tokens: int, dtype: torch.dtype = torch.float32, head_of: Callable[[nn.Linear], Any] = lambda head: head
) -> list[list[torch.Tensor]]:
    """Loss and gradients, in chunks and from whole logits."""
    found: list[list[torch.Tensor]] = []
    for in_chunks in (True, False):
        hidden, wanted, linear = given(dtype)
        head = head_of(linear)
        if in_chunks:
            loss = chunked_cross_entropy(hidden, wanted, head, list(linear.parameters()), tokens=tokens)
        else:
            loss = F.cross_entropy(head(hidden).float(), wanted, reduction="sum")
        (loss * 0.3).backward()
        found.append([loss.detach(), hidden.grad, linear.weight.grad, linear.bias.grad])
    return found


@pytest.mark.parametrize("tokens", [1, CHUNK, ROWS, 1000])
def test_the_loss_and_its_gradients_are_those_of_whole_logits(tokens):
    chunked, whole = both(tokens)
    torch.testing.assert_close(chunked, whole, rtol=1e-5, atol=1e-6)


def test_gradients_of_chunks_are_summed_in_float32():
    chunked, whole = both(1, torch.bfloat16)
    exact = both(ROWS)[1]
    assert chunked[2].dtype == torch.bfloat16
    torch.testing.assert_close(chunked, whole, rtol=0.02, atol=0.02)
    torch.testing.assert_close(chunked[3].float(), exact[3], rtol=0.02, atol=0.02)


def test_what_is_done_to_logits_has_its_part_in_the_gradient():
    chunked, whole = both(CHUNK, head_of=lambda head: lambda hidden: torch.tanh(head(hidden) / 0.5) * 0.5)
    torch.testing.assert_close(chunked, whole, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(chunked[0], both(CHUNK)[0][0])


def test_without_rows_there_is_a_gradient_of_zeros():
    hidden, wanted, head = given()
    loss = chunked_cross_entropy(hidden[:0], wanted[:0], head, list(head.parameters()), tokens=CHUNK)
    loss.backward()
    assert loss.item() == 0
    assert not head.weight.grad.any()
    assert not hidden.grad.any()


@pytest.mark.parametrize("trained", ["hidden", "head", "nothing"])
def test_only_what_is_trained_has_a_gradient(trained):
    hidden, wanted, head = given()
    hidden.requires_grad_(trained == "hidden")
    head.requires_grad_(trained == "head")
    loss = chunked_cross_entropy(hidden, wanted, head, list(head.parameters()), tokens=CHUNK)
    torch.testing.assert_close(loss, F.cross_entropy(head(hidden), wanted, reduction="sum"))
    if trained == "nothing":
        assert not loss.requires_grad
        return
    loss.backward()
    assert (hidden.grad is None) == (trained != "hidden")
    assert (head.weight.grad is None) == (trained != "head")


def test_a_second_backward_pass_is_refused():
    hidden, wanted, head = given()
    loss = chunked_cross_entropy(hidden, wanted, head, list(head.parameters()), tokens=CHUNK)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_logits_never_exist_whole():
    """Neither forward nor backward does any operation return tokens x words, nor half of it."""
    model = stepping.tied()
    given = stepping.batch(rows=4, tokens=40)
    loss = prepare_loss(World(0, 1), model, ChunkedLogits(8)).loss
    whole = given.input_ids.numel() * stepping.WORDS
    sizes: dict[str, int] = {}
    for name, kind in {"chunks": loss, "whole": WholeLogits()}.items():
        with Largest() as largest:
            kind.summed(model, given).backward()
        sizes[name] = largest.numel
    assert sizes["whole"] >= whole * 0.9
    assert sizes["chunks"] < whole / 2


@pytest.mark.parametrize("kind", stepping.MODELS)
def test_models_and_their_tricks(kind):
    found = stepping.in_chunks(kind, "auto")
    torch.testing.assert_close(found["chunks"], found["whole"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("kind", "name"), [("capped", "final_logit_softcapping"), ("granite", "logits_scaling")])
def test_the_tricks_matter(kind, name):
    """Else the comparison above would prove nothing."""
    model = stepping.MODELS[kind]()
    with torch.no_grad():
        before = WholeLogits().summed(model, stepping.batch()).item()
        setattr(model.config, name, None if kind == "capped" else 1.0)
        after = WholeLogits().summed(model, stepping.batch()).item()
    assert abs(before - after) > 1e-2


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("kind", "plan", "rows"),
    [
        ("qwen3", "auto", 4),
        ("qwen3", "plan", 4),
        ("tied", "plan", 1),
        ("capped", "auto", 4),
        ("adapted", "auto", 4),
    ],
)
def test_the_head_in_a_group_of_fsdp2(worlds, kind, plan, rows):
    """In the root group and in its own, tied and not, also where a rank has no rows."""
    expected = stepping.in_chunks(kind, plan, rows)["whole"]
    for found in worlds(2).run(stepping.in_chunks, kind, plan, rows):
        torch.testing.assert_close(found["chunks"], found["whole"], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found["chunks"], expected, rtol=1e-4, atol=1e-5)


def test_the_body_is_run_once_to_try_the_loss():
    """Of a sharded model, each of its passes gathers all groups."""
    model = stepping.qwen3()
    passes = []
    model.model.layers[0].register_forward_hook(lambda *_: passes.append(1))
    assert prepare_loss(World(0, 1), model, ChunkedLogits()).note == ""
    assert len(passes) == 1
    assert "forward" not in vars(model.model)


def test_under_autocast():
    losses = {}
    for name, choice in {"whole": WholeLogits(), "chunks": ChunkedLogits(5)}.items():
        model = stepping.qwen3()
        loss = prepare_loss(World(0, 1), model, choice, lambda: torch.autocast("cpu", torch.bfloat16)).loss
        facts = stepping.work_on(model, loss=loss, dtype="bfloat16").gradient([stepping.batch(4)])
        losses[name] = [facts.loss, facts.grad_norm, stepping.gradients(model)]
    torch.testing.assert_close(losses["chunks"], losses["whole"], rtol=0.02, atol=2e-3)


class Peculiar(nn.Module):
    """Does to its logits what ``trick`` does."""

    def __init__(self, trick: Callable[[Any], Any]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        self.temperature = nn.Parameter(torch.ones(()))
        self.trick = trick

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: torch.Tensor, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=self.trick(self))


@pytest.mark.parametrize(
    ("trick", "reason"),
    [
        (
            lambda logits, model: logits.masked_fill(logits > 1, 0.0),
            "'__gt__'|reads 'masked_fill'|unsupported|not supported",
        ),
        (lambda logits, model: logits[..., :40], "takes a part of its logits"),
        (lambda logits, model: logits * model.temperature, "applies mul to its logits"),
        (lambda logits, model: torch.softmax(logits, -1), "applies softmax to its logits"),
        (lambda logits, model: logits.log_softmax(-1), "reads 'log_softmax' of its logits"),
        (lambda logits, model: logits + logits, "unsupported operand"),
    ],
)
def test_what_cannot_be_repeated_chunk_by_chunk_gets_whole_logits_and_a_note(trick, reason):
    model = Peculiar(lambda model: None)
    ids: list[torch.Tensor] = []

    def forward(input_ids: torch.Tensor, **_: Any) -> SimpleNamespace:
        ids.append(input_ids)
        return SimpleNamespace(logits=trick(model.head(model.embedding(input_ids)), model))

    model.forward = forward
    prepared = prepare_loss(World(0, 1), model, ChunkedLogits())
    assert isinstance(prepared.loss, WholeLogits)
    assert re.search(reason, prepared.note), prepared.note
    assert prepared.note.startswith("head cannot be run in chunks (")
    assert model.forward is forward
    assert isinstance(model.head, nn.Linear)


@pytest.mark.distributed
def test_a_head_that_fails_leaves_fsdp2_in_order(worlds):
    """It is only tried: the reason is told, and a step from whole logits is what it always was."""
    expected = stepping.failing_head()[1:]
    for note, *found in worlds(2).run(stepping.failing_head):
        assert note == "lm_head cannot be run in chunks (rows of tokens, please); whole logits are used"
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_model_whose_head_nobody_knows():
    prepared = prepare_loss(World(0, 1), stepping.Scaled(), ChunkedLogits())
    assert isinstance(prepared.loss, WholeLogits)
    assert prepared.note == "Scaled has no output embeddings; whole logits are used"


def test_a_model_that_changes_its_ways_is_an_error():
    """What worked when it was tried must not be something else later."""
    model = stepping.qwen3()
    loss = prepare_loss(World(0, 1), model, ChunkedLogits()).loss
    model.forward = lambda **_: SimpleNamespace(logits=torch.zeros(2, 12, stepping.WORDS))
    with pytest.raises(TrainingError, match="not those of its output embeddings"):
        loss.summed(model, stepping.batch())


@pytest.mark.parametrize("choice", [WholeLogits(), ChunkedLogits(5)])
def test_the_router_s_loss_that_a_config_asks_for_counts_as_in_transformers(choice):
    """Loss and gradients of one forward pass are those of the model's own loss."""
    given = stepping.batch()
    model, own = stepping.experts(), stepping.experts()
    loss = prepare_loss(World(0, 1), model, choice).loss
    assert type(loss) is (WholeLogits if isinstance(choice, WholeLogits) else LossInChunks)
    facts = stepping.work_on(model, loss=loss).gradient([given])
    theirs = own(**given.inputs(), labels=given.labels, use_cache=False)
    theirs.loss.backward()
    assert facts.loss == pytest.approx(theirs.loss.item(), rel=1e-6)
    assert 0.5 * theirs.aux_loss.item() > 0.5  # which is not little, beside the loss
    torch.testing.assert_close(stepping.gradients(model), stepping.gradients(own), rtol=1e-5, atol=1e-7)
    with evaluating(model):  # of which the perplexity is told
        counted = float(loss.summed(model, given)) / given.supervised_tokens
    assert counted == pytest.approx((theirs.loss - 0.5 * theirs.aux_loss).item(), rel=1e-5)


def test_the_router_s_loss_of_a_batch_without_rows_is_none():
    model = stepping.experts()
    empty = Batch(*[torch.zeros(1, 1, dtype=torch.long)] * 2, torch.full((1, 1), IGNORED), 0)
    assert WholeLogits().summed(model, empty).item() == 0


def test_a_router_s_loss_is_not_counted_where_the_config_does_not_ask():
    model = stepping.experts(output_router_logits=False)
    given = stepping.batch()
    theirs = model(**given.inputs(), labels=given.labels, use_cache=False).loss
    assert stepping.work_on(model).gradient([given]).loss == pytest.approx(theirs.item(), rel=1e-6)


@pytest.mark.distributed
def test_router_s_losses_of_several_ranks_and_forward_passes(worlds):
    """Each counts by its share of the supervised tokens, wherever it was computed."""
    expected = stepping.routed()
    torch.testing.assert_close(expected[0], expected[1], rtol=1e-5, atol=1e-6)
    for found in worlds(2).run(stepping.routed):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_what_a_config_asks_for_and_cannot_be_counted_is_refused():
    model = stepping.experts()
    forward = model.forward

    def more(**inputs: Any) -> Any:
        output = forward(**inputs)
        if output.loss is not None:
            output.loss = output.loss + 0.25
        return output

    model.forward = more
    with pytest.raises(ConfigError, match="output_router_logits is on, but MixtralForCausalLM adds something"):
        prepare_loss(World(0, 1), model, WholeLogits())


def test_chunks_have_tokens():
    with pytest.raises(ConfigError, match="tokens=0"):
        ChunkedLogits(0)
