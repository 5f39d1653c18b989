"""Local steps between synchronizations: local SGD and DiLoCo."""
