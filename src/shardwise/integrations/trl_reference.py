"""The frozen copy of an adapter that TRL compares with, filled from an adapter that is sharded.

[Note: References] DPO, GRPO and their kin put a second adapter "ref" into a PEFT model and copy the first one's
values into it, parameter by parameter: ``model.get_parameter(name).data.copy_(value)``. What PEFT adds to a
model that is sharded is whole on every rank, in no group of FSDP2's, and stays so: it is small, and never
trained. Where the first adapter is sharded, its values are DTensors, and copying one into a whole tensor is an
error. So for these names ``get_parameter`` answers with a stand-in that gathers the value first. TRL asks for
all of them in one order on all ranks, so gathering is safe.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.integrations import trainer_compat as compat


class _Filled:
    """Stands for a whole parameter that takes the values of a sharded one."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = parameter

    @property
    def data(self) -> _Filled:
        return self

    @torch.no_grad()
    def copy_(self, values: torch.Tensor) -> None:
        """Collective: yes, over the mesh of ``values``."""
        whole = values.full_tensor() if isinstance(values, DTensor) else values
        self._parameter.copy_(whole)


def fill_reference(parameter: nn.Parameter, name: str) -> nn.Parameter | _Filled:
    """The parameter; or, of a reference that is whole, what takes sharded values in its place."""
    is_reference = f".{compat.REFERENCE}." in name and not isinstance(parameter, DTensor)
    return _Filled(parameter) if is_reference else parameter
