"""Checks whether this transformers has the names that shardwise patches (5.19 and newer)."""

import pytest

from shardwise.core.errors import ConfigError


def require_patched_names() -> None:
    """Skip the module that calls it, if it has not."""
    pytest.importorskip("accelerate")
    try:
        import shardwise.integrations.trainer_compat  # noqa: F401
    except ConfigError as error:
        pytest.skip(str(error), allow_module_level=True)
