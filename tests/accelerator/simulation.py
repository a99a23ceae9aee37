"""Functions that show how the simulated accelerator behaves without waits, and what it counts."""

import os

import torch
from tests.accelerator import simulated


def read_too_early() -> tuple[list[float], list[float]]:
    """Values that another stream brings: read without a wait, and after one."""
    host = torch.arange(4.0).pin_memory()
    device = torch.empty(4, device="npu")
    side = torch.npu.Stream()
    with torch.npu.stream(side), simulated.paused():
        device.copy_(host, non_blocking=True)
        with torch.npu.stream(torch.npu.default_stream()):
            early = device.tolist()
    torch.npu.current_stream().wait_stream(side)
    return early, device.tolist()


def freed_too_early(is_recorded: bool) -> list[float]:
    """What another stream copies of memory that is freed meanwhile."""
    source, target = torch.ones(4, device="npu"), torch.zeros(4, device="npu")
    torch.npu.synchronize()
    side = torch.npu.Stream()
    with torch.npu.stream(side), simulated.paused():
        target.copy_(source)
        if is_recorded:
            source.record_stream(side)
        del source
        torch.npu.default_stream().synchronize()  # in whose order it is freed
    side.synchronize()
    values: list[float] = target.tolist()
    return values


def counts() -> dict[str, int]:
    """Of a copy of each kind, one wait, and a mask, whose shape the host must know."""
    pinned, pageable = torch.ones(1000, dtype=torch.uint8).pin_memory(), torch.ones(8)
    device = torch.ones(8, device="npu")
    torch.npu.synchronize()
    with simulated.counting() as found:
        device.copy_(pageable)
        small = torch.empty(1000, dtype=torch.uint8, device="npu")
        small.copy_(pinned, non_blocking=True)
        pinned.copy_(small, non_blocking=True)
        torch.npu.synchronize()
        device[device > 0]
        device.cpu()
        held = torch.empty(1025, dtype=torch.uint8, pin_memory=True)
    assert held.is_pinned()
    return found


def use_in_a_fork() -> int:
    """The exit status of a process that is forked from this one and uses the device: 7 where it is refused."""
    torch.ones(1, device="npu")
    child = os.fork()
    if child == 0:
        try:
            torch.ones(1, device="npu")
        except RuntimeError as error:
            os._exit(7 if "forked" in str(error) and torch.npu._is_in_bad_fork() else 1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
