"""Ranks that act together, fail together, and are ended when they do not."""

import inspect
import os
import re
import signal
from datetime import timedelta

import pytest
import torch.distributed as dist
from tests.ranks import faults
from tests.support import local_ranks
from tests.support.local_ranks import LocalRanks, RankError
from tests.support.world import require_same_error, run_world

from shardwise.core.errors import CheckpointError, FormatError, StorageError
from shardwise.options import LoadOptions, SaveOptions, StateOptions, StreamOptions, Timeouts
from shardwise.ranks.call_arguments import get_world
from shardwise.ranks.world import World

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("ranks", [(0,), (2,), (0, 2)])
def test_an_error_on_some_ranks_is_raised_on_all(worlds, ranks):
    errors = worlds(3).run(faults.raise_on, ranks, False)
    assert errors == [("StorageError", f"rank {ranks[0]}: disk {ranks[0]} is gone")] * 3


def test_the_same_error_everywhere_names_no_rank(worlds):
    assert worlds(3).run(faults.raise_on, (0, 1, 2), True) == [("StorageError", "the disk is gone")] * 3


def test_errors_that_are_not_ours_travel_too(worlds):
    assert worlds(2).run(faults.foreign_error) == [("CheckpointError", "KeyError: 'absent'")] * 2


def test_a_broadcast_returns_or_raises_the_same_on_all_ranks(worlds):
    assert worlds(3).run(faults.first_shares) == [{"rank": 0}] * 3
    assert worlds(3).run(faults.first_fails) == [("FormatError", "the header lies", [0, 1, 2])] * 3
    assert worlds(3).run(faults.last_fails) == [("FormatError", "rank 2: the header lies")] * 3


def test_out_of_memory_on_one_rank_is_a_training_error_on_all(worlds):
    for kind, text in worlds(2).run(faults.fail_in_training, MemoryError("no more")):
        assert kind == "TrainingError"
        assert re.search(r"rank 1 \(.*\) has left the call: out of memory \(no more\)", text)


def test_an_error_of_ours_on_one_rank_alone_ends_the_others_too(worlds):
    lost, failed = worlds(2).run(faults.fail_in_training, FormatError("row 7 is odd"))
    assert failed == ("FormatError", "row 7 is odd")
    assert lost[0] == "RankLostError"
    assert re.search(r"rank 1 \(.*\) has left the call: FormatError: row 7 is odd", lost[1])
    lost, failed = worlds(2).run(faults.fail_in_training, SystemExit(3))
    assert failed == ("SystemExit", "3")
    assert re.search(r"rank 1 \(.*\) has left the call: SystemExit: 3", lost[1])


def test_a_rank_that_may_start_no_thread_says_so(worlds):
    worlds(2).run(faults.raise_on, (), True)  # which starts the heartbeats
    first, second = worlds(2).run(faults.start_no_thread)
    assert first[0] == second[0] == ("CheckpointError", "rank 1: RuntimeError: can't start new thread")
    assert second[1] == ("ValueError", "row 7 is odd")
    assert first[1][0] == "RankLostError"
    assert first[1][1].endswith("has left the call: ValueError: row 7 is odd")


def test_an_error_that_all_ranks_raise_is_not_announced_to_one_that_still_tidies_up(worlds):
    told = worlds(2).run(faults.fail_together_in_training, StorageError("the disk is full"))
    assert told == [("rank 1: the disk is full", False)] * 2
    told = worlds(2).run(faults.fail_together_in_training, MemoryError())
    assert told == [("rank 1: out of memory (MemoryError). See docs/out_of_memory.md", False)] * 2


def test_ranks_in_other_calls_of_a_lasting_world_are_named(worlds):
    """A rank that is in the first rank's call may be told in its next phase only."""
    first, second, third = worlds(3).run(faults.meet_in_other_calls)
    kind, text = second[0]
    assert kind == "RankMismatchError"
    assert text.startswith("rank 0 is in load (find the adapter), and rank 1 is in save (find the adapter): a call")
    assert [first[1], second[1], third[1]] == [second[0]] * 3
    for told in (first[0], third[0]):
        assert told in (("", ""), second[0])


def test_ranks_that_disagree_are_named(worlds):
    wanted = [("RankMismatchError", "the number on rank 2 is not that of rank 0")] * 3
    assert worlds(3).run(faults.disagree) == wanted


def test_ranks_of_a_subgroup_have_their_global_ranks_in_every_message(worlds):
    """Also a buffer that only the first or only the last of them has is named, on both."""
    none, one, other = worlds(3).run(faults.subgroup_errors)
    assert none == []
    assert one == other
    number, other_order, arguments, settings, tensors, models, first_only, last_only = one
    assert number == "the number on rank 2 is not that of rank 1"
    assert other_order == ""
    assert arguments.startswith("the list of arguments on rank 2 is not that of rank 1: dtype (odd against even). ")
    assert settings.startswith("the config on rank 2 is not that of rank 1: size (odd against even). Give every ")
    assert "w is a tensor of shape (1, 2), torch.float32 on rank 2, a tensor of shape (1, 1)" in tensors
    assert "on rank 2, a parameter of shape (1, 1), trained on rank 1" in models
    assert first_only == last_only
    assert first_only.startswith("non-persistent buffers differ between ranks: table.")


def test_one_rank_of_a_machine_is_the_first(worlds):
    assert worlds(3).run(faults.first_on_host) == [True, False, False]
    assert worlds(3).run(faults.first_on_host, True) == [True, False, False]


def test_an_error_has_the_step_in_which_its_rank_was(worlds):
    phase = "load, read, open files"
    expected = ("rank 1: gone", phase, [f"The ranks were in this phase: {phase}"])
    assert worlds(3).run(faults.fail_in_a_step) == [expected] * 3


def test_options_have_the_timeout_of_the_process_group(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=77))
    try:
        for options in (LoadOptions(), SaveOptions(), StateOptions(), StreamOptions()):
            timeouts = get_world(options, "load").timeouts
            assert (timeouts.join_timeout_s, timeouts.meeting_timeout_s) == (77, 77)
        own = Timeouts(join_timeout_s=88)
        assert get_world(LoadOptions(timeouts=own), "load").timeouts == own
    finally:
        dist.destroy_process_group()


def test_one_process_is_a_world_without_a_group():
    world = World.current()
    assert (world.rank, world.size) == (0, 1)
    assert world.all_gather_object("x") == ["x"]
    raised = StorageError("gone")
    with pytest.raises(StorageError) as caught, world.collective("write"):
        raise raised
    assert caught.value is raised
    with pytest.raises(CheckpointError, match="KeyError: 'absent'"), world.collective("look up"):
        print({}["absent"])
    with pytest.raises(KeyboardInterrupt), world.collective("write"):
        raise KeyboardInterrupt
    counts: list[int] = []
    with world.all_reduce("count", counts.extend) as exchange:
        exchange.local = 3
    assert (counts, exchange.result) == ([3], None)


def test_a_block_that_is_left_early_is_an_exchange(worlds):
    described = ["last", 1, "last"]
    without_first, without_second = [None, 0, 0], [1, None, 1]
    told = [[without_second], [without_first], [without_first, without_second]]
    assert worlds(3).run(faults.leave_early) == [(described, one) for one in told]


@pytest.mark.parametrize("inner", [True, False])
def test_an_error_in_nested_blocks_is_raised_once_on_all_ranks(worlds, inner):
    assert worlds(3).run(faults.fail_nested, inner) == [("StorageError", "rank 1: gone", [0, 1, 2])] * 3


def test_blocks_in_threads(worlds):
    told = [[[(place, number, rank) for rank in (0, 1)] for number in range(20)] for place in (0, 1)]
    assert worlds(2).run(faults.in_threads) == [told] * 2


@pytest.mark.parametrize("left", [0, 1])
def test_a_rank_that_has_begun_another_call_is_not_waited_for(worlds, left):
    ends = worlds(2).run(faults.begin_another_call, left)
    kind, text, _ = ends[1 - left]
    assert kind == "RankMismatchError"
    assert f"rank {left} has begun another call, and rank {1 - left} waits for it in count" in text
    assert [ranks for *_, ranks in ends] == [[0, 1]] * 2


def test_calls_may_be_nested(worlds):
    assert worlds(2).run(faults.nest_calls) == [[0, 1]] * 2


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_in_a_block_ends_the_call_of_the_others(worlds, kind):
    (lost, text), mine = worlds(2).run(faults.interrupted, kind)
    assert mine == (kind.__name__, "")
    assert lost == "RankLostError"
    assert re.search(rf"rank 1 .*has left the call: {kind.__name__}", text)


def test_the_trace_of_a_failed_rank_shows_the_lines_of_its_caller(worlds):
    assert worlds(2).run(faults.lines_of_the_cause) == [[], ["lines_of_the_cause"]]


def test_a_value_that_cannot_be_sent_is_an_error_on_all_ranks(worlds):
    one, other = worlds(2).run(faults.unpicklable)
    assert one == other
    assert one[0] == "CheckpointError"
    assert "rank 1: TypeError: cannot pickle" in one[1]


def test_a_value_that_cannot_be_received_is_an_error_on_all_ranks(worlds):
    errors = worlds(2).run(faults.unreadable)
    require_same_error(errors, "CheckpointError", "rank 1: ValueError: invalid literal for int()")


def test_no_method_takes_a_function_but_a_pure_reduction():
    taken = {
        name
        for method in vars(World).values()
        if inspect.isfunction(method) and not method.__name__.startswith("_")
        for name, annotation in inspect.get_annotations(method).items()
        if "Callable" in str(annotation)
    }
    assert taken == {"reduce_fun"}


def test_a_fresh_world_answers_by_rank():
    assert run_world(2, faults.add, 3, 4) == [7, 8]


def test_a_rank_that_raises_is_shown_with_its_traceback():
    with LocalRanks(2, is_forked=True) as ranks:
        with pytest.raises(RankError, match=r"\[rank 1\] ValueError: not like this") as caught:
            ranks.run(faults.raise_here, 1)
        assert isinstance(caught.value.errors[1], ValueError)
        assert not ranks.is_alive
        with pytest.raises(RankError, match=r"\[rank 0\] its process is gone since an earlier call failed"):
            ranks.run(faults.add, 1, 2)


@pytest.mark.parametrize("act", [faults.exit_on, faults.sleep_on, None], ids=["ends", "hangs", "is gone"])
def test_a_rank_that_is_lost_ends_the_others(monkeypatch, act):
    """It ends or hangs in a call, or its process has ended between two."""
    monkeypatch.setattr(local_ranks, "_GRACE_S", 1.0)
    limit_s, told = local_ranks.LIMIT_S, r"\[rank 1\] .*exit code 7"
    if act is faults.sleep_on:
        limit_s, told = 2, r"\[rank 1\] did not finish in time"
    with LocalRanks(2, timeout_s=limit_s, is_forked=True) as ranks:
        if act is None:
            os.kill(ranks.pid(1), signal.SIGKILL)
            ranks._processes[1].join()
            told = r"\[rank 1\] its process ended with exit code -9"
        with pytest.raises(RankError, match=told):
            ranks.run(act or faults.raise_here, 1)
        assert not ranks.is_alive
