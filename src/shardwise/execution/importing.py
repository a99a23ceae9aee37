"""Imported by a process before all else, if that process imports what others are then forked from.

Importing torch and transformers makes objects by the hundred thousand, all of which stay. Python's search for
unreachable cycles goes through them again and again: a fifth of the time. So there is none until the ranks are
there; :mod:`shardwise.execution.local_ranks` begins it again in each.
"""

from __future__ import annotations

import gc

gc.disable()
