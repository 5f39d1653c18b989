"""Kinds of tensors, of gradients and of calls, one row each: what the other rows leave out.

make bench ARGS="--only dtype,strided,scalars,late,sparse,own,state,sam,gate,partition"
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import cycle
from typing import Any

import torch
from pairs import Step, race
from recipes import Recipe, plain_norm
from rows import Effort, Measured, Row
from steps import Build, forms, of, ours, row
from torch import Tensor
from workloads import BIG, GPT, KERNELS, MLP, SCALARS, SMALL, Workload

import functional_optim as fo
from functional_optim import adapters

Change = Callable[[Tensor], Tensor]
"""What a parameter and its gradient become."""


def changed(change: Change, build: Build) -> Build:
    """A step over the same parameters in another dtype, or otherwise in memory."""

    def made(params: list[Tensor]) -> Step:
        found: list[Tensor] = [torch.nn.Parameter(change(p.detach())) for p in params]
        for p, q in zip(params, found, strict=True):
            q.grad = None if p.grad is None else change(p.grad)
        return build(found)

    return made


def complex_numbers(x: Tensor) -> Tensor:
    return torch.complex(x, x.flip(0))


def channels_last(x: Tensor) -> Tensor:
    return x.to(memory_format=torch.channels_last)


CHANGES: dict[str, tuple[str, Change]] = {
    "bfloat16": ("in bfloat16", Tensor.bfloat16),
    "float16": ("in float16", Tensor.half),
    "float64": ("in float64", Tensor.double),
    "complex64": ("in complex64", complex_numbers),
}


def of_another_kind(key: str, what: str, workload: Workload, change: Change) -> Row:
    """AdamW over changed parameters."""
    rivals = {name: changed(change, build) for name, build in forms("AdamW").items()}
    if change is complex_numbers:
        del rivals["torch, fused"]  # which refuses them
    return row(key, f"AdamW {what}", workload, changed(change, ours("AdamW")), rivals)


def late(build: Build) -> Build:
    """Steps in which one half of the parameters has no gradient, and then the other one."""

    def made(params: list[Tensor]) -> Step:
        step, grads = build(params), [p.grad for p in params]
        turns = cycle((0, 1))

        def half() -> None:
            turn = next(turns)
            for i, (p, g) in enumerate(zip(params, grads, strict=True)):
                p.grad = g if i % 2 == turn else None
            step()

        return half

    return made


ROWS, WIDTH, BATCH = 50_000, 64, 1024


def sparse(cls: Callable[..., torch.optim.Optimizer], effort: Effort) -> Step:
    """A step over a table whose gradient has the rows of one batch."""
    torch.manual_seed(0)
    rows, batch = (40, 8) if effort.quick else (ROWS, BATCH)
    table = torch.nn.Parameter(torch.randn(rows, WIDTH))
    index = torch.randint(rows, (1, batch))
    grad = torch.sparse_coo_tensor(index, torch.randn(batch, WIDTH), table.shape)
    table.grad = grad.coalesce()
    return cls([table], lr=1e-3).step


def sparse_pair(name: str, effort: Effort) -> Measured:
    """Ours and torch's of this name."""
    sides = [sparse(getattr(where, name), effort) for where in (adapters, torch.optim)]
    return race(sides[0], {"torch": sides[1]}, effort)


# ---------------------------------------------------------------- calls
def updated(made: Recipe) -> Build:
    """`tx.update` and `fo.apply_updates`, neither of them compiled."""

    def build(params: list[Tensor]) -> Step:
        tx, grads = made(), [p.grad for p in params]
        tree: Any = [p.detach() for p in params]
        state = tx.init(tree)

        def step() -> None:
            nonlocal tree, state
            updates, state = tx.update(grads, state, tree)
            tree = fo.apply_updates(tree, updates)

        return step

    return build


def unit_by_hand(params: list[Tensor]) -> Step:
    """`plain_norm` as a loop over the tensors."""
    tensors, grads = [p.detach() for p in params], [p.grad for p in params]
    slots = [(torch.zeros_like(p), torch.zeros_like(p)) for p in tensors]
    t = 0

    def step() -> None:
        nonlocal t
        t += 1
        for p, g, (m, v) in zip(tensors, grads, slots, strict=True):
            if g is None:
                continue
            m.lerp_(g, 0.1)
            v.mul_(0.999).addcmul_(g, g, value=0.001)
            u = (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
            p.add_(u / (u.norm() + 1e-6), alpha=-1e-3)

    return step


def stepped(make: Callable[[list[Tensor]], torch.optim.Optimizer], params: list[Tensor]) -> Any:
    """An optimizer after its first step, which makes its state."""
    opt = make(params)
    opt.step()
    return opt


def saving(make: Callable[[list[Tensor]], torch.optim.Optimizer]) -> Build:
    return lambda params: stepped(make, params).state_dict


def loading(make: Callable[[list[Tensor]], torch.optim.Optimizer]) -> Build:
    def build(params: list[Tensor]) -> Step:
        opt = stepped(make, params)
        saved = opt.state_dict()
        return lambda: opt.load_state_dict(saved)

    return build


def closed(params: list[Tensor], clear: Callable[[], None]) -> Callable[[], Tensor]:
    """A closure whose loss is the sum of squares."""

    def closure() -> Tensor:
        clear()
        loss = torch.stack([p.square().sum() for p in params]).sum()
        loss.backward()
        return loss

    return closure


def sam(params: list[Tensor]) -> Step:
    opt: Any = adapters.SAM(params, fo.sgd, lr=1e-3, momentum=0.9)
    return partial(opt.step, closed(params, opt.zero_grad))


def sam_by_hand(params: list[Tensor]) -> Step:
    """The ascent by foreach operations, and torch's fused SGD."""
    opt = torch.optim.SGD(params, lr=1e-3, momentum=0.9, fused=True)
    each: Any = torch  # whose functions of lists have private names
    closure = closed(params, opt.zero_grad)

    def step() -> None:
        closure()
        grads = [p.grad for p in params if p.grad is not None]
        norms = each._foreach_norm(grads)
        scale = 0.05 / (torch.linalg.vector_norm(torch.stack(norms)) + 1e-12)
        with torch.no_grad():
            old = [p.detach().clone() for p in params]
            each._foreach_add_(params, each._foreach_mul(grads, scale))
        closure()
        with torch.no_grad():
            each._foreach_copy_(params, old)
        opt.step()

    return step


def gated(lr: float = 1e-3) -> fo.GradientTransformation:
    """AdamW that leaves out steps with gradients that are not finite."""
    return fo.apply_if_finite(fo.adamw(lr), max_consecutive_errors=5)


def parted(lr: float = 1e-3) -> fo.GradientTransformation:
    """AdamW whose matrices decay."""
    rules = {"decay": fo.adamw(lr, weight_decay=0.1), "plain": fo.adam(lr)}
    return fo.partition(rules, lambda path, p: "decay" if p.dim() == 2 else "plain")


def rows() -> list[Row]:
    """One row for each kind."""
    found = [
        of_another_kind(f"dtype_{key}", what, GPT, change)
        for key, (what, change) in CHANGES.items()
    ]
    found.append(of_another_kind("strided", "in channels_last", KERNELS, channels_last))
    found.append(row("scalars", "AdamW", SCALARS, ours("AdamW"), forms("AdamW")))
    own, fused = ours("AdamW"), {"torch, fused, same": late(forms("AdamW")["torch, fused"])}
    what = "AdamW, a half without gradients, by turns"
    found += [row("late", what, workload, late(own), fused) for workload in (MLP, GPT)]
    table = f"an embedding of {ROWS:,} × {WIDTH}, {BATCH:,} rows of it"
    found += [
        Row(f"sparse-{name.lower()}", f"`{name}`, sparse", table, partial(sparse_pair, name))
        for name in ("SGD", "Adagrad", "SparseAdam")
    ]
    by_hand = {"torch's operations in a loop": unit_by_hand}
    what = "`tx.update` of a custom rule"
    found += [
        row("own", what, workload, updated(plain_norm), by_hand) for workload in (MLP, GPT, SMALL)
    ]
    loop = {"torch, for-loop": forms("AdamW")["torch, for-loop"]}
    what = "`tx.update` of AdamW and `fo.apply_updates`"
    found += [row("update", what, own, updated(fo.adamw), loop) for own in (MLP, GPT, SMALL)]
    adamw, theirs = adapters.AdamW, partial(torch.optim.AdamW, fused=True)
    for key, way in (("state_dict", saving), ("load_state_dict", loading)):
        rivals = {"torch": way(theirs)}
        found.append(row(key, f"`AdamW.{key}()`", GPT, way(adamw), rivals))
    rivals = {"torch: foreach, fused SGD": sam_by_hand}
    found += [row("sam", "SAM, with its losses", own, sam, rivals) for own in (MLP, GPT)]
    rivals = {"our AdamW": ours("AdamW")}
    found += [row("gate", "`apply_if_finite(adamw)`", own, of(gated), rivals) for own in (GPT, BIG)]
    found.append(row("partition", "AdamW, decay of matrices alone", GPT, of(parted), rivals))
    return found
