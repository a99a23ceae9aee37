"""Fixtures of the storage tests."""

import pytest

# The suites are no test modules by their names; their assertions should explain themselves all the same.
pytest.register_assert_rewrite("tests.support.storage_suite", "tests.support.writer_suite")
