"""CUDA without a card: kernels compiled ahead of time, and their PTX run on the CPU's memory."""
