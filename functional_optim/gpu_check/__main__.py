"""The command `python -m functional_optim.gpu_check`."""

from functional_optim.gpu_check.command import main

if __name__ == "__main__":
    raise SystemExit(main())
