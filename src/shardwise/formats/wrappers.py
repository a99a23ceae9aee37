"""Where in a nest of dicts the model is: trainers write {"model": {...}, "optimizer": {...}, "epoch": 3}."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

Path = tuple[str, ...]

MAX_DEPTH = 64
"""As deep as dicts may be nested."""

_OPTIMIZER_STATE = frozenset({"state", "param_groups"})


@dataclass(frozen=True, slots=True)
class WrapperChoice:
    """Which tensors are the model's: those whose paths begin with ``wrapper``, less the optimizer's.

    ``others`` are the paths of the optimizers beside the model.
    """

    wrapper: Path
    others: tuple[Path, ...]

    def key_of(self, path: Path) -> str | None:
        """The key of a tensor of the model; None for another's."""
        if any(path[: len(other)] == other for other in self.others):
            return None
        return ".".join(path[len(self.wrapper) :])


def choose_model(paths: Collection[Path]) -> WrapperChoice | None:
    """What of the tensors at these paths is the model; None when they are all an optimizer's.

    A dict is entered where everything but optimizers is in it. Where there are several, none is chosen: all
    tensors keep their whole paths as keys.
    """
    wrapper: Path = ()
    others: list[Path] = []
    kept = list(paths)
    while kept:
        depth = len(wrapper)
        inner = {path[depth] for path in kept if len(path) > depth + 1}
        is_flat = any(len(path) == depth + 1 for path in kept)
        if not is_flat and inner <= _OPTIMIZER_STATE:
            return None
        aside = {name for name in inner if name.lower().startswith("optim")}
        others += [(*wrapper, name) for name in sorted(aside)]
        kept = [path for path in kept if len(path) == depth + 1 or path[depth] not in aside]
        inner -= aside
        if is_flat or len(inner) != 1:
            break
        wrapper = (*wrapper, *inner)
    return WrapperChoice(wrapper, tuple(others)) if kept or not paths else None
