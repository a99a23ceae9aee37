"""What carries out the verbs: calls compared between ranks, checkpoints opened, models built, loads and saves."""
