"""Parts with optimizers, schedules, clips and a loss of one's own: together they are what each is alone."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import Worlds
from tests.training import tiny, towers
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise.errors import ConfigError, TrainingError
from shardwise.training.data.batches import Batch
from shardwise.training.loop import train
from shardwise.training.metrics import values_of
from shardwise.training.parts import OwnParts, TrainedPart
from shardwise.training.passes.losses import WholeLogits

Found = dict[str, Any]


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Eleven, so that in the third step of an epoch one rank has no row for its last micro-batch."""
    return str(tiny.write_chats(tmp_path_factory.mktemp("data") / "chats.jsonl", 11))


@pytest.fixture(scope="module")
def world(chats: str, worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    return worlds(2).run(towers.on_rank, chats, str(tmp_path_factory.mktemp("kept") / "checkpoints"))


@pytest.fixture(scope="module")
def alone(chats: str) -> Found:
    return towers.compared(chats)


def require_as_alone(found: Found) -> None:
    for number in (0, 1):
        torch.testing.assert_close(found["weights"][number], found["expected"][number], rtol=0, atol=0)
        moved = [
            name
            for name, value in found["weights"][number].items()
            if not value.equal(found["begun"][number][name])
        ]
        assert len(moved) == 6
    assert found["parts"] == found["expected parts"]
    assert found["norms"] == [
        math.hypot(*norms) for norms in zip(*([n for _, n in part] for part in found["parts"]), strict=True)
    ]
    assert all(
        norm > clip for part, clip in zip(found["parts"], (towers.CLIP, 0.01), strict=True) for _, norm in part
    )
    assert found["rates"] == [rate for rate, _ in found["parts"][0]]
    rates = [rate for rate, _ in found["parts"][1]]
    assert rates == pytest.approx([0.5 * 0.8**step for step in range(towers.STEPS)])


@pytest.mark.distributed
def test_two_parts_together_are_each_alone_to_the_bit(world: list[Found]) -> None:
    for found in world:
        require_as_alone(found["compared"])


def test_two_parts_together_in_one_process_are_each_alone_to_the_bit(alone: Found) -> None:
    require_as_alone(alone)
    assert alone["losses"][-1] < alone["losses"][0]


@pytest.mark.distributed
def test_two_parts_on_two_ranks_are_those_of_one_process(world: list[Found], alone: Found) -> None:
    assert world[0]["compared"]["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    torch.testing.assert_close(world[0]["compared"]["weights"], alone["weights"], rtol=1e-4, atol=1e-5)


def test_facts_of_several_parts_are_told_by_name_and_those_of_one_as_ever(alone: Found) -> None:
    rate, norm = alone["parts"][1][0]
    assert alone["json"]["right"] == {"learning_rate": rate, "grad_norm": norm}
    assert not alone["json of one"]


@pytest.mark.distributed
def test_parts_go_on_by_name_whatever_their_order(world: list[Found]) -> None:
    for found in (each["gone on"] for each in world):
        assert found["first"] == 4
        assert found["losses"] == found["expected losses"]
        assert found["rates"] == found["expected rates"]
        torch.testing.assert_close(found["weights"], found["expected weights"], rtol=0, atol=0)


@pytest.mark.distributed
def test_parts_of_other_names_than_the_checkpoints_are_refused(world: list[Found]) -> None:
    errors = world[0]["gone on"]["errors"]
    assert errors == world[1]["gone on"]["errors"]
    renamed, exchanged = errors
    assert renamed.startswith("CoverageError")
    assert "schedulers: what is stored is not of a ScheduleOfPart (it lacks ['wrong: " in renamed
    assert exchanged.startswith("CoverageError")
    assert "schedulers: what is stored is not of a ScheduleOfPart (it lacks ['left: gamma'])" in exchanged


@pytest.mark.distributed
def test_what_differs_between_ranks_and_what_is_no_number_is_said_by_all(world: list[Found]) -> None:
    for clip, order, spoilt in (found["refused"] for found in world):
        for error in (clip, order):
            assert error.startswith("DisagreementError: the list of parts")
            assert "on rank 1 is not that of rank 0" in error
        assert spoilt.startswith("TrainingError: step 1: the gradient norm in the part 'right' is inf")
        assert "rank 1: " in spoilt
    assert world[0]["refused"] == world[1]["refused"]


def test_a_part_is_trained_as_plain_torch_would(chats: str) -> None:
    model, report = towers.together(chats, lambda model: [towers.left(model), towers.right(model)])
    by_hand = towers.built()
    part = towers.right(by_hand)
    losses = []
    for batches in towers.loader(chats):
        count = sum(batch.supervised_tokens for batch in batches)
        loss = sum(towers.OfBoth().summed(by_hand, batch) for batch in batches) / count
        loss.backward()
        losses.append(float(loss.detach()))
        nn.utils.clip_grad_norm_(by_hand.towers[1].parameters(), 0.01, math.inf)
        part.optimizer.step()
        part.schedule.step()
        by_hand.zero_grad()
    torch.testing.assert_close(towers.weights(model, 1), towers.weights(by_hand, 1), rtol=1e-5, atol=1e-6)
    assert report.losses[0] == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.distributed
def test_a_loss_of_ones_own_is_divided_by_what_it_counts(world: list[Found], chats: str) -> None:
    """Rows here, of which one rank has none at times; in training and in evaluation."""
    alone = towers.by_rows(chats)
    model = towers.built()
    with torch.no_grad():
        [first, *_] = towers.loader(chats)
        rows = [towers.OfRows().summed(model, one_row(batch, row)) for batch in first for row in range(2)]
        [every] = towers.everything(chats, 11)
        all_rows = [towers.OfRows().summed(model, one_row(every, row)) for row in range(11)]
    assert alone["losses"][0] == pytest.approx(float(sum(rows)) / 4, rel=1e-6)
    assert alone["before"][0] == pytest.approx(float(sum(all_rows)) / 11, rel=1e-6)
    (sum(towers.OfRows().summed(model, batch) for batch in first) / 4).backward()
    left, right = ([parameter.grad for parameter in tower.parameters()] for tower in model.towers)
    norms = (nn.utils.get_total_norm(left), nn.utils.get_total_norm(right, math.inf))
    assert alone["norm"] == pytest.approx(math.hypot(*norms), rel=1e-5)
    for found in (each["rows"] for each in world):
        for name in ("before", "losses", "evaluated"):
            assert found[name] == pytest.approx(alone[name], rel=1e-5), name
        torch.testing.assert_close(found["weights"], alone["weights"], rtol=1e-4, atol=1e-5)
    assert alone["evaluated"] < alone["before"][0]


def one_row(batch: Batch, row: int) -> Batch:
    where = slice(row, row + 1)
    assert batch.attention_mask is not None
    return Batch(batch.input_ids[where], batch.attention_mask[where], batch.labels[where], 1)


def test_a_scale_that_is_too_much_for_one_part_is_too_much_for_all(chats: str) -> None:
    taken: list[int] = []
    spoilt: list[Any] = []

    def spoil(facts: Any) -> None:
        taken.append(-facts.step)
        if facts.step == 1:
            scale = model.towers[1].scale
            spoilt.append(scale.register_hook(lambda gradient: gradient * math.inf))
        elif spoilt:
            spoilt.pop().remove()

    model = towers.built()
    parts = [towers.left(model), towers.right(model)]
    numbers = {id(part.optimizer): number for number, part in enumerate(parts)}
    handle = register_optimizer_step_pre_hook(lambda optimizer, *_: taken.append(numbers[id(optimizer)]))
    try:
        report = train(model, towers.loader(chats), OwnParts(parts, "float16"), spoil, loss=towers.OfBoth())
    finally:
        handle.remove()
    assert taken == [0, 1, -1, -2, 0, 1, -3, 0, 1, -4, 0, 1, -5, 0, 1, -6]
    rates = [step.parts["right"].learning_rate for step in report.steps]
    assert rates[0] != rates[1] == rates[2] != rates[3]
    told = values_of(report.steps[1])["parts"]
    assert told["left"]["grad_norm"] > 0
    assert told["right"]["grad_norm"] is None


# ── what is refused ───────────────────────────────────────────────────────────────────────────────


def both(model: towers.Towers) -> list[TrainedPart]:
    return [towers.left(model), towers.right(model)]


def of_another(model: towers.Towers) -> list[TrainedPart]:
    one, other = both(model)
    return [one, towers.right(model, optimizer=other.optimizer, schedule=one.schedule)]


def plateau(model: towers.Towers) -> list[TrainedPart]:
    one, other = both(model)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(other.optimizer)
    return [one, towers.right(model, optimizer=other.optimizer, schedule=schedule)]


def shared(model: towers.Towers) -> list[TrainedPart]:
    return [towers.left(model), TrainedPart("all", torch.optim.SGD(model.parameters(), lr=0.1))]


def frozen(model: towers.Towers) -> list[TrainedPart]:
    model.towers[1].requires_grad_(False)
    return both(model)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda model: [], "there is none"),
        (lambda model: [towers.left(model), towers.right(model, name="left")], "'left' is the name of two"),
        (lambda model: [towers.left(model)], r"no part has towers\.1\..*, though a gradient is required"),
        (lambda model: [*both(model)[:1], towers.right(towers.Towers())], "'right': 6 of the 6 parameters of its"),
        (shared, r"'all' and 'left' both have towers\.0\."),
        (frozen, "'right': none of its 6 parameters requires a gradient"),
        (of_another, "'right': its LambdaLR is of another optimizer than its own"),
        (plateau, "'right': ReduceLROnPlateau asks for a loss at each step"),
    ],
)
def test_parts_that_do_not_fit_are_refused_before_the_first_step(chats: str, make: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"the parts cannot be trained so\n(.*\n)*  .*{said}"):
        towers.together(chats, make)


@pytest.mark.parametrize("wrong", [{"name": ""}, {"max_grad_norm": 0.0}, {"norm_type": 1.0}])
def test_a_part_without_a_name_or_with_another_norm_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="a part has a name, a greatest norm above 0"):
        towers.right(towers.Towers(), **wrong)


def test_a_dtype_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="dtype='fp16': it must be one of float32, bfloat16, float16"):
        OwnParts([], "fp16")


class OfLeft(towers.OfBoth):
    def summed(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return super().summed(lambda **inputs: {"left": model(**inputs)["left"]}, batch)


def test_a_part_that_gets_no_gradient_is_named(chats: str) -> None:
    model = towers.built()
    with pytest.raises(
        TrainingError, match="none of the 6 trained parameters of Towers in the part 'right' has got"
    ):
        train(model, towers.loader(chats), OwnParts(both(model)), loss=OfLeft())


def test_a_keyword_that_is_none_is_refused(chats: str) -> None:
    model = towers.built()
    with pytest.raises(TypeError, match="losss"):
        train(model, towers.loader(chats), OwnParts(both(model)), losss=OfLeft())


# ── the page ──────────────────────────────────────────────────────────────────────────────────────


def test_the_example_of_the_page(chats: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training by optimizers and a loss of one's own, as docs/train.md shows it."""
    page = (Path(__file__).parents[2] / "docs" / "train.md").read_text("utf-8")
    [example] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    tiny.write_model(tmp_path / "base")
    (tmp_path / "chats.jsonl").write_text(Path(chats).read_text())
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(example, "docs/train.md", "exec"), names)
    report, model = names["report"], names["model"]
    assert len(report.steps) == 20
    assert set(report.steps[0].parts) == {"embeddings", "body"}
    assert report.losses[-1] < report.losses[0]
    assert report.steps[0].parts["body"].learning_rate > report.steps[-1].parts["body"].learning_rate
    before = tiny.model().state_dict()
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert "model.embed_tokens.weight" in changed
    assert len(changed) == len(before)

    [batch] = names["step_loader"](names["rows"], names["TrainOptions"](batch_size=11)).__iter__().__next__()
    fresh = tiny.model()
    with torch.no_grad():
        found = float(names["RowMeans"]().summed(fresh, batch)) / names["RowMeans"]().count(batch)
        means = []
        for row in range(11):
            single = one_row(batch, row)
            means.append(float(WholeLogits().summed(fresh, single)) / single.supervised_tokens)
    assert found == pytest.approx(sum(means) / 11, rel=1e-5)
