"""Many names in few words."""

import pytest
import torch
from safetensors.torch import save_file
from tests.cli.running import RUNNER
from torch import nn

import shardwise
from shardwise.cli import main
from shardwise.core.errors import KeyMismatchError
from shardwise.core.formatting import collapse, format_ranks
from shardwise.options import Ignore


def test_names_that_differ_in_one_number_become_one():
    names = ["layers.0.up", "layers.1.up", "layers.3.up", "norm", "layers.10.up"]
    assert collapse(names) == [("layers.{0..1,3,10}.up", 4), ("norm", 1)]


def test_two_varying_numbers_become_stars():
    assert collapse(["a.0.b.0", "a.1.b.1", "a.1.b.0"]) == [("a.*.b.*", 3)]


def test_a_number_of_thousands_of_digits_is_a_name_like_any():
    long = "a." + "1" * 5000
    assert collapse([long]) == [(long, 1)]
    assert collapse(["a.1", "a.2", long]) == [("a.{1..2}", 2), (long, 1)]


def test_a_name_alone_stays_to_the_letter():
    assert collapse(["model-00005-of-00005.safetensors"]) == [("model-00005-of-00005.safetensors", 1)]


def test_ranks_are_reported_in_few_words_however_many_they_are():
    assert format_ranks([1, 2, 5]) == "1, 2, 5"
    assert format_ranks(range(1, 1024)) == "1-1023"
    assert format_ranks([0, *range(3, 9), 11, 12]) == "0, 3-8, 11-12"
    assert format_ranks(range(1, 1024, 2)) == "1, 3, 5, 7, 9, 11, 13, 15 and 504 more"


def test_control_characters_are_shown_escaped(tmp_path):
    """Names in files are untrusted, and a terminal obeys some of them."""
    file = tmp_path / "model.safetensors"
    save_file({"weight": torch.zeros(2, 2), "bias": torch.zeros(2), "\x1b[2J\x9b": torch.zeros(1)}, file)
    with pytest.raises(KeyMismatchError) as refused:
        shardwise.load(nn.Linear(2, 2), file)
    report = shardwise.load(nn.Linear(2, 2), file, on_unexpected=Ignore())
    command = RUNNER.invoke(main, ["verify", str(tmp_path / "\x1b[2J\x9b")])
    for text in (str(refused.value), str(report), command.stderr):
        assert "\\x1b[2J\\x9b" in text
        assert all(line.isprintable() for line in text.splitlines())
