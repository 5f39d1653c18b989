"""Where optimizer objects that version 0.2.0 has pickled look for their classes."""

from functional_optim.adapters.ready_made import made as __getattr__  # noqa: F401
