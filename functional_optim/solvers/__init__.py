"""Least squares: residuals, linear solvers, damping and losses, and the loop around them."""
