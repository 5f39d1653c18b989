"""The protocol and the one-tensor rule: pure functions over trees, without kernels or objects."""
