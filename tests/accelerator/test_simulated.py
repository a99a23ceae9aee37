"""The simulated accelerator itself, and how often the host waits for it."""

import math
import os
from typing import Any
from unittest import mock

import pytest
import torch
from peft import LoraConfig
from tests.accelerator import checks, simulated
from tests.accelerator.ranks import simulated_ranks
from tests.accelerator.test_ranks import written
from transformers import LlamaConfig, LlamaForCausalLM, TrainerControl

import shardwise
from shardwise.bank.sampling import Sample
from shardwise.core.tensors import Code, Form4
from shardwise.integrations.agreed_events import AgreedEvents
from shardwise.models.four_bit.config import LocalScales, Packing, product

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
}
"""Of a Llama of two layers, one rank. A load's workers wait once for each request at most."""


def test_budgets(rank, tmp_path):
    """Runs first: in a fresh process the peak of pinned memory is that of the call."""
    (found,) = rank.run(checks.costs, written("llama", tmp_path / "llama"), str(tmp_path / "out"))
    over = {
        what: counts for what, counts in found.items() if any(counts[name] > BUDGETS[what][name] for name in counts)
    }
    assert over == {}


def read_too_early() -> tuple[list[float], list[float]]:
    """Values that another stream brings: read without a wait, and after one."""
    host = torch.arange(4.0).pin_memory()
    device = torch.empty(4, device="npu")
    side = torch.npu.Stream()
    with torch.npu.stream(side), simulated.paused():
        device.copy_(host, non_blocking=True)
        with torch.npu.stream(torch.npu.default_stream()):
            early = device.tolist()
    torch.npu.current_stream().wait_stream(side)
    return early, device.tolist()


def test_who_does_not_wait_reads_poison(rank):
    ((early, late),) = rank.run(read_too_early)
    assert late == [0, 1, 2, 3]
    assert all(value < -1e8 for value in early)


def freed_too_early(is_recorded: bool) -> list[float]:
    """What another stream copies of memory that is freed meanwhile."""
    source, target = torch.ones(4, device="npu"), torch.zeros(4, device="npu")
    torch.npu.synchronize()
    side = torch.npu.Stream()
    with torch.npu.stream(side), simulated.paused():
        target.copy_(source)
        if is_recorded:
            source.record_stream(side)
        del source
        torch.npu.default_stream().synchronize()  # in whose order it is freed
    side.synchronize()
    values: list[float] = target.tolist()
    return values


def test_memory_is_freed_in_the_order_of_its_stream(rank):
    (found,) = rank.run(freed_too_early, False)
    assert all(map(math.isnan, found))
    assert rank.run(freed_too_early, True) == [[1, 1, 1, 1]]


def counts() -> dict[str, int]:
    """Of a copy of each kind, one wait, and a mask, whose shape the host must know."""
    pinned, pageable = torch.ones(1000, dtype=torch.uint8).pin_memory(), torch.ones(8)
    device = torch.ones(8, device="npu")
    torch.npu.synchronize()
    with simulated.counting() as found:
        device.copy_(pageable)
        small = torch.empty(1000, dtype=torch.uint8, device="npu")
        small.copy_(pinned, non_blocking=True)
        pinned.copy_(small, non_blocking=True)
        torch.npu.synchronize()
        device[device > 0]
        device.cpu()
        held = torch.empty(1025, dtype=torch.uint8, pin_memory=True)
    assert held.is_pinned()
    return found


def test_counted_waits_and_copies(rank):
    (found,) = rank.run(counts)
    names = ("pageable_to_device", "pageable_to_host", "pinned_to_device", "pinned_to_host", "async_copies")
    assert [found[name] for name in names] == [1, 1, 1, 1, 2]
    assert found["host_waits"] == 5  # the mask counts twice: its nonzero, and the index
    assert found["pinned_bytes"] == 2048


def use_in_a_fork() -> int:
    """The exit status of a process that is forked from this one and uses the device: 7 where it is refused."""
    torch.ones(1, device="npu")
    child = os.fork()
    if child == 0:
        try:
            torch.ones(1, device="npu")
        except RuntimeError as error:
            os._exit(7 if "forked" in str(error) and torch.npu._is_in_bad_fork() else 1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_process_cannot_use_it(rank):
    assert rank.run(use_in_a_fork) == [7]


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


def small_llama(layers: int) -> Any:
    """On the device, sharded."""
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
    return model


def passes(layers: int, tenants: int, alike: bool) -> dict[str, list[int]]:
    """Of a pass and the steps of all tenants, with dropout."""
    bank = shardwise.AdapterBank(small_llama(layers))
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
            bank.optim_step({name: {} for name in bank.names})
    return {"pass": waits(passed), "steps": waits(stepped)}


def test_passes_and_steps_of_a_bank(rank):
    """The host waits for the losses, and for the norms of the gradients, whatever the layers, tenants and rows."""
    sizes = [(1, 2, True), (2, 5, True), (2, 5, False)]
    counted = [rank.run(passes, *size)[0] for size in sizes]
    # With torch 2.11 one more copy to the device is from pageable memory, for which the host waits.
    of_pass = [1, 0, 1] if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13) else [2, 1, 1]
    assert counted == [{"pass": of_pass, "steps": [1, 0, 1]}] * 3


def offloaded() -> dict[str, Any]:
    """An adapter whose values are on the host for a while: it takes the next step as one that never was there."""
    bank = shardwise.AdapterBank(small_llama(1))
    rows = {"input_ids": torch.arange(18).view(2, 9)}
    with torch.device("npu"):  # as the default of a caller
        for name in ("ada", "twin"):
            bank.add_adapter(name, LoraConfig(r=4, target_modules=["q_proj"]))
        sizes, copied, pinned = [], [], 0
        for number in range(3):
            bank.forward_backward([("ada", rows), ("twin", rows)])
            if number < 2:
                bank.optim_step({"ada": {}, "twin": {}})
            ada = bank._adapters["ada"]
            short = mock.patch("shardwise.bank.adapter.host_memory", return_value=0)
            with short, pytest.raises(shardwise.TrainingError, match="'ada': needs .* of host memory"):
                bank.offload("ada")
            assert all(each.untyped_storage().nbytes() for each in (ada.flat, ada.gradient))
            with simulated.counting() as counted:
                bank.offload("ada")
            sizes += [each.untyped_storage().nbytes() for each in (ada.flat, ada.gradient)]
            copied.append(counted["pageable_to_host"])
            pinned += counted["pinned_bytes"]
        bank.optim_step({"ada": {}, "twin": {}})
        states = [bank.state_dict(name) for name in ("ada", "twin")]
    same = [
        all(values.equal(states[1][part][key]) for key, values in states[0][part].items())
        for part in ("adapter", "training")
    ]
    return {"sizes": sizes, "copied": copied, "pinned": pinned, "device": ada.flat.device.type, "same": same}


def test_an_adapter_on_the_host_has_no_memory_on_the_device(rank):
    """Matrices and two moments are copied, and the gradient of an open window. None of it is pinned."""
    found = {"sizes": [0] * 6, "copied": [3, 3, 4], "pinned": 0, "device": "npu", "same": [True, True]}
    assert rank.run(offloaded) == [found]


def scores() -> list[str]:
    """Devices of the log probabilities of a prompt, which a server sends to other ranks."""
    bank = shardwise.AdapterBank(small_llama(1))
    sample = Sample(None, [1, 2, 3], max_tokens=2, prompt_logprobs=True, top_prompt_logprobs=2)
    [output] = bank.generate([sample])
    assert output.prompt_logprobs is not None
    assert output.top_prompt_logprobs is not None
    return [each.device.type for each in (output.prompt_logprobs, *output.top_prompt_logprobs)]


def test_log_probabilities_of_prompts_are_on_the_host(rank):
    assert rank.run(scores) == [["cpu", "cpu", "cpu"]]


def agreements() -> list[int]:
    class OfTwo:
        size = 2
        is_in_train = True
        is_stop_requested = False
        model = torch.nn.Module()

    events = AgreedEvents(lambda *_args, **_others: TrainerControl(), OfTwo())
    events.world = OfTwo()  # type: ignore[assignment]
    with simulated.counting() as counted:
        control = events("on_step_end", None, None, TrainerControl())
    assert not control.should_training_stop
    return waits(counted)


def test_agreements_of_the_trainer(rank):
    assert rank.run(agreements) == [[0, 0, 0]]
