"""Functions that ranks run in tests of kernels: libraries that are not installed, restated by what they patch."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType, ModuleType
from typing import Any
from unittest import mock

import torch
import transformers
from peft import LoraConfig
from tests.loading import on_ranks
from torch import nn
from torch.distributed.fsdp import FSDPModule

import shardwise
from shardwise.models import kernels
from shardwise.models.four_bit.layers import are_fused_experts

NORMS = ("Qwen3RMSNorm", "LlamaRMSNorm")


def scaled(norm: Any, hidden: torch.Tensor) -> torch.Tensor:
    """A norm as Liger's: a function of the module's own weight."""
    norm.calls = getattr(norm, "calls", 0) + 1
    mean = hidden.pow(2).mean(-1, keepdim=True)
    return norm.weight * (hidden * torch.rsqrt(mean + norm.variance_epsilon))


@contextmanager
def liger(calls: list[dict[str, Any]]) -> Iterator[None]:
    """Liger's function for a model that exists, which patches its norms. It notes what it has found."""

    def apply(model: nn.Module, **config: Any) -> None:
        patched = [name for name, module in model.named_modules() if type(module).__name__ in NORMS]
        for module in filter(are_fused_experts, model.modules()):
            module.forward = MethodType(scaled, module)
        for name in patched:
            norm = model.get_submodule(name)
            norm.forward = MethodType(scaled, norm)
        calls.append(
            {
                "class": type(model).__name__,
                "config": config,
                "patched": patched,
                "plain": all(type(item) is nn.Parameter and item.is_meta for item in model.parameters()),
                "sharded": any(isinstance(module, FSDPModule) for module in model.modules()),
                "adapted": [name for name, _ in model.named_parameters() if "lora" in name],
            }
        )

    module = ModuleType("liger_kernel.transformers")
    module._apply_liger_kernel_to_instance = apply  # type: ignore[attr-defined]
    modules = {"liger_kernel": ModuleType("liger_kernel"), "liger_kernel.transformers": module}
    available = mock.patch.object(
        sys.modules["transformers.integrations.liger"], "is_liger_kernel_available", return_value=True
    )
    with mock.patch.dict(sys.modules, modules), available:
        yield


def with_liger(folder: str, recomputes: bool) -> dict[str, Any]:
    """What Liger's function has found, how often its norms have run, and gradients that are others without."""
    calls: list[dict[str, Any]] = []
    keywords: dict[str, Any] = {
        "dtype": "float32",
        "tuning": shardwise.Lora(LoraConfig(target_modules=["q_proj"], r=2)),
        "sharding": shardwise.Sharding(activation_checkpointing=recomputes),
    }
    with liger(calls):
        model = shardwise.from_pretrained(folder, **keywords, liger_kernel_config={"rope": False})
    tokens = on_ranks.batch(model.config.vocab_size, rows=2, seed=0)
    found = on_ranks.loss_and_gradients(model, tokens)
    expected = on_ranks.loss_and_gradients(shardwise.from_pretrained(folder, **keywords), tokens)
    differing = [name for name, value in expected.items() if not torch.allclose(found[name], value, atol=1e-6)]
    runs = {module.calls for module in model.modules() if type(module).__name__ in NORMS}
    return {"calls": calls, "differing": differing, "keys": len(expected), "runs": sorted(runs)}


@contextmanager
def hub_kernels(found: list[Any]) -> Iterator[None]:
    """transformers' function for kernels of the hub, as if they were there: class, argument and device."""

    def note(model: Any, use_kernels: bool, *_: Any) -> None:
        weight = next(model.parameters())
        found.append((type(model).__bases__[-1].__name__, use_kernels, weight.device.type))

    with (
        mock.patch.object(kernels, "is_kernels_available", return_value=True),
        mock.patch.object(transformers.PreTrainedModel, "set_use_kernels", note),
    ):
        yield


def with_hub_kernels(folder: str) -> list[Any]:
    """What transformers' function is called with, without the keyword and then with it."""
    found: list[Any] = []
    with hub_kernels(found):
        shardwise.from_pretrained(folder, tuning=shardwise.Lora(LoraConfig(target_modules=["q_proj"], r=2)))
        before = list(found)
        shardwise.from_pretrained(folder, use_kernels=True)
    return [before, found]


def compiled(folder: str, keywords: dict[str, Any], recomputes: bool, own: bool) -> dict[str, Any]:
    """Losses of steps on other lengths with compiled blocks and without, names of tensors, and compiled frames."""
    losses: dict[str, list[float]] = {}
    names: dict[str, list[str]] = {}
    for kind in (False, {"backend": "aot_eager"}):
        sharding = shardwise.Sharding(activation_checkpointing=recomputes, compile=kind)
        model = shardwise.from_pretrained(folder, dtype="float32", sharding=sharding, **keywords)
        if own:
            model.gradient_checkpointing_enable()
        losses[str(bool(kind))] = [*_steps(model.train())]
        names[str(bool(kind))] = [*model.state_dict()]
    frames = torch._dynamo.utils.counters["frames"]["ok"]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return {"losses": losses, "names": names, "frames": frames}


def _steps(model: Any) -> Iterator[float]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    for step, length in enumerate((8, 12, 7)):
        torch.manual_seed(step)
        tokens = torch.randint(0, model.config.vocab_size, (2, length))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()
