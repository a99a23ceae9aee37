"""What all ranks give of a model is the model, each element once."""

import pytest
from tests.execution import sharing_out


@pytest.mark.distributed
@pytest.mark.parametrize(("mesh", "size"), [("flat", 3), ("hsdp", 4), ("tp", 4)])
def test_every_element_is_given_once(worlds, mesh, size):
    assert worlds(size).run(sharing_out.shares_are_exact, mesh) == [[]] * size


def test_one_rank_gives_all():
    assert sharing_out.shares_are_exact("flat") == []


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        ("meta", "ShardingError", "rank 1: blocks.0.q_proj.weight on meta"),
        (
            "dtype",
            "RankMismatchError",
            "shape, dtype or order): blocks.0.q_proj.weight",
        ),
        ("shape", "RankMismatchError", "blocks.0.q_proj.weight"),
    ],
)
def test_all_ranks_raise_for_one_ranks_model(worlds, what, kind, words):
    ends = worlds(2).run(sharing_out.error_of, what)
    assert len(set(ends)) == 1
    assert ends[0][0] == kind
    assert words in ends[0][1]


@pytest.mark.distributed
def test_half_of_a_mesh_is_refused(worlds):
    ends = worlds(4).run(sharing_out.error_of_half_a_mesh)
    assert ends[0] == ends[1]
    assert ends[0][0] == "ShardingError"
    assert "do not hold, together, each element of" in ends[0][1]
