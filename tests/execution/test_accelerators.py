"""What torch is asked about accelerators, by a torch that pretends to have one; ``tests/gpu`` asks a real one."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import shardwise
from shardwise.execution.memory import DeviceStaging, available_memory
from shardwise.models.torch_api import settle

GIB = 1 << 30


class Pretended:
    """A module as torch has one for each kind of accelerator; ``told`` is what was done, in order."""

    def __init__(self) -> None:
        self.told: list[str] = []
        told = self.told

        class Stream:
            def __init__(self, name: Any) -> None:
                self.name = "own" if isinstance(name, torch.device) else name

            def wait_stream(self, other: Any) -> None:
                told.append(f"{self.name} waits for {other.name}")

            def synchronize(self) -> None:
                told.append(f"{self.name} is waited for")

        self.Stream = Stream

    def current_stream(self, _: Any) -> Any:
        return self.Stream("current")

    def mem_get_info(self, _: Any) -> tuple[int, int]:
        return 1 * GIB, 16 * GIB

    def memory_reserved(self, _: Any) -> int:
        return 9 * GIB

    def memory_allocated(self, _: Any) -> int:
        return 6 * GIB


@pytest.fixture(params=["cuda", "xpu"])
def pretended(request, monkeypatch):
    module = Pretended()
    monkeypatch.setattr(torch, "get_device_module", lambda kind: {request.param: module}[kind])
    return torch.device(request.param, 0), module


def test_memory_that_torch_keeps_for_tensors_to_come_is_free(pretended):
    device, _ = pretended
    assert available_memory(device).device_bytes == 4 * GIB


def test_what_was_asked_of_the_device_before_comes_before_copies_to_it(pretended):
    device, module = pretended
    DeviceStaging(1 << 20, device)
    assert module.told == ["own waits for current"]


def test_tensors_are_settled_before_other_threads_read_them(pretended):
    device, module = pretended
    settle([torch.ones(1), torch.ones(1, device="meta")])
    assert module.told == []
    settle([SimpleNamespace(device=device)] * 3)  # type: ignore[list-item]
    assert module.told == ["current is waited for"]


def test_a_device_of_another_kind_is_refused_by_name():
    with pytest.raises(shardwise.ShardingError, match="device mps:0: .* kinds: cuda, xpu, npu. Load on the CPU"):
        available_memory(torch.device("mps", 0))
