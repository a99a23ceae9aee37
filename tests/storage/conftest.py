"""What the tests of storages start from."""

from __future__ import annotations

import pytest

# The suite is no test module by its name; its assertions should explain themselves all the same.
pytest.register_assert_rewrite("shardwise.testing.storage_suite")
