"""What is alive in each moment of a step: FSDP2's order, followed group by group."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardwise.layout import PassPart, Stretch
from shardwise.planning.forecasts.training_memory import (
    ACTIVATIONS,
    GRADIENTS,
    GROUPS,
    OPTIMIZER,
    REDUCED,
    STEPPING,
    WEIGHTS,
    GroupMemory,
    InGroups,
    Standing,
    Ungrouped,
    greatest,
    moments,
    resting,
    stepping,
)

ROOT = 2
SMALL = GroupMemory(gathered=10, parameters=10, cast=0, reduced=20, gradients=5, summed=0)
LARGE = GroupMemory(gathered=100, parameters=100, cast=7, reduced=200, gradients=50, summed=0)
ROOTS = GroupMemory(gathered=1000, parameters=1000, cast=0, reduced=2000, gradients=500, summed=0)
HELD = Standing(weights=555, optimizer=1110, gradients=555)


def forward(block, kept=1):
    return Stretch(PassPart.FORWARD, block, (block,), (block,), rise=kept + 2, kept=kept)


def backward(block, kept=1, released=0):
    return Stretch(PassPart.BACKWARD, block, (block,), (block,), released + 3, released - kept, released)


PASSES = (
    Stretch(PassPart.FORWARD, -1, (ROOT,), (), rise=4, kept=4),
    forward(0),
    forward(1),
    Stretch(PassPart.LOSS, -1, (), (), rise=9, kept=3),
    Stretch(PassPart.LOSS_BACKWARD, -1, (ROOT,), (), rise=6, kept=-3),
    backward(1, released=100),
    backward(0, released=10),
    Stretch(PassPart.BACKWARD, -1, (), (ROOT,), rise=1000, kept=1000 - 4, released=1000),
)


IN_GROUPS = InGroups((SMALL, LARGE, ROOTS))


def found(how=IN_GROUPS, held=HELD, passes=PASSES):
    return list(moments(passes, how, held))


def test_two_gathered_buffers_are_there_while_the_second_is_filled():
    made = found(InGroups((LARGE, LARGE, ROOTS)))
    # The root's parameters; the first block's buffer; the second's beside it, with what is cast to be gathered.
    assert 1000 + 100 + 100 + 7 in [moment.terms[GROUPS] for moment in made if moment.phase == "forward"]


def test_blocks_that_are_not_resharded_stay_gathered_until_their_gradients_are_there():
    kept = [m.terms[GROUPS] for m in found(InGroups((SMALL, LARGE, ROOTS), reshards=False)) if m.phase == "loss"]
    gone = [m.terms[GROUPS] for m in found() if m.phase == "loss"]
    assert max(kept) == 1000 + 110 + 100  # with the last buffer, which the end of the forward pass frees
    assert min(kept) == 1000 + 110
    assert min(gone) == 1000 + 100  # the last block's buffer, or what is gathered ahead for the backward pass


def test_a_group_is_gathered_ahead_while_the_one_after_it_is_in_use():
    """Of the blocks the second one is first in the backward pass; meanwhile the first one's buffer is there."""
    in_use = [m for m in found() if m.phase == "backward" and m.terms[GROUPS] == 1000 + 100 + 10]
    assert in_use


def test_gradients_and_what_they_are_summed_from_are_there_at_once():
    made = [m for m in found() if m.phase == "backward" and m.terms[REDUCED] == 200]
    assert max(moment.terms[ACTIVATIONS] for moment in made) >= 100  # whole gradients of the group, before they go
    assert found()[-1].terms[GRADIENTS] == HELD.gradients - ROOTS.gradients


def test_a_collective_that_copies_takes_as_much_again():
    plain = max(moment.terms[REDUCED] for moment in found())
    copied = max(m.terms[REDUCED] for m in found(InGroups((SMALL, LARGE, ROOTS), copies_to_sum=True)))
    assert (plain, copied) == (2500, 4000)


def test_one_kept_buffer_serves_one_group_at_a_time():
    how = InGroups((LARGE, LARGE, ROOTS), reused=100)
    held = Standing(weights=0, optimizer=0, gradients=0, gathering=how.kept)
    assert how.kept == 100
    made = [moment.terms[GROUPS] for moment in found(how, held) if moment.phase == "forward"]
    # The kept buffer has the first block; the second, which comes while that is held, has one of its own.
    assert 1000 + 100 + 100 + 100 in made


def test_alone_nothing_is_gathered_and_gradients_stay_whole():
    made = found(Ungrouped(), Standing(weights=1, optimizer=2, gradients=1110))
    assert all(moment.terms[GROUPS] == moment.terms[REDUCED] == 0 for moment in made)
    assert [moment.terms[GRADIENTS] for moment in made][-1] == 110  # before those of the root are there
    assert made[-1].terms[ACTIVATIONS] == 4 - 4 + 4 + 1000  # they are among what the passes make


def test_what_is_kept_between_micro_batches_is_there_from_the_beginning():
    made = found(held=Standing(weights=1, optimizer=2, gradients=555, between=5000))
    assert min(moment.terms[GRADIENTS] for moment in made) == 5000


def test_the_step_and_the_rest():
    held = Standing(weights=1, optimizer=20, gradients=300, stepping=4000)
    assert dict(stepping(held).terms) == {WEIGHTS: 1, OPTIMIZER: 20, GRADIENTS: 300, GROUPS: 0, STEPPING: 4000}
    assert stepping(held).total == 4321
    assert resting("checkpoint", held, {"staging": 5}).total == 26


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=6), st.booleans())
def test_all_that_is_kept_goes_again_and_no_moment_is_less_than_what_is_always_there(blocks, again):
    groups = (*[SMALL] * len(blocks), ROOTS)
    root = len(blocks)
    passes = [
        Stretch(PassPart.FORWARD, -1, (root,), (), 0, 0),
        *(Stretch(PassPart.FORWARD, i, (i,), (i,), kept + more, kept) for i, (kept, more) in enumerate(blocks)),
        Stretch(PassPart.LOSS_BACKWARD, -1, (root,), (), 0, 0),
        *(
            Stretch(PassPart.BACKWARD, i, (i,), (i,), 10 + blocks[i][1], 10 - blocks[i][0], 10)
            for i in reversed(range(len(blocks)))
        ),
        Stretch(PassPart.BACKWARD, -1, (), (root,), 0, 0),
    ]
    held = Standing(weights=7, optimizer=14, gradients=5 * len(blocks) + 500)
    made = list(moments(passes, InGroups(groups, reshards=not again), held))
    assert made[-1].terms[ACTIVATIONS] == 0
    assert min(moment.total for moment in made) >= 21
    most = greatest(made)
    assert set(most) <= {"forward", "loss", "backward"}
    assert all(moment.total <= most[moment.phase].total for moment in made)
    # As much is alive as the blocks have left, and no less.
    assert max(m.terms[ACTIVATIONS] for m in made) >= sum(kept for kept, _ in blocks)
