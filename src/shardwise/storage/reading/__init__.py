"""Give me these bytes: the contract of a reader, and the readers."""
