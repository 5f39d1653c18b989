"""What helps to tune a training: sweeps over one number of a recipe, and reports on a run."""
