"""Imported first by the process that ranks are forked from: it imports what they need.

Importing torch and transformers makes objects by the hundred thousand, all of which stay. Python's search for
unreachable cycles goes through them again and again: a fifth of the time. So there is none until the ranks are
there; each begins it again (``live_as_rank``).

The process ends with the one that started it. It does not end by a SIGTERM or a Ctrl-C that is meant for all of a
group: the process that watches over the ranks learns of their ends from it. And it imports nothing from the folder
it happens to be in.
"""

from __future__ import annotations

import gc
import signal
import sys

if any("multiprocessing.forkserver" in word for word in sys.orig_argv):  # nobody else's signals are changed
    gc.disable()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.path[:] = [folder for folder in sys.path if folder]
