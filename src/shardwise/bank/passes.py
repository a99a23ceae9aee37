"""One pass of many tenants' rows through the base: forward, the loss of each token, backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from shardwise.bank import dropout
from shardwise.bank.backends import BackendChoice
from shardwise.bank.routing import Route, RouteSwitch, TenantRows
from shardwise.bank.rows import PassPlan, TenantRow
from shardwise.bank.tenant import Tenant
from shardwise.errors import TrainingError
from shardwise.training.data.batches import IGNORED


@dataclass(frozen=True, slots=True)
class EntryRows:
    """What this rank has of one entry of a call."""

    tenant: Tenant | None
    rows: Sequence[TenantRow]
    first: int
    """How many rows of the entry lower ranks have."""


class FusedPass:
    """A micro-batch of many tenants on its way through the base. It owns its route ([Note: A route])."""

    def __init__(
        self,
        plan: PassPlan,
        entries: Sequence[EntryRows],
        device: torch.device,
        choice: BackendChoice,
        *,
        is_training: bool,
    ) -> None:
        self.spans: dict[int, slice] = {}
        members: list[TenantRows] = []
        rows: list[TenantRow] = []
        for number in plan.entries:
            entry = entries[number]
            span = slice(len(rows), len(rows) + len(entry.rows))
            rows.extend(entry.rows)
            self.spans[number] = span
            if entry.tenant is not None:
                key = dropout.key_of(
                    entry.tenant.options.seed, entry.tenant.windows, entry.tenant.window.micro_batches
                )
                keys = dropout.row_keys(key, entry.first, len(entry.rows))
                members.append(TenantRows(entry.tenant, span.start, span.stop, keys))
        self.has_rows = bool(rows)
        shape = (max(len(rows), 1), plan.tokens)
        self.input_ids = torch.zeros(shape, dtype=torch.int64)
        self.attention_mask = torch.zeros(shape, dtype=torch.int64)
        self.labels = torch.full(shape, IGNORED)
        self.weights = torch.zeros(shape)
        for number, row in enumerate(rows):
            length = len(row.input_ids)
            self.input_ids[number, :length] = row.input_ids
            self.attention_mask[number, :length] = 1
            self.labels[number, :length] = row.labels
            self.weights[number, :length] = row.weights
        if not rows:  # this rank's shards are needed all the same
            self.attention_mask[:] = 1
        self.device = device
        anchor = torch.zeros((), device=device, requires_grad=True)
        self.route = Route(shape[0], shape[1], tuple(members), choice, anchor, is_training)
        self.logprobs: torch.Tensor | None = None
        """(rows, tokens - 1), float32: of each label, given what stands before it; 0 where there is none."""

    def forward(self, model: nn.Module, switch: RouteSwitch) -> None:
        """Collective: as the model is."""
        with switch.on(self.route):
            output: Any = model(
                input_ids=self.input_ids.to(self.device),
                attention_mask=self.attention_mask.to(self.device),
                use_cache=False,
            )
        logits: torch.Tensor = output.logits[:, :-1]
        following = self.labels[:, 1:].to(self.device)
        losses = F.cross_entropy(
            logits.flatten(0, 1).float(), following.flatten(), reduction="none", ignore_index=IGNORED
        )
        self.logprobs = -losses.view(following.shape)

    def backward(self, switch: RouteSwitch, scales: Mapping[int, float]) -> dict[int, float]:
        """Add to the gradients of the tenants, each token's loss times its weight and the scale of its entry.

        There is no sum over tenants that one of them could spoil: every token's loss has a gradient of its own.

        Collective: as the model is.

        Returns: by entry, the sum of the weighted losses of this rank's rows.
        """
        logprobs = self.logprobs
        assert logprobs is not None
        if not logprobs.requires_grad:
            raise TrainingError("the loss depends on no adapter of these tenants; look at their targets")
        weights = self.weights[:, 1:].clone()
        weights[self.labels[:, 1:] == IGNORED] = 0
        scaled = weights.clone()
        for number, span in self.spans.items():
            scaled[span] *= scales[number]
        with switch.on(self.route):
            torch.autograd.backward(logprobs, -scaled.to(self.device))
        self.logprobs = logprobs.detach()
        losses = (-self.logprobs.double() * weights.to(self.device)).cpu()
        return {number: float(losses[span].sum()) for number, span in self.spans.items()}
