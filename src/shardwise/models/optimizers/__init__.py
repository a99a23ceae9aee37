"""What optimizers keep, as data, and bound to other parameters."""
