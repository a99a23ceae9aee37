"""Ranks on two hosts: disks that differ, a host that is lost, and a link that is cut."""

import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tests.hosts.netns import PORT, HostProcess, Hosts, lacking, two_hosts
from tests.training import tiny

from shardwise.ranks.timeouts import Timeouts

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    if cause := lacking():
        pytest.skip(f"two hosts cannot be had here: {cause}")
    with two_hosts(tmp_path) as made:
        tiny.write_model(made.folder / "model")
        tiny.write_chats(made.folder / "chats.jsonl", 8)
        yield made


def training(hosts: Hosts, steps: int = 100_000, rows: int = 1) -> list[object]:
    """The command, with checkpoints in a folder that both hosts see, and some rows a rank in each step."""
    places = ["--model_name_or_path", hosts.folder / "model", "--dataset_name", hosts.folder / "chats.jsonl"]
    places += ["--output_dir", hosts.folder / "out", "--max_steps", steps, "--per_device_train_batch_size", rows]
    more = ["--logging_steps=1", "--save_steps=20", "--report_to=none", "--bf16=false", "--disable_tqdm=true"]
    return ["-m", "shardwise", "train", *places, "--max_length=64", *more]


def wait_for_steps(rank: HostProcess, more: int) -> None:
    done = rank.text().count("{'loss'")
    rank.wait_for("{'loss'", done + more)


def test_loads_and_saves_on_disks_that_differ_are_refused_alike(hosts: Hosts) -> None:
    for host in range(2):
        for name in ("same", "other values", "other shapes"):
            shutil.copytree(hosts.folder / "model", hosts.disk_of(host) / name)
    values = load_file(hosts.folder / "model" / "model.safetensors")
    name = next(name for name in values if "q_proj" in name)
    for folder, changed in (("other values", values[name] + 1), ("other shapes", values[name][:-2].clone())):
        save_file({**values, name: changed}, hosts.disk_of(1) / folder / "model.safetensors", {"format": "pt"})
    ranks = hosts.start_ranks("-m", "tests.hosts.on_host", hosts.folder)
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].text()
    first, second = (re.findall(r"^([a-z ]+): (.*)$", rank.text(), re.MULTILINE) for rank in ranks)
    told = dict(second)
    assert told.items() <= dict(first).items()
    assert f"waiting for rank 1 of 2 at {hosts.address(0)}:{PORT}" in ranks[0].text()
    assert told["loaded"] == told["loaded again"] == told["own copies"] != ""
    assert "Error" not in told["loaded"]
    assert told["saved to one folder"] == ""
    for copies in ("differing values", "differing shapes"):
        assert told[copies].startswith("RankMismatchError: model.safetensors")
    assert told["saved to two folders"].startswith("StorageError: rank 1: ")
    assert "Save to a directory that all ranks share" in told["saved to two folders"]
    assert not list(hosts.disk_of(0).glob("saved/*"))


def test_a_host_is_killed_and_its_training_continues_on_the_other(hosts: Hosts) -> None:
    ranks = hosts.start_ranks(*training(hosts))
    wait_for_steps(ranks[0], 30)
    hosts.kill(ranks[1])
    assert ranks[0].wait() == 2
    assert f"rank 1 (host {hosts.host_name(1)}, process " in ranks[0].text()
    newest = max(int(folder.name.partition("-")[2]) for folder in (hosts.folder / "out").glob("checkpoint-*"))
    assert newest >= 20
    alone = hosts.start(0, sys.executable, *training(hosts, newest + 5, rows=2))
    assert alone.wait() == 0, alone.text()
    assert alone.text().count("{'loss'") == 5


def test_a_link_that_is_cut_for_good_ends_the_ranks_of_both_hosts(hosts: Hosts) -> None:
    ranks = hosts.start_ranks(*training(hosts))
    wait_for_steps(ranks[0], 5)
    hosts.cut()
    time.sleep(Timeouts().heartbeat_timeout_s / 9)
    hosts.restore()
    wait_for_steps(ranks[0], 20)
    hosts.cut()
    assert [rank.wait() for rank in ranks] == [2, 2]
    assert re.search(r"in step \d+: rank 1 \(host .*no sign of life for \d+ s", ranks[0].text(), re.MULTILINE)
    assert re.search(r"in step \d+: the store .* has not answered for", ranks[1].text(), re.MULTILINE)


def test_a_rank_that_never_arrives_is_named_by_the_waiting_ranks(hosts: Hosts) -> None:
    ranks = [hosts.start_rank(rank, 3, *training(hosts)) for rank in range(2)]
    for rank in ranks:
        rank.wait_for(f"waiting for rank 2 of 3 at {hosts.address(0)}:{PORT}" if rank is ranks[0] else "waiting")
    for rank in reversed(ranks):  # the first has the store, without which the others end by themselves
        os.kill(rank.pid, signal.SIGTERM)
    assert [rank.wait() for rank in ranks] == [128 + signal.SIGTERM] * 2
