"""What users call: one page each, read top to bottom."""
