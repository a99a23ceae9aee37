"""What ``plan`` foresees of a bank is what one takes, counted in bytes of tensors."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from click.testing import CliRunner
from peft import LoraConfig
from tests import zoo
from tests.bank import banking
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, Qwen3Config

import shardwise
from shardwise.bank import backends
from shardwise.bank.backends import GroupedAlways
from shardwise.cli import main
from shardwise.errors import ConfigError

WORDS, ROWS, TOKENS = 8192, 4, 64
RANKS = (3, 4, 8, 30, 32)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of many words, so that logits are most of a pass."""
    folder = tmp_path_factory.mktemp("base")
    config = Qwen3Config(**{**banking.SIZES, "vocab_size": WORDS}, tie_word_embeddings=True)
    with zoo.silenced():
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def lora(rank: int, targets: Any = "all-linear") -> LoraConfig:
    return LoraConfig(r=rank, target_modules=targets)


def bytes_in_tensors() -> int:
    """Of all tensors of this process, each storage once."""
    gc.collect()
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in gc.get_objects()
        if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type == "cpu"
    }
    return sum(storages.values())


def rows(number: int) -> tuple[str, dict[str, torch.Tensor]]:
    return f"t{number}", {"input_ids": torch.arange(ROWS * TOKENS).view(ROWS, TOKENS)}


def test_tenants_take_16_bytes_for_each_number(base):
    """Float32, gradients and two moments; also of embeddings, and of layers that have other shapes."""
    configs = [*(lora(rank) for rank in RANKS), lora(8, ["embed_tokens", "lm_head"]), lora(5, ["down_proj"])]
    plan = shardwise.plan(base, ranks=1, device="cpu", tenants=[shardwise.Lora(config) for config in configs])
    bank = shardwise.AdapterBank(shardwise.from_pretrained(base))
    before = bytes_in_tensors()
    for number, config in enumerate(configs):
        bank.create(f"t{number}", config)
    for number in range(len(configs)):
        bank.forward_backward([rows(number)])
        bank.optim_step(f"t{number}")
    taken = bytes_in_tensors() - before
    assert taken == pytest.approx(plan.bank[0].tenant_bytes, rel=0.05)
    assert plan.bank[0].trained == tuple(bank.trained_counts().values())
    weights = sum(values.nbytes for values in bank._model.parameters())
    assert plan.bank[0].weight_bytes == pytest.approx(weights, rel=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_grouped_products_pack(base, dtype):
    """The most that one layer packs at a time, of tenants whose ranks are alike once padded."""
    tenants = [shardwise.Lora(lora(rank)) for rank in RANKS]
    plan = shardwise.plan(base, ranks=1, device="cpu", dtype=str(dtype).removeprefix("torch."), tenants=tenants)
    bank = shardwise.AdapterBank(shardwise.from_pretrained(base, dtype=dtype), backend=GroupedAlways())
    for number, tenant in enumerate(tenants):
        bank.create(f"t{number}", tenant.config)
    packed: list[int] = []
    own = backends._packed

    def look(*arguments: Any) -> Any:
        found = own(*arguments)
        packed.append(sum(values.nbytes for values in found))
        return found

    with mock.patch.object(backends, "_packed", look):
        bank.forward_backward([rows(number) for number in range(len(tenants))])
    assert max(packed) == pytest.approx(plan.bank[0].packed_bytes, rel=0.05)
    alone = shardwise.plan(base, ranks=1, device="cpu", tenants=tenants[:1])
    assert alone.bank[0].packed_bytes == 0


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events at the end of each cycle")  # torch 2.11
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_a_pass(base, dtype):
    plan = shardwise.plan(
        base,
        ranks=1,
        device="cpu",
        tenants=[shardwise.Lora(lora(4))],
        tokens_per_pass=ROWS * TOKENS,
        dtype=str(dtype).removeprefix("torch."),
    )
    bank = shardwise.AdapterBank(shardwise.from_pretrained(base, dtype=dtype))
    bank.create("t0", lora(4))
    bank.forward_backward([rows(0)])
    bank.optim_step("t0")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        bank.forward_backward([rows(0)])
    most = now = 0
    for event in sorted(seen.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    assert most == pytest.approx(plan.bank[0].logits_bytes, rel=0.05)


def test_ranks_hold_their_shards_and_whole_tenants(base):
    tenants = [shardwise.Lora(lora(8))] * 3
    one, *_ = shardwise.plan(base, ranks=1, tenants=tenants).bank
    four = shardwise.plan(base, ranks=4, tenants=tenants)
    assert [rank.rank for rank in four.bank] == [0, 1, 2, 3]
    for rank, load in zip(four.bank, four.ranks, strict=True):
        assert rank.tenant_bytes == one.tenant_bytes
        assert rank.weight_bytes == load.padded_bytes < one.weight_bytes
        assert rank.gathered_bytes == four.largest_group.gathered_bytes
        parts = rank.weight_bytes, rank.tenant_bytes, rank.gathered_bytes, rank.packed_bytes, rank.logits_bytes
        assert rank.total_bytes == sum(parts)
    assert one.gathered_bytes == 0
    assert four.training == ()
    assert four.trainable_parameters == shardwise.plan(base, ranks=4).trainable_parameters


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"tenants": []}, "a bank that is planned has one or more"),
        ({"tenants": [shardwise.Lora(lora(4, ["q_prj"]))]}, "nothing is named 'q_prj'"),
        ({"tenants": [shardwise.Lora(lora(4))], "tuning": shardwise.Full()}, "leave out tuning"),
        ({"tenants": [shardwise.Lora(lora(4))], "tokens_per_pass": 0}, "tokens_per_pass=0: a pass has one token"),
    ],
)
def test_tenants_that_cannot_be(base, options, match):
    with pytest.raises(ConfigError, match=match):
        shardwise.plan(base, ranks=2, **options)


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(main, ["plan", *arguments])


def test_the_command(base):
    given = (str(base), "--ranks", "2", "--tenants", "8", "--tokens-per-pass", "512")
    told = invoke(*given, "--rank", "16")
    assert told.exit_code == 0, told.output
    trained = 2 * 16 * (32 + 32 + 2 * (32 + 16) + 32 + 32 + 3 * (32 + 48))
    assert f"tenants     8, each training {trained:,} numbers: " in told.output
    assert "and for a pass largest group" in told.output
    assert "logits of 512 tokens 48.00 MiB" in told.output
    found = json.loads(invoke(*given, "--tuning", "lora=16,targets=q_proj+v_proj", "--json").stdout)
    assert found["bank"][1]["trained"] == [2 * 16 * (32 + 32 + 32 + 16)] * 8
    for more, match in (
        ((), "either --rank R, or --tuning"),
        (("--rank", "4", "--tuning", "lora=4"), "either --rank R, or --tuning"),
        (("--tuning", "full"), "tenants are LoRAs"),
    ):
        refused = invoke(*given, *more)
        assert refused.exit_code == 2
        assert match in refused.output
    assert "--rank is of tenants" in invoke(str(base), "--ranks", "2", "--rank", "4").output
