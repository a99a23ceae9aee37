"""Forecasts in words and as JSON."""

from __future__ import annotations

import json

import pytest

from shardwise.report.forecast import Forecast
from shardwise.report.forecast_parts import ComputedForecast, Experts, GroupForecast, RankForecast
from shardwise.report.names import in_bytes

MIB = 1 << 20


def rank(number, *, held=4, read=4, files=2, experts=None):
    return RankForecast(
        rank=number,
        shard_bytes=held * MIB,
        padded_bytes=4 * MIB,
        device_bytes=5 * MIB,
        host_bytes=16 * MIB,
        needed_bytes=read * MIB,
        read_bytes=read * MIB,
        reads=1200,
        files=files,
        experts=experts or {},
    )


def forecast(ranks, **changes):
    facts = {
        "checkpoint": "somewhere",
        "model_class": "Qwen3ForCausalLM",
        "dtype": "bfloat16",
        "device": "cuda",
        "mesh": {"fsdp": len(ranks)},
        "nodes": 1,
        "parameters": 1234567,
        "checkpoint_bytes": 8 * MIB,
        "checkpoint_tensors": 30,
        "checkpoint_files": 1,
        "bytes_per_dtype": {"BF16": 7 * MIB, "F32": 1 * MIB},
        "groups": (
            *(GroupForecast((f"layers.{number}",), "BF16", 9, 1000, 2000) for number in range(3)),
            GroupForecast(("head", "tail"), "BF16", 2, 5000, 10000),
            GroupForecast(("",), "BF16", 1, 10, 20),
        ),
        "ranks": tuple(ranks),
    }
    return Forecast(**facts | changes)


def test_few_ranks_have_a_line_each():
    experts = {"a.experts": Experts(0, 8, 16, is_cut=False), "b.experts": Experts(0, 8, 16, is_cut=False)}
    lines = str(forecast([rank(0, experts=experts), rank(1, held=2)])).splitlines()
    assert lines[0] == "plan for somewhere"
    assert "  model       Qwen3ForCausalLM, 1,234,567 parameters in BF16 (7.00 MiB), F32 (1.00 MiB)" in lines
    assert "  checkpoint  8.00 MiB, 30 tensors, 1 file" in lines
    assert "  mesh        fsdp=2, cuda, 1 node" in lines
    assert "  groups      layers.{0..2} x3: 1,000 BF16 parameters, 1.95 KiB gathered each" in lines
    assert "              head + tail: 5,000 BF16 parameters, 9.77 KiB gathered" in lines
    assert "              (root): 10 BF16 parameters, 20 B gathered" in lines
    assert "  largest     head + tail: 9.77 KiB gathered" in lines
    table = [line.split() for line in lines if line.lstrip().startswith(("rank", "0 ", "1 "))]
    assert table[0] == ["rank", "holds", "device", "host", "reads", "requests", "files", "experts"]
    assert " ".join(table[1]) == "0 4.00 MiB 5.00 MiB 16.00 MiB 4.00 MiB 1,200 2 8 of 16 (0..7)"
    assert " ".join(table[2]) == "1 2.00 MiB 5.00 MiB 16.00 MiB 4.00 MiB 1,200 2"
    assert "  all ranks   read 8.00 MiB, 1.00 times the checkpoint, in 2,400 requests; open a file 4 times" in lines
    assert "  imbalance   1.333 held, 1.000 read (most over mean)" in lines


def test_many_ranks_are_least_mean_and_most():
    ranks = [rank(number, held=1 if number == 20 else 4, read=9 if number == 7 else 4) for number in range(32)]
    text = str(forecast(ranks, nodes=4))
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert any(row.startswith("least 1.00 MiB") for row in rows)
    assert any(row.startswith("mean 3.91 MiB 5.00 MiB 16.00 MiB 4.16 MiB") for row in rows)
    assert any(row.startswith("most 4.00 MiB 5.00 MiB 16.00 MiB 9.00 MiB") for row in rows)
    assert "on rank 0 0 0 7 0 0" in rows
    assert "each node 128.00 MiB of host memory" in rows


def test_experts_that_differ_by_stack_are_told_apart():
    experts = {"a": Experts(0, 8, 16, is_cut=False), "b": Experts(0, 16, 16, is_cut=True)}
    assert "a 8 of 16 (0..7); b a part of each of 16" in str(forecast([rank(0, experts=experts)]))


@pytest.mark.parametrize(
    ("experts", "words"),
    [
        (Experts(0, 16, 16, is_cut=False), "all 16"),
        (Experts(0, 16, 16, is_cut=True), "a part of each of 16"),
        (Experts(3, 4, 16, is_cut=False), "1 of 16 (3)"),
        (Experts(3, 9, 16, is_cut=True), "a part of each of 6 of 16 (3..8)"),
        (Experts(0, 0, 16, is_cut=False), "none of 16"),
    ],
)
def test_experts_in_words(experts, words):
    assert str(experts) == words


def test_everything_unusual_has_a_line():
    lines = str(
        forecast(
            [rank(0)],
            whole={"layers.0.scale": "it has no dimensions", "layers.1.scale": "it has no dimensions"},
            tied={"head": "embed"},
            cast={"norm": ("BF16", "F32")},
            initialized=tuple(f"{letter}.score" for letter in "abcdefgh"),
            ignored_keys=("extra",),
            computed=(ComputedForecast(("x", "y"), "Dequantize", 2048, 4096),),
            notes=("one", "two"),
        )
    ).splitlines()
    assert "  whole       layers.{0..1}.scale: it has no dimensions x2" in lines
    assert "  tied        head = embed" in lines
    assert "  cast        norm: BF16 to F32" in lines
    assert "              ... and 2 more" in lines
    assert "  ignored     extra" in lines
    assert "  computed    x, y by Dequantize: 2.00 KiB read whole, needs a budget of 4.00 KiB" in lines
    assert lines[-2:] == ["  note        one", "              two"]


def test_json_has_all_of_it_and_the_summary():
    made = forecast([rank(0), rank(1, held=2)], nodes=2).to_dict()
    assert json.loads(json.dumps(made))["ranks"][1]["shard_bytes"] == 2 * MIB
    assert made["summary"] == {
        "read_bytes": 8 * MIB,
        "read_ratio": 1.0,
        "held_imbalance": 4 / 3,
        "read_imbalance": 1.0,
        "file_opens": 4,
        "device_bytes": 5 * MIB,
        "host_bytes": 16 * MIB,
        "node_host_bytes": 16 * MIB,
        "largest_group": {"modules": ["head", "tail"], "gathered_bytes": 10000},
    }


def test_a_model_that_holds_nothing_is_balanced():
    empty = forecast([rank(0, held=0, read=0), rank(1, held=0, read=0)], checkpoint_bytes=0)
    assert (empty.held_imbalance, empty.read_imbalance, empty.read_ratio) == (1.0, 1.0, 0.0)


@pytest.mark.parametrize(
    ("nbytes", "words"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (3 << 29, "1.50 GiB"), (1 << 51, "2,048.00 TiB")],
)
def test_sizes_in_words(nbytes, words):
    assert in_bytes(nbytes) == words
