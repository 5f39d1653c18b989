"""Steps of optimizer objects."""
