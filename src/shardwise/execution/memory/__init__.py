"""Memory for tensors: fresh, shared between ranks, pinned, and how much of it is free."""
