"""The cache of compiled kernels: list it, or reduce its size.

    python -m functional_optim.cache                # its path, its size, and every file
    python -m functional_optim.cache --prune        # remove old files, and what is too much
    python -m functional_optim.cache --prune --days 30 --megabytes 100
    python -m functional_optim.cache --clear        # remove all

You need not call this: whenever the library caches a kernel, it removes kernels that were not used
for 90 days, and above 512 MiB the least recently used ones, including kernels of other versions of
the package or of the compiler. A removed kernel is compiled again when it is needed.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence

from functional_optim.kernels import disk_cache

DAY = 86400.0
MEBIBYTE = 2**20


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status: 1 if no kernels are cached here.

    Example::

        >>> from functional_optim import cache
        >>> cache.main(["--folder"])  # doctest: +ELLIPSIS
        /...
        0
    """
    parser = argparse.ArgumentParser(
        prog="python -m functional_optim.cache",
        description="List the cache of compiled kernels, or reduce its size.",
    )
    parser.add_argument("--folder", action="store_true", help="print its path, no more")
    parser.add_argument("--prune", action="store_true", help="remove old or surplus kernels")
    parser.add_argument("--clear", action="store_true", help="remove all kernels")
    parser.add_argument(
        "--days", type=float, help="without use, after which --prune removes (default 90)"
    )
    parser.add_argument(
        "--megabytes", type=float, help="that --prune leaves at most, in MiB (default 512)"
    )
    given = parser.parse_args(argv)
    if not given.prune and (given.days, given.megabytes) != (None, None):
        parser.error("--days and --megabytes say what --prune removes; add --prune.")
    if given.folder and (given.prune or given.clear):
        parser.error("--folder prints a path, no more; leave it out to remove kernels.")
    days = disk_cache.OLDEST / DAY if given.days is None else given.days
    size = disk_cache.LARGEST / MEBIBYTE if given.megabytes is None else given.megabytes
    for name, value in (("--days", days), ("--megabytes", size)):
        if math.isnan(value) or value < 0:
            parser.error(f"{name} must be at least 0, but is {value:g}.")
    folder = disk_cache.folder()
    if folder is None:
        _say(f"No kernels are cached: {disk_cache.VARIABLE} is off, or its folder cannot be used.")
        return 1
    if given.folder:
        _say(str(folder))
        return 0
    if given.prune or given.clear:
        removed = disk_cache.prune(
            folder, *((0.0, 0.0) if given.clear else (size * MEBIBYTE, days * DAY))
        )
        _say(f"Removed {_told(removed)}.")
    left = disk_cache.kept(folder)
    _say(f"{folder} holds {_told(left)}.")
    if not (given.prune or given.clear):
        for file in left:
            age = max(0.0, time.time() - file.used) / DAY
            _say(f"  {file.path.name}  {file.size / 1024:8.1f} KiB  used {age:.0f} days ago")
    return 0


def _told(files: Sequence[disk_cache.KeptKernel]) -> str:
    size = sum([file.size for file in files]) / MEBIBYTE
    return f"{len(files)} kernel{'s' * (len(files) != 1)} of {size:.1f} MiB"


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    raise SystemExit(main())
