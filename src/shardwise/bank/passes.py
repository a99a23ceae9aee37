"""A pass of many adapters through the base: forward, losses entry by entry, backward."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from shardwise.bank.adapter import BankAdapter
from shardwise.bank.hooks import ActiveRouting, AdapterRows, BatchRouting
from shardwise.bank.kernels import BackendChoice, row_keys, stable_key
from shardwise.bank.rows import IGNORED, PassPlan, RowCounts, UnpaddedRow
from shardwise.core.errors import TrainingError
from shardwise.fsdp.gradients import reset_fsdp_state
from shardwise.fsdp.named_tensors import find_fsdp_root
from shardwise.fsdp.torch_private import sent
from shardwise.ranks.world import World
from shardwise.transfer.memory import available_memory

_POLL_S = 0.0005


@dataclass(frozen=True, slots=True)
class SharedBase:
    """The base of a bank, its ranks, and how adapters on it are computed."""

    world: World
    model: PreTrainedModel
    device: torch.device
    switch: ActiveRouting
    backend: BackendChoice
    pad_to: int

    @property
    def vocab_size(self) -> int:
        embeddings: Any = self.model.get_input_embeddings()
        return int(embeddings.weight.shape[0])

    @property
    def max_length(self) -> int:
        """Maximum number of tokens in a row."""
        limit = getattr(self.model.config, "max_position_embeddings", None)
        return limit if isinstance(limit, int) and limit > 0 else 1 << 30

    def free_bytes(self) -> int | None:
        """Return free memory of the device, or of the host if that computes. None if unknown."""
        memory = available_memory(self.device)
        return memory.host_bytes if self.device.type == "cpu" else memory.device_bytes

    def wait_for_device(self) -> None:
        """Wait until the device has computed the pass.

        Raises:
            Stopped: another rank has failed, so that a gather on the device may never end.
        """
        if self.device.type == "cpu":
            return
        event = torch.get_device_module(self.device).Event()
        event.record()
        while not event.query():
            self.world.check()
            time.sleep(_POLL_S)

    def recover(self) -> None:
        """Reset FSDP2 after an interrupted pass. Collective: no."""
        root = find_fsdp_root(self.model)
        if root is not None:
            reset_fsdp_state(root)


class FusedPass:
    """A pass of a micro-batch of many adapters through the base.

    It owns its route ([Note: A route] in ``bank/hooks.py``).

    Args:
        base: the base.
        plan: the pass.
        adapters: the adapter of each entry of the call.
        counts: counts of the rows of each entry, on all ranks.
        local_rows: rows of each entry, of this rank.
        is_training: False for evaluation.
    """

    def __init__(
        self,
        base: SharedBase,
        plan: PassPlan,
        adapters: Sequence[BankAdapter | None],
        counts: Sequence[RowCounts],
        local_rows: Sequence[Sequence[UnpaddedRow]],
        *,
        is_training: bool,
    ) -> None:
        self.spans: dict[int, slice] = {}
        """The rows of each entry in the pass."""
        keys = [torch.empty(0, dtype=torch.int64)]
        rows: list[UnpaddedRow] = []
        # Rows of this rank, entry by entry. The dropout key of a row depends on its place among the rows of all
        # ranks, so masks do not depend on the number of ranks.
        for number in plan.entries:
            adapter = adapters[number]
            first_row = sum(counts[number].rows[: base.world.rank])
            self.spans[number] = slice(len(rows), len(rows) + len(local_rows[number]))
            rows.extend(local_rows[number])
            if adapter is not None:
                key = stable_key(adapter.options["seed"], adapter.windows, adapter.micro_batches)
                keys.append(row_keys(key, first_row, len(local_rows[number])))
        # (rows, tokens), padded on the right. Padding has no label, and so no loss.
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
        if not rows:  # one dummy row, so that this rank takes part in FSDP2's all-gathers
            self.attention_mask[:] = 1
        self.device = base.device
        anchor = torch.zeros((), device=self.device, requires_grad=True)
        # Keys of all rows in one transfer. Rows of the base have none, and come last.
        keys_on_device = sent(torch.cat(keys), self.device)
        members = []
        for number, span in self.spans.items():
            if (adapter := adapters[number]) is not None:
                members.append(AdapterRows(adapter, span.start, span.stop, keys_on_device[span]))
        self.route = BatchRouting(shape[0], shape[1], tuple(members), base.backend, anchor, is_training)
        self.logits: torch.Tensor | None = None
        """(rows, tokens, vocabulary), from the forward pass to the backward pass."""
        self.logits_grad: torch.Tensor | None = None
        """Of the same shape and dtype, 0 for rows whose loss raised. None if it is 0 for all rows."""
        self.loss_weights: torch.Tensor | None = None
        """Weight of each label, 0 for ignored ones: (rows, tokens - 1)."""
        self.logprobs = torch.zeros((shape[0], shape[1] - 1), device=self.device)
        """Log probability of each label. 0 for ignored labels."""

    def forward(self, model: nn.Module, switch: ActiveRouting) -> None:
        """Run the forward pass, and keep the logits. Collective: if the model is sharded."""
        with switch.on(self.route):
            output: Any = model(
                input_ids=sent(self.input_ids, self.device),
                attention_mask=sent(self.attention_mask, self.device),
                use_cache=False,
            )
        self.logits = output.logits

    def compute_losses(self, scales: Mapping[int, float] | None = None) -> dict[int, str]:
        """Compute log probabilities and, with scales, the gradient of the logits, entry by entry. Collective: no.

        The gradient is that of each token's loss, times the token's weight and the entry's scale. Losses are not
        summed, so a loss that raises or is not finite does not affect other entries.

        Example: a pass of "ada" with 2 rows and "bob" with 1 row, padded to 64 tokens, with a vocabulary of 1000,
        has logits of shape (3, 64, 1000). Those of token i predict label i + 1, so ``logits[0:2, :-1]`` of shape
        (2, 63, 1000) and ``labels[0:2, 1:]`` of shape (2, 63) give the 2 x 63 losses of "ada". With 50 labels of
        weight 1 on all ranks and a scale of 1 / 50, the gradient is that of their mean.

        Memory: the logits of an entry in float32, three times.

        Returns:
            Errors of losses that raised, by entry.
        """
        assert self.logits is not None
        logits = self.logits.detach()
        # Evaluation: no backward pass follows that needs them.
        if scales is None:
            self.logits = None
        labels = sent(self.labels, self.device)[:, 1:]  # (rows, tokens - 1): token i predicts label i + 1
        self.loss_weights = sent(self.weights[:, 1:].masked_fill(self.labels[:, 1:] == IGNORED, 0), self.device)
        failures = {}
        # Entry by entry: only one has float32 copies of its logits at a time.
        for number, span in self.spans.items():
            if span.start == span.stop:
                continue
            try:
                # (rows of the entry, tokens - 1, vocabulary): a leaf, so that its gradient ends here.
                leaf = logits[span, :-1].requires_grad_(scales is not None)
                losses = token_losses(leaf, labels[span])  # (rows of the entry, tokens - 1)
                if scales is not None:
                    if self.logits_grad is None:
                        self.logits_grad = torch.zeros_like(logits)
                    # The weights are the gradient of the sum of weighted losses with respect to each loss.
                    [gradient] = torch.autograd.grad(losses, leaf, self.loss_weights[span] * scales[number])
                    self.logits_grad[span, :-1] = gradient
                self.logprobs[span] = -losses.detach()
            except Exception as error:
                failures[number] = f"{type(error).__name__}: {error}"
        return failures

    def backward(self, switch: ActiveRouting) -> None:
        """Accumulate the adapters' gradients. Collective: as the model is."""
        logits, gradient = self.logits, self.logits_grad
        self.logits = self.logits_grad = None
        assert logits is not None
        if not logits.requires_grad:
            raise TrainingError("the loss depends on none of the adapters. Check their targets")
        # Also without any gradient: the others gather in this backward pass, so this rank must take part.
        with switch.on(self.route):
            torch.autograd.backward(
                logits, logits.new_zeros(()).expand_as(logits) if gradient is None else gradient
            )

    def sum_losses(self) -> dict[int, float]:
        """Return the sum of the weighted losses of this rank's rows by entry."""
        assert self.loss_weights is not None
        losses = (-self.logprobs.double() * self.loss_weights).cpu()
        return {number: float(losses[span].sum()) for number, span in self.spans.items()}


def token_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the loss of each label in float32, 0 for ignored ones: (rows, tokens).

    ``logits`` are (rows, tokens, vocabulary), and ``labels`` (rows, tokens), already shifted.
    """
    losses = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="none", ignore_index=IGNORED)
    return losses.view(labels.shape)
