"""Fine-tuning in a plain loop, on data that is masked exactly."""
