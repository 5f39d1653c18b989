"""In-place steps of many tensors."""
