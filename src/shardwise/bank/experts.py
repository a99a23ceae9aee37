"""Adapters on fused experts, by few grouped products.

Rows whose adapter has no matrices on the experts go through the module's own forward function. Others are sorted
by (expert, adapter). Their products with the base are one grouped product, with a group for each expert, and those
with the adapters two, with a group for each pair of expert and adapter. Groups end at the last row, since a grouped
product leaves rows after the last group as they were in memory.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.bank.adapter import LoraWeights
from shardwise.bank.kernels import SegmentLoop, adapt
from shardwise.bank.routes import AdapterRows, Route
from shardwise.fsdp.torch_private import to_device
from shardwise.models.four_bit import layers

UP: Final = ("gate_up_proj", "up_proj")
"""Parameters of the first product: gate and up in one, or up alone."""

_ALIGNED_BYTES: Final = 16
"""Rows of the tensors of a grouped product begin at multiples of it."""

_MOST_GROUPS: Final = 1023
"""Of a grouped product: CUDA's kernel takes no more."""


def compute_experts(
    route: Route,
    name: str,
    module: Any,
    own_forward: Any,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """Compute the experts of a module for a pass of many adapters.

    Args:
        route: of the pass.
        name: of the module.
        module: the fused experts, with unsharded weights.
        own_forward: the module's own forward function.
        hidden_states: (rows * tokens, width).
        top_k_index: (rows * tokens, k), the experts of each token.
        top_k_weights: of the same shape, the weight of each expert.

    Returns: (rows * tokens, width).
    """
    inputs = hidden_states, top_k_index, top_k_weights
    stacks = [f"{name}.{parameter}" for parameter in (*UP, "down_proj")]
    if not any(map(route.is_target, stacks)):
        result: Tensor = own_forward(*inputs)
        return result
    route.require_rows(name, hidden_states)
    adapter_rows: list[AdapterRows] = []
    for of_adapter in route.adapter_rows:
        has_matrices = any(stack in of_adapter.adapter.weights_by_site for stack in stacks)
        if has_matrices and of_adapter.stop > of_adapter.start:
            adapter_rows.append(of_adapter)
    if not adapter_rows:
        result = own_forward(*inputs)
    else:
        adapted, others, order = _split_tokens(route, adapter_rows, hidden_states.device)
        # 128 experts and 9 adapters would be 1,152 groups: parts of 7 adapters and of 2 have 896 and 256.
        most = max(_MOST_GROUPS // module.num_experts, 1)
        parts = [adapter_rows[start : start + most] for start in range(0, len(adapter_rows), most)]
        sizes = [sum(each.stop - each.start for each in part) * route.tokens for part in parts]
        inputs_by_part = zip(*(each[adapted].split(sizes) for each in inputs), strict=True)
        results = [
            _compute_adapted(route, name, module, part, *inputs_of_part)
            for part, inputs_of_part in zip(parts, inputs_by_part, strict=True)
        ]
        result = results[0] if len(results) == 1 else torch.cat(results)
        if len(others):
            # Rows without matrices on the experts keep the bits of the base's own forward function.
            result = torch.cat([result, own_forward(*(each[others] for each in inputs))])[order]
    is_trained = any(of_adapter.keys is not None for of_adapter in adapter_rows)
    # No segments: it attaches the anchor, so that the result requires a gradient on ranks without rows, too.
    anchored = adapt(route.anchor, result.detach(), result, [], SegmentLoop())
    return route.record_site(name, anchored, is_trained=is_trained)


def _split_tokens(
    route: Route, adapter_rows: Sequence[AdapterRows], device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tokens of adapters, all other tokens, and the place of each token in the two joined.

    Example: 3 rows of 2 tokens, of which row 1 belongs to an adapter: (2, 3), (0, 1, 4, 5) and (2, 3, 0, 1, 4, 5).
    """
    is_adapted = torch.zeros(route.rows, dtype=torch.bool, device="cpu")
    for of_adapter in adapter_rows:
        is_adapted[of_adapter.start : of_adapter.stop] = True
    of_tokens = is_adapted.repeat_interleave(route.tokens)
    adapted, others = of_tokens.nonzero()[:, 0], (~of_tokens).nonzero()[:, 0]
    order = torch.cat([adapted, others]).argsort()
    return to_device(adapted, device), to_device(others, device), to_device(order, device)


def _compute_adapted(
    route: Route,
    name: str,
    module: Any,
    adapter_rows: Sequence[AdapterRows],
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """Compute the experts of tokens that all belong to adapters, one adapter after the other."""
    num_experts, k = module.num_experts, top_k_index.shape[1]
    # Of each pair (token, expert), the number of its adapter: (tokens * k,).
    counts = [(of_adapter.stop - of_adapter.start) * route.tokens * k for of_adapter in adapter_rows]
    numbers = to_device(torch.repeat_interleave(torch.tensor(counts, device="cpu")), hidden_states.device)
    # Sorted by expert, then by adapter. With 3 adapters, pairs of expert 2 and adapter 1 are group 2 * 3 + 1 = 7.
    groups, order = (top_k_index.flatten() * len(adapter_rows) + numbers).sort(stable=True)
    bounds = torch.arange(1, num_experts * len(adapter_rows) + 1, device=groups.device)
    # (experts * adapters,), of each group; int32, as grouped_mm takes its offsets.
    ends = torch.searchsorted(groups, bounds).int()
    # Those of an expert's last adapter.
    ends_of_experts = ends[len(adapter_rows) - 1 :: len(adapter_rows)].contiguous()
    experts = groups // len(adapter_rows)
    up = next(parameter for parameter in UP if hasattr(module, parameter))
    hidden = hidden_states[order // k]  # (tokens * k, width)
    for parameter in (up, "down_proj"):
        rows = hidden.contiguous()
        hidden = _multiply_base(module, parameter, rows, experts, ends_of_experts)
        stack = f"{name}.{parameter}"
        weights = [of_adapter.adapter.weights_by_site.get(stack) for of_adapter in adapter_rows]
        if any(each is not None for each in weights):
            are_trained = [of_adapter.keys is not None for of_adapter in adapter_rows]
            # (groups, in, r) and (groups, r, out). An adapter without matrices on this stack has zeros.
            stack_matrices: Any = _StackedMatrices.apply
            A, B = stack_matrices(route.anchor, rows.detach(), num_experts, hidden.shape[1], weights, are_trained)
            hidden = hidden + multiply_groups(multiply_groups(rows, A, ends), B, ends)
        if parameter == up:
            hidden = layers.apply_activation(module, hidden)
    weighted = hidden * top_k_weights.flatten()[order].unsqueeze(1)
    # Back in the order of tokens, and summed over the experts of each: no addition in an order that varies.
    return weighted.to(hidden_states.dtype)[order.argsort()].view(len(hidden_states), k, -1).sum(1)


def _multiply_base(module: Any, parameter: str, rows: Tensor, experts: Tensor, ends: Tensor) -> Tensor:
    """Multiply rows, sorted by expert, with the weights of the base: (pairs, out)."""
    if layers.are_experts_in_four_bits(module) and parameter in module.packings:
        weights_by_expert: Any = layers.ExpertWeights(module, parameter)
        products = []
        for expert, of_expert in _split_groups(rows, ends):
            # Products with the weights of one expert dequantize them, also in the backward pass.
            weight = weights_by_expert[expert]
            if module.is_transposed:
                products.append(of_expert @ weight)
            else:
                products.append(F.linear(of_expert, weight))
        product = torch.cat(products)
    else:
        weights = getattr(module, parameter)
        if not module.is_transposed:
            weights = weights.mT
        product = multiply_groups(rows, weights, ends)  # weights (experts, in, out)
    if module.has_bias:
        product = product + getattr(module, f"{parameter}_bias")[experts]
    return product


def multiply_groups(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Multiply each group of rows with its own weights (groups, in, out). Groups end at ``ends``.

    Example: with ends (2, 2, 5), rows 0 and 1 are multiplied with ``weights[0]``, and rows 2 to 4 with
    ``weights[2]``.
    """
    # The kernel takes no float64, no rows whose bytes are not aligned, and not any number of groups. Others are
    # multiplied group by group.
    size, is_taken = rows.element_size(), rows.dtype != torch.float64 and len(ends) <= _MOST_GROUPS
    if is_taken and not any(size * width % _ALIGNED_BYTES for width in weights.shape[1:]):
        return F.grouped_mm(rows, weights.to(rows.dtype), offs=ends)
    return torch.cat([of_group @ weights[group].to(rows.dtype) for group, of_group in _split_groups(rows, ends)])


def _split_groups(rows: Tensor, ends: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield the number and the rows of each group that has any."""
    start = 0
    for group, end in enumerate(ends.tolist()):
        if end > start:
            yield group, rows[start:end]
        start = end


class _StackedMatrices(torch.autograd.Function):
    """Stacks the matrices of all adapters for grouped products: (groups, in, r) and (groups, r, out).

    r is the largest rank, rounded up to the alignment of rows. Other ranks are padded by zeros. Gradients are added
    to the adapters' buffers ([Note: Straight into the buffer]).
    """

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        rows: Tensor,
        num_experts: int,
        out: int,
        weights_by_adapter: Sequence[LoraWeights | None],
        are_trained: Sequence[bool],
    ) -> tuple[Tensor, Tensor]:
        multiple, dtype, width = _ALIGNED_BYTES // rows.element_size() or 1, rows.dtype, rows.shape[1]
        # Of 16-bit matrices, 8 numbers are 16 bytes: ranks 4 and 12 are padded to 16.
        most = max(weights.rank for weights in weights_by_adapter if weights is not None)
        rank = -(-most // multiple) * multiple
        # Rows of memory are along r for B and along in for A, so that both are aligned.
        A = torch.zeros((num_experts, len(weights_by_adapter), rank, width), dtype=dtype, device=anchor.device)
        B = torch.zeros((num_experts, len(weights_by_adapter), rank, out), dtype=dtype, device=anchor.device)
        for number, weights in enumerate(weights_by_adapter):
            if weights is not None:
                A[:, number, : weights.rank] = weights.A.to(dtype)  # (experts, r, in)
                B[:, number, : weights.rank] = (weights.B.mT * weights.scaling).to(dtype)  # (experts, r, out)
        ctx.weights_by_adapter, ctx.are_trained, ctx.num_experts = weights_by_adapter, are_trained, num_experts
        return A.flatten(0, 1).mT, B.flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        A, B = (each.unflatten(0, (ctx.num_experts, -1)) for each in gradients)  # (experts, adapters, ...)
        for number, (weights, is_trained) in enumerate(zip(ctx.weights_by_adapter, ctx.are_trained, strict=True)):
            if weights is not None and is_trained:
                weights.a_grad.add_(A[:, number, :, : weights.rank].mT)
                weights.b_grad.add_(B[:, number, : weights.rank].mT, alpha=weights.scaling)
        return None, None, None, None, None, None


def unsupported_experts_reason(name: str, module: nn.Module, parameter: str) -> str:
    """Return the reason why the experts of a module cannot have adapters, or ""."""
    if parameter not in (*UP, "down_proj") or not layers.are_fused_experts(module):
        return (
            f"{name}.{parameter}: is a parameter of a {type(module).__name__}. Of parameters, only those of fused "
            "experts of transformers (gate_up_proj, up_proj, down_proj) can have adapters. Remove it from "
            "target_parameters"
        )
    if getattr(module, "has_post_expert_norm", False) or layers.are_expert_parallel(module):
        return f"{name}: experts with their own norms, or distributed over ranks, cannot have adapters"
    return ""
