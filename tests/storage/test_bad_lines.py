"""A line of a table that leads nowhere is one error, on every rank, that names it."""

from __future__ import annotations

import pytest
from tests.storage import bad_lines

import shardwise
from shardwise.errors import ConfigError


@pytest.mark.distributed
@pytest.mark.parametrize("table", bad_lines.TABLES)
def test_a_line_that_leads_nowhere_on_one_rank_is_the_same_error_on_all(worlds, table):
    first, second = worlds(2).run(bad_lines.loaded, table)
    assert first == second
    assert first[0] == "ConfigError"
    assert "nosuch.module" in first[1]
    assert "correct the line" in first[1]


def test_layers_in_a_form_that_has_no_line_are_an_error_that_names_them():
    with pytest.raises(ConfigError, match=r"InOwnForm \('own'\); add a line for it to FORMS"):
        shardwise.load(bad_lines.InOwnForm(5, 3), bad_lines.stored())
