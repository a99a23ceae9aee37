"""Training state that survives: checkpoints in the format of ``torch.distributed.checkpoint``, on any ranks."""
