"""What a type checker knows of the drop-ins' constructors. Read by `make check`, and never run.

A call that is marked must be an error: with a signature of `*args` and `**kwargs` it would be none,
and a mark that silences no error is reported as one.
"""

import torch
from torch import Tensor, nn

from functional_optim import adapters


def right(params: list[Tensor], model: nn.Module) -> None:
    adapters.Adadelta(params, 1.0, 0.9, compile=True)
    adapters.Adafactor(params, beta2_decay=-0.8, compile=True)
    adapters.Adagrad(params, 1e-2, 0.0, initial_accumulator_value=0.1, compile=True)
    adapters.Adam(model.parameters(), 1e-3, (0.9, 0.99), fused=None, compile="strict")
    adapters.AdamW(model.named_parameters(), lr=1e-3, betas=(0.9, 0.99), eps=1e-8, compile=False)
    adapters.AdamW(params, stored="int8")
    adapters.Adam(params, stored={"exp_avg": torch.bfloat16})
    adapters.Adamax(params, betas=(0.9, 0.99), compile=True)
    adapters.ASGD(params, lambd=1e-4, alpha=0.75, t0=1e6, compile=True)
    adapters.Muon(params, nesterov=True, ns_steps=5, adjust_lr_fn="original", compile=True)
    adapters.NAdam(params, momentum_decay=4e-3, compile=True)
    adapters.RAdam(params, decoupled_weight_decay=True, compile=True)
    adapters.RMSprop(params, alpha=0.99, centered=True, compile=True)
    adapters.Rprop(params, etas=(0.5, 1.2), step_sizes=(1e-6, 50), compile=True)
    adapters.SGD([{"params": params, "lr": 0.1}], momentum=0.9, nesterov=True, compile=True)
    adapters.SparseAdam(params, betas=(0.9, 0.99), maximize=True, compile=True)
    adapters.LBFGS(params, line_search_fn="strong_wolfe")


def names(params: list[Tensor]) -> None:
    adapters.Adadelta(params, unknown=1)  # pyright: ignore[reportCallIssue]
    adapters.Adafactor(params, unknown=1)  # pyright: ignore[reportCallIssue]
    adapters.Adagrad(params, unknown=1)  # pyright: ignore[reportCallIssue]
    adapters.Adam(params, unknown=1)  # pyright: ignore[reportCallIssue]
    adapters.AdamW(params, unknown=1)  # pyright: ignore[reportCallIssue]
    adapters.Adamax(params, unknown=1)  # pyright: ignore[reportCallIssue]
    adapters.ASGD(params, unknown=1)  # pyright: ignore[reportCallIssue]
    adapters.Muon(params, unknown=1)  # pyright: ignore[reportCallIssue]
    adapters.NAdam(params, unknown=1)  # pyright: ignore[reportCallIssue]
    adapters.RAdam(params, unknown=1)  # pyright: ignore[reportCallIssue]
    adapters.RMSprop(params, unknown=1)  # pyright: ignore[reportCallIssue]
    adapters.Rprop(params, unknown=1)  # pyright: ignore[reportCallIssue]
    adapters.SGD(params, unknown=1)  # pyright: ignore[reportCallIssue]
    adapters.SparseAdam(params, unknown=1)  # pyright: ignore[reportCallIssue]
    adapters.LBFGS(params, unknown=1)  # pyright: ignore[reportCallIssue]


def types(params: list[Tensor]) -> None:
    adapters.AdamW(params, lr="0.1")  # pyright: ignore[reportArgumentType]
    adapters.AdamW(params, betas=0.9)  # pyright: ignore[reportArgumentType]
    adapters.AdamW(params, compile="lax")  # pyright: ignore[reportArgumentType]
    adapters.AdamW(params, stored=8)  # pyright: ignore[reportArgumentType]
    adapters.SGD(params, nesterov=0.5)  # pyright: ignore[reportArgumentType]
