"""Checkpoints of tiny models with the truth about them, and the comparison that every rank makes."""

import copy
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tests import zoo
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange

from shardwise.core.formatting import canonical_name
from shardwise.core.reports import LoadReport
from shardwise.fsdp.named_tensors import raw_bytes

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def save_prefixed(model: PreTrainedModel, directory: Path) -> None:
    """The hub's layout with the prefixes that a fresh model's own ``save_pretrained`` drops."""
    zoo.save_original(model, directory, prefixes=True)


def save_half(model: PreTrainedModel, directory: Path) -> None:
    """The hub's layout in bfloat16; every element is cast where a model is brought up in float32."""
    zoo.save_original(copy.deepcopy(model).to(torch.bfloat16), directory)


LAYOUTS = {"original": zoo.save_original, "internal": zoo.save_internal, "prefixed": save_prefixed}
FURTHER_LAYOUTS = {"half": save_half}


@dataclass(frozen=True)
class Case:
    """A checkpoint on disk, and the file with what a normal load makes of it."""

    specimen: zoo.Specimen
    directory: str
    dtype: str
    truth: str

    def __str__(self) -> str:
        return f"{self.specimen.name} {Path(self.directory).name} {self.dtype}"


def prepare(
    specimen: zoo.Specimen,
    folder: Path,
    *,
    dtypes: Sequence[str] = tuple(DTYPES),
    layouts: Sequence[str] = tuple(LAYOUTS),
) -> list[Case]:
    """Save a tiny model in every layout, and for each dtype the outcome of transformers' own loader.

    Where that loader is known not to give back what was saved (``zoo.KNOWN_UPSTREAM``), the truth is that.
    """
    model = zoo.build(specimen)
    cases: list[Case] = []
    for layout, save in (LAYOUTS | FURTHER_LAYOUTS).items():
        if layout not in layouts or (layout == "prefixed" and not has_prefixes(specimen, model)):
            continue
        directory = folder / specimen.name.replace(":", "-") / layout
        directory.mkdir(parents=True)
        save(model, directory)
        for dtype in dtypes:
            reference = type(model).from_pretrained(directory, dtype=DTYPES[dtype])
            if specimen.name in zoo.KNOWN_UPSTREAM:
                for name, value in model.state_dict().items():
                    stored = value.to(torch.bfloat16) if layout == "half" else value
                    reference.state_dict(keep_vars=True)[name].data.copy_(stored)
            truth = directory.parent / f"{layout}-{dtype}.pt"
            torch.save(snapshot(reference), truth)
            cases.append(Case(specimen, str(directory), dtype, str(truth)))
    return cases


def has_prefixes(specimen: zoo.Specimen, model: PreTrainedModel) -> bool:
    """Whether checkpoints of the model have prefixes that loading removes, and transformers can put them back."""
    changes = any(isinstance(item, PrefixChange) for item in get_model_conversion_mapping(model))
    return changes and specimen.name not in zoo.PREFIXES_UNSUPPORTED


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Whole values of all parameters and buffers by name, and which names share a tensor."""
    tensors = {**dict(named(model))}
    groups: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(id(tensor), []).append(name)
    return {
        "values": {name: whole(tensor) for name, tensor in tensors.items()},
        "ties": sorted(sorted(names) for names in groups.values()),
    }


def named(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and buffers under all of their names."""
    parameters = model.named_parameters(remove_duplicate=False)
    buffers = model.named_buffers(remove_duplicate=False)
    return [(canonical_name(name), tensor) for name, tensor in [*parameters, *buffers]]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The global value, gathered by torch itself (collective for a DTensor)."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def require_equal(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> None:
    """The same tensors under the same names."""
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def unlike(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of what is not bit for bit, shape for shape and dtype for dtype the same."""
    faults = sorted(found.keys() ^ wanted.keys())
    for name in found.keys() & wanted.keys():
        one, other = found[name], wanted[name]
        if (one.dtype, one.shape) != (other.dtype, other.shape) or not torch.equal(
            raw_bytes(one), raw_bytes(other)
        ):
            faults.append(name)
    return faults


def differences(found: dict[str, Any], truth: dict[str, Any]) -> list[str]:
    """What is not bitwise the same in two snapshots."""
    faults: list[str] = []
    values, expected = found["values"], truth["values"]
    faults += [f"only one has {name}" for name in sorted(values.keys() ^ expected.keys())]
    for name in values.keys() & expected.keys():
        one, other = values[name], expected[name]
        if one.dtype != other.dtype:
            faults.append(f"{name} is {one.dtype}, not {other.dtype}")
        elif one.shape != other.shape or not torch.equal(raw_bytes(one), raw_bytes(other)):
            faults.append(f"{name} has other values")
    if found["ties"] != truth["ties"]:
        faults.append("other tensors are tied")
    return faults


def faults_of(case: Case, bring_up: Callable[[], tuple[nn.Module, LoadReport]]) -> list[str]:
    """What is not as it should be about a model of the case, and about the report of its load."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    try:
        model, report = bring_up()
    except Exception:
        return [traceback.format_exc()]
    faults = differences(snapshot(model), torch.load(case.truth, weights_only=True))
    if report.read_bytes > 1.2 * report.checkpoint_bytes:
        faults.append(f"read {report.read_bytes} bytes of {report.checkpoint_bytes}")
    return faults
