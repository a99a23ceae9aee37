"""Which matrices tenants will have on a base, and what they take; found out on meta."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from shardwise.engines.tuning_arguments import tuning_named
from shardwise.errors import ConfigError
from shardwise.models.build import build_on_meta
from shardwise.planning.forecasts.tenants import AdaptedLinear, TenantShape
from shardwise.tuning.modes import Lora
from shardwise.tuning.sites import LinearSite, adapter_words, outline_adapter


def tenants_named(count: int, *, rank: int | None, tuning: str | None) -> tuple[Lora, ...]:
    """As many tenants alike, from words; ``rank`` is of a LoRA on all linear layers.

    Raises:
        ConfigError: there is no LoRA in the words, or there are two.
    """
    if (rank is None) == (tuning is None):
        raise ConfigError(
            "--tenants needs to know what each of them is: either --rank R, or --tuning lora=R,targets=A+B"
        )
    found = tuning_named(tuning if tuning is not None else f"lora={rank}")
    if not isinstance(found, Lora):
        raise ConfigError(f"--tuning={tuning}: tenants are LoRAs; give lora=R[,alpha=X][,targets=A+B]")
    return (found,) * count


def tenant_shapes(base: PreTrainedModel, tenants: Sequence[Lora], directory: Path) -> list[TenantShape]:
    """What each tenant has on a base; those of one config are looked at once.

    Raises:
        ConfigError: a config cannot be honoured on this base.
    """
    if not tenants:
        raise ConfigError("tenants=(): a bank that is planned has one or more; leave it out for the base alone")
    known: dict[str, TenantShape] = {}
    shapes = []
    for tenant in tenants:
        words = adapter_words(tenant.config)
        if words not in known:
            known[words] = _shape(base, tenant, directory)
        shapes.append(known[words])
    return shapes


def _shape(base: PreTrainedModel, tenant: Lora, directory: Path) -> TenantShape:
    anew = build_on_meta(type(base), copy.deepcopy(base.config), torch.float32, directory)
    outline = outline_adapter(anew, tenant.config)
    return TenantShape(
        sum(torch.Size(matrix.shape).numel() for matrix in outline.matrices()),
        tuple(
            AdaptedLinear(site.module, site.r, site.lora_A.shape[1] + site.lora_B.shape[0])
            for site in outline.sites
            if isinstance(site, LinearSite)
        ),
    )
