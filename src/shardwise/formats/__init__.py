"""Stored layouts: tensors of files, and the checkpoints that files make up. Without torch."""
