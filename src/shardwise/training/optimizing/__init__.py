"""Optimizers by name: made and tried; scaling and clipping of gradients."""
