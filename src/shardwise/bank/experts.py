"""Fused experts with adapters on their stacked weights, without ever making a weight that has one added.

The rows that come to an expert are in the order of their tokens, and so of their tenants: each of them meets its
own tenant's matrices of this expert, as in a linear layer. Sorting comes first, by expert, once for a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from shardwise.bank.backends import SegmentLoop, SitePart, adapt
from shardwise.bank.routing import Route
from shardwise.bank.tenant import expert_site
from shardwise.models import pretrained
from shardwise.models.four_bits.four_bit_experts import weight_of_expert

_UP = ("gate_up_proj", "up_proj")
_KNOWN = (*_UP, "down_proj")


def require_fused_experts(name: str, module: nn.Module, parameter: str) -> str:
    """Why the experts of a module cannot have adapters; "" where they can."""
    experts: Any = module
    if parameter not in _KNOWN or not pretrained.are_fused_experts(module):
        return (
            f"{name}.{parameter}: a parameter of a {type(module).__name__}, and only those of fused experts as "
            "transformers has them (gate_up_proj, up_proj, down_proj) can have adapters; take it out of "
            "target_parameters"
        )
    if getattr(experts, "has_post_expert_norm", False) or pretrained.are_parted_experts(module):
        return f"{name}: experts with norms of their own or on ranks of their own cannot have adapters yet"
    return ""


def adapted_experts(
    route: Route,
    name: str,
    module: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """What the experts of a module give for a micro-batch of many tenants.

    Args:
        route: of the micro-batch.
        name: of the module.
        module: the fused experts; their weights are whole here.
        hidden_states: (rows * tokens, width).
        top_k_index: (rows * tokens, k), the experts of each token.
        top_k_weights: of the same shape, what each counts.

    Returns: (rows * tokens, width).
    """
    route.require_rows(name, hidden_states)
    bounds = [bound * route.tokens for bound in route.bounds()]
    chosen, order = top_k_index.flatten().sort(stable=True)
    tokens = order // top_k_index.shape[1]
    counts = torch.bincount(chosen, minlength=module.num_experts)[: module.num_experts].tolist()
    result = torch.zeros_like(hidden_states)
    start = 0
    up = next(parameter for parameter in _UP if hasattr(module, parameter))
    for expert, count in enumerate(counts):
        own = tokens[start : start + count]
        weights = top_k_weights.flatten()[order[start : start + count]].unsqueeze(1)
        start += count
        if not count:
            continue
        # Tokens of a tenant begin where its first token would be put.
        cuts = torch.searchsorted(own, torch.tensor(bounds, device=own.device)).tolist()
        hidden = _product(route, module, name, up, expert, hidden_states[own], cuts)
        hidden = pretrained.activated(module, hidden)
        hidden = _product(route, module, name, "down_proj", expert, hidden, cuts)
        result = result.index_add(0, own, (hidden * weights).to(result.dtype))
    return route.note(name, adapt(route.anchor, result.detach(), result, [], SegmentLoop()))


def _product(
    route: Route, module: Any, name: str, parameter: str, expert: int, rows: torch.Tensor, cuts: Sequence[int]
) -> torch.Tensor:
    weight = weight_of_expert(module, parameter, expert)
    found = rows @ weight if module.is_transposed else F.linear(rows, weight)
    if module.has_bias:
        found = found + getattr(module, f"{parameter}_bias")[expert]
    parts = [
        SitePart(pair, cuts[number], cuts[number + 1])
        for number, pair in enumerate(route.pairs(expert_site(name, parameter, expert)))
        if pair is not None and cuts[number] < cuts[number + 1]
    ]
    return adapt(route.anchor, rows, found, parts, SegmentLoop()) if parts else found
