"""The simulated accelerator itself, and how often the host waits for it."""

import math
from typing import Any

import pytest
import torch
from peft import LoraConfig
from tests.accelerator import checks, simulated, simulation
from tests.accelerator.ranks import simulated_ranks
from tests.accelerator.test_ranks import written
from transformers import LlamaConfig, LlamaForCausalLM, TrainerControl

import shardwise
from shardwise.integrations.agreed_events import AgreedEvents
from shardwise.models.quantization import LocalScales, Packing, product
from shardwise.tensors import Code, Form4

pytestmark = pytest.mark.distributed

WAITS = ("host_waits", "pageable_to_device", "pageable_to_host")


@pytest.fixture(scope="module")
def rank(library):
    """One process with the accelerator."""
    with simulated_ranks(1) as found:
        yield found


BUDGETS = {
    "load": {"host_waits": 12, "pageable_to_device": 0, "pageable_to_host": 2, "pinned_peak": 8 << 20},
    "save": {"host_waits": 22, "pageable_to_device": 0, "pageable_to_host": 0, "pinned_peak": 32 << 20},
    "step": {"host_waits": 2, "pageable_to_device": 1, "pageable_to_host": 0, "pinned_peak": 0},
    "bank pass": {"host_waits": 8, "pageable_to_device": 5, "pageable_to_host": 1, "pinned_peak": 0},
}
"""Of a Llama of two layers, one rank, three tenants. A load's workers wait once for each request at most."""


def test_budgets(rank, tmp_path):
    """Runs first: in a fresh process the peak of pinned memory is that of the call."""
    (found,) = rank.run(checks.costs, written("llama", tmp_path / "llama"), str(tmp_path / "out"))
    over = {
        what: counts for what, counts in found.items() if any(counts[name] > BUDGETS[what][name] for name in counts)
    }
    assert over == {}


def test_who_does_not_wait_reads_poison(rank):
    ((early, late),) = rank.run(simulation.read_too_early)
    assert late == [0, 1, 2, 3]
    assert all(value < -1e8 for value in early)


def test_memory_is_freed_in_the_order_of_its_stream(rank):
    (found,) = rank.run(simulation.freed_too_early, False)
    assert all(map(math.isnan, found))
    assert rank.run(simulation.freed_too_early, True) == [[1, 1, 1, 1]]


def test_counted_waits_and_copies(rank):
    (found,) = rank.run(simulation.counts)
    names = ("pageable_to_device", "pageable_to_host", "pinned_to_device", "pinned_to_host", "async_copies")
    assert [found[name] for name in names] == [1, 1, 1, 1, 2]
    assert found["host_waits"] == 5  # the mask counts twice: its nonzero, and the index
    assert found["pinned_bytes"] == 2048


def test_a_forked_process_cannot_use_it(rank):
    assert rank.run(simulation.use_in_a_fork) == [7]


def waits(counted: dict[str, int]) -> list[int]:
    return [counted[name] for name in WAITS]


def products() -> dict[str, list[int]]:
    """Of a product and its derivative, after a first one of each kind of scales."""
    packed = torch.arange(64, dtype=torch.uint8).view(4, 16).npu()
    plain, codes = (torch.full((4, width), 120, dtype=torch.uint8).npu() for width in (4, 1))
    nested = torch.ones(1).npu(), torch.zeros(1).npu()
    kinds = {
        "plain": (LocalScales(plain), Form4.NF4),
        "nested": (LocalScales(codes, *nested), Form4.NF4),
        "exponents": (LocalScales(codes), Code.E2M1),
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


def test_products_in_four_bits(rank):
    assert rank.run(products) == [{"plain": [0, 0, 0], "nested": [0, 0, 0], "exponents": [0, 0, 0]}]


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


def test_passes_and_steps_of_a_bank(rank):
    """The host waits for the losses, and for the norms of the gradients, whatever the layers, tenants and rows."""
    sizes = [(1, 2, True), (2, 5, True), (2, 5, False)]
    counted = [rank.run(passes, *size)[0] for size in sizes]
    # With torch 2.11 one more copy to the device is from pageable memory, for which the host waits.
    of_pass = [1, 0, 1] if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13) else [2, 1, 1]
    assert counted == [{"pass": of_pass, "steps": [1, 0, 1]}] * 3


def agreements() -> list[int]:
    class OfTwo:
        size = 2
        is_in_train = True

    events = AgreedEvents(lambda *_args, **_others: TrainerControl(), OfTwo(), OfTwo())  # type: ignore[arg-type]
    with simulated.counting() as counted:
        control = events("on_step_end", None, None, TrainerControl())
    assert not control.should_training_stop
    return waits(counted)


def test_agreements_of_the_trainer(rank):
    assert rank.run(agreements) == [[0, 0, 0]]
