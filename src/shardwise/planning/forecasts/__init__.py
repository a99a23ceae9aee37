"""What a load will take on every rank, before anything is read."""
