"""What ``shardwise serve`` relies on in the client: its version is served, and its calls are known."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

tinker = pytest.importorskip("tinker")
from shardwise.serve import messages  # noqa: E402

SERVED = {
    *("asample", "checkpoints", "client/config", "create_model", "create_sampling_session", "create_session"),
    *("forward_backward", "get_info", "get_server_capabilities", "healthz", "load_weights", "optim_step"),
    *("retrieve_future", "samplers/_", "save_weights", "save_weights_for_sampler", "session_heartbeat"),
    *("sessions/_/finish", "telemetry", "training_runs/_", "training_runs/_/checkpoints"),
    *("training_runs/_/checkpoints/_", "unload_model", "weights_info"),
}
LEFT_OUT = {
    *("audit", "auth/apikey/me", "auth/token", "billing/usage/checkpoints/current", "billing/usage/events"),
    *("cancel_future", "client/dynamic_config", "copy_weights", "create_custom_loss", "join_sampling_session"),
    *(
        "retrieve_futures",
        "save_weights_external",
        "sessions",
        "sessions/_",
        "sessions/_/project",
        "sessions/_/trace_export",
    ),
    *("sessions/search", "training_runs", "training_runs/_/checkpoints/_/external_weights_urls"),
    *("training_runs/_/checkpoints/_/publish", "training_runs/_/checkpoints/_/ttl"),
}
"""Calls without which training and sampling work. Each is answered by 404."""


def test_the_installed_client_is_served() -> None:
    """If not: run tests/serve with the bound raised, and see the changelog of the client for calls."""
    assert Version(tinker.__version__) in messages.CLIENTS


def test_the_bound_of_the_extra_is_that_of_the_server() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    required = [Requirement(each) for each in project["optional-dependencies"]["serve"]]
    assert [each.specifier for each in required if each.name == "tinker"] == [messages.CLIENTS]


def test_the_calls_of_the_client_are_known() -> None:
    found = set()
    for file in Path(tinker.__file__).parent.rglob("*.py"):
        if not file.stem.endswith("_test"):
            found |= set(re.findall(r'"/api/v1/([^"]+)"', file.read_text()))
    calls = {re.sub(r"\{\w+\}", "_", call) for call in found}
    assert calls <= SERVED | LEFT_OUT, "new calls of the client: serve them, or list them here"
    assert calls >= SERVED - {"unload_model"}, "calls that no client makes"  # has a type, and no call, in 0.38
