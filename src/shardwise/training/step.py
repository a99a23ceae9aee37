"""One step: forward, backward, accumulation, scaling, clipping, optimizers ([Note: A step] in ``parts.py``)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.distributed as dist
from torch import nn

from shardwise.errors import TrainingError
from shardwise.execution.ranks.world import World
from shardwise.models import torch_words
from shardwise.observing.phases import phase
from shardwise.training.data.batches import Batch
from shardwise.training.optimizing.gradients import (
    Scaling,
    Unscaled,
    clip_factor,
    norm_of,
    norm_share,
    reduced,
    scale_gradients,
)
from shardwise.training.parts import TrainedPart
from shardwise.training.passes.forward import Accumulation, Forward, WholeGradients, exchange_gradients
from shardwise.training.passes.losses import Loss


@dataclass(frozen=True, slots=True)
class StepGradient:
    """What a step's gradient is, the same on every rank. The gradient itself is in the parameters, clipped."""

    loss: float
    """Mean cross entropy of the supervised tokens of all ranks and micro-batches, in nats; with the router's loss,
    where the config asks for one. Of a loss of one's own, the mean of what it counts."""
    norms: tuple[float, ...]
    """Of each part's gradient, without the scale of the loss, before it was clipped."""
    tokens: int
    supervised_tokens: int
    is_heard: tuple[bool, ...] = ()
    """Of each thing that ranks were asked to tell, whether one of them did."""
    most: int = 0
    """The greatest of what ranks had measured."""

    @property
    def grad_norm(self) -> float:
        """Of the whole gradient; finite where all parts' norms are."""
        return math.hypot(*self.norms)


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """How a step comes about; made once for a training.

    Attributes:
        world: the ranks that train together.
        forward: the model, and how its loss is taken.
        parts: what is trained, at least one, in the same order on every rank.
        accumulation: what is kept between micro-batches.
        scaling: what the loss is multiplied by.
    """

    world: World
    forward: Forward
    parts: Sequence[TrainedPart]
    accumulation: Accumulation = field(default_factory=WholeGradients)
    scaling: Scaling = field(default_factory=Unscaled)

    def gradient(
        self, batches: Sequence[Batch], tell: Callable[[], Sequence[bool]] = lambda: (), measured: int = 0
    ) -> StepGradient:
        """Compute the gradient of all micro-batches, on all ranks, and clip that of each part.

        The loss is summed, and divided by what it counts (supervised tokens) on all ranks and in all micro-batches,
        so that the numbers of ranks and of micro-batches do not change the result.

        Collective: yes. Beside what FSDP2 exchanges, a few numbers twice: tokens are counted while the first
        forward pass goes on, loss and norms are summed after the last backward pass. Then the host waits. Norms of
        type infinity take one exchange more.

        Args:
            batches: the micro-batches of this rank, as many on every one.
            tell: what else this rank has to say to all, asked for after the last backward pass.
            measured: a number of this rank, of which all learn the greatest.
        """
        device = self.forward.device
        counts = _Counts(self.world, batches, self.forward.loss, measured)
        total = torch.zeros((), dtype=torch.float64, device=device)
        for index, batch in enumerate(batches):
            exchange_gradients(self.forward.model, self.accumulation, is_last=index == len(batches) - 1)
            with phase("forward"):
                loss = self.forward.summed(batch)
            # FSDP2 averages gradients over the ranks; as their sum is meant, the number of ranks is a factor.
            with phase("backward"):
                (loss * counts.weight(self.scaling.scale * self.world.size, device)).backward()
            total += loss.detach()
        with phase("sum"):
            loss_sum, norms, is_heard = self._summed(total, tell())
        for part, parameters, norm in zip(self.parts, self._members, norms, strict=True):
            scale_gradients(parameters, clip_factor(norm, part.max_grad_norm) / self.scaling.scale)
        tokens, supervised_tokens, counted = counts.read()
        return StepGradient(
            loss_sum / max(counted, 1), norms, tokens, supervised_tokens, is_heard, counts.greatest()
        )

    @cached_property
    def _members(self) -> list[list[nn.Parameter]]:
        """The parameters of each part, in the model's order, in which their norms are summed."""
        return [part.parameters_in(self.forward.model) for part in self.parts]

    def _summed(
        self, loss: torch.Tensor, told: Sequence[bool]
    ) -> tuple[float, tuple[float, ...], tuple[bool, ...]]:
        """The loss of all ranks, the norms of their gradients, and whether any of them told something."""
        kinds = [part.norm_type for part in self.parts]
        shares = [
            norm_share(parameters, kind, self.world.size).to(loss.device)
            for parameters, kind in zip(self._members, kinds, strict=True)
        ]
        if math.inf in kinds:
            greatest = reduced(torch.stack(shares), math.inf, self.world.group).to(loss.device) / self.world.size
            shares = [
                most if kind == math.inf else share
                for kind, share, most in zip(kinds, shares, greatest, strict=True)
            ]
        own = torch.cat([torch.stack([loss, *shares]), torch.tensor(told, dtype=torch.float64, device=loss.device)])
        loss_sum, *sums = reduced(own, 2.0, self.world.group).tolist()
        totals, heard = sums[: len(kinds)], sums[len(kinds) :]
        norms = [norm_of(total, kind) / self.scaling.scale for total, kind in zip(totals, kinds, strict=True)]
        return loss_sum, tuple(norms), tuple(count > 0 for count in heard)

    def take(self, gradient: StepGradient) -> None:
        """Have all parts take their step, unless the scale of the loss was too much; and forget the gradient.

        Collective: no; the verdict is the same on every rank.

        Raises:
            TrainingError: no scale is small enough.
        """
        with phase("optimizer"):
            if self.scaling.judge(gradient.grad_norm):
                for part in self.parts:
                    part.optimizer.step()
                    part.schedule.step()
        for part in self.parts:
            part.optimizer.zero_grad()

    def require_finite(self, step: int, gradient: StepGradient) -> None:
        """Stop before an optimizer takes in what is not a number. A norm that overflowed is a scaler's affair.

        Raises:
            TrainingError: the loss or a norm is none; the same on every rank.
        """
        for name, value in self._looked_at(gradient):
            if not math.isfinite(value):
                raise TrainingError(
                    f"step {step}: the {name} is {value}; the parameters are still those of step {step - 1}. Lower "
                    "the learning rate, or look for rows unlike the others"
                )

    def _looked_at(self, gradient: StepGradient) -> Iterator[tuple[str, float]]:
        yield "loss", gradient.loss
        if isinstance(self.scaling, Unscaled):
            for part, norm in zip(self.parts, gradient.norms, strict=True):
                yield f"gradient norm{self._named(part)}", norm

    def require_reached(self, gradient: StepGradient) -> None:
        """Refuse to take steps that change nothing of a part.

        FSDP2 begins the backward pass of a group at the tensors that its forward pass returned, as far as it finds
        them (``torch.utils._pytree``). Of a model whose only group is the root, there is no other beginning.

        Collective: yes, where a norm is nothing.

        Raises:
            TrainingError: no parameter of a part has a gradient.
        """
        still = [part for part, norm in zip(self.parts, gradient.norms, strict=True) if norm == 0]
        if still and gradient.supervised_tokens:
            self.world.together(lambda: self._require_gradients(still))

    def _require_gradients(self, parts: Sequence[TrainedPart]) -> None:
        for part in parts:
            self._require_gradient(part)

    def _require_gradient(self, part: TrainedPart) -> None:
        parameters = [parameter for parameter in part.parameters if parameter.requires_grad]
        if any(parameter.grad is not None for parameter in parameters):
            return
        whose = type(self.forward.model).__name__
        raise TrainingError(
            f"none of the {len(parameters)} trained parameters of {whose}{self._named(part)} has got a gradient. "
            "Either the loss does not depend on them, or the model returns an object in which FSDP2 finds no "
            "tensors: return a tuple, a dict or a ModelOutput, or make its blocks groups of their own (another "
            "wrap policy)"
        )

    def _named(self, part: TrainedPart) -> str:
        """Which part is meant, where there are several."""
        return "" if len(self.parts) == 1 else f" in the part {part.name!r}"


class _Counts:
    """The tokens of a step on all ranks. They are summed while the ranks begin to compute, and read at the end.

    Beside them is a number of each rank, in a place of its own.
    """

    def __init__(self, world: World, batches: Sequence[Batch], loss: Loss, measured: int) -> None:
        own = (
            sum(batch.tokens for batch in batches),
            sum(batch.supervised_tokens for batch in batches),
            sum(loss.count(batch) for batch in batches),
            *(measured if rank == world.rank else 0 for rank in range(world.size)),
        )
        self._sums = torch.tensor(own)
        self._work: dist.Work | None = None
        if world.size > 1:
            self._sums = self._sums.to(torch_words.object_device(world.group))
            self._work = dist.all_reduce(self._sums, group=world.group, async_op=True)

    def _wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None

    def weight(self, factor: float, device: torch.device) -> torch.Tensor:
        """What a loss is multiplied by, on the device, so that the host need not wait for it."""
        self._wait()
        return (factor / self._sums[2].clamp(min=1).to(torch.float64)).to(device, torch.float32)

    def read(self) -> tuple[int, int, int]:
        """Tokens, supervised ones, and what the loss counts."""
        self._wait()
        tokens, supervised_tokens, counted = self._sums[:3].tolist()
        return tokens, supervised_tokens, counted

    def greatest(self) -> int:
        """Of what the ranks have measured."""
        self._wait()
        return int(self._sums[3:].max())
