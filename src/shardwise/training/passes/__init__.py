"""The forward and backward pass of a batch: precision, losses, what ranks keep of gradients."""
