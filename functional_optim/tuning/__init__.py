"""Tuning: sweeps over one hyperparameter of a recipe, and reports on a training run."""
