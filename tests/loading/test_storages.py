"""The public functions over every storage: the same bits, and the same errors on every rank."""

import pytest
import torch
from tests import truth
from tests.loading import on_ranks
from tests.small_checkpoints import small_qwen3
from tests.support.http_store import HttpStore, Status
from tests.support.world import require_same_error

from shardwise import ConfigError


@pytest.fixture(scope="module")
def wanted(qwen3):
    return truth.snapshot(on_ranks.bring_up(str(qwen3)))["values"]


def same(found, wanted) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_url_brings_up_the_same_model(worlds, qwen3, wanted):
    with HttpStore(qwen3) as store:
        for values in worlds(3).run(on_ranks.whole_values, store.url, {}):
            assert same(values, wanted)
        alone = on_ranks.bring_up(store.url)
    assert same(truth.snapshot(alone)["values"], wanted)
    assert alone.config.name_or_path == store.url


def test_a_url_may_name_the_file(qwen3, wanted):
    with HttpStore(qwen3) as store:
        assert same(
            truth.snapshot(on_ranks.bring_up(f"{store.url}/model.safetensors.index.json"))["values"], wanted
        )


def test_a_store_that_refuses_what_it_does_not_have_needs_no_generation_config(qwen3, wanted):
    files = {file.name: file.read_bytes() for file in qwen3.iterdir() if file.name != "generation_config.json"}
    with HttpStore(files) as store:
        store.inject(Status(403), file="generation_config.json")
        assert same(truth.snapshot(on_ranks.bring_up(store.url))["values"], wanted)


def test_code_is_not_read_from_a_url():
    config = b'{"time_step_limit": [0.0, Infinity], "auto_map": {"AutoModel": "modeling_own.Own"}}'
    files = {"config.json": config}  # with what state space models have
    with HttpStore(files) as store, pytest.raises(ConfigError, match=r"\(modeling_own\.Own\), which is not read"):
        on_ranks.bring_up(store.url, trust_remote_code=True)


def test_a_passing_fault_is_survived(worlds, qwen3, wanted):
    with HttpStore(qwen3) as store:
        store.inject(Status(503), file="*.safetensors", skip=6, times=3)
        for values in worlds(3).run(on_ranks.whole_values, store.url, {}):
            assert same(values, wanted)


def test_a_lasting_fault_is_the_same_error_on_every_rank(worlds, qwen3):
    with HttpStore(qwen3) as store:
        store.inject(Status(403), file="*.safetensors", skip=8)
        errors = worlds(3).run(on_ranks.error_of, store.url, {})
    require_same_error(errors, "StorageError", "403", ".safetensors")


def test_configs_that_one_rank_cannot_write_are_the_same_error_on_every_rank(worlds, qwen3):
    with HttpStore(qwen3) as store:
        errors = worlds(2).run(on_ranks.error_with_a_full_disk, store.url)
    require_same_error(errors, "CheckpointError", "rank 1: OSError: the disk is full")


def test_a_file_replaced_while_it_is_read_is_noticed(worlds, qwen3, tmp_path):
    small_qwen3().save_pretrained(tmp_path)
    errors = worlds(3).run(on_ranks.file_replaced_while_reading, str(tmp_path), 1)
    require_same_error(errors, "StorageError", "model.safetensors", "replaced or rewritten")


@pytest.mark.parametrize("mode", ["once", "alone"])
def test_replicas_hold_the_same_bits(worlds, qwen3, wanted, mode):
    outcomes = worlds(4).run(on_ranks.shared_load, str(qwen3), (2, 2), mode)
    for values, _ in outcomes:
        assert same(values, wanted)
    checkpoint = outcomes[0][1]["checkpoint_bytes"]
    reads = sum(report["read_bytes"] for _, report in outcomes)
    copies = 2 if mode == "alone" else 1
    assert copies * checkpoint <= reads <= 1.02 * copies * checkpoint


def test_a_remote_checkpoint_is_read_once_for_all_replicas(worlds, qwen3, wanted):
    with HttpStore(qwen3) as store:
        outcomes = worlds(4).run(on_ranks.shared_load, store.url, (2, 2), "weighed")
    for values, report in outcomes:
        assert same(values, wanted)
        assert len(report["read_once"]) == report["loaded"]
    reads = sum(report["read_bytes"] for _, report in outcomes)
    assert reads <= 1.02 * outcomes[0][1]["checkpoint_bytes"]


def test_replicas_read_for_themselves_from_a_local_disk(worlds, qwen3):
    outcomes = worlds(4).run(on_ranks.shared_load, str(qwen3), (2, 2), "weighed")
    for _, report in outcomes:
        assert not report["read_once"]
