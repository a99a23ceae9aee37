"""Losses of requests: functions of log probabilities.

Each takes the log probabilities p of the targets that count, of all rows of a request in a pass, one row after the
other: (positions,) or (positions, K). ``values`` are of the same shape: the weights w, of any sign, and where a
loss needs them the log probabilities q of the policy that sampled the rows, and advantages A. ``rows`` (positions,)
are numbers of rows, from 0. The ratio is r = exp(p - q). Results have the shape of p. They are summed over the rows
of a request, and divided by the number of positions of a window if the adapter has ``reduction="mean"``.

p has no graph. The gradient of the sum with respect to p is what the backward pass begins with. So a loss that
raises, or whose gradient is not finite, fails its request alone.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import torch
from torch import Tensor

from shardwise.core.errors import ConfigError

TokenLoss: TypeAlias = Callable[[Tensor, Mapping[str, Tensor], Mapping[str, float]], Tensor]


def cross_entropy(p: Tensor, values: Mapping[str, Tensor], _config: Mapping[str, float]) -> Tensor:
    """Return -w p. With targets (positions, K), the weights are those of a distribution (distillation)."""
    return -p * values["weights"]


def importance_sampling(p: Tensor, values: Mapping[str, Tensor], _config: Mapping[str, float]) -> Tensor:
    """Return -w r A: the policy gradient of rows that another policy has sampled.

    Its gradient with respect to p is -w r A. (Sutton and Barto: "Reinforcement Learning", 2nd edition, 2018, 13.3
    and 5.5.)
    """
    return -_log_ratios(p, values).exp() * values["advantages"] * values["weights"]


def ppo(p: Tensor, values: Mapping[str, Tensor], config: Mapping[str, float]) -> Tensor:
    """Return -w min(r A, clip(r, low, high) A).

    (Schulman et al., 2017, arXiv 1707.06347, equation 7.)
    """
    ratio, advantages = _log_ratios(p, values).exp(), values["advantages"]
    return -torch.minimum(ratio * advantages, _clip(ratio, config) * advantages) * values["weights"]


def cispo(p: Tensor, values: Mapping[str, Tensor], config: Mapping[str, float]) -> Tensor:
    """Return -w c A p with c = clip(r, low, high) as a constant.

    (MiniMax, 2025, arXiv 2506.13585, equation 4.) In contrast to :func:`ppo`, positions with a clipped ratio have a
    gradient.
    """
    ratio = _log_ratios(p.detach(), values).exp()
    return -_clip(ratio, config) * values["advantages"] * p * values["weights"]


def dro(p: Tensor, values: Mapping[str, Tensor], config: Mapping[str, float]) -> Tensor:
    """Return -w (A p - beta / 2 (p - q)^2).

    (Richemond et al., 2024, arXiv 2405.19107, section 3.) At its minimum p - q = A / beta. The advantage stands for
    the reward less the value of the prompt.
    """
    quadratic = (p - values["logprobs"]).square()
    return -(values["advantages"] * p - config["beta"] / 2 * quadratic) * values["weights"]


def gspo(p: Tensor, values: Mapping[str, Tensor], config: Mapping[str, float]) -> Tensor:
    """Return -w min(s A, clip(s, low, high) A) / n with one ratio s for each row.

    s = exp(mean of p - q over the n positions of the row with a weight other than 0). Summed over a row it is the
    loss of the sequence. (Zheng et al., 2025, arXiv 2507.18071, equations 5 and 7.)
    """
    counts = (values["weights"] != 0).to(p.dtype)
    rows, advantages = values["rows"], values["advantages"]
    num_positions = _sum_by_row(counts, rows).clamp(min=1)
    ratio = (_sum_by_row(_log_ratios(p, values), rows) / num_positions).exp()[rows]
    losses = torch.minimum(ratio * advantages, _clip(ratio, config) * advantages)
    return -losses * values["weights"] / num_positions[rows]


def _log_ratios(p: Tensor, values: Mapping[str, Tensor]) -> Tensor:
    """Return p - q, and 0 where the weight is 0: there the ratio may be infinite, and 0 times it is NaN."""
    return torch.where(values["weights"] != 0, p - values["logprobs"], 0.0)


def _sum_by_row(values: Tensor, rows: Tensor) -> Tensor:
    """Return the sums over the positions of each row, in the shape of ``values``: there are no more rows."""
    sums = torch.zeros_like(values)
    if values.device.type == "cpu":
        return sums.index_add(0, rows, values)
    return sums.index_put((rows,), values, accumulate=True)  # as for embeddings: deterministic on CUDA


def _clip(ratio: Tensor, config: Mapping[str, float]) -> Tensor:
    return ratio.clamp(config["clip_low_threshold"], config["clip_high_threshold"])


@dataclass(frozen=True, slots=True)
class NamedLoss:
    """A loss, what its rows must have, and its settings with their defaults."""

    function: TokenLoss
    needs: tuple[str, ...] = ()
    config: Mapping[str, float] = field(default_factory=dict)


_SAMPLED: Final = ("logprobs", "advantages")
_CLIP: Final = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}

LOSSES: Final[dict[str, NamedLoss]] = {
    "cross_entropy": NamedLoss(cross_entropy),
    "importance_sampling": NamedLoss(importance_sampling, _SAMPLED),
    "ppo": NamedLoss(ppo, _SAMPLED, _CLIP),
    "cispo": NamedLoss(cispo, _SAMPLED, _CLIP),
    "dro": NamedLoss(dro, _SAMPLED, {"beta": 0.05}),
    # As in the paper: sequences have ratios near 1.
    "gspo": NamedLoss(gspo, _SAMPLED, {"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4}),
}


def complete_config(who: str, loss: str, config: Mapping[str, object]) -> dict[str, float]:
    """Return the settings of a loss with its defaults.

    Raises:
        ConfigError: the loss or a setting is unknown, or a value is not valid.
    """
    if loss not in LOSSES:
        raise ConfigError(f"{who}: there is no loss {loss!r}. Use {', '.join(LOSSES)}, or a function")
    defaults = LOSSES[loss].config
    completed = dict(defaults)
    for key, value in config.items():
        if key not in defaults:
            raise ConfigError(f"{who}: {loss} has no setting {key!r}. It has {', '.join(defaults) or 'none'}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{who}: {key}={value!r} of {loss}: is not a number. Pass one")
        completed[key] = float(value)
    if "beta" in completed and not 0 < completed["beta"] < math.inf:
        raise ConfigError(f"{who}: beta={completed['beta']} of {loss}: is not a number above 0. Pass one")
    if defaults.keys() >= _CLIP.keys():
        low, high = (completed[key] for key in _CLIP)
        if not 0 <= low <= 1 <= high:
            raise ConfigError(
                f"{who}: clip_low_threshold={low} and clip_high_threshold={high} of {loss}: are no bounds of a "
                "ratio, 0 <= low <= 1 <= high. Pass 1 - epsilon and 1 + epsilon, or 0 and infinity for no bound"
            )
    return completed
