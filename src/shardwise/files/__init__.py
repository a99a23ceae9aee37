"""Stored bytes: readers and writers of a folder, formats of checkpoints, quantized forms. Without torch."""
