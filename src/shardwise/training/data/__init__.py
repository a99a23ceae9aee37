"""Data sets: where rows come from, their tokens kept, mixed, packed and dealt to ranks."""
