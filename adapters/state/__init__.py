"""Names, hyperparameters, saving and loading of optimizer objects."""
