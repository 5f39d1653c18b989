"""Checks on a GPU: `python -m gpu_check` prints one page of results.

It also writes them to a file, with versions, figures and tracebacks, to be sent to the project.
Nothing here needs the tests.
"""
