"""Evaluation, checkpoints, stopping: a training that ends and goes on is one that did not end."""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.quiet import quieten
from tests.training import tiny
from tests.training.keeping import MemoryKeeper
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers.modeling_outputs import CausalLMOutput

from shardwise.checkpoints.checkpointer import Checkpointer
from shardwise.errors import ConfigError, StorageError, TrainingError
from shardwise.execution.ranks.world import World
from shardwise.models.replicated import average_replicated_gradients
from shardwise.models.wrapping import wrap
from shardwise.models.wrapping.policies import WholeModel
from shardwise.training.checkpoints import Checkpoints, KeptInFolders, SettingsAsked, TrainingProgress
from shardwise.training.data.batches import Padded, evaluation_batches
from shardwise.training.data.loader import step_loader
from shardwise.training.data.read_once import TrainData, read_data
from shardwise.training.evaluation_rows import EndEarly, Evaluation, evaluate
from shardwise.training.loop import train
from shardwise.training.metrics import MetricsFile, RunLog, Trackers
from shardwise.training.options import EachEpoch, Epochs, Ratio, Steps, TrainOptions
from shardwise.training.passes.forward import Forward
from shardwise.training.report import (
    CheckpointFacts,
    EvaluationFacts,
    Event,
    PartFacts,
    Remark,
    StepFacts,
    TrainReport,
)
from shardwise.training.stopping import StopRequest, stopping_on_signals

OPTIONS = TrainOptions(
    learning_rate=1e-3, duration=Epochs(3), batch_size=3, warmup=Ratio(0.2), schedule="linear", seed=7
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> TrainData:
    chats = tiny.write_chats(tmp_path_factory.mktemp("data") / "chats.jsonl", 8)
    return read_data(chats, tiny.tokenizer(), max_length=64)


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_a_training_that_stopped_goes_on_as_if_it_had_not(data: TrainData) -> None:
    model = tiny.model()
    whole = train(model, step_loader(data, OPTIONS), OPTIONS)
    expected = weights(model)

    keeper, stop = MemoryKeeper(), StopRequest()

    def ask(facts: Event) -> None:
        if facts.step == 4:
            stop.number = signal.SIGTERM

    first = train(
        tiny.model(), step_loader(data, OPTIONS), OPTIONS, ask, checkpoints=Checkpoints(keeper), stop=stop
    )
    # It was asked once the fourth step was done, and agreed on that in the fifth.
    assert (first.is_stopped, first.last_step, list(keeper.kept), keeper.waited) == (True, 5, [5], 1)

    model = tiny.model()
    told: list[Event] = []
    rest = train(model, step_loader(data, OPTIONS), OPTIONS, told.append, checkpoints=Checkpoints(keeper))
    assert (rest.is_stopped, rest.last_step) == (False, 9)
    assert isinstance(told[0], CheckpointFacts)
    assert (told[0].kind, told[0].step) == ("restored", 5)
    assert [*first.losses, *rest.losses] == whole.losses
    rates = [step.learning_rate for report in (first, rest) for step in report.steps]
    assert rates == [step.learning_rate for step in whole.steps]
    assert [round(step.epoch, 3) for step in rest.steps] == [2.0, 2.375, 2.75, 3.0]
    torch.testing.assert_close(weights(model), expected, rtol=0, atol=0)


def test_what_is_asked_for_now_and_overruled_by_the_checkpoint_is_told(data: TrainData) -> None:
    keeper, stop = MemoryKeeper(), StopRequest()
    stop.number = signal.SIGTERM
    train(tiny.model(), step_loader(data, OPTIONS), OPTIONS, checkpoints=Checkpoints(keeper), stop=stop)
    for options, wanted in (
        (OPTIONS, None),
        (replace(OPTIONS, learning_rate=2e-3), "learning_rate 0.001 (asked for now: 0.002); a new run"),
        (replace(OPTIONS, weight_decay=0.5), "weight_decay 0 (asked for now: 0.5); a new run"),
    ):
        told: list[Event] = []
        report = train(
            tiny.model(), step_loader(data, options), options, told.append, checkpoints=Checkpoints(keeper)
        )
        remarks = [fact.text for fact in told if isinstance(fact, Remark)]
        assert len(remarks) == (wanted is not None)
        assert all(str(wanted) in remark for remark in remarks)
        assert report.steps[0].learning_rate != 0.002


def test_settings_that_are_asked_for_are_gone_on_with_where_that_is_said(data: TrainData) -> None:
    """At every step the rate is what it would be, had it been asked for from the beginning."""
    keeper, stop = MemoryKeeper(), StopRequest()
    stop.number = signal.SIGTERM
    train(tiny.model(), step_loader(data, OPTIONS), OPTIONS, checkpoints=Checkpoints(keeper), stop=stop)
    asked = replace(OPTIONS, learning_rate=2e-3, weight_decay=0.5, betas=(0.8, 0.9))
    whole = train(tiny.model(), step_loader(data, asked), asked)
    taken: list[dict[str, Any]] = []
    handle = register_optimizer_step_pre_hook(lambda optimizer, *_: taken.append({**optimizer.param_groups[0]}))
    try:
        checkpoints = Checkpoints(keeper, settings=SettingsAsked())
        report = train(tiny.model(), step_loader(data, asked), asked, checkpoints=checkpoints)
    finally:
        handle.remove()
    rates = [step.learning_rate for step in report.steps]
    assert rates == [step.learning_rate for step in whole.steps[1:]] == [group["lr"] for group in taken]
    assert all((group["weight_decay"], group["betas"]) == (0.5, (0.8, 0.9)) for group in taken)
    [remark] = report.remarks
    assert "the optimizer goes on with learning_rate 0.002 (the checkpoint's: 0.001)" in remark
    assert "weight_decay 0.5 (the checkpoint's: 0)" in remark


@pytest.mark.parametrize("user", [{}, {"step": 3}, {"step": "3", "evaluated_step": 0, "best_loss": None}])
def test_a_checkpoint_of_another_loop_is_refused(data: TrainData, user: dict[str, Any]) -> None:
    keeper = MemoryKeeper()
    train(tiny.model(), step_loader(data, OPTIONS), OPTIONS, checkpoints=Checkpoints(keeper, every=4))
    keeper.kept[9]["user"] = user
    with pytest.raises(ConfigError, match="was not kept by this training loop"):
        train(tiny.model(), step_loader(data, OPTIONS), OPTIONS, checkpoints=Checkpoints(keeper))


def test_what_a_loop_keeps_of_itself_comes_back() -> None:
    for standing in (TrainingProgress(), TrainingProgress(7, 5, 0.25)):
        assert TrainingProgress.from_dict(json.loads(json.dumps(standing.to_dict()))) == standing


def test_checkpoints_every_so_many_steps_and_at_the_end(data: TrainData) -> None:
    keeper = MemoryKeeper()
    train(tiny.model(), step_loader(data, OPTIONS), OPTIONS, checkpoints=Checkpoints(keeper, every=4))
    assert list(keeper.kept) == [4, 8, 9]
    report = train(tiny.model(), step_loader(data, OPTIONS), OPTIONS, checkpoints=Checkpoints(keeper, every=4))
    assert (report.steps, report.last_step) == ((), 9)
    assert keeper.waited == 2


def test_other_data_cannot_be_gone_on_with(data: TrainData, tmp_path: Path) -> None:
    keeper = MemoryKeeper()
    train(tiny.model(), step_loader(data, OPTIONS), OPTIONS, checkpoints=Checkpoints(keeper, every=4))
    other = read_data(tiny.write_chats(tmp_path / "more.jsonl", 9), tiny.tokenizer(), max_length=64)
    with pytest.raises(ConfigError, match=r"more.jsonl: the position is one in other data \(rows 8 then and 9 now"):
        train(tiny.model(), step_loader(other, OPTIONS), OPTIONS, checkpoints=Checkpoints(keeper, every=4))


def test_a_loss_that_is_no_number_names_its_rows_and_keeps_nothing(data: TrainData) -> None:
    keeper = MemoryKeeper()
    model = tiny.model()

    def spoil(facts: Event) -> None:
        if facts.step == 4 and isinstance(facts, StepFacts):
            with torch.no_grad():
                model.model.norm.weight.fill_(math.nan)

    with pytest.raises(TrainingError) as caught:
        train(model, step_loader(data, OPTIONS), OPTIONS, spoil, checkpoints=Checkpoints(keeper, every=3))
    steps = list(step_loader(data, OPTIONS))
    lines = sorted(line for batch in steps[4] for line in batch.lines)
    assert str(caught.value).startswith("step 5: the loss is nan")
    assert f"rank 0: {data.path}, lines {', '.join(map(str, lines))})" in str(caught.value)
    assert list(keeper.kept) == [3]


def test_evaluation_is_the_mean_of_all_tokens(data: TrainData) -> None:
    model = tiny.model()
    everything = evaluation_batches(data, Padded(), 8)
    loss, tokens = evaluate(World.current(), Forward(model), everything)
    [batch] = list(everything)
    with torch.no_grad():
        expected = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=batch.labels).loss
    assert (loss, tokens) == (pytest.approx(float(expected), abs=1e-5), data.supervised_tokens)
    assert evaluate(World.current(), Forward(model), evaluation_batches(data, Padded(), 3))[0] == pytest.approx(
        loss, abs=1e-6
    )


def test_the_best_is_kept_and_known_again(data: TrainData) -> None:
    best: list[int] = []
    told: list[Event] = []
    evaluation = Evaluation(evaluation_batches(data, Padded(), 8), 2, lambda facts: best.append(facts.step))
    keeper = MemoryKeeper()
    model = tiny.model()
    dropout: list[bool] = []
    model.model.register_forward_hook(lambda module, *_: dropout.append(module.training))
    report = train(
        model,
        step_loader(data, OPTIONS),
        OPTIONS,
        told.append,
        evaluation=evaluation,
        checkpoints=Checkpoints(keeper, every=9),
    )
    assert [found.step for found in report.evaluations] == [2, 4, 6, 8, 9]
    assert [found for found in told if isinstance(found, EvaluationFacts)] == list(report.evaluations)
    assert best == [found.step for found in report.evaluations if found.is_best]
    assert best[-1] == 9
    assert report.evaluations[0].perplexity == pytest.approx(math.exp(report.evaluations[0].loss))
    assert (dropout.count(False), dropout.count(True)) == (5, 9)
    assert keeper.kept[9]["user"] == {
        "step": 9,
        "evaluated_step": 9,
        "best_loss": report.evaluations[-1].loss,
        "reached_loss": report.evaluations[-1].loss,
        "waited": 0,
    }


def test_a_training_of_which_no_evaluation_is_better_ends_and_knows_so_when_it_goes_on(data: TrainData) -> None:
    keeper, looked_at = MemoryKeeper(), evaluation_batches(data, Padded(), 8)

    def going(patience: int, stop_at: int | None = None) -> TrainReport:
        stop = StopRequest()

        def ask(facts: Event) -> None:
            if facts.step == stop_at:
                stop.number = signal.SIGTERM

        return train(
            tiny.model(),
            step_loader(data, OPTIONS),
            OPTIONS,
            ask,
            evaluation=Evaluation(looked_at, 2, ending=EndEarly(patience, min_delta=50.0)),
            checkpoints=Checkpoints(keeper, EachEpoch()),
            stop=stop,
        )

    # The first evaluation is better than none; the two after it are not better by fifty.
    stopped = going(2, stop_at=4)
    assert (stopped.is_stopped, stopped.last_step, len(stopped.evaluations)) == (True, 5, 2)
    ended = going(2)
    assert (ended.is_stopped, ended.last_step, [found.step for found in ended.evaluations]) == (False, 6, [6])
    assert [remark for remark in ended.remarks if "the last 2 evaluations have not been better" in remark]
    assert list(keeper.kept) == [3, 5, 6]
    again = going(2)
    assert (again.steps, again.remarks) == ((), ended.remarks)
    more = going(3)
    assert (more.last_step, len(more.steps)) == (8, 2)
    with pytest.raises(ConfigError, match="patience=0"):
        EndEarly(0)


def test_an_evaluation_that_is_better_by_little_is_the_best_and_no_reason_to_go_on() -> None:
    progress = TrainingProgress(step=1)
    for loss, waited, reached in ((2.0, 0, 2.0), (1.95, 1, 2.0), (1.91, 2, 2.0), (1.89, 0, 1.89), (3.0, 1, 1.89)):
        progress = progress.evaluated(loss, min_delta=0.1)
        assert (progress.waited, progress.reached_loss) == (waited, reached)
    assert progress.best_loss == 1.89
    old = {"step": 3, "evaluated_step": 2, "best_loss": 1.5}
    assert TrainingProgress.from_dict(old) == TrainingProgress(3, 2, 1.5, 1.5, 0)


def test_checkpoints_and_evaluations_of_each_epoch(data: TrainData) -> None:
    keeper = MemoryKeeper()
    report = train(
        tiny.model(),
        step_loader(data, OPTIONS),
        OPTIONS,
        checkpoints=Checkpoints(keeper, EachEpoch()),
        evaluation=Evaluation(evaluation_batches(data, Padded(), 8), EachEpoch()),
    )
    assert list(keeper.kept) == [found.step for found in report.evaluations] == [3, 6, 9]


def test_an_evaluation_that_a_stop_came_before_is_not_lost(data: TrainData) -> None:
    evaluation = Evaluation(evaluation_batches(data, Padded(), 8), 3)
    whole = train(tiny.model(), step_loader(data, OPTIONS), OPTIONS, evaluation=evaluation)
    keeper, stop = MemoryKeeper(), StopRequest()

    def ask(facts: Event) -> None:
        if facts.step == 2:
            stop.number = signal.SIGTERM

    def again(on_facts: Any, stop: StopRequest | None) -> TrainReport:
        loader = step_loader(data, OPTIONS)
        checkpoints = Checkpoints(keeper)
        return train(
            tiny.model(), loader, OPTIONS, on_facts, evaluation=evaluation, checkpoints=checkpoints, stop=stop
        )

    first, rest = again(ask, stop), again(lambda facts: None, None)
    assert (first.last_step, first.evaluations) == (3, ())
    assert [(found.step, found.loss) for found in rest.evaluations] == [
        (found.step, found.loss) for found in whole.evaluations
    ]


def test_an_evaluation_that_is_no_number_ends_the_training_and_nothing_is_saved_of_it(data: TrainData) -> None:
    model, best, keeper = tiny.model(), [], MemoryKeeper()
    spoilt = Evaluation(evaluation_batches(data, Padded(), 8), 3, best.append)

    def spoil(facts: Event) -> None:
        if facts.step == 3 and isinstance(facts, StepFacts):
            with torch.no_grad():
                model.model.norm.weight.fill_(math.nan)

    with pytest.raises(TrainingError, match="the evaluation after step 3: the loss is nan"):
        train(
            model,
            step_loader(data, OPTIONS),
            OPTIONS,
            spoil,
            evaluation=spoilt,
            checkpoints=Checkpoints(keeper, every=1),
        )
    assert (best, list(keeper.kept), keeper.waited) == ([], [1, 2], 1)


def test_going_on_with_more_steps_goes_on_at_the_rate_of_the_longer_schedule(data: TrainData) -> None:
    def rates(options: TrainOptions, keeper: MemoryKeeper) -> tuple[list[float], list[float]]:
        taken: list[float] = []
        model = tiny.model()
        loader, checkpoints = step_loader(data, options), Checkpoints(keeper, every=1)

        def take(optimizer: torch.optim.Optimizer, *_: object) -> None:
            taken.append(optimizer.param_groups[0]["lr"])

        handle = register_optimizer_step_pre_hook(take)
        try:
            report = train(model, loader, options, checkpoints=checkpoints)
        finally:
            handle.remove()
        return taken, [step.learning_rate for step in report.steps]

    keeper, longer = MemoryKeeper(), replace(OPTIONS, duration=Epochs(5))
    rates(OPTIONS, keeper)
    whole, _ = rates(longer, MemoryKeeper())
    taken, told = rates(longer, keeper)
    assert taken == told == pytest.approx(whole[9:])


def test_what_a_listener_raises_ends_the_training_at_the_next_step(data: TrainData) -> None:
    def fail(facts: Event) -> None:
        raise StorageError(f"no place for step {facts.step}")

    with pytest.raises(StorageError, match="no place for step 1"):
        train(tiny.model(), step_loader(data, OPTIONS), OPTIONS, fail)


@pytest.mark.usefixtures("ctrl_c")
def test_signals_ask_once_and_then_end() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stopping_on_signals() as stop:
        assert not stop.is_made
        signal.raise_signal(signal.SIGTERM)
        assert stop.is_made
        assert stop.number == signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(SystemExit) as caught:
            signal.raise_signal(signal.SIGTERM)
        assert caught.value.code == 143
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_signal_is_noted_while_the_main_thread_cannot_hear_it() -> None:
    """As in a collective that waits for a lost rank."""
    noted: list[bool] = []

    def ask() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        while not stop.has_come():
            time.sleep(0.01)
        noted.append(stop.is_made)

    with stopping_on_signals() as stop:
        assert not stop.has_come()
        asking = threading.Timer(0.05, ask)
        asking.start()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 1_000_000)  # lets other threads run, and hears nothing
        asking.join()
        assert stop.is_made
    assert noted == [False]


@pytest.mark.parametrize(
    ("schedule", "options"),
    [("cosine_with_min_lr", {"min_lr_rate": 0.1}), ("warmup_stable_decay", {"num_decay_steps": 3})],
)
def test_schedules_take_options(data: TrainData, schedule: Any, options: dict[str, Any]) -> None:
    chosen = TrainOptions(schedule=schedule, schedule_options=options, duration=Steps(4), batch_size=8)
    assert len(train(tiny.model(), step_loader(data, chosen), chosen).steps) == 4
    wrong = TrainOptions(schedule=schedule, schedule_options={"min_lr_rat": 1}, batch_size=8)
    with pytest.raises(ConfigError, match=rf"the schedule '{schedule}' cannot be made"):
        train(tiny.model(), step_loader(data, wrong), wrong)


def stopped_and_spoilt(file: str) -> tuple[bool, int, str]:
    """On two ranks: whether and when a training that only the second was asked to stop did; and an error."""
    quieten()
    world = World.current()
    data = read_data(file, tiny.tokenizer(), max_length=64)
    stop = StopRequest()

    def ask(facts: Event) -> None:
        if facts.step == 2 and world.rank == 1:
            stop.number = signal.SIGTERM

    model = sharded()
    report = train(model, step_loader(data, OPTIONS), OPTIONS, ask, stop=stop)
    if world.rank == 1:
        model.model.norm.register_forward_hook(lambda module, given, output: output * math.nan)
    with pytest.raises(TrainingError) as caught:
        train(model, step_loader(data, OPTIONS), OPTIONS)
    return report.is_stopped, report.last_step, str(caught.value)


class Mixed(torch.nn.Module):
    """A parameter without dimensions stays whole on every rank, beside others that are sharded."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(260, 16)
        self.norm = torch.nn.LayerNorm(16)
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.head = torch.nn.Linear(16, 260)

    def forward(self, input_ids: torch.Tensor, **_: Any) -> CausalLMOutput:
        return CausalLMOutput(logits=self.head(self.norm(self.scale * self.embedding(input_ids))))


def mixed_steps(file: str, folder: str, last_step: int) -> list[float]:
    """Losses of a training, on these ranks, that goes on from its folder."""
    quieten()
    data = read_data(file, tiny.tokenizer(), max_length=64)
    options = replace(OPTIONS, duration=Steps(6), batch_size=4 // World.current().size)
    model, mesh, stop = Mixed(), wrap.default_mesh(), StopRequest()
    if mesh is not None:
        wrap.wrap(model, wrap.Sharding(mesh=mesh, wrap=WholeModel()))
        average_replicated_gradients(model, mesh)

    def ask(facts: Event) -> None:
        if facts.step == last_step - 1:
            stop.number = signal.SIGTERM

    def check(optimizer: torch.optim.Optimizer, *_: object) -> None:
        # Loops over many tensors at once take no mixture, whatever was restored of another number of ranks.
        assert {group["foreach"] for group in optimizer.param_groups} == {None if mesh is None else False}
        assert all(member.grad is not None for group in optimizer.param_groups for member in group["params"])

    handle = register_optimizer_step_pre_hook(check)
    checkpointer = Checkpointer(folder)
    source = None if checkpointer.latest() is None else checkpointer
    checkpoints = Checkpoints(KeptInFolders(checkpointer, source))
    try:
        return train(model, step_loader(data, options), options, ask, checkpoints=checkpoints, stop=stop).losses
    finally:
        handle.remove()


@pytest.mark.distributed
def test_other_ranks_go_on_though_they_keep_whole_what_one_process_had_beside_the_rest(
    worlds: Any, tmp_path: Path
) -> None:
    chats = str(tiny.write_chats(tmp_path / "chats.jsonl", 12))
    whole = mixed_steps(chats, str(tmp_path / "whole"), 6)
    there = str(tmp_path / "there")
    first = mixed_steps(chats, there, 2)
    second, other = worlds(2).run(mixed_steps, chats, there, 4)
    assert second == other
    rest = mixed_steps(chats, there, 6)
    assert [len(part) for part in (first, second, rest)] == [2, 2, 2]
    assert [*first, *second, *rest] == pytest.approx(whole, rel=1e-5)


def sharded() -> Any:
    model = tiny.model()
    mesh = wrap.default_mesh()
    assert mesh is not None
    wrap.wrap(model, wrap.Sharding(mesh=mesh))
    return model


@pytest.mark.distributed
def test_one_rank_that_is_asked_stops_all_and_one_that_fails_is_named(worlds: Any, tmp_path: Path) -> None:
    chats = tiny.write_chats(tmp_path / "chats.jsonl", 12)
    first, second = worlds(2).run(stopped_and_spoilt, str(chats))
    assert first == second
    is_stopped, last_step, error = first
    assert (is_stopped, last_step) == (True, 3)
    assert error.startswith("step 1: the loss is nan")
    assert "The rows where it is (rank 1: " in error
    assert "rank 0" not in error


def test_one_row_of_a_step_may_be_to_blame(data: TrainData) -> None:
    """Of two micro-batches, the one whose loss is no number is named."""
    options = replace(OPTIONS, batch_size=1, gradient_accumulation_steps=3)
    model = tiny.model()
    [[_, guilty, _], *_] = list(step_loader(data, options))

    def spoil(module: Any, args: Any, keywords: Any, output: Any) -> None:
        if torch.equal(keywords["input_ids"], guilty.input_ids):
            output.logits.mul_(math.nan)

    model.register_forward_hook(spoil, with_kwargs=True)
    with pytest.raises(TrainingError, match=rf"where it is \(rank 0: .*, line {guilty.lines[0]}\)"):
        train(model, step_loader(data, options), options)


# Metrics


def step(number: int, loss: float = 1.0) -> StepFacts:
    return StepFacts(number, loss, 1e-3, 1.0, 10, 5, 0.5, 1)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_metrics_go_on_after_the_step_of_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path)
    for facts in (
        step(1),
        EvaluationFacts(1, 2.0, 5, 0.1, True),
        step(2),
        CheckpointFacts(2, 0.1, "saved"),
        step(3),
    ):
        first.tell(facts)
    first.close()
    with path.open("a") as file:
        file.write('{"kind": "step", "st')  # killed here

    second = MetricsFile(path)
    for facts in (CheckpointFacts(2, 0.1, "restored"), step(3, loss=7.0)):
        second.tell(facts)
    second.close()
    found = [(line["kind"], line["step"]) for line in read(path)]
    assert found == [
        ("step", 1),
        ("evaluation", 1),
        ("step", 2),
        ("checkpoint_saved", 2),
        ("checkpoint_restored", 2),
        ("step", 3),
    ]
    assert (read(path)[-1]["loss"], read(path)[-1]["tokens_per_second"]) == (7.0, 20.0)

    third = MetricsFile(path)
    third.tell(step(1))
    third.close()
    assert [line["step"] for line in read(path)] == [1]


def test_metrics_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(StorageError, match=r"metrics.jsonl: it cannot be written"):
        MetricsFile(tmp_path / "metrics.jsonl").tell(step(1))


def test_a_tracker_of_accelerate_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracking = pytest.importorskip("accelerate.tracking")
    told: list[tuple[str, Any]] = []

    class Fake(tracking.GeneralTracker):
        name = "fake"
        requires_logging_directory = True

        def __init__(self, run_name: str, logging_dir: str, mood: str) -> None:
            super().__init__()
            told.append(("made", (run_name, logging_dir, mood)))

        @property
        def tracker(self) -> None:
            return None

        def start(self) -> None:
            told.append(("start", None))

        def store_init_configuration(self, values: dict[str, Any]) -> None:
            told.append(("config", values))

        def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
            told.append((f"step {step}", values))

        def finish(self) -> None:
            told.append(("finish", None))

    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "fake", Fake)
    options = {"fake": {"mood": "good"}}
    trackers = Trackers(["fake"], tmp_path, "mine", {"a": {"b": 1, "c": None}}, options)
    trackers.tell(replace(step(3), parts={"a": PartFacts(0.1, math.inf)}))
    trackers.tell(EvaluationFacts(3, 2.0, 5, 0.1, True))
    trackers.close()
    assert told[:3] == [
        ("made", ("mine", str(tmp_path), "good")),
        ("start", None),
        ("config", {"a.b": 1, "a.c": "None"}),
    ]
    assert told[3][0] == "step 3"
    assert told[3][1]["train/loss"] == 1.0
    assert told[3][1]["train/parts.a.learning_rate"] == 0.1
    assert "train/parts.a.grad_norm" not in told[3][1]
    assert set(told[4][1]) == {
        f"evaluation/{name}" for name in ("loss", "perplexity", "seconds", "supervised_tokens")
    }
    assert told[-1] == ("finish", None)
    with pytest.raises(ConfigError, match="fake cannot be started"):
        Trackers(["fake"], tmp_path, "mine", {}, {"fake": {"moood": 1}})


@pytest.mark.parametrize("fails_in", ["start", "log", "finish"])
def test_a_tracker_that_fails_is_told_once_and_ends_nothing(
    fails_in: str, data: TrainData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracking = pytest.importorskip("accelerate.tracking")
    calls: list[str] = []

    class Failing(tracking.GeneralTracker):
        name = "failing"
        requires_logging_directory = False

        def __init__(self, run_name: str) -> None:
            super().__init__()

        @property
        def tracker(self) -> None:
            return None

        def _do(self, what: str) -> None:
            calls.append(what)
            if what == fails_in and calls.count(what) >= (4 if what == "log" else 1):
                raise OSError("no network\nat all")

        def start(self) -> None:
            self._do("start")

        def store_init_configuration(self, values: dict[str, Any]) -> None:
            self._do("config")

        def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
            self._do("log")

        def finish(self) -> None:
            self._do("finish")

    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "failing", Failing)
    heard: list[Event] = []
    path = tmp_path / "metrics.jsonl"
    log = RunLog(
        heard.append, MetricsFile(path), lambda complain: Trackers(["failing"], tmp_path, "mine", {}, {}, complain)
    )
    report = train(tiny.model(), step_loader(data, OPTIONS), OPTIONS, log.tell)
    log.close()
    assert report.last_step == 9
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(1, 10))
    [remark] = [fact for fact in heard if isinstance(fact, Remark)]
    assert [line["text"] for line in lines if line["kind"] == "remark"] == [remark.text]
    assert remark.text.startswith("the tracker failing cannot be ")
    assert "(OSError: no network); the training and metrics.jsonl go on" in remark.text
    # One that could not be started, or failed thrice in a row, is left alone.
    assert calls.count("log") == {"start": 0, "log": 6, "finish": 9}[fails_in]
