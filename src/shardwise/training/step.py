"""One optimizer step's work: forward, backward, accumulation, scaling, clipping."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.errors import TrainingError
from shardwise.execution.ranks.world import World
from shardwise.models import process_groups
from shardwise.models.standing import computing_device, root_of
from shardwise.training.accumulation import Accumulation, WholeGradients, exchange_gradients
from shardwise.training.clipping import clip_factor, norm_of, norm_share, reduced, scale_gradients
from shardwise.training.data import Batch
from shardwise.training.losses import Loss, WholeLogits
from shardwise.training.options import TrainOptions
from shardwise.training.scaling import Scaling, Unscaled


@dataclass(frozen=True, slots=True)
class StepGradient:
    """What a step's gradient is, the same on every rank. The gradient itself is in the parameters, clipped."""

    loss: float
    """Mean cross entropy of the supervised tokens of all ranks and micro-batches, in nats; with the router's loss,
    where the config asks for one."""
    grad_norm: float
    """Of the whole gradient, without the scale of the loss, before it was clipped."""
    tokens: int
    supervised_tokens: int
    is_heard: tuple[bool, ...] = ()
    """Of each thing that ranks were asked to tell, whether one of them did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """How the gradient of a step comes about; made once for a training.

    Attributes:
        world: the ranks that train together.
        model: sharded or not.
        parameters: those that are trained, at least one.
        options: of these the dtype and the greatest norm.
        loss: how the loss is taken; see :func:`~shardwise.training.losses.prepare_loss`.
        accumulation: what is kept between micro-batches.
        scaling: what the loss is multiplied by.
        norm_type: of the norm that is clipped, 2 or infinity.
    """

    world: World
    model: nn.Module
    parameters: Sequence[nn.Parameter]
    options: TrainOptions
    loss: Loss = field(default_factory=WholeLogits)
    accumulation: Accumulation = field(default_factory=WholeGradients)
    scaling: Scaling = field(default_factory=Unscaled)
    norm_type: float = 2.0

    @property
    def device(self) -> torch.device:
        """Where forward and backward passes compute."""
        return computing_device(self.parameters[0])

    def gradient(self, batches: Sequence[Batch], tell: Callable[[], Sequence[bool]] = lambda: ()) -> StepGradient:
        """Compute the gradient of all micro-batches, on all ranks, and clip it.

        The loss is that of all supervised tokens divided by their number on all ranks and in all micro-batches, so
        that the numbers of ranks and of micro-batches do not change the result.

        Collective: yes. Beside what FSDP2 exchanges, a few numbers twice: tokens are counted while the first
        forward pass goes on, loss and norm are summed after the last backward pass. Then the host waits.

        Args:
            batches: the micro-batches of this rank, as many on every one.
            tell: what else this rank has to say to all, asked for after the last backward pass.
        """
        device = self.device
        counts = _Counts(self.world, batches)
        total = torch.zeros((), dtype=torch.float64, device=device)
        for index, batch in enumerate(batches):
            exchange_gradients(self.model, self.accumulation, is_last=index == len(batches) - 1)
            with computing_in(self.model, device, self.options):
                loss = self.loss.summed(self.model, batch.to(device))
            # FSDP2 averages gradients over the ranks; as their sum is meant, the number of ranks is a factor.
            (loss * counts.weight(self.scaling.scale * self.world.size, device)).backward()
            total += loss.detach()
        loss_sum, grad_norm, is_heard = self._summed(total, tell())
        scale_gradients(self.parameters, clip_factor(grad_norm, self.options.max_grad_norm) / self.scaling.scale)
        tokens, supervised_tokens = counts.read()
        return StepGradient(loss_sum / max(supervised_tokens, 1), grad_norm, tokens, supervised_tokens, is_heard)

    def _summed(self, loss: torch.Tensor, told: Sequence[bool]) -> tuple[float, float, tuple[bool, ...]]:
        """The loss of all ranks, the norm of their gradient, and whether any of them told something."""
        share = norm_share(self.parameters, self.norm_type, self.world.size).to(loss.device)
        if self.norm_type == math.inf:
            share = reduced(share, self.norm_type, self.world.group).to(loss.device) / self.world.size
        own = torch.cat([torch.stack([loss, share]), torch.tensor(told, dtype=torch.float64, device=loss.device)])
        loss_sum, total, *heard = reduced(own, 2.0, self.world.group).tolist()
        is_heard = tuple(count > 0 for count in heard)
        return loss_sum, norm_of(total, self.norm_type) / self.scaling.scale, is_heard


class _Counts:
    """The tokens of a step on all ranks. They are summed while the ranks begin to compute, and read at the end."""

    def __init__(self, world: World, batches: Sequence[Batch]) -> None:
        own = [sum(batch.tokens for batch in batches), sum(batch.supervised_tokens for batch in batches)]
        self._sums = torch.tensor(own)
        self._work: dist.Work | None = None
        if world.size > 1:
            self._sums = self._sums.to(process_groups.object_device(world.group))
            self._work = dist.all_reduce(self._sums, group=world.group, async_op=True)

    def _wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None

    def weight(self, factor: float, device: torch.device) -> torch.Tensor:
        """What a token's loss is multiplied by, on the device, so that the host need not wait for it."""
        self._wait()
        return (factor / self._sums[1].clamp(min=1).to(torch.float64)).to(device, torch.float32)

    def read(self) -> tuple[int, int]:
        """Tokens, and supervised ones."""
        self._wait()
        tokens, supervised_tokens = self._sums.tolist()
        return tokens, supervised_tokens


def parameter_groups(parameters: Sequence[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Parameters by what AdamW does to them: matrices decay, norms and biases do not.

    The groups are the same whatever is sharded, so that any number of ranks can go on with them.
    """
    groups: dict[bool, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.ndim >= 2, []).append(parameter)
    return [
        {"params": members, "weight_decay": weight_decay if decays else 0.0} for decays, members in groups.items()
    ]


def make_optimizer(parameters: Sequence[nn.Parameter], options: TrainOptions) -> torch.optim.AdamW:
    """AdamW for these parameters. torch's loops over many tensors at once take no mixture of sharded and whole."""
    is_mixed = len({isinstance(parameter, DTensor) for parameter in parameters}) > 1
    return torch.optim.AdamW(
        parameter_groups(parameters, options.weight_decay),
        lr=options.learning_rate,
        betas=options.betas,
        eps=options.eps,
        foreach=False if is_mixed else None,
    )


def computing_in(model: nn.Module, device: torch.device, options: TrainOptions) -> AbstractContextManager[object]:
    """Mixed precision for a model that is not sharded; a sharded one has it in its FSDP2 policy."""
    if options.dtype == "float32" or root_of(model) is not None:
        return nullcontext()
    return torch.autocast(device.type, getattr(torch, options.dtype))


def require_reached(model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
    """Refuse to take steps that change nothing.

    FSDP2 begins the backward pass of a group at the tensors that its forward pass returned, as far as it finds them
    (``torch.utils._pytree``). Of a model whose only group is the root, that is the only beginning there is.

    Raises:
        TrainingError: no parameter has a gradient.
    """
    if any(parameter.grad is not None for parameter in parameters):
        return
    raise TrainingError(
        f"none of the {len(parameters)} trained parameters of {type(model).__name__} has got a gradient. Either "
        "the loss does not depend on them, or the model returns an object in which FSDP2 finds no tensors: return "
        "a tuple, a dict or a ModelOutput, or make its blocks groups of their own (another wrap policy)"
    )


def require_finite(step: int, loss: float, grad_norm: float) -> None:
    """Stop before the optimizer takes in what is not a number. Both are the same on every rank."""
    for name, value in (("loss", loss), ("gradient norm", grad_norm)):
        if not math.isfinite(value):
            raise TrainingError(
                f"step {step}: the {name} is {value}; the parameters are still those of step {step - 1}. Lower the "
                "learning rate, or look for rows unlike the others"
            )
