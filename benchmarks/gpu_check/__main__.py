"""The command `python -m gpu_check`."""

from gpu_check.command import main

if __name__ == "__main__":
    raise SystemExit(main())
