"""Kinds of errors, told from torch's texts."""

import pytest
import torch
import torch.distributed as dist

from shardwise.ranks.collective_errors import is_collective_error, translate_collective_errors
from shardwise.ranks.outcomes import is_out_of_memory
from shardwise.ranks.world import World

GLOO = (
    "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
    "[127.0.0.1]:45729. This is typically caused by a remote worker crashing."
)
NCCL = "NCCL error in: ProcessGroupNCCL.cpp:2518, remote process exited or there was a network error"
NCCL_MEMORY = "NCCL error: unhandled cuda error, Cuda failure 2 'out of memory'"
CUDA = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.10 GiB"


@pytest.mark.parametrize(
    ("error", "of_a_collective", "out_of_memory"),
    [
        (RuntimeError(GLOO), True, False),
        (dist.DistBackendError(NCCL), True, False),
        (dist.DistBackendError(NCCL_MEMORY), True, False),
        (dist.DistNetworkError("The client socket has timed out"), True, False),
        (torch.OutOfMemoryError(CUDA), False, True),
        (MemoryError(), False, True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False, False),
        (ValueError("out of memory of its users"), False, False),
        (ConnectionResetError("Connection reset by peer"), False, False),
    ],
)
def test_causes_of_errors_are_distinguished(error, of_a_collective, out_of_memory):
    assert (is_collective_error(error), is_out_of_memory(error)) == (of_a_collective, out_of_memory)


def test_host_memory_errors_of_torch_are_recognized():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    assert is_out_of_memory(caught.value)
    assert not is_collective_error(caught.value)


def test_one_process_has_no_other_rank():
    with (
        pytest.raises(RuntimeError, match="Connection closed"),
        translate_collective_errors(World(0, 1), lambda: "here"),
    ):
        raise RuntimeError(GLOO)
