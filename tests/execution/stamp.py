"""A module that knows in which process it was imported."""

from __future__ import annotations

import os

IMPORTED_BY = os.getpid()
