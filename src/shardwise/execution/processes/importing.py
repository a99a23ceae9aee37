"""Imported first by the process that ranks are forked from: it imports what they need.

Importing torch and transformers makes objects by the hundred thousand, all of which stay. Python's search for
unreachable cycles goes through them again and again: a fifth of the time. So there is none until the ranks are
there; :mod:`shardwise.execution.processes.local_ranks` begins it again in each.

The process ends with the one that started it. It does not end by a SIGTERM that is meant for all of a group:
whoever watches over the ranks learns of their ends from it. And it imports nothing from the folder it happens to be
in.
"""

from __future__ import annotations

import gc
import signal
import sys

if any("multiprocessing.forkserver" in word for word in sys.orig_argv):  # nobody else's signals are changed
    gc.disable()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.path[:] = [folder for folder in sys.path if folder]
