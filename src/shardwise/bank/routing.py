"""Routes rows of a pass to the adapters of their tenants, by hooks on layers and experts.

[Note: A route] A micro-batch owns its route, which does not change. It is on the bank's switch during the forward
pass of this micro-batch and during its backward pass, which the bank also runs. So activations that are computed
again meet the rows they met at first, whoever recomputes them, in whatever thread, and however many other
micro-batches have been run meanwhile. With no route on the switch, the base is as if there were no bank.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, assert_never

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardwise.bank.backends import (
    BackendChoice,
    EmbeddingLoop,
    GroupedProducts,
    RoutedSegment,
    SegmentLoop,
    adapt,
    choose_backend,
    key_of,
)
from shardwise.bank.tenant import LoraWeights, Tenant, expert_site
from shardwise.errors import ConfigError, TrainingError
from shardwise.models import four_bit_layers, torch_api
from shardwise.models.four_bit_layers import weight_of_expert
from shardwise.models.view import canonical
from shardwise.tuning.sites import AdaptedSite, EmbeddingSite, ExpertsSite, LinearSite


@dataclass(frozen=True, slots=True)
class TenantRows:
    """The rows ``start <= i < stop`` of a micro-batch are a tenant's."""

    tenant: Tenant
    start: int
    stop: int
    keys: torch.Tensor
    """Of its rows, for dropout: (rows,), on the device."""


@dataclass(slots=True)
class BatchRouting:
    """The rows of a micro-batch: (rows, tokens), and whose they are, in order. Rows of nobody come last.

    ``is_training`` is off for evaluation: there is no dropout, and no backward pass to wait for.
    """

    rows: int
    tokens: int
    members: tuple[TenantRows, ...]
    choice: BackendChoice
    anchor: torch.Tensor
    is_training: bool = True
    grouped: GroupedProducts = field(default_factory=GroupedProducts)
    chosen: Counter[str] = field(default_factory=Counter)
    passed: set[str] = field(default_factory=set)
    """Sites that the forward pass has come to, and those that the backward pass has."""
    reached: set[str] = field(default_factory=set)

    def parts(self, site: str, step: int) -> list[RoutedSegment]:
        """The tenants that have an adapter there. ``step``: how many rows of the input each row has there."""
        found = []
        for member in self.members:
            pair = member.tenant.pairs.get(site)
            if pair is not None and member.stop > member.start:
                keys = member.keys if pair.dropout and self.is_training else None
                found.append(RoutedSegment(pair, member.start * step, member.stop * step, keys, key_of(site)))
        return found

    def linear(self, site: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.require_rows(site, x)
        parts = self.parts(site, x.shape[:-1].numel() // self.rows)
        backend, why = (
            choose_backend(self.choice, parts, x, y, self.grouped) if parts else (SegmentLoop(), "no rows")
        )
        self.chosen[why] += 1
        return self.note(site, adapt(self.anchor, x, y, parts, backend))

    def embedding(self, site: str, ids: torch.Tensor, y: torch.Tensor, factor: float) -> torch.Tensor:
        column = ids.unsqueeze(-1)
        self.require_rows(site, column)
        parts = self.parts(site, ids.numel() // self.rows)
        return self.note(site, adapt(self.anchor, column, y, parts, EmbeddingLoop(factor)))

    def bounds(self) -> list[int]:
        """Return where the rows of each member begin, and where those of the last end."""
        return [member.start for member in self.members] + [member.stop for member in self.members[-1:]]

    def pairs(self, site: str) -> list[LoraWeights | None]:
        """Return the matrices of each member at a site."""
        return [member.tenant.pairs.get(site) for member in self.members]

    def note(self, site: str, y: torch.Tensor) -> torch.Tensor:
        """Have it written down when the gradient of ``y`` comes."""
        if self.is_training:
            self.passed.add(site)
        if y.requires_grad:
            y.register_hook(lambda _gradient: self.reached.add(site))
        return y

    def require_rows(self, site: str, x: torch.Tensor) -> None:
        """Reject an input whose rows cannot be identified: batch first, or rows and tokens in one dimension."""
        if tuple(x.shape[:2]) != (self.rows, self.tokens) and (x.ndim != 2 or len(x) != self.rows * self.tokens):
            raise TrainingError(
                f"{site} is called with a tensor of shape {tuple(x.shape)}, in which the {self.rows} rows of "
                f"{self.tokens} tokens cannot be told apart. Remove it from the targets"
            )

    def require_reached(self) -> None:
        """Refuse a backward pass that has passed an adapter by: it would train on nothing, without a word.

        Raises:
            TrainingError: naming the sites.
        """
        if missed := sorted(self.passed - self.reached):
            more = f" and {len(missed) - 3} more" if len(missed) > 3 else ""
            raise TrainingError(
                f"the backward pass has not come to {', '.join(missed[:3])}{more}: the loss does not depend on "
                "its output, or activations are recomputed with use_reentrant=True. Take it out of the "
                "targets, or recompute with use_reentrant=False"
            )


@dataclass(slots=True)
class ActiveRouting:
    """The route that is on, if any. Autograd may look from a thread of its own, so this is no context variable."""

    route: BatchRouting | None = None

    @contextmanager
    def on(self, route: BatchRouting) -> Iterator[None]:
        before, self.route = self.route, route
        try:
            yield
        finally:
            self.route = before


def hook_layer(module: nn.Module, site: str, switch: ActiveRouting, *, is_embedding: bool) -> RemovableHandle:
    """Add adapters to the output of a linear layer or an embedding.

    ``remove()`` of the returned handle removes the hook.

    The hook comes before FSDP2's own, where the layer is a group by itself: it belongs to the layer.
    """

    def add(own: nn.Module, args: Sequence[Any], keywords: dict[str, Any], output: torch.Tensor) -> Any:
        if switch.route is None:
            return None
        given = args[0] if args else next(iter(keywords.values()))
        if is_embedding:
            return switch.route.embedding(site, given, output, float(getattr(own, "embed_scale", 1.0)))
        return switch.route.linear(site, given, output)

    return module.register_forward_hook(add, prepend=True, with_kwargs=True)


_UP = ("gate_up_proj", "up_proj")


_KNOWN = (*_UP, "down_proj")


def require_fused_experts(name: str, module: nn.Module, parameter: str) -> str:
    """Return the reason why the experts of a module cannot have adapters, or ""."""
    experts: Any = module
    if parameter not in _KNOWN or not four_bit_layers.are_fused_experts(module):
        return (
            f"{name}.{parameter}: a parameter of a {type(module).__name__}, and only those of fused experts as "
            "transformers has them (gate_up_proj, up_proj, down_proj) can have adapters. Take it out of "
            "target_parameters"
        )
    if getattr(experts, "has_post_expert_norm", False) or four_bit_layers.are_parted_experts(module):
        return f"{name}: experts with norms of their own or on ranks of their own cannot have adapters yet"
    return ""


def adapted_experts(
    route: BatchRouting,
    name: str,
    module: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Compute the experts of a module for a micro-batch of many tenants.

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
    chosen, order = top_k_index.flatten().sort(stable=True)
    tokens = order // top_k_index.shape[1]
    result = torch.zeros_like(hidden_states)
    up = next(parameter for parameter in _UP if hasattr(module, parameter))
    for expert, (start, *bounds, stop) in enumerate(_bounds(route, chosen, tokens, module.num_experts)):
        if start == stop:
            continue
        own = tokens[start:stop]
        weights = top_k_weights.flatten()[order[start:stop]].unsqueeze(1)
        cuts = [bound - start for bound in bounds]
        hidden = _product(route, module, name, up, expert, hidden_states[own], cuts)
        hidden = four_bit_layers.activated(module, hidden)
        hidden = _product(route, module, name, "down_proj", expert, hidden, cuts)
        result = result.index_add(0, own, (hidden * weights).to(result.dtype))
    return route.note(name, adapt(route.anchor, result.detach(), result, [], SegmentLoop()))


def _bounds(route: BatchRouting, chosen: torch.Tensor, tokens: torch.Tensor, experts: int) -> list[list[int]]:
    """Return where, of sorted pairs (expert, token), those of each expert begin, those of each member, and the end.

    The host waits for the device once.
    """
    most = route.rows * route.tokens
    firsts = torch.tensor([0, *(bound * route.tokens for bound in route.bounds()), most])
    wanted = torch.arange(experts).unsqueeze(1) * most + firsts
    found = torch.searchsorted(chosen * most + tokens, torch_api.sent(wanted, chosen.device))
    bounds: list[list[int]] = found.tolist()
    return bounds


def _product(
    route: BatchRouting,
    module: Any,
    name: str,
    parameter: str,
    expert: int,
    rows: torch.Tensor,
    cuts: Sequence[int],
) -> torch.Tensor:
    weight = weight_of_expert(module, parameter, expert)
    found = rows @ weight if module.is_transposed else F.linear(rows, weight)
    if module.has_bias:
        found = found + getattr(module, f"{parameter}_bias")[expert]
    parts = [
        RoutedSegment(pair, cuts[number], cuts[number + 1])
        for number, pair in enumerate(route.pairs(expert_site(name, parameter, expert)))
        if pair is not None and cuts[number] < cuts[number + 1]
    ]
    return adapt(route.anchor, rows, found, parts, SegmentLoop()) if parts else found


class SiteHooks:
    """The layers of a base that are listening, and for how many tenants. No parameter is touched."""

    def __init__(self, model: nn.Module, switch: ActiveRouting) -> None:
        self._modules = {canonical(name): module for name, module in model.named_modules(remove_duplicate=False)}
        self._switch = switch
        self._used: Counter[str] = Counter()
        self._take_off: dict[str, Callable[[], object]] = {}

    def require_fitting(self, sites: Sequence[AdaptedSite]) -> None:
        """Refuse sites that the base cannot serve.

        Raises:
            ConfigError: naming each.
        """
        experts = [site for site in sites if isinstance(site, ExpertsSite)]
        reasons = (require_fused_experts(one.module, self._modules[one.module], one.parameter) for one in experts)
        faults = [why for why in reasons if why]
        seen: dict[nn.Module, str] = {}
        for site in sites:
            module, place = self._modules[site.module], site.module
            if not isinstance(site, ExpertsSite) and seen.setdefault(module, place) != place:
                faults.append(f"{place} and {seen[module]} are one layer; target one of the two")
        if faults:
            raise ConfigError("this LoRA cannot be trained beside others:\n  " + "\n  ".join(faults))

    def add(self, sites: Sequence[AdaptedSite]) -> None:
        for name in sorted({site.module for site in sites}):
            self._used[name] += 1
            if name not in self._take_off:
                site = next(site for site in sites if site.module == name)
                self._take_off[name] = self._put_on(site, self._modules[name])

    def remove(self, sites: Sequence[AdaptedSite]) -> None:
        for name in {site.module for site in sites}:
            self._used[name] -= 1
            if not self._used[name]:
                self._take_off.pop(name)()

    def _put_on(self, site: AdaptedSite, module: nn.Module) -> Callable[[], object]:
        match site:
            case LinearSite() | EmbeddingSite():
                is_embedding = isinstance(site, EmbeddingSite)
                return hook_layer(module, site.module, self._switch, is_embedding=is_embedding).remove
            case ExpertsSite():
                return self._replace_forward(site.module, module)
            case _:
                assert_never(site)

    def _replace_forward(self, name: str, module: nn.Module) -> Callable[[], object]:
        before, own = vars(module).get("forward"), module.forward

        def forward(*args: Any, **keywords: Any) -> torch.Tensor:
            route = self._switch.route
            if route is None:
                found: torch.Tensor = own(*args, **keywords)
                return found
            return adapted_experts(route, name, module, *args, **keywords)

        def take_off() -> None:
            del module.forward
            if before is not None:
                module.forward = before

        module.forward = forward
        return take_off
