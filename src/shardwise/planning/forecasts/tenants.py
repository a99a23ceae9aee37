"""What many adapters on one base take, beside the base, on every rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from shardwise.report.forecast_parts import BankForecast, GroupForecast, RankForecast

STATE_BYTES = 16
"""Of each trained number: itself, its gradient, and AdamW's two moments, in float32."""

_LOGITS_COPIES = 3
"""Float32 numbers for each logit of a pass, where there are most: of the loss its logarithms and two gradients."""


@dataclass(frozen=True, slots=True)
class AdaptedLinear:
    """A linear layer that a tenant has an adapter on: A is (rank, in), B (out, rank)."""

    site: str
    rank: int
    width: int
    """Of the layer's input and output together."""


@dataclass(frozen=True, slots=True)
class TenantShape:
    """What of a tenant takes memory."""

    trained: int
    """Numbers, in all layers of whatever kind."""
    linears: tuple[AdaptedLinear, ...]


def padded_rank(rank: int, itemsize: int) -> int:
    """The rank that a grouped product takes: rows of 16 bytes, or a multiple."""
    step = 16 // itemsize
    return -(-rank // step) * step


def packed_bytes(tenants: Sequence[TenantShape], itemsize: int) -> int:
    """The most that a layer's grouped products pack: matrices of all tenants whose padded ranks are alike.

    It is packed anew for each layer, and so there is one such copy at a time.
    """
    by_site: dict[str, list[AdaptedLinear]] = defaultdict(list)
    for tenant in tenants:
        for linear in tenant.linears:
            by_site[linear.site].append(linear)
    most = 0
    for linears in by_site.values():
        ranks = sorted(padded_rank(linear.rank, itemsize) for linear in linears)
        for rank, run in groupby(ranks):
            count = len(list(run))
            most = max(most, count * rank * linears[0].width * itemsize if count > 1 else 0)
    return most


def forecast_bank(
    tenants: Sequence[TenantShape],
    ranks: Sequence[RankForecast],
    groups: Sequence[GroupForecast],
    *,
    itemsize: int,
    words: int,
    tokens: int,
) -> tuple[BankForecast, ...]:
    """By rank, what a bank takes in the steady state.

    Args:
        tenants: all of them.
        ranks: what bringing up the base takes.
        groups: of FSDP2's.
        itemsize: of the dtype that is computed in.
        words: of the vocabulary.
        tokens: of a rank in a pass, padding included.
    """
    packed = packed_bytes(tenants, itemsize)
    gathered = max((group.gathered_bytes for group in groups), default=0) if len(ranks) > 1 else 0
    trained = tuple(tenant.trained for tenant in tenants)
    return tuple(
        BankForecast(
            rank=rank.rank,
            trained=trained,
            weight_bytes=rank.padded_bytes,
            tenant_bytes=STATE_BYTES * sum(trained),
            gathered_bytes=gathered,
            packed_bytes=packed,
            logits_bytes=_LOGITS_COPIES * 4 * tokens * words,
            tokens=tokens,
        )
        for rank in ranks
    )
