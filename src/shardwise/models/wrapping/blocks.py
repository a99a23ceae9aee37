"""What is done to the forward pass of a model's blocks: recomputed in the backward pass, or compiled.

[Note: A block's forward] Both replace ``forward`` on the block itself, so no module is put around it: names,
classes and what looks at them (wrap policies, conversions, a state dict) are as before. ``fully_shard`` works by
hooks around ``forward``, whichever comes first: a block is gathered, then run. In the backward pass FSDP2 gathers a
block before the first of its saved tensors is asked for, so the recomputation finds its parameters whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import Cache

from shardwise.errors import ConfigError
from shardwise.models.view import canonical


@dataclass(frozen=True, slots=True)
class Off:
    """Blocks are run as they are."""


@dataclass(frozen=True, slots=True)
class PerBlock:
    """Activations of a block are not kept but computed again in the backward pass, from the block's input.

    The gradient is the same to the bit, dropout included: the random state of the first pass is restored for the
    second. Under a block that is not ``every``-th, counted from the first, activations are kept.
    """

    every: int = 1

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError(f"every={self.every}: activations are recomputed for each block (1), or each n-th")


ActivationCheckpointing: TypeAlias = PerBlock | Off


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileBlocks:
    """Every block is compiled by ``torch.compile``, once for all that are alike; nothing around blocks is.

    Attributes are those of ``torch.compile``.
    """

    backend: str = "inductor"
    mode: str | None = None
    fullgraph: bool = False
    dynamic: bool | None = None


Compiling: TypeAlias = CompileBlocks | Off


def require_unprepared(model: nn.Module, names: Sequence[str], recomputing: ActivationCheckpointing) -> None:
    """Refuse blocks that would be recomputed twice, or are prepared already.

    Raises:
        ConfigError: naming the first.
    """
    if isinstance(recomputing, PerBlock):
        for name, module in model.named_modules():
            if getattr(module, "gradient_checkpointing", False):
                raise ConfigError(_twice(canonical(name) or type(model).__name__))
    for name in names:
        if isinstance(vars(model.get_submodule(name)).get("forward"), (Compiled, Recomputed)):
            raise ConfigError(f"{canonical(name)} is recomputed or compiled already; prepare a model's blocks once")


def prepare_blocks(
    model: nn.Module, names: Sequence[str], recomputing: ActivationCheckpointing, compiling: Compiling
) -> None:
    """Recompute or compile the blocks of these names, which :func:`require_unprepared` has looked at."""
    for index, name in enumerate(names):
        block = model.get_submodule(name)
        if isinstance(compiling, CompileBlocks):
            _set_forward(block, Compiled(block.forward, compiling))
        if isinstance(recomputing, PerBlock) and index % recomputing.every == 0:
            _set_forward(block, Recomputed(block, block.forward, canonical(name)))


class Recomputed:
    """The forward pass of a block, of which only the input is kept for the backward pass."""

    def __init__(self, block: nn.Module, forward: Callable[..., Any], name: str) -> None:
        self.block = block
        self.forward = forward
        self.name = name
        functools.update_wrapper(self, forward)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **keywords)
        if self.block.training and getattr(self.block, "gradient_checkpointing", False):
            raise ConfigError(_twice(self.name))
        args = tuple(self._without_cache(value) for value in args)
        keywords = {key: self._without_cache(value) for key, value in keywords.items()}
        if "use_cache" in keywords:
            keywords["use_cache"] = False
        # Keywords go as an argument: torch looks in arguments alone for devices whose random state is to be kept.
        return checkpoint(self._run, keywords, *args, use_reentrant=False, preserve_rng_state=True)

    def _run(self, keywords: dict[str, Any], *args: Any) -> Any:
        return self.forward(*args, **keywords)

    def _without_cache(self, value: Any) -> Any:
        """None for a cache: the second pass would write its keys and values to it once more.

        transformers makes an empty one for each forward pass unless it is told ``use_cache=False``.
        """
        if not isinstance(value, Cache):
            return value
        if value.get_seq_length():
            raise ConfigError(
                f"{self.name}: a cache that holds {value.get_seq_length()} tokens cannot be used where activations "
                "are recomputed; load the model with activation_checkpointing=Off(), or run it under no_grad"
            )
        return None


class Compiled:
    """The forward pass of a block, compiled when it is first called."""

    def __init__(self, forward: Callable[..., Any], options: CompileBlocks) -> None:
        self.forward = forward
        self.options = options
        self.compiled: Callable[..., Any] | None = None
        functools.update_wrapper(self, forward)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        if self.compiled is None:
            self.compiled = torch.compile(
                self.forward,
                backend=self.options.backend,
                mode=self.options.mode,
                fullgraph=self.options.fullgraph,
                dynamic=self.options.dynamic,
            )
        return self.compiled(*args, **keywords)

    def __getstate__(self) -> dict[str, Any]:
        """Without what is compiled, which a copy of the model would share with the model it was copied from."""
        return {**vars(self), "compiled": None}


def _set_forward(block: nn.Module, forward: Callable[..., Any]) -> None:
    block.forward = forward


def _twice(name: str) -> str:
    return (
        f"{name} recomputes activations by itself (its gradient_checkpointing is on), and would once more by "
        "activation_checkpointing=PerBlock(); take one: turn the model's own off, or pass Off()"
    )
