"""How the tensors of an optimizer object are stepped."""
