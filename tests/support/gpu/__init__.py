"""CUDA without a card: kernels compiled ahead of time, and interpreted on a device for tests."""
