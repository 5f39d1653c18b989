"""Sweeps over one number of a recipe."""
