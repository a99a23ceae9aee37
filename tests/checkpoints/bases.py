"""Functions that ranks run in tests of the base of an adapter."""

from typing import Any

import torch
from peft import LoraConfig
from tests.loading.on_ranks import attempt

import shardwise
from shardwise import Checkpointer, TrainState
from shardwise.options import AdapterOnly, Ignore, Nf4


def tuned(folder: str, quantization: Any = None, dtype: torch.dtype = torch.float32) -> Any:
    config = LoraConfig(r=2, target_modules=["q_proj", "up_proj"])
    return shardwise.from_pretrained(folder, tuning=shardwise.Lora(config), quantization=quantization, dtype=dtype)


QUANTIZATIONS = {"nf4": Nf4(block_size=32), "nested nf4": Nf4(block_size=32, double_quant=True)}


def save(base: str, run: str, how: str = "") -> None:
    model = tuned(base, QUANTIZATIONS.get(how))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    Checkpointer(run, only=AdapterOnly()).save(1, TrainState(model, optimizer))


def restore(base: str, run: str, how: str = "", only: tuple[str, ...] | None = None) -> Any:
    """The report's line; or the error, and whether the adapter is as it was."""
    dtype = torch.bfloat16 if how == "bfloat16" else torch.float32
    model = tuned(base, QUANTIZATIONS.get(how), dtype)
    trained = [p for p in model.parameters() if p.requires_grad]
    for parameter in trained:
        torch.nn.init.ones_(parameter)
    state = TrainState(model, torch.optim.AdamW(trained, lr=0.01))
    checkpointer = Checkpointer(run, only=AdapterOnly())
    if only is not None:
        report = checkpointer.restore(state, on_other_base=Ignore(only=only))
        return report.base
    found: list[Any] = []
    kind, text = attempt(lambda: found.append(checkpointer.restore(state)))
    if found:
        assert f"base: {found[0].base}" in str(found[0])
        return found[0].base
    assert all(bool((p == 1).all()) for p in trained), "nothing was placed"
    return kind, text
