"""One tenant: its name, its matrices in one flat buffer, their gradient in another, its optimizer, its window."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.bank.backends import TenantPair
from shardwise.bank.optimizers import (
    FlatSlices,
    Moments,
    OptimizerMaker,
    ShardedMoments,
    WholeMoments,
    adamw,
    gathered,
    made_optimizer,
)
from shardwise.errors import ConfigError
from shardwise.execution.ranks.world import World
from shardwise.training.optimizing.gradients import clip_factor, norm_of, norm_share, scale_gradients
from shardwise.training.parts import RateSchedule, TrainedPart, Unchanging
from shardwise.tuning.sites import (
    AdaptedSite,
    AdapterOutline,
    EmbeddingSite,
    ExpertsSite,
    LinearSite,
    adapter_words,
)

if TYPE_CHECKING:
    from peft import LoraConfig


ScheduleMaker: TypeAlias = Callable[[Optimizer], RateSchedule]


@dataclass(frozen=True, slots=True)
class TokenMean:
    """A tenant's loss is the mean over the tokens it learns in a window, on all ranks and in all micro-batches."""


@dataclass(frozen=True, slots=True)
class WeightedSum:
    """A tenant's loss is the sum over its tokens, each times the weight that the caller gives it; 1 without."""


Reduction: TypeAlias = TokenMean | WeightedSum


def unchanging(_optimizer: Optimizer) -> RateSchedule:
    return Unchanging()


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantOptions:
    """How a tenant is trained.

    Attributes:
        optimizer: makes its optimizer, of the one flat parameter it is given, elementwise; or, if it refuses that,
            of the matrices (``torch.optim.Muon``).
        optimizer_state: which rank has what the optimizer keeps; all of it is on every rank by default.
        schedule: makes what becomes of its learning rate; stepped with the optimizer.
        max_grad_norm: the norm to which a greater one of its gradient is scaled down; infinity for no limit.
        accumulation: how many micro-batches (calls of ``forward_backward``) make a window, after which it steps.
        reduction: what its loss is of its tokens' losses.
        seed: what its matrices begin with, and its dropout, follow from.
    """

    optimizer: OptimizerMaker = adamw
    schedule: ScheduleMaker = unchanging
    max_grad_norm: float = math.inf
    accumulation: int = 1
    reduction: Reduction = field(default_factory=TokenMean)
    seed: int = 0
    optimizer_state: Moments = field(default_factory=WholeMoments)

    def __post_init__(self) -> None:
        faults = []
        if not self.max_grad_norm > 0:
            faults.append(f"max_grad_norm={self.max_grad_norm}: it is above 0; leave it out for no limit")
        if not _is_integer(self.accumulation) or self.accumulation < 1:
            faults.append(f"accumulation={self.accumulation!r}: a window has 1 micro-batch or more")
        reduction: object = self.reduction
        if not isinstance(reduction, TokenMean | WeightedSum):
            faults.append(f"reduction={self.reduction!r}: pass TokenMean() or WeightedSum()")
        moments: object = self.optimizer_state
        if not isinstance(moments, WholeMoments | ShardedMoments):
            faults.append(f"optimizer_state={moments!r}: pass WholeMoments() or ShardedMoments()")
        if not _is_integer(self.seed):
            faults.append(f"seed={self.seed!r}: it is an integer")
        if faults:
            raise ConfigError("the tenant cannot be trained so\n  " + "\n  ".join(faults))


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(slots=True)
class TenantWindow:
    """What a tenant has gathered since its last step."""

    micro_batches: int = 0
    learned_tokens: int = 0
    """On all ranks."""


class Tenant:
    """An adapter and all that is its own.

    Memory: four numbers of float32 for each trained one, with AdamW; less with :class:`ShardedMoments`.
    """

    def __init__(
        self,
        name: str,
        config: LoraConfig,
        outline: AdapterOutline,
        options: TenantOptions,
        device: torch.device,
        world: World,
    ) -> None:
        self.name = name
        self.options = options
        self.config = copy.deepcopy(config)
        self.words = adapter_words(config)
        """Its config, in words that are the same in every process."""
        self.sites = outline.sites
        self.shapes = {matrix.key: matrix.shape for matrix in outline.matrices()}
        count = sum(math.prod(shape) for shape in self.shapes.values())
        self.flat = nn.Parameter(torch.zeros(count, device=device))
        self.gradient = torch.zeros(count, device=device)
        self.flat.grad = self.gradient
        self.matrices = _views(self.flat.detach(), self.shapes)
        self.gradients = _views(self.gradient, self.shapes)
        for matrix in outline.matrices():
            outline.begin(matrix, self.matrices[matrix.key], options.seed)
        self.pairs = {
            key: pair
            for site in outline.sites
            for key, pair in _pairs_of(site, self.matrices, self.gradients).items()
        }
        self.world = world
        self.slices = FlatSlices(count, world.size)
        self.own = made_optimizer(options.optimizer, self._stepped(), self.pairs, options.optimizer_state)
        optimizer = self.own.optimizer
        self.part = TrainedPart(name, optimizer, options.schedule(optimizer), options.max_grad_norm)
        self.max_grad_norm = options.max_grad_norm
        self.window = TenantWindow()
        self.windows = 0
        """Windows that are over, whether or not the step was taken."""
        self.steps = 0

    @property
    def rank(self) -> int:
        """The greatest of its sites."""
        return max(site.r for site in self.sites)

    @property
    def trained_count(self) -> int:
        return self.flat.numel()

    @property
    def has_slices(self) -> bool:
        """Whether this rank keeps the moments of a slice only."""
        return isinstance(self.options.optimizer_state, ShardedMoments)

    @property
    def own_slice(self) -> slice:
        """Of the flat buffers, this rank's."""
        return self.slices.of(self.world.rank)

    def by_matrix(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views of a flat tensor of so many numbers, by the names of matrices."""
        return _views(flat, self.shapes)

    def _stepped(self) -> nn.Parameter:
        """What of the flat parameter this rank's optimizer steps. Shares memory with it, as their gradients do."""
        if not self.has_slices:
            return self.flat
        own = nn.Parameter(self.flat.detach()[self.own_slice])
        own.grad = self.gradient[self.own_slice]
        return own

    def stand_in(self) -> Tenant:
        """One of the same shape whose matrices are 0; it shares all else, the gradient too."""
        other = copy.copy(self)
        other.pairs = {
            site: replace(pair, A=torch.zeros_like(pair.A), B=torch.zeros_like(pair.B))
            for site, pair in self.pairs.items()
        }
        return other

    def norm(self) -> float:
        """Of the gradient as it is in the buffer, which is the whole one once it has been summed over the ranks."""
        members = [_with_gradient(self.matrices[key], self.gradients[key]) for key in self.shapes]
        return norm_of(float(norm_share(members, 2.0, 1)), 2.0)

    def settings(self) -> dict[str, str]:
        """What its next step is taken with, and how many it has taken: the same on every rank."""
        group = {key: value for key, value in self.part.optimizer.param_groups[0].items() if key != "params"}
        counts = {"max_grad_norm": self.max_grad_norm, "steps": self.steps, "windows": self.windows}
        numbers = {
            key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in group.items()
        }
        return {key: repr(value) for key, value in {**numbers, **counts}.items()}

    def require_changes(self, changes: Mapping[str, Any]) -> None:
        """Refuse changes of settings that are not there, or cannot be so.

        Raises:
            ConfigError: naming each.
        """
        group = self.part.optimizer.param_groups[0]
        known = {key for key, value in group.items() if key not in ("params", "initial_lr", "foreach", "fused")}
        kind = type(self.part.optimizer).__name__
        faults = [
            f"{key}: {kind} has {', '.join(sorted(known))}, and there is max_grad_norm"
            for key in changes
            if key not in known and key != "max_grad_norm"
        ]
        if "lr" in changes and not isinstance(self.part.schedule, Unchanging):
            faults.append("lr: the schedule of this tenant sets it; create it without one")
        for key, value in changes.items():
            for number in value if isinstance(value, tuple) else (value,):
                is_number = isinstance(number, int | float) and not math.isnan(number) and number >= 0
                if not is_number or (key == "max_grad_norm" and number == 0):
                    faults.append(f"{key}={value!r} is no number that it can be")
        if faults:
            raise ConfigError(f"the step of {self.name!r} cannot be changed so\n  " + "\n  ".join(faults))

    def change(self, changes: Mapping[str, Any]) -> None:
        """Change settings of the optimizer, or ``max_grad_norm``; they stay so."""
        settings = dict(changes)
        self.max_grad_norm = float(settings.pop("max_grad_norm", self.max_grad_norm))
        self.part.optimizer.param_groups[0].update(settings)

    def step(self, scale: float) -> tuple[bool, float]:
        """Take a step by the gradient times ``scale``, unless that is not finite; then forget it.

        Returns whether it was taken, and the norm before it was clipped. Collective: where moments are sharded.
        """
        if scale != 1.0:
            self.gradient.mul_(scale)
        norm = self.norm()
        if is_finite := math.isfinite(norm):
            scale_gradients([self.flat], clip_factor(norm, self.max_grad_norm))
            self.part.optimizer.step()
            if self.has_slices and self.world.size > 1:
                flat = self.flat.detach()
                flat.copy_(gathered(flat[self.own_slice], self.slices, self.world))
            self.part.schedule.step()
            self.steps += 1
        self.gradient.zero_()
        self.window = TenantWindow()
        self.windows += 1
        return is_finite, norm


def _with_gradient(values: torch.Tensor, gradient: torch.Tensor) -> nn.Parameter:
    """A parameter that shares memory with both; for functions that look at parameters."""
    parameter = nn.Parameter(values, requires_grad=False)
    parameter.grad = gradient
    return parameter


def _views(flat: torch.Tensor, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    sizes = [math.prod(shape) for shape in shapes.values()]
    return {key: piece.view(shape) for (key, shape), piece in zip(shapes.items(), flat.split(sizes), strict=True)}


def _pairs_of(
    site: AdaptedSite, matrices: Mapping[str, torch.Tensor], gradients: Mapping[str, torch.Tensor]
) -> dict[str, TenantPair]:
    """The matrices of a site, by the name that a layer of the base asks for them; of experts, for each expert."""
    keys = (site.lora_A.key, site.lora_B.key)
    A, B = (matrices[key] for key in keys)
    a_grad, b_grad = (gradients[key] for key in keys)
    match site:
        case LinearSite():
            return {site.module: TenantPair(A, B, a_grad, b_grad, site.scaling, site.dropout)}
        case EmbeddingSite():
            return {site.module: TenantPair(A, B, a_grad, b_grad, site.scaling)}
        case ExpertsSite():
            return {
                expert_site(site.module, site.parameter, expert): TenantPair(
                    _rows_of_experts(A, site.experts)[expert],
                    _columns_of_experts(B, site.experts)[..., expert],
                    _rows_of_experts(a_grad, site.experts)[expert],
                    _columns_of_experts(b_grad, site.experts)[..., expert],
                    site.scaling,
                )
                for expert in range(site.experts)
            }


def expert_site(module: str, parameter: str, expert: int) -> str:
    """What the matrices of one expert are asked for by."""
    return f"{module}.{parameter}.{expert}"


def _rows_of_experts(A: torch.Tensor, experts: int) -> torch.Tensor:
    """As PEFT has it, (r * experts, in) is expert by expert."""
    return A.view(experts, -1, A.shape[1])


def _columns_of_experts(B: torch.Tensor, experts: int) -> torch.Tensor:
    """And (out, r * experts) rank by rank."""
    return B.view(len(B), -1, experts)


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def require_name(name: object) -> str:
    """A name that is safe as that of a folder, of a file, and in a log.

    Raises:
        ConfigError: it is not.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name) or ".." in name or name.endswith("."):
        raise ConfigError(
            f"{name!r} is no name of an adapter: up to 128 letters, digits, '.', '_' and '-', the first a letter "
            "or a digit, the last no '.', and no '..'"
        )
    return name
