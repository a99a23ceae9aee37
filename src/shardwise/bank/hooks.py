"""Hooks of a base's layers and experts, by which they add adapters to the rows of a route (``bank/routes.py``)."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from shardwise.bank.experts import compute_experts, unsupported_experts_reason
from shardwise.bank.kernels import EmbeddingLoop
from shardwise.bank.routes import ActiveRoute
from shardwise.core.errors import ConfigError
from shardwise.core.formatting import canonical_name
from shardwise.models.lora.adapted_layers import AdaptedSite, EmbeddingSite, ExpertsSite


class SiteHooks:
    """Hooks on the layers of a base, with the number of adapters that use each. No parameter is changed."""

    def __init__(self, model: nn.Module, active_route: ActiveRoute) -> None:
        modules = model.named_modules(remove_duplicate=False)
        self._modules = {canonical_name(name): module for name, module in modules}
        self._active_route = active_route
        self._used: Counter[str] = Counter()
        self._removers: dict[str, Callable[[], object]] = {}

    def require_supported(self, sites: Sequence[AdaptedSite]) -> None:
        """Check that the base can serve all sites.

        Raises:
            ConfigError: it cannot. The message has each site.
        """
        faults: list[str] = []
        first_names: dict[nn.Module, str] = {}
        for site in sites:
            name, module = site.module, self._modules[site.module]
            if isinstance(site, ExpertsSite):
                if reason := unsupported_experts_reason(name, module, site.parameter):
                    faults.append(reason)
            # Hooks are by name. A layer with two names would have two hooks, and add both matrices of an adapter.
            elif first_names.setdefault(module, name) != name:
                faults.append(f"{name} and {first_names[module]} are one layer. Target one of the two")
        if faults:
            raise ConfigError("this LoRA cannot be trained in a bank:\n  " + "\n  ".join(faults))

    def add(self, sites: Sequence[AdaptedSite]) -> None:
        # Once for each module: experts are one module with a site for each of their stacks.
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

        def add_deltas(layer: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], output: torch.Tensor) -> Any:
            route = self._active_route.route
            if route is None:
                return None
            # The input of a linear layer or an embedding is its first argument, whatever its name.
            inputs = args[0] if args else next(iter(kwargs.values()))
            if not isinstance(site, EmbeddingSite):
                return route.add_adapters(site.module, inputs, output)
            # A scaled embedding (Gemma) multiplies its output, and so the delta of an adapter.
            factor, padding_idx = getattr(layer, "embed_scale", 1.0), getattr(layer, "padding_idx", None)
            backend = EmbeddingLoop(float(factor), padding_idx)
            return route.add_adapters(site.module, inputs.unsqueeze(-1), output, backend)

        # If the layer is a group of FSDP2, the hook runs before FSDP2's.
        return module.register_forward_hook(add_deltas, prepend=True, with_kwargs=True).remove

    def _replace_forward(self, name: str, module: nn.Module) -> Callable[[], object]:
        """Have experts compute their adapters, too. A forward hook does not see the input of each expert."""
        attribute, own_forward = vars(module).get("forward"), module.forward
        is_removed = False

        def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
            route = self._active_route.route
            if route is None or is_removed:
                output: torch.Tensor = own_forward(*args, **kwargs)
                return output
            return compute_experts(route, name, module, own_forward, *args, **kwargs)

        def remove_forward() -> None:
            nonlocal is_removed
            is_removed = True
            # If another bank on this base has replaced this function since, it still calls it.
            if vars(module).get("forward") is not forward:
                return
            del module.forward
            # The class's forward function shows again, or an earlier one of the module, as of activation
            # checkpointing.
            if attribute is not None:
                module.forward = attribute

        module.forward = forward
        return remove_forward
