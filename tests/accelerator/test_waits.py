"""How often the host waits for a simulated device in steps that repeat, whatever the layers and tenants."""

from typing import Any

import pytest
import torch
from peft import LoraConfig
from tests.accelerator import simulated
from tests.accelerator.ranks import simulated_ranks
from transformers import LlamaConfig, LlamaForCausalLM, TrainerControl

import shardwise
from shardwise.integrations.agreed_events import AgreedEvents
from shardwise.models.quantization import KeptScales, Packing, product
from shardwise.tensors import Code, Form4

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

WAITS = ("host_waits", "pageable_to_device", "pageable_to_host")


@pytest.fixture(scope="module")
def ranks(library):
    with simulated_ranks(1) as found:
        yield found


def waits(counted: dict[str, int]) -> list[int]:
    return [counted[name] for name in WAITS]


def products() -> dict[str, list[int]]:
    """Of a product and its derivative, after a first one of each kind of scales."""
    packed = torch.arange(64, dtype=torch.uint8).view(4, 16).npu()
    plain, codes = (torch.full((4, width), 120, dtype=torch.uint8).npu() for width in (4, 1))
    nested = torch.ones(1).npu(), torch.zeros(1).npu()
    kinds = {
        "plain": (KeptScales(plain), Form4.NF4),
        "nested": (KeptScales(codes, *nested), Form4.NF4),
        "exponents": (KeptScales(codes), Code.E2M1),
    }
    found = {}
    for name, (scales, form) in kinds.items():
        packing = Packing(form, 32, torch.bfloat16)
        for _ in range(2):
            rows = torch.ones(3, 32, dtype=torch.bfloat16, device="npu", requires_grad=True)
            with simulated.counting() as counted:
                made = product(rows, packed, scales, None, packing)
                made.backward(torch.ones_like(made))
        found[name] = waits(counted)
    return found


def test_products_in_four_bits(ranks):
    assert ranks.run(products) == [{"plain": [0, 0, 0], "nested": [0, 0, 0], "exponents": [0, 0, 0]}]


def passes(layers: int, tenants: int, alike: bool) -> dict[str, list[int]]:
    """Of a pass and the steps of all tenants, with dropout."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    shardwise.shard(model)
    bank = shardwise.AdapterBank(model)
    lora = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1)
    for number in range(tenants):
        bank.add_adapter(f"{number}", lora, max_grad_norm=0.1)
    rows: list[tuple[str, Any]] = [
        (name, {"input_ids": torch.ones(2 if alike else 1 + number % 3, 9, dtype=torch.int64)})
        for number, name in enumerate(bank.names)
    ]
    for _ in range(2):
        with simulated.counting() as passed:
            bank.forward_backward(rows)
        with simulated.counting() as stepped:
            bank.optim_steps(bank.names)
    return {"pass": waits(passed), "steps": waits(stepped)}


@pytest.mark.parametrize("alike", [True, False])
def test_passes_and_steps_of_a_bank(ranks, alike):
    """The host waits for the losses, and for the norms of the gradients."""
    found = [ranks.run(passes, layers, tenants, alike)[0] for layers, tenants in ((1, 2), (2, 5))]
    assert found == [{"pass": [1, 0, 1], "steps": [1, 0, 1]}] * 2


def agreements() -> list[int]:
    class OfTwo:
        size = 2
        is_in_train = True

    events = AgreedEvents(lambda *_args, **_others: TrainerControl(), OfTwo(), OfTwo())  # type: ignore[arg-type]
    with simulated.counting() as counted:
        control = events("on_step_end", None, None, TrainerControl())
    assert not control.should_training_stop
    return waits(counted)


def test_agreements_of_the_trainer(ranks):
    assert ranks.run(agreements) == [[0, 0, 0]]
