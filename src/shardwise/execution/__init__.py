"""Effects: what a plan decided is done, on all ranks, within a budget of memory."""
