"""An adapter: its matrices in one flat buffer, their gradient in another, its optimizer and its window."""

from __future__ import annotations

import copy
import inspect
import math
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, get_args

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ConstantLR, LRScheduler, ReduceLROnPlateau
from typing_extensions import TypedDict

from shardwise.core.errors import ConfigError, TrainingError
from shardwise.core.formatting import in_bytes
from shardwise.models.lora import adapted_layers, peft_private
from shardwise.ranks.world import World
from shardwise.transfer.memory import host_memory

if TYPE_CHECKING:
    from peft import LoraConfig


OptimizerMaker: TypeAlias = Callable[[list[nn.Parameter]], Optimizer]

_ELEMENTWISE: tuple[type[Optimizer], ...] = (
    *(torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam),
    *(torch.optim.SGD, torch.optim.ASGD, torch.optim.RMSprop, torch.optim.Rprop),
    *(torch.optim.Adagrad, torch.optim.Adadelta),
)


def adamw(parameters: list[nn.Parameter]) -> Optimizer:
    """Make the default optimizer of an adapter."""
    return torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.0)


def create_optimizer(make: OptimizerMaker, flat: nn.Parameter) -> Optimizer:
    """Make the optimizer of an adapter's flat parameter.

    Raises:
        ConfigError: the optimizer cannot be made, is not known to be elementwise, or has other parameters.
    """
    try:
        optimizer = make([flat])
    except (ValueError, TypeError) as error:
        raise ConfigError(f"optimizer: cannot be made, {error}") from error
    # Exact classes, not subclasses: a step of another class may use norms or means of a whole tensor, and this
    # tensor has all matrices.
    kind = type(optimizer)
    if kind not in _ELEMENTWISE:
        supported = ", ".join(sorted(each.__name__ for each in _ELEMENTWISE))
        raise ConfigError(
            f"optimizer: {kind.__module__}.{kind.__qualname__} is not known to be elementwise, and all matrices "
            f"are one flat parameter. Use one of {supported}"
        )
    if [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups] != [[id(flat)]]:
        raise ConfigError(
            f"optimizer: {kind.__qualname__} must have the given parameter in one group, and no other"
        )
    return optimizer


ScheduleMaker: TypeAlias = Callable[[Optimizer], LRScheduler]
"""Makes a scheduler of an optimizer."""


Reduction: TypeAlias = Literal["mean", "sum"]
"""An adapter's loss: the mean over the supervised tokens of a window, or their sum, each times its weight."""


def create_schedule(make: ScheduleMaker, optimizer: Optimizer) -> LRScheduler:
    """Make the schedule of an adapter.

    Raises:
        ConfigError: the schedule cannot be made, is not one of torch's, or depends on a metric.
    """
    try:
        schedule: object = make(optimizer)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"schedule: cannot be made, {error}") from error
    if isinstance(schedule, ReduceLROnPlateau):
        raise ConfigError("schedule: ReduceLROnPlateau needs a metric. Pass lr to optim_step instead")
    if not isinstance(schedule, LRScheduler):
        raise ConfigError(f"schedule: returned a {type(schedule).__name__}. Return an LRScheduler of torch")
    return schedule


def constant_lr(optimizer: Optimizer) -> ConstantLR:
    """Make the default schedule of an adapter, which leaves the learning rate as it is."""
    return ConstantLR(optimizer, factor=1.0, total_iters=0)


class AdapterOptions(TypedDict, total=False):
    """Options of an adapter's training.

    Attributes:
        optimizer: makes an elementwise optimizer of the adapter's one flat parameter.
        schedule: makes the learning rate scheduler, which is stepped with the optimizer.
        max_grad_norm: gradients with a larger norm are scaled down to it. 0 or infinity for no limit.
        gradient_accumulation_steps: micro-batches (calls of ``forward_backward``) of a window. Fewer or more before
            a step are an error. None for any number.
        reduction: reduction of the losses of its tokens.
        seed: seed of the initial matrices and of dropout.
    """

    optimizer: OptimizerMaker
    schedule: ScheduleMaker
    max_grad_norm: float
    gradient_accumulation_steps: int | None
    reduction: Reduction
    seed: int


DEFAULT_OPTIONS: Final[AdapterOptions] = {
    "optimizer": adamw,
    "schedule": constant_lr,
    "max_grad_norm": math.inf,
    "gradient_accumulation_steps": None,
    "reduction": "mean",
    "seed": 0,
}


def require_options(options: Mapping[str, Any]) -> None:
    """Check the values of options whose names are valid.

    Raises:
        ConfigError: values are invalid. The message has all of them.
    """
    faults = []
    for name, value in options.items():
        if name in ("optimizer", "schedule") and not callable(value):
            faults.append(f"{name}={value!r}: is not a function. Pass one")
        elif name == "max_grad_norm" and not (isinstance(value, int | float) and value >= 0):
            faults.append(f"max_grad_norm={value!r}: is not a number of at least 0. Pass 0 for no limit")
        elif name == "gradient_accumulation_steps" and not (value is None or (type(value) is int and value > 0)):
            faults.append(f"gradient_accumulation_steps={value!r}: pass 1 or more")
        elif name == "reduction" and value not in get_args(Reduction):
            faults.append(f"reduction={value!r}: pass 'mean' or 'sum'")
        elif name == "seed" and type(value) is not int:
            faults.append(f"seed={value!r}: is not an integer")
    if faults:
        raise ConfigError("invalid options of an adapter:\n  " + "\n  ".join(faults))


class AdapterState(Enum):
    """State of an adapter, which decides which call may come next."""

    ACCUMULATING = auto()
    """``forward_backward``, or ``optim_step`` if the number of micro-batches is not fixed: the window is open."""
    FULL = auto()
    """``optim_step``: the window has ``gradient_accumulation_steps`` micro-batches."""
    FAILED = auto()
    """``load_state_dict`` or ``delete_adapter``: a step has failed, and values may differ between ranks."""


class BankAdapter:
    """An adapter and its training. New matrices are zeros until the bank fills them.

    Memory: with AdamW, 16 bytes for each trained number. Without training, 4.
    """

    def __init__(
        self,
        name: str,
        config: LoraConfig,
        sites: Sequence[adapted_layers.AdaptedSite],
        options: AdapterOptions,
        device: torch.device,
        world: World,
        *,
        is_trained: bool = True,
    ) -> None:
        self.name, self.is_trained = name, is_trained
        self.options = options
        self.config = copy.deepcopy(config)
        self.comparable_config = peft_private.comparable_text(config)
        """The config as text that is equal in every process."""
        self.sites = tuple(sites)
        self.shapes = {matrix.key: matrix.shape for site in sites for matrix in (site.lora_A, site.lora_B)}
        count = sum(math.prod(shape) for shape in self.shapes.values())
        # (count,), all matrices one after the other. The backward pass adds to views of the gradient, so it is only
        # zeroed in place: zero_grad() would have the optimizer read another tensor than the views.
        self.flat = nn.Parameter(torch.zeros(count, dtype=torch.float32, device=device))
        self.gradient = torch.zeros(count, dtype=torch.float32, device=device if is_trained else "meta")
        self.flat.grad = self.gradient if is_trained else None
        self._offloaded: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        """Tensors without memory on the device, and their values on the host. None for zeros."""
        self.matrices = _views(self.flat.detach(), self.shapes)
        self.gradients = _views(self.gradient, self.shapes)
        self.weights_by_site: dict[str, LoraWeights] = {}
        for site in sites:
            self.weights_by_site |= _get_weights(site, self.matrices, self.gradients)
        self.world = world
        self.optimizer = create_optimizer(options["optimizer"], self.flat)
        self.schedule = create_schedule(options["schedule"], self.optimizer)
        self.max_grad_norm = options["max_grad_norm"]
        self.micro_batches = 0
        """Micro-batches of the open window."""
        self.num_supervised_tokens = 0
        """Supervised tokens of the open window, on all ranks."""
        self.failure: Exception | None = None
        """The error of a step that failed, on this rank or another one. Its values are those of no step."""
        self.windows = 0
        """Completed windows, whether or not their step was taken."""
        self.steps = 0

    @property
    def state(self) -> AdapterState:
        if self.failure is not None:
            return AdapterState.FAILED
        fixed = self.options["gradient_accumulation_steps"]
        is_full = fixed is not None and self.micro_batches >= fixed
        return AdapterState.FULL if is_full else AdapterState.ACCUMULATING

    @property
    def scales_before_backward(self) -> bool:
        """Whether a loss is divided by the number of its supervised tokens before the backward pass.

        That is possible for the mean over a window of exactly one micro-batch, whose tokens are counted before the
        pass. Otherwise sums accumulate, and the step divides their gradient by the tokens of all.
        """
        return self.options["reduction"] == "mean" and self.options["gradient_accumulation_steps"] == 1

    @property
    def gradient_scale(self) -> float:
        """The factor of the accumulated gradient at the end of the window."""
        if self.options["reduction"] == "sum" or self.scales_before_backward:
            return 1.0
        # The gradient is of a sum over all tokens of the window on all ranks: micro-batches with 30 and 10 of them
        # are scaled by 1 / 40.
        return 1 / max(self.num_supervised_tokens, 1)

    @property
    def rank(self) -> int:
        """The largest rank of its matrices."""
        return max(site.r for site in self.sites)

    @property
    def scalings(self) -> dict[str, float]:
        """The factor of each site's product."""
        return {site.lora_A.key: site.scaling for site in self.sites}

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of its optimizer."""
        return {key: value for key, value in self.optimizer.param_groups[0].items() if key != "params"}

    @property
    def changeable(self) -> set[str]:
        """Settings that are numbers. Flags decide which state the optimizer has, and schedules need initial_lr."""
        numbers = {key for key, value in self.settings.items() if not isinstance(value, bool | None)}
        return numbers - {"initial_lr"}

    def comparable_settings(self) -> dict[str, str]:
        """Return the settings of its next step and its counts as text."""
        counts = {"max_grad_norm": self.max_grad_norm, "steps": self.steps, "windows": self.windows}
        return {key: repr(value) for key, value in {**without_tensors(self.settings), **counts}.items()}

    def find_invalid_settings(self, settings: Mapping[str, Any]) -> list[str]:
        """List the reasons why settings cannot replace those of the optimizer, or ``max_grad_norm``."""
        kind, numbers = type(self.optimizer), self.changeable
        faults = []
        for key, value in settings.items():
            if key == "max_grad_norm":
                is_valid = isinstance(value, int | float) and value >= 0
            elif key in numbers:
                is_valid = _is_like(value, self.settings[key])
            else:
                faults.append(
                    f"{key}: {kind.__name__} has {', '.join(sorted(numbers))}, and there is max_grad_norm"
                )
                continue
            if not is_valid:
                faults.append(f"{key}={value!r} is not a valid value")
        # All settings at once, since limits of some depend on others: SGD's nesterov needs a momentum.
        if settings.keys() - {"max_grad_norm"} and not faults:
            combined = {**self.settings, **settings}
            accepted = inspect.signature(kind).parameters
            try:  # the constructor knows the limits of each setting
                kind([self.flat.new_empty(0)], **{key: value for key, value in combined.items() if key in accepted})
            except (ValueError, TypeError, RuntimeError) as error:
                faults.append(str(error))
        return faults

    def require_trained(self) -> None:
        """Raise ConfigError for a copy to sample from."""
        if not self.is_trained:
            raise ConfigError(f"adapter {self.name!r}: is a copy for sampling. Copy it with training=True")

    @contextmanager
    def changing(self, changes: Mapping[str, Any]) -> Iterator[None]:
        """Change settings of the optimizer, or ``max_grad_norm``, within the block."""
        settings, group, max_grad_norm = dict(changes), self.optimizer.param_groups[0], self.max_grad_norm
        self.max_grad_norm = float(settings.pop("max_grad_norm", max_grad_norm))
        before = {key: group[key] for key in settings}
        group.update(settings)
        try:
            yield
        finally:
            group.update(before)
            self.max_grad_norm = max_grad_norm

    def clip(self, norm: float) -> None:
        """Scale the gradient down to ``max_grad_norm``."""
        # As torch's clip_grad_norm_, with its 1e-6. 0 is no limit.
        if self.max_grad_norm and (factor := self.max_grad_norm / (norm + 1e-6)) < 1:
            self.gradient.mul_(factor)

    def zero_grad(self) -> None:
        """Discard the open window."""
        self.gradient.zero_()
        self.micro_batches = self.num_supervised_tokens = 0

    def copy_training(self, source: BankAdapter) -> None:
        """Copy all of the training of an adapter with equal options. Matrices are not copied."""
        self.gradient.copy_(source.gradient)
        # Copies, since optimizers update their state in place. Without a step yet, there is no state.
        if source.flat in source.optimizer.state:
            self.optimizer.state[self.flat] = copy.deepcopy(source.optimizer.state[source.flat])
        self.optimizer.param_groups[0].update(copy.deepcopy(source.settings))
        self.schedule.load_state_dict(copy.deepcopy(source.schedule.state_dict()))
        self.max_grad_norm = source.max_grad_norm
        self.windows, self.steps = source.windows, source.steps
        self.micro_batches, self.num_supervised_tokens = source.micro_batches, source.num_supervised_tokens

    def offload(self) -> None:
        """Move matrices, the gradient of an open window and the optimizer's state to the host, until they are used.

        If memory does not suffice, everything stays on the device.

        Raises:
            TrainingError: the host has too little free memory.
        """
        if self._offloaded or self.flat.device.type == "cpu":
            return
        state = self.optimizer.state.get(self.flat, {}).values()
        tensors = [self.flat.detach(), *(each for each in state if isinstance(each, torch.Tensor))]
        if self.micro_batches:
            tensors.append(self.gradient)
        # Not those on the host, such as counts of steps.
        tensors = [tensor for tensor in tensors if tensor.device == self.flat.device]
        # Every rank has the same values, and all ranks may be on this host.
        needed, free = self.world.size * sum(tensor.nbytes for tensor in tensors), host_memory()
        if free is not None and needed > free:
            raise TrainingError(
                f"adapter {self.name!r}: needs {in_bytes(needed)} of host memory (ranks: {self.world.size}), of "
                f"which {in_bytes(free)} is free. It stays on the device. Delete adapters that are not used"
            )
        # Pageable: torch rounds pinned memory up to a power of two, and never returns it to the system.
        self._offloaded = [(tensor, tensor.cpu()) for tensor in tensors]
        if not self.micro_batches and self.is_trained:
            self._offloaded.append((self.gradient, None))
        for tensor, _ in self._offloaded:
            # Views of the tensor stay valid: they share its storage, which gets its size back.
            tensor.untyped_storage().resize_(0)

    def bring_back(self) -> None:
        """Move an offloaded adapter to the device again."""
        # The list is cleared at the end: if memory does not suffice for a tensor, the next call begins anew with
        # all of them.
        for tensor, values in self._offloaded:
            tensor.untyped_storage().resize_(tensor.nbytes)
            if values is None:
                tensor.zero_()
            else:
                tensor.copy_(values)
        self._offloaded = []


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """An adapter's matrices at one site and their gradients, float32: views of its flat buffers.

    ``A`` is (r, in), ``B`` is (out, r). For experts they are (experts, r, in) and (experts, out, r).
    """

    A: torch.Tensor
    B: torch.Tensor
    a_grad: torch.Tensor
    b_grad: torch.Tensor
    scaling: float
    dropout: float = 0.0

    @property
    def rank(self) -> int:
        return self.A.shape[-2]


def without_tensors(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with Python's numbers in place of tensors."""
    return {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in settings.items()}


def _is_like(value: object, current: object) -> bool:
    """Return whether a value is finite and not negative, and a number or a tuple of numbers as the current one."""
    if isinstance(current, tuple) and isinstance(value, tuple):
        return len(value) == len(current) and all(map(_is_like, value, current))
    is_number = isinstance(value, int | float) and 0 <= value <= sys.float_info.max
    return is_number and not isinstance(current, tuple)


def _views(flat: torch.Tensor, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    sizes = [math.prod(shape) for shape in shapes.values()]
    return {key: piece.view(shape) for (key, shape), piece in zip(shapes.items(), flat.split(sizes), strict=True)}


def _get_weights(
    site: adapted_layers.AdaptedSite, matrices: Mapping[str, torch.Tensor], gradients: Mapping[str, torch.Tensor]
) -> dict[str, LoraWeights]:
    """Return the matrices of a site by the name that the base's layer uses."""
    A, a_grad = matrices[site.lora_A.key], gradients[site.lora_A.key]  # (r, in)
    B, b_grad = matrices[site.lora_B.key], gradients[site.lora_B.key]  # (out, r)
    if not isinstance(site, adapted_layers.ExpertsSite):
        dropout = getattr(site, "dropout", 0.0)
        return {site.module: LoraWeights(A, B, a_grad, b_grad, site.scaling, dropout)}
    # For experts, PEFT stores A as (experts * r, in), expert by expert, but B as (out, r * experts), rank by rank.
    A, a_grad = (values.view(site.experts, -1, values.shape[1]) for values in (A, a_grad))  # (experts, r, in)
    B, b_grad = (values.view(len(values), -1, site.experts) for values in (B, b_grad))  # (out, r, experts)
    B, b_grad = B.permute(2, 0, 1), b_grad.permute(2, 0, 1)  # (experts, out, r)
    return {f"{site.module}.{site.parameter}": LoraWeights(A, B, a_grad, b_grad, site.scaling)}


def require_name(name: object) -> str:
    """Return an adapter's name. It is never the name of a folder: see ``core/formatting.py``, ``folder_name``.

    Raises:
        ConfigError: the name is not valid.
    """
    is_text = isinstance(name, str) and 0 < len(name) <= 128
    # Cc are control characters, and Cs halves of a surrogate pair, which no file can have.
    if not is_text or any(unicodedata.category(char) in ("Cc", "Cs") for char in str(name)):
        raise ConfigError(f"{name!r} is not a valid adapter name: 1 to 128 characters, no control characters")
    return str(name)


@dataclass(frozen=True, slots=True)
class AdapterLoss:
    """Outcome of a request.

    Attributes:
        adapter: its name. None for the base.
        loss: of the rows of all ranks, by the adapter's ``reduction``. NaN if it raised.
        num_supervised_tokens: positions with a target, of the rows of all ranks.
        logprobs: log probabilities of this rank's rows, 0 for ignored targets: (tokens - 1,) for each row of a
            batch, and of the shape of the targets for each row of a list.
        failure: the error that its loss raised, as text. None if it did not.
    """

    adapter: str | None
    loss: float
    num_supervised_tokens: int
    logprobs: list[torch.Tensor]
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class FusedLosses:
    """Outcome of a call of ``forward_backward``.

    Attributes:
        requests: in order.
        passes: number of passes through the base.
    """

    requests: list[AdapterLoss]
    passes: int

    @property
    def adapters(self) -> dict[str, AdapterLoss]:
        """Outcomes by name, of adapters with one request."""
        counts = Counter(outcome.adapter for outcome in self.requests)
        return {each.adapter: each for each in self.requests if each.adapter and counts[each.adapter] == 1}


@dataclass(frozen=True, slots=True)
class AdapterStep:
    """Outcome of a call of ``optim_step``, equal on every rank.

    Attributes:
        is_taken: False if the gradient was not finite. Matrices, moments and schedule are then unchanged.
        grad_norm: norm of the gradient before it was clipped.
        num_supervised_tokens: of the window, on all ranks.
        learning_rate: learning rate of the step.
    """

    is_taken: bool
    grad_norm: float
    num_supervised_tokens: int
    learning_rate: float


@dataclass(frozen=True, slots=True)
class AdapterStart:
    """Position from which the training of a loaded adapter continues, or the reason why it starts anew.

    Attributes:
        steps: optimizer steps.
        windows: completed windows, whether or not their step was taken.
        micro_batches: micro-batches of the open window.
        num_supervised_tokens: supervised tokens of the open window, on all ranks.
        base: comparison of the base with the one it was trained on, as text.
        reason: why optimizer, schedule and counts start anew. "" if they continue.
    """

    steps: int = 0
    windows: int = 0
    micro_batches: int = 0
    num_supervised_tokens: int = 0
    base: str = field(default="", compare=False)
    reason: str = ""

    @property
    def is_resumed(self) -> bool:
        """True if a training state was restored."""
        return not self.reason
