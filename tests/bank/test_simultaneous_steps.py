"""Steps of several adapters at once are bit for bit those of one after the other."""

import math
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from peft import LoraConfig
from tests.bank.banking import WORDS, falling
from tests.truth import require_equal
from transformers import LlamaConfig, LlamaForCausalLM

import shardwise
from shardwise.bank import adapter, optimizer_steps
from shardwise.core.errors import ConfigError


def bank_of(kinds: list[type[torch.optim.Optimizer]]) -> shardwise.AdapterBank:
    """Two adapters for each optimizer, of which the first has a schedule; some are clipped."""
    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    bank = shardwise.AdapterBank(
        LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1))
    )
    for number, kind in enumerate(each for each in kinds for _ in range(2)):
        keywords: adapter.AdapterOptions | dict = {
            "optimizer": lambda own, kind=kind: kind(own, lr=1e-2),
            "max_grad_norm": math.inf if number % 3 else 0.1,
            "gradient_accumulation_steps": 1,
            "seed": number,
            **({} if number % 2 else {"schedule": falling}),
        }
        bank.add_adapter(f"{number}", LoraConfig(r=4, target_modules=["q_proj", "down_proj"]), **keywords)
    return bank


def micro_batch(bank: shardwise.AdapterBank, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    bank.forward_backward(
        [
            (name, {"input_ids": torch.randint(0, WORDS, (1 + place % 2, 9), generator=generator)})
            for place, name in enumerate(bank.names)
        ]
    )


def require_same_state(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert repr(found["facts"]) == repr(expected["facts"])
    for part in ("adapter", "training"):
        require_equal(found[part], expected[part])


def test_the_same_bits_by_every_optimizer() -> None:
    one, other = bank_of([*adapter._ELEMENTWISE]), bank_of([*adapter._ELEMENTWISE])
    for number in range(3):
        micro_batch(one, number)
        micro_batch(other, number)
        for bank in (one, other):
            bank._adapters["2"].gradient[number:].fill_(math.nan if number == 1 else 0.5)
        together = one.optim_step({name: {} for name in one.names})
        alone = {name: other.optim_step(name) for name in other.names}
        assert repr(together) == repr(alone)
        assert together["2"].is_taken == (number != 1)
    for name in one.names:
        require_same_state(one.state_dict(name), other.state_dict(name))


def test_none_steps_when_one_cannot() -> None:
    bank = bank_of([torch.optim.SGD])
    micro_batch(bank, 0)
    bank.optim_step("1")
    with pytest.raises(ConfigError, match="adapter '1': has accumulated 0 of 1 micro-batches"):
        bank.optim_step({"0": {}, "1": {}})
    assert bank.optim_step("0").is_taken
    assert bank.optim_step({}) == {}


@pytest.mark.parametrize("part", ["schedule", "optimizer"])
def test_a_step_that_fails_changes_no_other_adapter(part: str) -> None:
    one, other = bank_of([torch.optim.AdamW]), bank_of([torch.optim.AdamW])
    for bank in (one, other):
        bank.delete_adapter("0")
        bank.add_adapter("failing", LoraConfig(r=4, target_modules=["q_proj"]), schedule=falling)
        micro_batch(bank, 0)
        bank.optim_step({"failing": {}, "1": {}})
        micro_batch(bank, 1)
    before = one.state_dict("failing")
    own, error = getattr(one._adapters["failing"], part), ValueError("no such step")
    with mock.patch.object(own, "step", side_effect=error), pytest.raises(shardwise.ShardwiseError, match="such"):
        one.optim_step({"failing": {}, "1": {}})
    other.optim_step({"failing": {}, "1": {}})
    with pytest.raises(ConfigError, match="'failing': a step failed, ValueError: no such step"):
        micro_batch(one, 2)
    one.load_state_dict("failing", before)
    for bank in (one, other):
        bank.delete_adapter("failing")
        micro_batch(bank, 2)
        bank.optim_step("1")
    require_same_state(one.state_dict("1"), other.state_dict("1"))


def test_learning_rates_that_are_tensors_are_told_apart():
    rates = [torch.tensor(0.1), torch.tensor(0.100001)]
    weights = [torch.zeros(2, requires_grad=True) for _ in rates]
    for weight in weights:
        weight.grad = torch.ones(2)
    made = [torch.optim.SGD([weight], lr=rate) for weight, rate in zip(weights, rates, strict=True)]
    optimizer_steps._step_optimizers(
        [SimpleNamespace(optimizer=each, settings=each.param_groups[0]) for each in made]
    )
    assert [float(weight.detach()[0]) for weight in weights] == [-float(rate) for rate in rates]
