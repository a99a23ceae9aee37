"""From a storage into the memory of tensors: copies carried out, shared, computed, compared, audited."""
