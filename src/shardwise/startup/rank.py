"""What one rank does for an arm: everything is imported, then observed while the model comes up."""

from __future__ import annotations

import gc
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.engines.load_options import LoadOptions
from shardwise.execution.memory.copy_in import memory_of
from shardwise.models.view import local_boxes, local_tensor, raw_bytes, strided_view
from shardwise.observing.phases import phase
from shardwise.startup.arms import STEPS, StartupJob, on_meta
from shardwise.startup.kinds import PHASES
from shardwise.startup.values import BroughtUp, run_starts
from shardwise.tensors.fingerprint import MODULUS, fingerprint
from shardwise.verbs.observe import observe

SAMPLES_PER_SECOND = 100.0
_PAGE = 4096


def bring_up_observed(arm: str, job: StartupJob) -> BroughtUp:
    """Bring the model up by this arm, with an optimizer, observed into the folder of the run.

    Collective: yes, over all ranks. Every page of every shard is written to in the phase of the optimizer, as its
    first step will: until then a loader may have left values in a mapped file.
    """
    import transformers

    warnings.simplefilter("ignore")
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    del transformers
    on_meta(job)  # imports what this model needs
    gc.collect()
    dist.barrier()
    steps = STEPS[arm]
    with observe(job.run, samples_per_second=SAMPLES_PER_SECOND) as observer:
        with phase(PHASES[0]):
            loaded = steps.load(job)
        observer.sample()
        with phase(PHASES[1]):
            model = steps.wrap(loaded)
            del loaded
        observer.sample()
        with phase(PHASES[2]):
            torch.optim.AdamW(model.parameters(), lr=1e-5)
            _write_to(model)
        observer.sample()
    return _held(model)


def _write_to(model: nn.Module) -> None:
    """One byte of each page of what this rank has on the host, which stays as it is."""
    for tensor in _locals(model):
        if tensor.device.type == "cpu" and tensor.is_contiguous():
            flat = raw_bytes(tensor)
            flat[::_PAGE].bitwise_xor_(0)
            flat[-1:].bitwise_xor_(0)


def _held(model: nn.Module) -> BroughtUp:
    on_host = on_device = 0
    for tensor in _locals(model):
        if tensor.device.type == "cpu":
            on_host += tensor.nbytes
        else:
            on_device += tensor.nbytes
    shards: dict[str, int] = {}
    wholes: dict[str, int] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        (shards if isinstance(tensor, DTensor) else wholes)[name] = _fingerprint(name, tensor)
    return BroughtUp(on_host, on_device, LoadOptions().budget_bytes, shards, wholes)


def _locals(model: nn.Module) -> list[torch.Tensor]:
    """What this rank has of each parameter and buffer, each once, empty ones left out."""
    found: dict[int, torch.Tensor] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        local = local_tensor(tensor)
        if local.is_meta:
            raise RuntimeError(f"{name} was left on meta")
        if local.numel():
            found.setdefault(local.data_ptr(), local)
    return list(found.values())


def _fingerprint(name: str, tensor: torch.Tensor) -> int:
    """Of the elements that this rank has, where they lie in the whole tensor."""
    local, size, total = local_tensor(tensor), tensor.element_size(), 0
    for part in local_boxes(tensor, name):
        data = raw_bytes(strided_view(local, part.local).cpu())
        runs = run_starts(part.box, tensor.shape)
        nbytes = data.numel() // len(runs)
        for number, start in enumerate(runs):
            total += fingerprint(memory_of(data[number * nbytes :][:nbytes]), start * size)
    return total % MODULUS
