"""How the example says no."""


class BadInput(Exception):
    """A flag, a folder or a file that cannot be used: one sentence for the user, exit code 2."""
