"""Each adapter of a bank on two ranks trains as it would alone in one process."""

import pytest
import torch
from tests.bank import banking, on_ranks
from tests.bank.banking import STEPS, distance, recipes
from tests.support.world import require_words
from tests.truth import require_equal


@pytest.mark.parametrize(("kind", "limit"), [("loop", 1e-5), ("grouped", 5e-4)])
def test_each_adapter_comes_out_as_alone(worlds, base, kind, limit):
    """One comes late; one is on one rank alone, in turn; windows of 1 to 3; activations are computed again."""
    first, second = worlds(2).run(on_ranks.together, base, kind)
    for name, begin in first["begin"].items():
        recipe = recipes()[name]
        alone = banking.alone(base, name, recipe, begin, pad_to=16)
        assert distance(first["adapters"][name], alone, begin) <= limit, name
        require_equal(first["adapters"][name], second["adapters"][name])
    assert first["base is same"]
    assert second["base is same"]
    assert first["steps"] == second["steps"]
    assert first["losses"] == second["losses"]
    assert len(first["steps"]) == STEPS * len(first["begin"]), "each took all of its own"
    assert first["all_reduces"] == len(first["steps"]), "one for each adapter and step, and no other"


def test_steps_at_once_meet_as_often_as_one(worlds, base):
    """Two meetings, whatever their number; with the bits of one after the other."""
    ranks = worlds(2).run(on_ranks.steps_at_once, base)
    first = ranks[0]
    assert first["calls"] == {
        "together": {"all_reduce": 3, "meetings": 2},
        "alone": {"all_reduce": 3, "meetings": 6},
    }
    others, invalid, changes = first["errors"]
    assert "on rank 1 is not that of rank 0: the adapter that takes a step (" in others
    assert invalid.startswith("ConfigError: rank 1: invalid settings for the step of 'dee':\n  lr=-1.0")
    assert "on rank 1 is not that of rank 0: the changes of its settings (" in changes
    for each in ranks:
        assert each["errors"] == first["errors"]
        require_equal(*each["gradients"])
        for kind in ("together", "alone"):
            for name, state in each["adapters"][kind].items():
                for part in ("adapter", "training"):
                    require_equal(state[part], first["adapters"]["together"][name][part])


@pytest.mark.slow
def test_gradients_do_not_depend_on_the_groups(worlds, base):
    """Where embeddings and linear layers are groups by themselves; and in 16 bits, near to it."""
    first, _ = worlds(2).run(on_ranks.other_groups, base, "every layer")
    assert first["groups"] > 15
    for name, begin in first["begin"].items():
        recipe = recipes()[name]
        alone = banking.alone(base, name, recipe, begin, steps=6 // recipe.gradient_accumulation_steps, pad_to=16)
        assert distance(first["adapters"][name], alone, begin) <= 1e-5, name
    half, other = worlds(2).run(on_ranks.other_groups, base, "16 bits")
    assert half["losses"] == other["losses"] != first["losses"]
    assert half["losses"] == pytest.approx(first["losses"], rel=0.03)
    require_equal(half["adapters"]["cy"], other["adapters"]["cy"])


def test_log_probabilities_are_not_cast_with_the_output(worlds, base):
    for each in worlds(2).run(on_ranks.outputs_in_16_bits, base):
        for values, expected in zip(each["torch.bfloat16"], each["None"], strict=True):
            assert values.dtype == torch.float32
            assert not values.equal(values.bfloat16().float())
            torch.testing.assert_close(values, expected, rtol=0.03, atol=0.03)  # hidden states are cast


def test_a_fault_of_one_rank_is_raised_on_all(worlds, base):
    first, second = worlds(2).run(on_ranks.faults, base)
    assert first["errors"] == second["errors"]
    expected = {
        "rows of one rank": "ConfigError: rank 1: 'ada': input_ids are from 1",
        "no rows of one rank": "ConfigError: rank 1: 'ada': the rows are not a dict",
        "no rows": "ConfigError: requests: is not a list",
        "other adapters": "RankMismatchError: rank 1 has rows of 'dee' (cross_entropy",
        "another config": "RankMismatchError: the adapter 'x' (its config or options) on rank 1 is not that of",
        "another rate": "RankMismatchError: the adapter 'x' (its config or options)",
        "another seed": "RankMismatchError: the adapter 'x' (its config or options)",
        "another step": "on rank 1 is not that of rank 0: the adapter that takes a step (",
        "other changes": "on rank 1 is not that of rank 0: the changes of its settings (",
        "not begun": "half way",
        "half way": "half way",
        "half way back": "half way",
    }
    require_words(first["errors"], expected)
    assert first["verdicts"] == second["verdicts"] == [False, True]
    assert first["kinds"] == {"DTensor"}, "nothing is left gathered"
    require_equal(*first["dee"])
    require_equal(first["ada"][0], second["ada"][0])
    assert not all(one.equal(other) for one, other in zip(*(each.values() for each in first["ada"]), strict=True))
