"""How a model comes up, by this library and by others: what that takes of memory and time, beside each other."""
