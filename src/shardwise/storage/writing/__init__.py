"""Take these bytes: the contract of a writer, and the writers."""
