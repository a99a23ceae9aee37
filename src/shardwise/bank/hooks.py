"""Has layers of a base ask the bank: hooks and forward passes, put on when a tenant needs them, and taken off."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, assert_never

import torch
from torch import nn

from shardwise.bank.experts import adapted_experts, require_fused_experts
from shardwise.bank.routing import RouteSwitch, hook_embedding, hook_linear
from shardwise.errors import ConfigError
from shardwise.models.view import canonical
from shardwise.tuning.sites import AdaptedSite, EmbeddingSite, ExpertsSite, LinearSite


class SiteHooks:
    """The layers of a base that are listening, and for how many tenants. No parameter is touched."""

    def __init__(self, model: nn.Module, switch: RouteSwitch) -> None:
        self._modules = {canonical(name): module for name, module in model.named_modules(remove_duplicate=False)}
        self._switch = switch
        self._used: Counter[str] = Counter()
        self._take_off: dict[str, Callable[[], object]] = {}

    def require_fitting(self, sites: Sequence[AdaptedSite]) -> None:
        """Refuse sites that the base cannot serve.

        Raises:
            ConfigError: naming each.
        """
        faults = [why for site in sites if isinstance(site, ExpertsSite) if (why := self._why_not_experts(site))]
        seen: dict[nn.Module, str] = {}
        for site in sites:
            module, place = self._modules[site.module], site.module
            if not isinstance(site, ExpertsSite) and seen.setdefault(module, place) != place:
                faults.append(f"{place} and {seen[module]} are one layer; target one of the two")
        if faults:
            raise ConfigError("this LoRA cannot be trained beside others:\n  " + "\n  ".join(faults))

    def _why_not_experts(self, site: ExpertsSite) -> str:
        return require_fused_experts(site.module, self._modules[site.module], site.parameter)

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
            case LinearSite():
                return hook_linear(module, site.module, self._switch).remove
            case EmbeddingSite():
                return hook_embedding(module, site.module, self._switch).remove
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
