"""States as flat dicts with torch's keys, and access to a state by name."""
