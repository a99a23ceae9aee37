"""What is freed on the CPU stays with the process.

[Note: Freed memory] FSDP2 gathers a group of parameters into fresh memory and frees it after use: twice a step for
every group. glibc gives each such block back to the system at once and has it anew for the next one, page by page:
over a step as many first touches as all groups take, more than all that is computed where a batch is small. Kept,
what one group has left is what the next one gets. A process then has the most that it ever needed, to its end.
"""

from __future__ import annotations

import contextlib
import ctypes

# mallopt(3)
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_what_is_freed() -> None:
    """From now on the allocator of this process keeps what is freed, where it is glibc's."""
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, -1)
