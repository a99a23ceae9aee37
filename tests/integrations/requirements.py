"""Whether this transformers has a door for models that are sharded already (5.19 and newer)."""

import pytest

from shardwise.errors import ConfigError


def require_doors() -> None:
    """Skip the module that calls it, where there is none."""
    pytest.importorskip("accelerate")
    try:
        import shardwise.integrations.trainer_compat  # noqa: F401
    except ConfigError as error:
        pytest.skip(str(error), allow_module_level=True)
