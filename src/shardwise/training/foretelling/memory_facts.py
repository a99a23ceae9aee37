"""What a training has needed of memory, beside what its plan says."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from shardwise.execution.processes.launched import this_device
from shardwise.observing import phases
from shardwise.report.names import in_bytes
from shardwise.report.training_plan import TrainingPlan
from shardwise.storage.names import is_url
from shardwise.training.configuration.config_sections import TrainConfig
from shardwise.training.foretelling.foreseeing import foresee_training
from shardwise.training.foretelling.step_memory import Machines
from shardwise.training.loop import peak_memory
from shardwise.training.passes.forward import SHARDED_FOR_LACK_OF_MEMORY
from shardwise.training.report import TrainReport
from shardwise.training.session import Session

_UNFORESEEN_BYTES = 96 << 20
"""About the most that libraries and the allocator of a rank take: of a small model, more than the model does."""


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """Of the first rank: of its accelerator, else of its process, over what that had after imports.

    ``foreseen_bytes`` is None where ``why_not`` says why.
    """

    needed_bytes: int
    foreseen_bytes: int | None
    phase: str = ""
    why_not: str = ""

    def __str__(self) -> str:
        needed = f"memory: the first rank needed {in_bytes(self.needed_bytes)}"
        if self.foreseen_bytes is None:
            return f"{needed}; not foreseen: {self.why_not}"
        told = f"{needed}, foreseen were {in_bytes(self.foreseen_bytes)} (most in: {self.phase})"
        if 0 < self.needed_bytes - self.foreseen_bytes <= _UNFORESEEN_BYTES:
            return f"{told}; what libraries and the allocator take, some tens of MiB, is not foreseen"
        return told

    def to_dict(self) -> dict[str, Any]:
        """The facts as plain JSON values."""
        return dataclasses.asdict(self)


def memory_before() -> int:
    """What is there before a training, to be given to :func:`memory_facts`: libraries, on the processors."""
    device = this_device()
    return peak_memory(device) if device.type == "cpu" else 0


def _told(plan: TrainingPlan) -> dict[str, Any]:
    """What was foreseen of each phase, for whoever observes this rank."""
    return {
        "device": plan.load.device,
        "phases": {
            phase.phase: {"device_bytes": phase.device_bytes, "host_bytes": phase.host_bytes}
            for phase in plan.phases
        },
    }


def memory_facts(session: Session, trained: TrainReport, before: int) -> MemoryFacts | None:
    """What was needed, and what the plan of this very training says; None where no step was taken.

    The plan is made when all is done: made before, it would take memory from what is measured. Whoever observes
    this rank is told of it.

    Collective: no; about a second of the rank that asks.
    """
    if not trained.steps:
        return None
    needed = max(trained.steps[-1].memory_bytes - before, 0)
    if is_url(session.config.model.name):
        return MemoryFacts(needed, None, why_not="the model is at a URL, which is not asked again")
    try:
        machines = Machines(ranks=session.size, device=this_device().type)
        with phases.phase("foresee"):
            plan = foresee_training(_as_it_was(session, trained), machines)
    except Exception as error:  # whatever it is: the training is over, and good
        return MemoryFacts(needed, None, why_not=str(error).partition("\n")[0])
    phases.tell("training", _told(plan))
    return MemoryFacts(needed, plan.peak_bytes, plan.worst.phase)


def _as_it_was(session: Session, trained: TrainReport) -> TrainConfig:
    """The configuration with what the data, the tokenizer and the machine have decided."""
    config = session.config
    changes: dict[str, Any] = {}
    if session.data is not None and not config.data.packing and len(session.data.examples):
        longest = max(int(session.data.examples.lengths.max()), 2)
        changes["data"] = config.data.model_copy(update={"max_length": longest})
        rows = -(-len(session.data.examples) // session.size)
        batch = {"batch_size": min(config.training.batch_size, rows)}
        changes["training"] = config.training.model_copy(update=batch)
    if SHARDED_FOR_LACK_OF_MEMORY in trained.remarks:
        section = changes.get("training", config.training)
        changes["training"] = section.model_copy(update={"accumulate": "sharded_gradients"})
    if config.model.resize_vocab == "tokenizer":
        changes["model"] = config.model.model_copy(update={"resize_vocab": len(session.tokenizer)})
    return config.model_copy(update=changes)
