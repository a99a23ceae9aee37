"""The switch under which accelerate treats sharded models as they are, and fills others shard by shard.

[Note: Doors] accelerate has no interface for models that are sharded already. So a handful of its functions is
replaced while the switch is on, and never by an import. Each replacement passes on what is none of its business, so
that accelerate is as ever for DDP, DeepSpeed and FSDP1. When the switch goes off, the functions are put back; one
that somebody else has wrapped meanwhile is left in place, and passes everything on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from shardwise.integrations import (
    accelerate_filling,
    accelerate_prepare,
    accelerate_states,
    pending,
)
from shardwise.integrations.accelerate_compat import (
    Accelerator,
    AcceleratorState,
    accelerator_module,
    check_doors,
    fsdp_utils,
)
from shardwise.models.pretrained import loading_door, placing_door
from shardwise.tuning.configs import adapter_doors


def accelerate() -> AccelerateSwitch:
    """The switch: a context, or ``accelerate().install()`` once for a whole script.

    While it is on, in this process:

    - ``Accelerator.prepare`` leaves models alone that ``fully_shard`` has sharded, and the parameters of their
      optimizers, also inside of PEFT's, and also on CPUs, where accelerate would take DDP;
    - models that accelerate is to shard by FSDP2 with ``cpu_ram_efficient_loading`` are left on meta by
      ``from_pretrained`` on every rank, and filled by ``prepare`` from the files, each rank reading its own bytes;
    - ``save_state`` and ``load_state`` write and read in parallel, commit in one step, and resume on any number of
      ranks; ``get_state_dict`` and ``clip_grad_norm_`` know parameters that stay whole.

    Raises:
        ConfigError: accelerate is not installed, or is of a version whose functions are not those known here.
    """
    check_doors()
    return AccelerateSwitch()


class AccelerateSwitch:
    """Turns the replaced functions of accelerate on and off. May be nested: they stay until the last one is off."""

    _installed = 0
    _put_back: list[Callable[[], None]] = []  # noqa: RUF012 - of the process, as what it replaces is

    def __init__(self) -> None:
        self._is_on = False

    def install(self) -> None:
        """Turn it on, until :meth:`remove`; once more does nothing."""
        if self._is_on:
            return
        if AccelerateSwitch._installed == 0:
            try:
                for owner, name, make in _doors():
                    AccelerateSwitch._put_back.append(_replace(owner, name, make))
            except BaseException:
                _restore()
                raise
        self._is_on = True
        AccelerateSwitch._installed += 1

    def remove(self) -> None:
        """Turn it off; accelerate is as it was, if nobody else has it on."""
        if not self._is_on:
            return
        self._is_on = False
        AccelerateSwitch._installed -= 1
        if AccelerateSwitch._installed == 0:
            _restore()

    def __enter__(self) -> Self:
        self.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


Replacing = Callable[..., Any]
"""What takes the place of a function: called with that function first, and then with its arguments."""


def _doors() -> list[tuple[Any, str, Replacing]]:
    """Whose function of which name is replaced by what."""
    return [
        (AcceleratorState, "__init__", accelerate_prepare.begin_state),
        (Accelerator, "prepare", accelerate_prepare.prepare_objects),
        (Accelerator, "_prepare_fsdp2", accelerate_filling.prepare_fsdp2),
        (fsdp_utils, "fsdp2_load_full_state_dict", accelerate_filling.load_full_state_dict),
        (Accelerator, "get_state_dict", accelerate_states.get_state_dict),
        (Accelerator, "clip_grad_norm_", accelerate_states.clip_grad_norm),
        (Accelerator, "save_state", accelerate_states.save_state),
        (Accelerator, "load_state", accelerate_states.load_state),
        (accelerator_module, "save_fsdp_model", accelerate_states.save_model),
        (accelerator_module, "load_fsdp_model", accelerate_states.load_model),
        (accelerator_module, "save_fsdp_optimizer", accelerate_states.save_optimizer),
        (accelerator_module, "load_fsdp_optimizer", accelerate_states.load_optimizer),
        (*loading_door(), pending.load_later),
        (*placing_door(), pending.place_missing),
        *((*door, pending.keep_adapter) for door in adapter_doors()),
    ]


def _replace(owner: Any, name: str, replacing: Replacing) -> Callable[[], None]:
    """Put a function in the place of another; what puts the other back, where nobody has come in between."""
    before = vars(owner)[name]
    original = getattr(owner, name)

    @functools.wraps(original)
    def door(*args: Any, **keywords: Any) -> Any:
        if AccelerateSwitch._installed == 0:
            return original(*args, **keywords)
        return replacing(original, *args, **keywords)

    mine = staticmethod(door) if isinstance(before, staticmethod) else door
    setattr(owner, name, mine)

    def put_back() -> None:
        if vars(owner).get(name) is mine:
            setattr(owner, name, before)

    return put_back


def _restore() -> None:
    while AccelerateSwitch._put_back:
        AccelerateSwitch._put_back.pop()()
