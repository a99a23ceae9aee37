"""Values without torch: tensors and boxes, expressions over stored tensors, layouts, reports, errors."""
