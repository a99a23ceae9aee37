"""States of models and optimizers that ranks, or files, bring along: agreed upon, and compared."""
