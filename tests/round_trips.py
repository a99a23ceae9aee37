"""Saving what a case brought up, and the comparison with what transformers saves and loads."""

import logging
import shutil
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from tests import load_cases, truth, zoo
from tests.load_cases import Way
from torch import nn
from transformers import AutoConfig

import shardwise
from shardwise.ranks.timeouts import Timeouts
from shardwise.saving.prepare import SaveOptions

OPTIONS = SaveOptions(budget_bytes=1 << 20, timeouts=Timeouts(heartbeat_timeout_s=120))


def save_and_compare(case: truth.Case, way: Way, folder: str) -> list[str] | None:
    """Run on every rank: the faults found; None where the mesh does not apply.

    One file is byte for byte what transformers saves. Several files load in transformers as the case does. What was
    saved, loaded and saved again is the same file.
    """
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    try:
        model, _ = load_cases.bring_up(case, way)
    except load_cases.NotApplicable:
        return None
    try:
        return _faults(case, way, model, Path(folder))
    except Exception:
        return [traceback.format_exc()]


def _faults(case: truth.Case, way: Way, model: nn.Module, folder: Path) -> list[str]:
    out, again = folder / "saved", folder / "again"
    faults: list[str] = []
    shardwise.save(model, out, options=OPTIONS)
    if _is_first():
        faults += _unlike_transformers(case, out, folder / "expected")
    _meet()
    shardwise.save(model, out, max_shard_size="100KB", verify=True, options=OPTIONS)
    if _is_first() and case.specimen.name not in zoo.KNOWN_UPSTREAM:
        with zoo.silenced():
            loaded = zoo.model_class(case.specimen).from_pretrained(out, dtype=truth.DTYPES[case.dtype])
        found = truth.differences(truth.snapshot(loaded), torch.load(case.truth, weights_only=True))
        faults += [f"loaded by transformers: {fault}" for fault in found]
    _meet()
    if way.mesh in ("flat", "hsdp"):
        model = shardwise.from_pretrained(
            out,
            model_class=zoo.model_class(case.specimen),
            dtype=truth.DTYPES[case.dtype],
            sharding=shardwise.Sharding(mesh=load_cases.hybrid_mesh() if way.mesh == "hsdp" else None),
        )
        shardwise.save(model, again, options=OPTIONS)
        if _is_first() and (again / "model.safetensors").read_bytes() != _expected_bytes(folder):
            faults.append("saved, loaded and saved again, it is another file")
    _meet()
    if _is_first():
        shutil.rmtree(folder, ignore_errors=True)
    _meet()
    return faults


def _unlike_transformers(case: truth.Case, out: Path, expected: Path) -> list[str]:
    with zoo.silenced():
        reference = zoo.model_class(case.specimen).from_pretrained(case.directory, dtype=truth.DTYPES[case.dtype])
    if case.specimen.name in zoo.KNOWN_UPSTREAM:
        values = torch.load(case.truth, weights_only=True)["values"]
        for name, tensor in reference.state_dict(keep_vars=True).items():
            tensor.data.copy_(values[name])
    with zoo.silenced():
        reference.save_pretrained(expected)
    faults: list[str] = []
    if (out / "model.safetensors").read_bytes() != _expected_bytes(expected.parent):
        faults.append("model.safetensors is not what transformers saves")
    # A class of transformers makes another model's config its own kind; shardwise keeps the checkpoint's.
    is_own_kind = type(AutoConfig.from_pretrained(case.directory)) is type(reference.config)
    for name in ("config.json", "generation_config.json") if is_own_kind else ():
        one, other = ((place / name) for place in (out, expected))
        if one.is_file() != other.is_file() or (one.is_file() and one.read_text() != other.read_text()):
            faults.append(f"{name} is not what transformers saves")
    return faults


def _expected_bytes(folder: Path) -> bytes:
    return (folder / "expected" / "model.safetensors").read_bytes()


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _meet() -> None:
    if dist.is_initialized():
        dist.barrier()
