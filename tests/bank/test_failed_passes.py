"""A pass that fails is discarded as a whole, on all ranks, and the bank is as before."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.bank import failing
from tests.bank.failing import members, rows_of, trouble
from tests.bank.on_ranks import bank_of
from tests.bank.test_isolation import everything
from tests.truth import require_equal

from shardwise.bank.collective_resync import longest
from shardwise.errors import RankMismatchError, ShardwiseError
from shardwise.models.gradients import Gather


@pytest.mark.parametrize("backend", ["loop", "auto"], ids=["loop", "grouped"])
@pytest.mark.parametrize("kind", ["forward", "backward", "memory"])
def test_a_pass_that_fails_changes_no_tenant_by_a_bit(base, kind, backend):
    """Also tenants in the middle of a window; and all train on as if there had been no such pass."""
    own = members()
    quiet, bank = bank_of(base, own, backend), bank_of(base, own, backend)
    good = [(name, rows_of(name, recipe, 0)) for name, recipe in own.items()]
    bad = [(name, rows_of(name, recipe, 1, bad=name == "x")) for name, recipe in own.items()]
    for each in (quiet, bank):
        each.forward_backward(good[1:2])
    before = {name: everything(bank, name) for name in own}
    with trouble(bank, kind), pytest.raises(ShardwiseError, match="not this token|no more") as told:
        bank.forward_backward(bad)
    assert told.value.__notes__ == ["This was a pass of 'ada', 'bob', 'x', 'dee'; all of it is discarded."]
    for name in own:
        require_equal(everything(bank, name), before[name])
    for each in (quiet, bank):
        each.forward_backward(good)
        for name in own:
            each.optim_step(name)
    for name in own:
        require_equal(everything(bank, name), everything(quiet, name))


def test_ranks_that_are_on_different_ways_cannot_be_brought_into_step():
    first, second, other = (Gather(number, 4, torch.float32, uses_full_mesh=True) for number in range(3))
    assert longest((0, 1, 2), [[first], [first, second], []]) == [first, second]
    with pytest.raises(RankMismatchError, match="rank 6 has gathered other groups .* Start all ranks again"):
        longest((0, 4, 6), [[first], [first, second], [other]])


@pytest.mark.parametrize(
    ("size", "groups"),
    [(2, "blocks"), (2, "every layer"), pytest.param(4, "some ranks gather", marks=pytest.mark.slow)],
)
def test_a_rank_that_fails_alone_delays_no_other_rank(worlds: Any, base: Path, size: int, groups: str) -> None:
    """In the middle of a pass, while the others wait for it in a gather: they come out, and all go on."""
    ranks = worlds(size).run(failing.one_rank_fails, base, groups)
    for each in ranks:
        assert set(each["errors"].values()) == {f"CheckpointError: rank {size - 1}: ValueError: not this token"}
        both = {"forward: 1 gathers", "backward: 1 gathers"}
        # Of several others, one may hear of the failure before it comes to the gather that the rest are in.
        assert (
            each["waited for"] == both if each is ranks[-1] else each["waited for"] <= (both if size > 2 else set())
        )
        assert each["refused"].startswith(f"ConfigError: 'x': a step failed, rank {size - 1}: ValueError")
        bank, quiet = each["states"]
        for name in bank:
            require_equal(bank[name]["adapter"], quiet[name]["adapter"])
        assert each["gathered"] == {"DTensor"}
