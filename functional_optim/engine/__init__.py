"""Stepping many tensors in place."""
