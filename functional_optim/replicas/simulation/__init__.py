"""Replicas that fail, in one process and in virtual time."""
