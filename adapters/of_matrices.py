"""The old location of classes, for optimizer objects pickled by version 0.2.0."""

from functional_optim.adapters.ready_made import made as __getattr__  # noqa: F401
