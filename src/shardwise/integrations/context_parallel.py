"""Checks of models and inputs under accelerate's context parallelism.

Within ``maybe_context_parallel`` each rank has a chunk of every sequence, and torch replaces
``scaled_dot_product_attention``. Positions and labels that a model makes by itself are then those of the chunk, and
other attentions see the chunk alone: the loss is wrong, without an error.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn

from shardwise.core.errors import ConfigError
from shardwise.fsdp.named_tensors import unwrap
from shardwise.models.pretrained import get_attention_implementation, outermost_pretrained


class SplitSequences:
    """accelerate's context for split sequences, and a hook that refuses a model's inputs while it is entered.

    Args:
        split: a function that returns the context.
    """

    def __init__(self, split: Callable[..., AbstractContextManager[None]]) -> None:
        self._split = split
        self._is_entered = False

    @contextmanager
    def __call__(self, **buffers: Any) -> Iterator[None]:
        with self._split(**buffers):
            self._is_entered = True
            try:
                yield
            finally:
                self._is_entered = False

    def require_inputs(self, model: nn.Module, _args: Any, inputs: dict[str, Any]) -> None:
        """Refuse inputs that the model would complete from its part of the sequence.

        Raises:
            ConfigError: naming the input.
        """
        if not self._is_entered:
            return
        needed: list[str] = []
        # A model that takes positions would count those of each part from 0.
        if "position_ids" in inspect.signature(type(model).forward).parameters:
            needed.append("position_ids")
        # It would shift labels within a part, where the target of the last token is on another rank.
        if inputs.get("labels") is not None:
            needed.append("shift_labels")
        if missing := [name for name in needed if inputs.get(name) is None]:
            raise ConfigError(
                f"{type(model).__name__} without {' and '.join(missing)}: it would make them from this rank's "
                "part of the sequence. Make them from whole sequences, add them to the buffers of "
                "maybe_context_parallel, and pass them to the model"
            )


def require_split(model: nn.Module, split: SplitSequences) -> None:
    """Check a model's attention now, and its inputs whenever the context is entered.

    Raises:
        ConfigError: the attention is not torch's ``scaled_dot_product_attention``.
    """
    require_sdpa(model)
    for _, inner in outermost_pretrained(unwrap(model)):
        inner.register_forward_pre_hook(split.require_inputs, with_kwargs=True)


def require_sdpa(model: nn.Module) -> None:
    """Check a model's attention.

    Raises:
        ConfigError: it is not torch's ``scaled_dot_product_attention``.
    """
    for _, inner in outermost_pretrained(unwrap(model)):
        attention = get_attention_implementation(inner)
        if attention != "sdpa":
            raise ConfigError(
                f"{type(inner).__name__} with attn_implementation={attention!r}: under context parallelism every "
                "rank would attend to its own part of a sequence only. Load it with attn_implementation='sdpa'"
            )
