"""Population methods and estimators as optimizer objects."""
