"""What is stored: what files say of their tensors, and the checkpoints that they make up. Without torch."""
