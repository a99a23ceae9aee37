"""Who reads what, and what is missing. Pure: no torch, no files, no processes."""

from shardwise.planning.consent import Consent, Ignore, Initialize, OnMissing, OnUnexpected, Refuse
from shardwise.planning.load_plan import (
    Fill,
    Init,
    Keep,
    LoadPlan,
    ModelRules,
    Read,
    Recompute,
    Tie,
    plan_load,
)
from shardwise.planning.stored import stored_tensors

__all__ = [
    "Consent",
    "Fill",
    "Ignore",
    "Init",
    "Initialize",
    "Keep",
    "LoadPlan",
    "ModelRules",
    "OnMissing",
    "OnUnexpected",
    "Read",
    "Recompute",
    "Refuse",
    "Tie",
    "plan_load",
    "stored_tensors",
]
