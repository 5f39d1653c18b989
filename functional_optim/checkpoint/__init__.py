"""States as flat dicts under torch's keys, and reading a state by name."""
