"""How fast this machine is, for limits of processor time that are to hold on any."""

import time

_ROUNDS = 400_000
_ROUNDS_S = 0.02
"""What the rounds take where the limits were set."""


def slowness() -> float:
    """Return how many times longer this process computes now than where the limits were set; at least 1."""
    start, table = time.process_time(), {}
    for number in range(_ROUNDS):
        table[number % 1000] = number
    return max(1.0, (time.process_time() - start) / _ROUNDS_S)
