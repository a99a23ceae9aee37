"""Memory of a pass, estimated before it runs."""

import copy
import math
from collections.abc import Sequence
from typing import Any, Final

from shardwise.bank.adapter import BankAdapter
from shardwise.bank.adapter_files import outline_lora
from shardwise.bank.passes import SharedBase
from shardwise.fsdp.policies import find_repeated_blocks
from shardwise.fsdp.wrap import ActivationCheckpointing, Recomputed, Sharding, prepare_blocks

_TRACED_ABOVE: Final = 1 / 64
"""Share of the free memory. Activations are 10 to 60 times their lower bound, unless they are computed again."""


def estimate_pass(
    base: SharedBase,
    adapters: Sequence[BankAdapter],
    rows: int,
    tokens: int,
    targets: int,
    width: int,
    free: int | None,
) -> int:
    """Return the bytes that a pass needs on a rank: logits of a chunk, targets, activations, and gathered groups.

    Collective: no.

    Activations are traced on fake tensors if they may be more than the free memory. That takes some seconds for the
    first pass of a length. Otherwise they are a lower bound: 2 bytes for each hidden state of each layer.

    Args:
        base: the base.
        adapters: those with a backward pass, of which the largest is traced. None for a pass without.
        rows: rows of the pass on the rank.
        tokens: their padded length.
        targets: number of their positions with targets.
        width: targets of a position (K), the most of any row, to which the others are padded.
        free: free bytes of the rank. None if unknown.
    """
    config = base.model.config.get_text_config()
    layers, hidden_size = getattr(config, "num_hidden_layers", 1), getattr(config, "hidden_size", 0)
    # Log-softmax in float32, and for the backward pass its gradient and that of the logits. Only then do the hidden
    # states of all layers stay in memory.
    bytes_per_logit, num_stored = (12, layers) if adapters else (6, 1)
    logits = min(targets, base.chunk_positions) * base.vocab_size * bytes_per_logit
    # About 40 bytes for each target: itself (int64), its log probability and gradient, and what a loss takes and
    # computes (float32). Log probabilities are returned for each token.
    selected = width * (40 * targets + 4 * rows * tokens)
    needed = 2 * rows * tokens * hidden_size * num_stored
    if adapters and free is not None and needed > free * _TRACED_ABOVE:
        needed = max(needed, rows * _trace_row(base, max(adapters, key=lambda each: each.flat.numel()), tokens))
    return logits + selected + needed + base.gathered_bytes


def _trace_row(base: SharedBase, adapter: BankAdapter, tokens: int) -> int:
    """Return the bytes of activations of a row of an adapter. 0 if the base cannot run without data."""
    from shardwise.models.activations import trace_activations  # needs a private name of torch to be imported

    # One row is traced, because activations of rows add up. Adapters with one config have equal activations.
    key = adapter.comparable_config, tokens
    if key not in base.activation_bytes:
        lora = copy.copy(adapter.config)
        lora.lora_dropout = 0.0  # masks are computed again, and not kept
        model: Any = outline_lora(base.model, lora, is_new=False).model
        traced_base = model.get_base_model()
        num_recomputed = sum(isinstance(vars(module).get("forward"), Recomputed) for module in base.model.modules())
        try:
            blocks = find_repeated_blocks(traced_base)
            # True is every block, as of the model's own checkpointing. Of Recomputed, every n-th, by their number.
            every: ActivationCheckpointing = any(
                getattr(module, "gradient_checkpointing", False) for module in base.model.modules()
            )
            if num_recomputed:
                every = math.ceil(len(blocks) / num_recomputed)
            prepare_blocks(traced_base, Sharding(activation_checkpointing=every))
            traced = trace_activations(model, traced_base, blocks, (1, tokens), param_dtype=base.model.dtype)
            base.activation_bytes[key] = traced.kept + max(traced.loss, traced.backward)
        except Exception:  # of the model's own code: any
            base.activation_bytes[key] = 0
    return base.activation_bytes[key]
