"""accelerate loads what is written here, and what accelerate writes is loaded here: models and optimizers."""

import pytest
import torch
from tests.integrations import trading
from torch import nn

import shardwise


@pytest.mark.parametrize(("size", "number"), [(1, 0), (3, 1)])
@pytest.mark.parametrize("form", trading.THEIR_FORMS)
def test_accelerate_loads_written_files(worlds, tmp_path, form, size, number):
    assert worlds(size).run(trading.ours_to_theirs, str(tmp_path), form, number) == [[]] * size


@pytest.mark.parametrize(("size", "number", "child"), [(1, 0, True), (3, 1, False)])
@pytest.mark.parametrize("form", trading.THEIR_FORMS)
def test_files_written_by_accelerate_are_loaded(worlds, tmp_path, form, size, number, child):
    assert worlds(size).run(trading.theirs_to_ours, str(tmp_path), form, number, child) == [[]] * size


@pytest.mark.parametrize("writer", ["accelerate", "shardwise"])
@pytest.mark.parametrize("form", ["full", "sharded"])
def test_another_number_of_ranks_continues(worlds, tmp_path, form, writer):
    worlds(3).run(trading.save, str(tmp_path), form, writer)
    assert worlds(2).run(trading.resume, str(tmp_path)) == [[]] * 2
    assert trading.resume(str(tmp_path)) == []


@pytest.mark.parametrize("form", ["sharded", "ranks"])
def test_ranks_read_an_interrupted_save_and_change_nothing(worlds, tmp_path, form):
    assert worlds(2).run(trading.of_an_interrupted_save, str(tmp_path), form) == [([], [])] * 2


def test_one_process_needs_no_group(worlds, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for form in trading.FORMS:
        folder = tmp_path / form
        folder.mkdir()
        trading.save(f"~/{form}", form, "shardwise")
        assert trading.resume(f"~/{form}") == []
        assert worlds(1).run(trading.resume, str(folder)) == [[]]


@pytest.mark.parametrize("form", trading.FORMS)
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_a_state_before_the_first_step_is_loaded_after_one(tmp_path, form, optimizer):
    """What was stepped since starts afresh; settings are those of the state, and a further step is that of then."""
    torch.manual_seed(0)
    model, data = nn.Linear(3, 2), torch.randn(4, 3)
    made = {
        "AdamW": torch.optim.AdamW(model.parameters(), lr=0.25),
        "SGD": torch.optim.SGD(model.parameters(), 0.25, 0.9),
    }
    used = made[optimizer]
    shardwise.save_accelerate_model(model, tmp_path, trading.FORMS[form])
    shardwise.save_accelerate_optimizer(model, used, tmp_path, trading.FORMS[form])

    def stepped() -> list[torch.Tensor]:
        used.zero_grad()
        model(data).square().sum().backward()
        used.step()
        return [parameter.detach().clone() for parameter in model.parameters()]

    first = stepped()
    used.param_groups[0]["lr"] = 7.0
    stepped()
    shardwise.load_accelerate_model(model, tmp_path)
    report = shardwise.load_accelerate_optimizer(model, used, tmp_path)
    assert used.param_groups[0]["lr"] == 0.25
    assert not used.state
    assert report.without_state == ("weight", "bias")
    assert all(map(torch.equal, stepped(), first))
