"""Adapters in accelerate's files: every rank's part of them arrives, and nothing else is touched."""

import pytest
from tests.integrations import adapting, trading


@pytest.mark.parametrize(
    ("form", "ours_first"),
    [*((form, False) for form in trading.THEIR_ADAPTER_FORMS), (trading.THEIR_ADAPTER_FORMS[-1], True)],
)
def test_every_ranks_part_of_an_adapter_arrives(worlds, tmp_path, form, ours_first):
    for faults, count in worlds(2).run(adapting.traded, str(tmp_path), form, ours_first):
        assert faults == []
        assert count == 12  # and the embeddings, which PEFT saves with them


@pytest.mark.parametrize("form", trading.THEIR_ADAPTER_FORMS)
def test_an_adapter_of_a_tied_base_arrives(worlds, tmp_path, form):
    for faults, unexpected in worlds(2).run(adapting.tied, str(tmp_path), form):
        assert faults == []
        assert unexpected == (("base_model.model.lm_head.weight",) if form == "full" else ())


def test_a_whole_adapter_has_the_names_that_accelerate_gives_it(worlds, tmp_path):
    found, trained = worlds(2).run(adapting.full_names, str(tmp_path))[0]
    assert found == trained


def test_an_adapter_beside_the_trained_one_is_saved_too(worlds, tmp_path):
    for faults, count, missing in worlds(2).run(adapting.beside_another, str(tmp_path)):
        assert (faults, missing) == ([], ())
        assert count > 0
