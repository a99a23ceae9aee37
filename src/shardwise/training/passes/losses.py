"""The cross entropy of a batch: from whole logits, or from those of a few tokens at a time.

[Note: Logits in chunks] Logits of all tokens take more memory than anything else of a step: 151,936 words and
8,192 tokens in float32 are 5 GB, and their gradient as much. In chunks, the head is applied to some tokens, their
loss is taken and led back to the head's weight and to its input at once, and the logits are freed. So no logits are
kept for the backward pass, and nothing is computed twice.

The head must see its parameters whole, which FSDP2 sees to by hooks around the forward passes of the head (where it
is a group of its own) and of the root. So the work is done inside of these: for the time of one pass the root has
another ``forward``, which runs the model's own with a stand-in for the head, and then the head, called as ever,
with a ``forward`` that returns the loss. What a model does to its logits (softcapping, a scale) it does to a
:class:`RecordedLogits`, which writes it down, and each chunk repeats it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import nn

from shardwise.errors import ConfigError, TrainingError
from shardwise.execution.ranks.world import World
from shardwise.models.placement import computing_device, root_of
from shardwise.models.view import canonical
from shardwise.training.data.batches import IGNORED, Batch
from shardwise.training.generation import evaluating
from shardwise.training.passes.forward_overrides import remembered, with_forward
from shardwise.training.passes.recorded_logits import LogitsStep, RecordedLogits, StandIn
from shardwise.training.passes.router_loss import require_router_loss, with_router_loss


class Loss(Protocol):
    """How the loss of a batch is taken. Those here are cross entropies; one's own may be anything that is a sum.

    Of all ranks and micro-batches the sums are added up and divided by what they count.
    """

    def summed(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The loss of a batch's rows, not divided by anything: 0-d, float32. Collective: as the model is.

        That of a batch without rows takes the same part in the model, and is 0: every rank takes part in a step.

        The cross entropy comes in training with the router's loss, where the config asks for one
        ([Note: Router losses]).
        """
        ...

    def count(self, batch: Batch) -> int:
        """What the sum is of: its supervised tokens, say, or its rows."""
        ...


@dataclass(frozen=True, slots=True)
class WholeLogits:
    """Logits of all tokens at once, as models return them.

    Memory: for each token and word 4 bytes for the loss and 4 for its gradient, beside the logits and theirs.
    """

    def summed(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        output = model(**batch.inputs(), use_cache=False)
        logits: torch.Tensor = output.logits
        # All of them: to pick those that are learned takes copies, and on an accelerator the host would wait.
        loss = F.cross_entropy(
            logits.flatten(0, 1).float(), _following(batch), reduction="sum", ignore_index=IGNORED
        )
        return with_router_loss(loss, model, output, batch)

    def count(self, batch: Batch) -> int:
        return batch.supervised_tokens


@dataclass(frozen=True, slots=True)
class ChunkedLogits:
    """Logits of ``tokens`` supervised tokens at a time.

    Memory: about 12 bytes for each of these and each word; between the passes the gradient of the head's weight.
    """

    tokens: int = 512

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ConfigError(f"tokens={self.tokens}: logits are computed for at least 1 token at a time")


LossChoice: TypeAlias = Loss | ChunkedLogits
"""How a loss is to be taken; one of one's own as it is."""


@dataclass(frozen=True, slots=True)
class PreparedLoss:
    """A loss that fits the model, and why it is not the one that was asked for, where it is not."""

    loss: Loss
    note: str = ""


def prepare_loss(
    world: World,
    model: nn.Module,
    choice: LossChoice,
    computing: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> PreparedLoss:
    """A loss for a model. Chunks are tried on a few tokens, and taken only where the loss is that of whole logits.

    ``computing`` is what forward passes are run in, such as ``torch.autocast``.

    Collective: yes. Changes nothing; nothing is left gathered.

    Raises:
        ConfigError: the config asks for a router's loss that cannot be counted.
    """
    if isinstance(choice, WholeLogits | ChunkedLogits):
        require_router_loss(world, model, computing)
    if not isinstance(choice, ChunkedLogits):
        return PreparedLoss(choice)
    head = _head_of(model)
    if head is None:
        return PreparedLoss(
            WholeLogits(), f"{type(model).__name__} has no output embeddings; whole logits are used"
        )
    chunked = LossInChunks(head, choice.tokens)
    reasons = [reason for reason in world.gather(_why_not(model, head, computing)) if reason]
    if reasons:
        return PreparedLoss(WholeLogits(), f"{reasons[0]}; whole logits are used")
    return PreparedLoss(chunked)


def untried_loss(model: nn.Module, choice: LossChoice) -> Loss:
    """The loss that :func:`prepare_loss` would find, if nothing is wrong with it: for passes without numbers."""
    head = _head_of(model) if isinstance(choice, ChunkedLogits) else None
    if not isinstance(choice, ChunkedLogits):
        return choice
    return WholeLogits() if head is None else LossInChunks(head, choice.tokens)


def _why_not(model: nn.Module, head: Head, computing: Callable[[], AbstractContextManager[object]]) -> str:
    """Why a model's loss cannot be taken in chunks; nothing where it can."""
    words = min(_TRIED_TOKENS, model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
    device = computing_device(next(model.parameters()))
    tokens = (torch.arange(_TRIED_TOKENS, device=device) % words).unsqueeze(0)
    batch = Batch(tokens, torch.ones_like(tokens), tokens, _TRIED_TOKENS)
    body = getattr(head.parent, getattr(head.parent, "base_model_prefix", ""), None)
    with evaluating(model), computing(), remembered(body if isinstance(body, nn.Module) else None):
        expected = float(WholeLogits().summed(model, batch))
        attempt = LossInChunks(head, tokens=3, refused=[])
        found = float(attempt.summed(model, batch))
    if attempt.refused:
        return attempt.refused[0]
    if not abs(found - expected) <= _TOLERANCE * max(abs(expected), 1.0):
        return f"{type(model).__name__} has a loss of {expected} from whole logits and of {found} in chunks"
    return ""


_TRIED_TOKENS = 8
_TOLERANCE = 1e-2
"""Of sums in bfloat16 in another order. What is done to logits is repeated, not guessed: little is left to find."""


@dataclass(frozen=True, slots=True)
class Head:
    """A model's output embeddings, and where they are registered."""

    name: str
    parent: nn.Module
    attribute: str
    module: nn.Module


@dataclass(frozen=True, slots=True)
class LossInChunks:
    """A loss that never has logits of more than some tokens; made by :func:`prepare_loss`.

    ``refused`` takes the reason why a model cannot be run so, where it is tried; else that is an error.
    """

    head: Head
    tokens: int
    refused: list[str] | None = field(default=None, compare=False)

    def summed(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        root = cast(nn.Module, root_of(model) or model)
        own: Callable[..., Any] = root.forward

        def forward(*args: Any, **keywords: Any) -> torch.Tensor:
            return self._attempt(lambda: self._loss(own, args, keywords, model, batch), batch)

        with with_forward(root, forward):
            found: torch.Tensor = model(**batch.inputs(), use_cache=False)
        return found

    def count(self, batch: Batch) -> int:
        return batch.supervised_tokens

    def _loss(
        self,
        forward: Callable[..., Any],
        args: Sequence[Any],
        keywords: dict[str, Any],
        model: nn.Module,
        batch: Batch,
    ) -> torch.Tensor:
        hidden, steps, output = self._hidden(forward, args, keywords)
        return with_router_loss(self._through_head(hidden, steps, batch), model, output, batch)

    def _through_head(self, hidden: torch.Tensor, steps: Sequence[LogitsStep], batch: Batch) -> torch.Tensor:
        """The head, called as ever, with its hooks; it returns the loss."""
        following = _following(batch)
        learned = (following != IGNORED).nonzero().squeeze(1)
        head, logits_of = self.head.module, self.head.module.forward

        def logits(rows: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = logits_of(rows)
            for step in steps:
                found = step(found)
            return found

        def loss(rows: torch.Tensor) -> torch.Tensor:
            return chunked_cross_entropy(
                rows, following[learned], logits, list(head.parameters()), tokens=self.tokens
            )

        with with_forward(head, lambda rows: self._attempt(lambda: loss(rows), batch)):
            result: torch.Tensor = head(hidden.flatten(0, 1).index_select(0, learned))
        return result

    def _attempt(self, function: Callable[[], torch.Tensor], batch: Batch) -> torch.Tensor:
        """What the function returns; where it is only tried, the reason is kept in place of an error.

        FSDP2's hooks are to run to their end then: nothing may be raised through them.
        """
        try:
            return function()
        except Exception as error:
            if self.refused is None:
                raise
            self.refused.append(f"{canonical(self.head.name)} cannot be run in chunks ({error})")
            return torch.zeros((), device=batch.labels.device)

    def _hidden(
        self, forward: Callable[..., Any], args: Sequence[Any], keywords: dict[str, Any]
    ) -> tuple[torch.Tensor, Sequence[LogitsStep], Any]:
        """What the model gives to its head, what it does to what the head gives, and all that it returned."""
        stand_in = StandIn(self.head.module)
        setattr(self.head.parent, self.head.attribute, stand_in)
        try:
            output = forward(*args, **keywords)
        finally:
            setattr(self.head.parent, self.head.attribute, self.head.module)
        logits = output.logits
        if not isinstance(logits, RecordedLogits) or len(stand_in.given) != 1:
            raise TrainingError("the model's logits are not those of its output embeddings")
        return stand_in.given[0], logits.steps, output


def chunked_cross_entropy(
    hidden: torch.Tensor,
    wanted: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    parameters: Sequence[torch.Tensor],
    *,
    tokens: int,
) -> torch.Tensor:
    """The summed cross entropy of ``head(hidden)``, of which never more than ``tokens`` rows exist.

    Gradients of ``hidden`` and of the parameters are computed together with the loss, so the backward pass, of
    which there can be one, computes nothing. They are summed in float32 at least.

    Collective: no.
    Memory: about 12 * ``tokens`` bytes for each word; until the backward pass, gradients of ``hidden`` and of the
    parameters.

    Args:
        hidden: (rows, width).
        wanted: (rows,), the token that each row is to predict.
        head: from (rows, width) to logits of (rows, words), each row for itself.
        parameters: those of the head that may be trained.
        tokens: rows of a chunk.

    Returns: 0-d, float32.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if torch.is_grad_enabled() and (hidden.requires_grad or trained):
        apply: Any = _ChunkedCrossEntropy.apply
        loss: torch.Tensor = apply(head, wanted, tokens, hidden, *trained)
        return loss
    total = torch.zeros((), dtype=torch.float64, device=hidden.device)
    for rows, labels in _chunks(hidden, wanted, tokens):
        total += _cross_entropy(head, rows, labels)
    return total.float()


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        head: Callable[[torch.Tensor], torch.Tensor],
        wanted: torch.Tensor,
        tokens: int,
        hidden: torch.Tensor,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        with_hidden = ctx.needs_input_grad[3]
        pieces: list[torch.Tensor] = []
        sums = [torch.zeros_like(parameter, dtype=_at_least_float32(parameter.dtype)) for parameter in parameters]
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        for rows, labels in _chunks(hidden, wanted, tokens):
            with torch.enable_grad():
                rows = rows.detach().requires_grad_(with_hidden)
                loss = _cross_entropy(head, rows, labels)
                inputs = [rows, *parameters] if with_hidden else list(parameters)
                found = list(torch.autograd.grad(loss, inputs, allow_unused=True))
            total += loss.detach()
            del loss
            if with_hidden:
                pieces.append(found.pop(0))
            for summed, gradient in zip(sums, found, strict=True):
                if gradient is not None:
                    summed += gradient
        ctx.with_hidden = with_hidden
        ctx.dtypes = [parameter.dtype for parameter in parameters]
        ctx.save_for_backward(*([torch.cat(pieces) if pieces else torch.zeros_like(hidden)] * with_hidden), *sums)
        return total.float()

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> Any:
        """In place, so that no second copy exists; torch refuses a second pass over what has been changed."""
        scaled = [gradient.mul_(outer[0]) for gradient in ctx.saved_tensors]
        hidden = scaled.pop(0) if ctx.with_hidden else None
        cast = [gradient.to(dtype) for gradient, dtype in zip(scaled, ctx.dtypes, strict=True)]
        return (None, None, None, hidden, *cast)


def _chunks(hidden: torch.Tensor, wanted: torch.Tensor, tokens: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    if len(wanted):
        yield from zip(hidden.split(tokens), wanted.split(tokens), strict=True)


def _cross_entropy(
    head: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor, wanted: torch.Tensor
) -> torch.Tensor:
    return F.cross_entropy(head(rows).float(), wanted, reduction="sum")


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _following(batch: Batch) -> torch.Tensor:
    """The token that each is to predict, flat; the last of a row predicts none."""
    return F.pad(batch.labels[:, 1:], (0, 1), value=IGNORED).flatten()


def _head_of(model: nn.Module) -> Head | None:
    find = getattr(model, "get_output_embeddings", None)
    module = find() if find is not None else None
    if not isinstance(module, nn.Module):
        return None
    for name, found in model.named_modules():
        if found is module:
            parent, _, attribute = name.rpartition(".")
            return Head(name, model.get_submodule(parent), attribute, module)
    return None
