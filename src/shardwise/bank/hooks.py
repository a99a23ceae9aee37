"""Routes rows of a pass to their adapters, by hooks on layers and experts.

[Note: A route] A micro-batch owns its route, which does not change. The route is active during the forward and the
backward pass of this micro-batch, both of which the bank runs. So recomputed activations use the same rows as the
first time, in any thread, and whatever other micro-batches have run meanwhile. Without an active route, the base
computes as if there were no bank.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardwise.bank.adapter import BankAdapter, expert_site
from shardwise.bank.kernels import (
    BackendChoice,
    EmbeddingLoop,
    GroupedProducts,
    RoutedSegment,
    SegmentLoop,
    adapt,
    select_backend,
    stable_key,
)
from shardwise.core.errors import ConfigError, TrainingError
from shardwise.fsdp import torch_private
from shardwise.fsdp.named_tensors import canonical
from shardwise.models.four_bit import layers
from shardwise.models.four_bit.layers import get_expert_weight
from shardwise.models.lora.adapted_layers import AdaptedSite, EmbeddingSite, ExpertsSite


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """Rows ``start <= i < stop`` of a micro-batch, which belong to one adapter.

    ``keys`` are those of the rows, for dropout: (rows,), on the device.
    """

    adapter: BankAdapter
    start: int
    stop: int
    keys: torch.Tensor


@dataclass(slots=True)
class BatchRouting:
    """The adapters of the rows of a micro-batch.

    Attributes:
        rows: number of rows.
        tokens: tokens of a row, with padding.
        members: rows of each adapter, in order. Rows without an adapter come last.
        choice: how adapters are computed.
        anchor: see [Note: Straight into the buffer] in ``bank/kernels.py``.
        is_training: False for evaluation, without dropout and without a backward pass.
        grouped: batched products of this micro-batch.
        backends: how adapters were computed, with the number of layers.
        forward_sites: sites that the forward pass has reached.
        backward_sites: sites that the backward pass has reached.
    """

    rows: int
    tokens: int
    members: tuple[AdapterRows, ...]
    choice: BackendChoice
    anchor: torch.Tensor
    is_training: bool = True
    grouped: GroupedProducts = field(default_factory=GroupedProducts)
    backends: Counter[str] = field(default_factory=Counter)
    forward_sites: set[str] = field(default_factory=set)
    backward_sites: set[str] = field(default_factory=set)

    def segments(self, site: str, step: int) -> list[RoutedSegment]:
        """Return the rows with an adapter at a site, whose input has ``step`` rows (tokens) for each batch row.

        Batch rows 2 and 3 of an adapter are rows 128 to 256 of a linear layer's input if rows have 64 tokens.
        """
        segments = []
        for member in self.members:
            pair = member.adapter.pairs.get(site)
            if pair is not None and member.stop > member.start:
                keys = member.keys if pair.dropout and self.is_training else None
                segments.append(
                    RoutedSegment(pair, member.start * step, member.stop * step, keys, stable_key(site))
                )
        return segments

    def add_adapters(
        self, site: str, x: torch.Tensor, y: torch.Tensor, backend: SegmentLoop | None = None
    ) -> torch.Tensor:
        """Return the output ``y`` (..., out) of a layer plus the adapters' deltas of its input ``x`` (..., in).

        Without ``backend``, one is selected and counted.
        """
        self.require_rows(site, x)
        segments = self.segments(site, x.shape[:-1].numel() // self.rows)
        if backend is None:
            backend, reason = select_backend(self.choice, segments, x, y, self.grouped)
            self.backends[reason] += 1
        return self.record_site(site, adapt(self.anchor, x, y, segments, backend))

    def record_site(self, site: str, y: torch.Tensor) -> torch.Tensor:
        """Record that the forward pass has reached a site, and when the backward pass does."""
        if self.is_training:
            self.forward_sites.add(site)
        if y.requires_grad:
            # Called in the backward pass. It returns None, so the gradient is not replaced.
            y.register_hook(lambda _gradient: self.backward_sites.add(site))
        return y

    def require_rows(self, site: str, x: torch.Tensor) -> None:
        """Raise TrainingError unless an input is (rows, tokens, ...) or (rows * tokens, width)."""
        if tuple(x.shape[:2]) != (self.rows, self.tokens) and (x.ndim != 2 or len(x) != self.rows * self.tokens):
            raise TrainingError(
                f"{site} is called with a tensor of shape {tuple(x.shape)}, in which the {self.rows} rows of "
                f"{self.tokens} tokens cannot be identified. Remove it from the targets"
            )

    def require_reached(self) -> None:
        """Check that the backward pass has reached every adapter that the forward pass has.

        Raises:
            TrainingError: it has not. The message has the sites.
        """
        if missed := sorted(self.forward_sites - self.backward_sites):
            more = f" and {len(missed) - 3} more" if len(missed) > 3 else ""
            raise TrainingError(
                f"the backward pass has not reached {', '.join(missed[:3])}{more}: the loss does not depend on "
                "its output, or activations are recomputed with use_reentrant=True. Remove it from the "
                "targets, or recompute with use_reentrant=False"
            )


@dataclass(slots=True)
class ActiveRouting:
    """The active route, if any. Autograd reads it from other threads, so it is not a context variable."""

    route: BatchRouting | None = None

    @contextmanager
    def on(self, route: BatchRouting) -> Iterator[None]:
        before, self.route = self.route, route
        try:
            yield
        finally:
            self.route = before


def hook_layer(module: nn.Module, site: str, switch: ActiveRouting, *, is_embedding: bool) -> RemovableHandle:
    """Add adapters to the output of a linear layer or an embedding, by a hook.

    If the layer is a group of FSDP2, the hook runs before FSDP2's.
    """

    def add(layer: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], output: torch.Tensor) -> Any:
        if switch.route is None:
            return None
        inputs = args[0] if args else next(iter(kwargs.values()))
        if is_embedding:
            # A scaled embedding (Gemma) multiplies its output, and so the delta of an adapter.
            backend = EmbeddingLoop(float(getattr(layer, "embed_scale", 1.0)))
            return switch.route.add_adapters(site, inputs.unsqueeze(-1), output, backend)
        return switch.route.add_adapters(site, inputs, output)

    return module.register_forward_hook(add, prepend=True, with_kwargs=True)


_UP = ("gate_up_proj", "up_proj")


def unsupported_experts_reason(name: str, module: nn.Module, parameter: str) -> str:
    """Return the reason why the experts of a module cannot have adapters, or ""."""
    if parameter not in (*_UP, "down_proj") or not layers.are_fused_experts(module):
        return (
            f"{name}.{parameter}: is a parameter of a {type(module).__name__}. Of parameters, only those of fused "
            "experts of transformers (gate_up_proj, up_proj, down_proj) can have adapters. Remove it from "
            "target_parameters"
        )
    if getattr(module, "has_post_expert_norm", False) or layers.are_expert_parallel(module):
        return f"{name}: experts with their own norms, or distributed over ranks, cannot have adapters"
    return ""


def compute_experts(
    route: BatchRouting,
    name: str,
    module: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Compute the experts of a module for a micro-batch of many adapters.

    Args:
        route: of the micro-batch.
        name: of the module.
        module: the fused experts, with unsharded weights.
        hidden_states: (rows * tokens, width).
        top_k_index: (rows * tokens, k), the experts of each token.
        top_k_weights: of the same shape, the weight of each expert.

    Returns: (rows * tokens, width).
    """
    route.require_rows(name, hidden_states)
    # Pairs (token, expert), by expert: (rows * tokens * k,). Stable, so tokens of an expert stay in order.
    experts, order = top_k_index.flatten().sort(stable=True)
    tokens = order // top_k_index.shape[1]
    result = torch.zeros_like(hidden_states)
    up = next(parameter for parameter in _UP if hasattr(module, parameter))
    for expert, (start, *bounds, stop) in enumerate(_find_bounds(route, experts, tokens, module.num_experts)):
        if start == stop:
            continue
        tokens_of_expert = tokens[start:stop]  # (pairs,)
        weights = top_k_weights.flatten()[order[start:stop]].unsqueeze(1)  # (pairs, 1)
        cuts = [bound - start for bound in bounds]
        hidden = _multiply(route, module, name, up, expert, hidden_states[tokens_of_expert], cuts)
        hidden = layers.apply_activation(module, hidden)
        hidden = _multiply(route, module, name, "down_proj", expert, hidden, cuts)  # (pairs, width)
        result = result.index_add(0, tokens_of_expert, (hidden * weights).to(result.dtype))
    # No segments: it attaches the anchor, so that the result requires a gradient on ranks without rows, too.
    return route.record_site(name, adapt(route.anchor, result.detach(), result, [], SegmentLoop()))


def _find_bounds(
    route: BatchRouting, experts: torch.Tensor, tokens: torch.Tensor, num_experts: int
) -> list[list[int]]:
    """Return the bounds of each expert and, within it, of each member in sorted pairs (expert, token).

    Example: 2 experts, and members with tokens 0 to 2 and 2 to 3 of 3 tokens. The pairs (0, 0), (0, 2), (1, 1),
    (1, 2) have bounds [0, 0, 1, 2, 2] and [2, 2, 3, 4, 4]: begin of the expert, begin of each member, end of the
    last member, end of the expert. The host waits for the device once.
    """
    # expert * num_tokens + token is ascending. So a member's pairs of an expert are one run, found by its bounds.
    num_tokens = route.rows * route.tokens
    rows = [member.start for member in route.members] + [member.stop for member in route.members[-1:]]
    firsts = torch.tensor([0, *(row * route.tokens for row in rows), num_tokens])
    sorted_bounds = torch.arange(num_experts).unsqueeze(1) * num_tokens + firsts  # (experts, members + 3)
    positions = torch.searchsorted(experts * num_tokens + tokens, torch_private.sent(sorted_bounds, experts.device))
    bounds: list[list[int]] = positions.tolist()
    return bounds


def _multiply(
    route: BatchRouting,
    module: Any,
    name: str,
    parameter: str,
    expert: int,
    rows: torch.Tensor,
    cuts: Sequence[int],
) -> torch.Tensor:
    """Multiply rows of an expert by its weight and its adapters. Member ``i`` has rows ``cuts[i]:cuts[i + 1]``."""
    weight = get_expert_weight(module, parameter, expert)
    product = rows @ weight if module.is_transposed else F.linear(rows, weight)
    if module.has_bias:
        product = product + getattr(module, f"{parameter}_bias")[expert]
    segments = []
    for number, member in enumerate(route.members):
        pair = member.adapter.pairs.get(expert_site(name, parameter, expert))
        if pair is not None and cuts[number] < cuts[number + 1]:
            segments.append(RoutedSegment(pair, cuts[number], cuts[number + 1]))
    return adapt(route.anchor, rows, product, segments, SegmentLoop()) if segments else product


class SiteHooks:
    """Hooks on the layers of a base, with the number of adapters that use each. No parameter is changed."""

    def __init__(self, model: nn.Module, switch: ActiveRouting) -> None:
        self._modules = {canonical(name): module for name, module in model.named_modules(remove_duplicate=False)}
        self._switch = switch
        self._used: Counter[str] = Counter()
        self._removers: dict[str, Callable[[], object]] = {}

    def require_supported(self, sites: Sequence[AdaptedSite]) -> None:
        """Check that the base can serve all sites.

        Raises:
            ConfigError: it cannot. The message has each site.
        """
        experts = [site for site in sites if isinstance(site, ExpertsSite)]
        reasons = (
            unsupported_experts_reason(one.module, self._modules[one.module], one.parameter) for one in experts
        )
        faults = [reason for reason in reasons if reason]
        seen: dict[nn.Module, str] = {}
        for site in sites:
            module, place = self._modules[site.module], site.module
            if not isinstance(site, ExpertsSite) and seen.setdefault(module, place) != place:
                faults.append(f"{place} and {seen[module]} are one layer. Target one of the two")
        if faults:
            raise ConfigError("this LoRA cannot be trained in a bank:\n  " + "\n  ".join(faults))

    def add(self, sites: Sequence[AdaptedSite]) -> None:
        for name in sorted({site.module for site in sites}):
            self._used[name] += 1
            if name not in self._removers:
                site = next(site for site in sites if site.module == name)
                self._removers[name] = self._attach(site, self._modules[name])

    def remove(self, sites: Sequence[AdaptedSite]) -> None:
        for name in {site.module for site in sites}:
            self._used[name] -= 1
            if not self._used[name]:
                self._removers.pop(name)()

    def _attach(self, site: AdaptedSite, module: nn.Module) -> Callable[[], object]:
        """Hook the module of a site. Return a function that removes the hook."""
        if isinstance(site, ExpertsSite):
            return self._replace_forward(site.module, module)
        return hook_layer(module, site.module, self._switch, is_embedding=isinstance(site, EmbeddingSite)).remove

    def _replace_forward(self, name: str, module: nn.Module) -> Callable[[], object]:
        """Have experts compute their adapters, too. A forward hook does not see the input of each expert."""
        attribute, own_forward = vars(module).get("forward"), module.forward

        def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
            route = self._switch.route
            if route is None:
                output: torch.Tensor = own_forward(*args, **kwargs)
                return output
            return compute_experts(route, name, module, *args, **kwargs)

        def remove_forward() -> None:
            del module.forward
            if attribute is not None:
                module.forward = attribute

        module.forward = forward
        return remove_forward
