"""From checkpoint keys to expressions and back: transformers' conversions on recorded tensors."""
