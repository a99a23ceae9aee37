"""The number of processors of a rank, and of threads that it starts."""

import os
import threading

import pytest
import torch
from tests.models import reference

import shardwise
from shardwise.core import machine
from shardwise.files import four_bit_blocks


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("0::/pod/box", {"pod/box/cpu.max": "250000 100000", "pod/cpu.max": "max 100000"}, {"pod/box": 2.5}),
        ("0::/pod/box", {"pod/cpu.max": "400000 100000"}, {"pod": 4.0}),
        ("0::/", {"cpu.max": "max 100000"}, {}),
        ("0::/", {"cpu.max": "torn"}, {}),
        ("0::/", {"cpu.max": "1 0"}, {}),
        ("3:cpu,cpuacct:/box", {"box/cpu.max": "5 10"}, {}),
    ],
)
def test_quotas_of_control_groups(tmp_path, own, files, expected):
    (tmp_path / "own").write_text(own + "\n")
    for name, text in files.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(text + "\n")
    found = machine.processor_quotas(tmp_path / "own", tmp_path / "groups")
    assert found == {str(tmp_path / "groups" / name): most for name, most in expected.items()}


def test_no_more_than_the_quota_compute_and_tokenize(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(machine, "processor_quotas", lambda: {"/": 3.5})
    assert machine.processor_count() == 3
    monkeypatch.setattr(machine, "processor_quotas", lambda: {"/": 0.1})
    assert machine.processor_count() == 1


@pytest.mark.parametrize("count", [1, 2])
def test_a_load_computes_on_no_more_threads(count, tmp_path, monkeypatch):
    reference.save_tiny(tmp_path, dtype=torch.bfloat16, hidden_size=128, intermediate_size=192, head_dim=64)
    real, seen, meeting = four_bit_blocks.quantize_rows, set(), threading.Barrier(count)

    def quantize_rows(*arguments):
        if threading.current_thread() not in seen:
            seen.add(threading.current_thread())
            meeting.wait()
        return real(*arguments)

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(count)))
    monkeypatch.setattr(four_bit_blocks, "quantize_rows", quantize_rows)
    options = shardwise.options.LoadOptions(progress=False)
    quantization = shardwise.options.Nf4()
    shardwise.from_pretrained(str(tmp_path), quantization=quantization, dtype=torch.bfloat16, options=options)
    assert len(seen) == count
