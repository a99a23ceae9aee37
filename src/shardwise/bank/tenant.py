"""One tenant: its name, its matrices in one flat buffer, their gradient in another, its optimizer, its window."""

from __future__ import annotations

import copy
import inspect
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.errors import ConfigError
from shardwise.execution.world import World
from shardwise.tuning import peft_compat, sites

if TYPE_CHECKING:
    from peft import LoraConfig


OptimizerMaker: TypeAlias = Callable[[list[nn.Parameter]], Optimizer]

_ELEMENTWISE: tuple[type[Optimizer], ...] = (
    *(torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam),
    *(torch.optim.SGD, torch.optim.ASGD, torch.optim.RMSprop, torch.optim.Rprop),
    *(torch.optim.Adagrad, torch.optim.Adadelta),
)


def adamw(parameters: list[nn.Parameter]) -> Optimizer:
    """Make the default optimizer of a tenant."""
    return torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.0)


def maker_of(name: str, settings: Mapping[str, Any]) -> OptimizerMaker | None:
    """Return a function that makes a torch optimizer of this class with these settings, or None for other classes.

    Raises:
        ConfigError: the settings make no sense.
    """
    kind: Any = next((each for each in _ELEMENTWISE if name == f"torch.optim.{each.__name__}"), None)
    if kind is None:
        return None
    known = {key: value for key, value in settings.items() if key in inspect.signature(kind).parameters}

    def make(parameters: list[nn.Parameter]) -> Optimizer:
        made: Optimizer = kind(parameters, **known)
        return made

    try:
        make([nn.Parameter(torch.zeros(1))])
    except (ValueError, TypeError, RuntimeError) as error:
        raise ConfigError(f"{name} cannot be made with the settings that were saved: {error}") from error
    return make


def made_optimizer(make: OptimizerMaker, flat: nn.Parameter) -> Optimizer:
    """Make the optimizer of a tenant's flat parameter.

    Raises:
        ConfigError: the optimizer is not one that is elementwise, or has other parameters.
    """
    optimizer = make([flat])
    kind = type(optimizer)
    if kind not in _ELEMENTWISE:
        known = ", ".join(sorted(each.__name__ for each in _ELEMENTWISE))
        raise ConfigError(
            f"{kind.__module__}.{kind.__qualname__} is not known to treat each element for itself, and a tenant's "
            f"matrices are one flat buffer. Take one of {known}"
        )
    if len(optimizer.param_groups) != 1 or [id(one) for one in optimizer.param_groups[0]["params"]] != [id(flat)]:
        raise ConfigError(
            f"{kind.__qualname__} must be made of the parameter it is given, in one group, and of no other"
        )
    return optimizer


class ConstantRate:
    """A schedule that leaves the learning rate as it is."""

    def step(self) -> None:
        """Change nothing."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore nothing."""


ScheduleMaker: TypeAlias = Callable[[Optimizer], Any]
"""Makes what has ``step``, ``state_dict`` and ``load_state_dict``, as torch's schedulers."""


Reduction: TypeAlias = Literal["mean", "sum"]
"""A tenant's loss: the mean over the tokens it learns in a window, or the sum over them, each times its weight."""


def unchanging(_optimizer: Optimizer) -> ConstantRate:
    return ConstantRate()


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantOptions:
    """Options of a tenant's training.

    Attributes:
        optimizer: makes its optimizer of the one flat parameter it is given, elementwise.
        schedule: makes the learning rate scheduler, which is stepped with the optimizer.
        max_grad_norm: gradients with a larger norm are scaled down to it. Infinity for no limit.
        gradient_accumulation_steps: how many micro-batches (calls of ``forward_backward``) make a window, after
            which it steps.
        reduction: reduction of the losses of its tokens.
        seed: seeds the initial matrices and the dropout.
    """

    optimizer: OptimizerMaker = adamw
    schedule: ScheduleMaker = unchanging
    max_grad_norm: float = math.inf
    gradient_accumulation_steps: int = 1
    reduction: Reduction = "mean"
    seed: int = 0

    def __post_init__(self) -> None:
        faults = []
        if not self.max_grad_norm > 0:
            faults.append(f"max_grad_norm={self.max_grad_norm}: it is above 0. Leave it out for no limit")
        if not _is_integer(self.gradient_accumulation_steps) or self.gradient_accumulation_steps < 1:
            faults.append(f"accumulation={self.gradient_accumulation_steps!r}: a window has 1 micro-batch or more")
        if self.reduction not in get_args(Reduction):
            faults.append(f"reduction={self.reduction!r}: pass 'mean' or 'sum'")
        if not _is_integer(self.seed):
            faults.append(f"seed={self.seed!r}: it is an integer")
        if faults:
            raise ConfigError("the tenant cannot be trained so\n  " + "\n  ".join(faults))


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(slots=True)
class TenantWindow:
    """Counts of a tenant since its last step."""

    micro_batches: int = 0
    num_supervised_tokens: int = 0
    """On all ranks."""


class Tenant:
    """An adapter and all that is its own.

    Memory: four numbers of float32 for each trained one, with AdamW.
    """

    def __init__(
        self,
        name: str,
        config: LoraConfig,
        outline: sites.AdapterOutline,
        options: TenantOptions,
        device: torch.device,
        world: World,
    ) -> None:
        self.name = name
        self.options = options
        self.config = copy.deepcopy(config)
        self.comparable_config = peft_compat.comparable_text(config)
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
            outline.initialize(matrix, self.matrices[matrix.key], options.seed)
        self.pairs = {
            key: pair
            for site in outline.sites
            for key, pair in _pairs_of(site, self.matrices, self.gradients).items()
        }
        self.world = world
        self.optimizer = made_optimizer(options.optimizer, self.flat)
        self.schedule = options.schedule(self.optimizer)
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

    def settings(self) -> dict[str, str]:
        """Return settings of its next step, and how many it has taken: the same on every rank."""
        group = {key: value for key, value in self.optimizer.param_groups[0].items() if key != "params"}
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
        group = self.optimizer.param_groups[0]
        known = {key for key, value in group.items() if key not in ("params", "initial_lr", "foreach", "fused")}
        kind = type(self.optimizer).__name__
        faults = [
            f"{key}: {kind} has {', '.join(sorted(known))}, and there is max_grad_norm"
            for key in changes
            if key not in known and key != "max_grad_norm"
        ]
        if "lr" in changes and not isinstance(self.schedule, ConstantRate):
            faults.append("lr: the schedule of this tenant sets it. Create it without one")
        for key, value in changes.items():
            for number in value if isinstance(value, tuple) else (value,):
                is_number = isinstance(number, int | float) and not math.isnan(number) and number >= 0
                if not is_number or (key == "max_grad_norm" and number == 0):
                    faults.append(f"{key}={value!r} is not a valid value")
        if faults:
            raise ConfigError(f"the step of {self.name!r} cannot be changed so\n  " + "\n  ".join(faults))

    def change(self, changes: Mapping[str, Any]) -> None:
        """Change settings of the optimizer, or ``max_grad_norm``, permanently."""
        settings = dict(changes)
        self.max_grad_norm = float(settings.pop("max_grad_norm", self.max_grad_norm))
        self.optimizer.param_groups[0].update(settings)

    def clip(self, norm: float) -> None:
        """Scale the gradient down to ``max_grad_norm``."""
        if (factor := self.max_grad_norm / (norm + 1e-6)) < 1:
            self.gradient.mul_(factor)


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """A tenant's matrices at one site, float32: views of its flat buffer, and of that of its gradient."""

    A: torch.Tensor
    """(r, in)"""
    B: torch.Tensor
    """(out, r)"""
    a_grad: torch.Tensor
    b_grad: torch.Tensor
    scaling: float
    dropout: float = 0.0

    @property
    def rank(self) -> int:
        return self.A.shape[0]


def _views(flat: torch.Tensor, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    sizes = [math.prod(shape) for shape in shapes.values()]
    return {key: piece.view(shape) for (key, shape), piece in zip(shapes.items(), flat.split(sizes), strict=True)}


def _pairs_of(
    site: sites.AdaptedSite, matrices: Mapping[str, torch.Tensor], gradients: Mapping[str, torch.Tensor]
) -> dict[str, LoraWeights]:
    """Return the matrices of a site by the names that the base's layer uses. For experts, those of each expert."""
    keys = (site.lora_A.key, site.lora_B.key)
    A, B = (matrices[key] for key in keys)
    a_grad, b_grad = (gradients[key] for key in keys)
    match site:
        case sites.LinearSite():
            return {site.module: LoraWeights(A, B, a_grad, b_grad, site.scaling, site.dropout)}
        case sites.EmbeddingSite():
            return {site.module: LoraWeights(A, B, a_grad, b_grad, site.scaling)}
        case sites.ExpertsSite():
            return {
                expert_site(site.module, site.parameter, expert): LoraWeights(
                    _rows_of_experts(A, site.experts)[expert],
                    _columns_of_experts(B, site.experts)[..., expert],
                    _rows_of_experts(a_grad, site.experts)[expert],
                    _columns_of_experts(b_grad, site.experts)[..., expert],
                    site.scaling,
                )
                for expert in range(site.experts)
            }


def expert_site(module: str, parameter: str, expert: int) -> str:
    """Name the site of the matrices of one expert."""
    return f"{module}.{parameter}.{expert}"


def _rows_of_experts(A: torch.Tensor, experts: int) -> torch.Tensor:
    """Return A as (r * experts, in), expert by expert, as PEFT stores it."""
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
            f"{name!r} is not a valid adapter name: up to 128 letters, digits, '.', '_' and '-', the first a "
            "letter or a digit, the last no '.', and no '..'"
        )
    return name


@dataclass(frozen=True, slots=True)
class TenantLoss:
    """Outcome of a micro-batch for one tenant."""

    loss: float
    """Of all ranks' rows: the mean over the tokens that are learned, or the sum with weights."""
    num_supervised_tokens: int
    """On all ranks."""
    logprobs: list[torch.Tensor]
    """Of this rank's rows, one tensor (tokens - 1,) for each: of each label, given what stands before it."""


@dataclass(frozen=True, slots=True)
class FusedLosses:
    """Outcome of a call of ``forward_backward``."""

    tenants: dict[str, TenantLoss]
    passes: int
    """Through the base; tenants whose rows have one length share a pass."""
    backends: dict[str, int]
    """How adapters were computed and why, to how many layers were on this rank."""


@dataclass(frozen=True, slots=True)
class TenantStep:
    """Outcome of a call of ``optim_step``, the same on every rank."""

    is_taken: bool
    """False where the gradient was not finite: matrices, moments and schedule are as before."""
    grad_norm: float
    """Before it was clipped."""
    num_supervised_tokens: int
    learning_rate: float
    """That the step was taken with."""


@dataclass(frozen=True, slots=True)
class TenantStart:
    """Position from which the training of a loaded tenant continues, or the reason why it begins anew."""

    steps: int = 0
    windows: int = 0
    """That are over, whether or not their step was taken."""
    micro_batches: int = 0
    """In the window that is open."""
    num_supervised_tokens: int = 0
    """In it, on all ranks."""
    base: str = field(default="", compare=False)
    """How the base compares with the one it was trained on, in words."""
    reason: str = ""
    """Why optimizer, schedule and counts begin anew; empty where they go on."""

    @property
    def is_resumed(self) -> bool:
        """True if the state of a training was read."""
        return not self.reason
