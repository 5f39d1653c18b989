"""Combinators: transformations for some leaves, for some steps, or around another one."""
