"""Optimizers are told apart: a state goes into one of its own kind, or nothing is changed."""

import itertools
from dataclasses import replace

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, GradientState
from tests.checkpoints import on_ranks
from tests.checkpoints.tiny import Training, differences

import shardwise
from shardwise import Checkpointer
from shardwise.options import Ignore

NAMES = "AdamW Adam NAdam RAdam Adamax SGD RMSprop Adagrad Adadelta ASGD Rprop"
KINDS = [getattr(torch.optim, name) for name in NAMES.split()]


def test_another_kind_is_refused_by_name_on_all_ranks(worlds, tmp_path):
    worlds(2).run(on_ranks.train_and_save, str(tmp_path), 1)
    found = worlds(2).run(on_ranks.restore_others, str(tmp_path))
    assert found[0] == found[1]
    texts = [text for (_, text), _ in found[0]]
    assert "optimizers: saved by torch.optim.AdamW, and there is torch.optim.NAdam now" in texts[0]
    assert "and there is torch.optim.Adam now" in texts[1]
    assert "saved with amsgrad=False, and it is True now (torch.optim.AdamW)" in texts[2]
    for (kind, _), changed in found[0]:
        assert (kind, changed) == ("KeyMismatchError", [])


SWITCHES = [
    (torch.optim.AdamW, {"amsgrad": True}, "amsgrad"),
    (torch.optim.Adam, {"amsgrad": True}, "amsgrad"),
    (torch.optim.SGD, {"momentum": 0.9}, "momentum"),
    (torch.optim.RMSprop, {"centered": True}, "centered"),
]


@pytest.mark.parametrize(("make", "settings", "name"), SWITCHES)
def test_a_switch_on_one_side_only_is_refused(tmp_path, make, settings, name):
    """Whichever side it is, with what a checkpointer saves and with what is handed over."""
    for one, other in itertools.permutations([settings, {}]):
        saved, training = Training(make=make, **one), Training(seed=1, make=make, **other)
        saved.step(1)
        folder = tmp_path / repr(one)
        Checkpointer(folder).save(1, saved.state)
        before = training.taken()
        with pytest.raises(shardwise.KeyMismatchError, match=f"saved with {name}="):
            Checkpointer(folder).restore(training.state)
        state = shardwise.get_optimizer_state_dict(saved.model, saved.optimizer)
        with pytest.raises(shardwise.KeyMismatchError, match=f"saved with {name}="):
            shardwise.set_optimizer_state_dict(training.model, training.optimizer, state)
        assert differences(training.taken(), before) == []


def test_with_consent_the_optimizer_is_left_as_it_is(tmp_path):
    saved, training = Training(), Training(seed=1, make=torch.optim.NAdam)
    saved.step(2)
    training.step(1)
    Checkpointer(tmp_path).save(2, saved.state)
    moments = training.taken()["moments"]
    report = Checkpointer(tmp_path).restore(training.state, on_mismatched=Ignore(only=("optimizers",)))
    assert report.mismatched == ("optimizers",)
    assert "optimizers" not in report.restored
    assert differences(training.taken()["moments"], moments) == []
    assert differences(training.taken()["model"], saved.taken()["model"]) == []
    training.step(1)


def test_how_a_step_is_computed_is_no_kind(tmp_path):
    saved, training = Training(fused=True), Training(seed=1, foreach=True)
    saved.step(2)
    Checkpointer(tmp_path).save(2, saved.state)
    Checkpointer(tmp_path).restore(training.state)
    assert differences(training.taken()["moments"], saved.taken()["moments"]) == []


def test_torch_s_own_kinds_are_distinguished_without_their_names():
    """By settings, and by what one of the kind keeps of a parameter."""
    states = {}
    for make in KINDS:
        training = Training(make=make)
        training.step(1)
        states[make] = shardwise.get_optimizer_state_dict(training.model, training.optimizer)
    taken = []
    for make in KINDS:
        training = Training(seed=1, make=make)
        for other, state in states.items():
            try:
                shardwise.set_optimizer_state_dict(training.model, training.optimizer, state)
            except shardwise.KeyMismatchError:
                continue
            taken.append((make, other))
    assert taken == [(make, make) for make in KINDS]


def test_state_that_is_set_in_inference_mode_can_be_trained(tmp_path):
    saved, restored, other = Training(), Training(seed=1), Training(seed=1)
    saved.step(1)
    Checkpointer(tmp_path).save(1, saved.state)
    with torch.inference_mode():
        Checkpointer(tmp_path).restore(restored.state)
        state = shardwise.get_optimizer_state_dict(saved.model, saved.optimizer)
        shardwise.set_optimizer_state_dict(other.model, other.optimizer, state)
    for each in (saved, restored, other):
        each.step(1)
    assert differences(restored.taken(), saved.taken()) == []
    assert other.taken()["moments"].keys() == saved.taken()["moments"].keys()


def test_state_of_one_rank_that_is_restored_in_inference_mode_can_be_trained(tmp_path):
    saved, restored = Training(make=torch.optim.Adafactor), Training(seed=1, make=torch.optim.Adafactor)
    saved.step(1)
    Checkpointer(tmp_path).save(1, saved.state)
    with torch.inference_mode():
        Checkpointer(tmp_path).restore(restored.state)
    for each in (saved, restored):
        each.step(1)
    assert differences(dict(restored.model.state_dict()), dict(saved.model.state_dict())) == []


class Mine(torch.optim.AdamW):
    """A class that nobody else knows."""


class Yours(torch.optim.AdamW):
    """Another one."""


def test_classes_of_others_go_by_their_names(tmp_path):
    saved = Training(make=Mine)
    saved.step(1)
    Checkpointer(tmp_path).save(1, saved.state)
    words = r"saved by .*test_optimizers\.Mine, and there is .*Yours now"
    with pytest.raises(shardwise.KeyMismatchError, match=words):
        Checkpointer(tmp_path).restore(Training(seed=1, make=Yours).state)
    assert Checkpointer(tmp_path).restore(Training(seed=1, make=Mine).state).mismatched == ()


@pytest.fixture
def wrapped():
    Accelerator(cpu=True)
    yield AcceleratedOptimizer
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def test_an_optimizer_inside_of_accelerate_s_wrapper_is_as_without(tmp_path, wrapped):
    for place, saved_in, restored_in in (
        ("one", wrapped, lambda each: each),
        ("other", lambda each: each, wrapped),
    ):
        saved, training = Training(), Training(seed=1)
        saved.step(1)
        Checkpointer(tmp_path / place).save(1, replace(saved.state, optimizers=saved_in(saved.optimizer)))
        assert "torch.optim.AdamW" in (tmp_path / place / "step-1" / "shardwise.checkpoint.json").read_text()
        Checkpointer(tmp_path / place).restore(replace(training.state, optimizers=restored_in(training.optimizer)))
        assert differences(training.taken(), saved.taken()) == []


def test_what_accelerate_and_the_trainer_wrote_is_distinguished_too(tmp_path):
    saved = Training()
    saved.step(1)
    shardwise.save_accelerate_optimizer(saved.model, saved.optimizer, tmp_path)
    training = Training(seed=1)
    shardwise.load_accelerate_optimizer(training.model, training.optimizer, tmp_path)
    assert differences(training.taken()["moments"], saved.taken()["moments"]) == []
    for make, settings in ((torch.optim.NAdam, {}), (torch.optim.AdamW, {"amsgrad": True})):
        training = Training(seed=1, make=make, **settings)
        with pytest.raises(shardwise.KeyMismatchError, match="amsgrad"):
            shardwise.load_accelerate_optimizer(training.model, training.optimizer, tmp_path)
        assert not training.optimizer.state
