"""Least squares, minima and roots: residuals, linear solvers, damping, losses, and the loop."""
