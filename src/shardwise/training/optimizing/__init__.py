"""Optimizers by name: made, tried, taught to step shards; scaling and clipping of gradients."""
