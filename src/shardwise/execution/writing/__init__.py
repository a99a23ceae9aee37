"""From the memory of tensors to a storage: one sink, and one way for what was written to count."""
