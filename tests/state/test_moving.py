"""A rank sends the received values of a buffer that differs between ranks, not its own."""

import torch.distributed as dist
from torch import nn

import shardwise
from shardwise import Sharding


def test_a_forwarding_rank_sends_received_data_and_not_its_own(worlds):
    """The first rank's values go to the second, which gives them to the third."""
    assert worlds(3).run(mean_of_all) == [[1.0] * 4] * 3


def mean_of_all() -> list[float]:
    """A buffer that has another value on each rank, as every rank gets it."""
    model = nn.Sequential(nn.BatchNorm1d(4))
    shardwise.shard(model, Sharding(wrap="whole_model"))
    mean = model.get_buffer("0.running_mean")
    mean.fill_(float(dist.get_rank() + 1))
    state = shardwise.get_model_state_dict(model, "full_on_all_ranks")
    assert mean.tolist() == [dist.get_rank() + 1] * 4
    return state["0.running_mean"].tolist()
