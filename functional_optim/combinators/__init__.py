"""Transformations made of others: for some leaves, for some steps, or around another one."""
