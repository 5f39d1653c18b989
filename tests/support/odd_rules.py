"""Rules whose slots are not like their parameter, and one that chooses among several updates."""

from collections import namedtuple
from typing import Any, NamedTuple

import torch
from torch import Tensor

import functional_optim as fo

ShapeScalars = namedtuple("ShapeScalars", "lr share")
Packed = namedtuple("Packed", "exp_avg count")
Basis = namedtuple("Basis", "basis seen")


class Shapes(NamedTuple):
    exp_avg: Tensor
    """Like p."""
    rows: Tensor
    """A number for each row."""
    columns: Tensor
    """A number for each column."""
    largest: Tensor
    """One number."""
    gram: Tensor
    """A square matrix of the rows, in float64."""


@fo.factory
def shapes(lr: Any = 0.1, beta: Any = 0.9) -> Any:
    """A rule for matrices whose slots have five shapes and two dtypes."""

    def init(p: Tensor) -> Shapes:
        m, n = p.shape
        gram = torch.zeros(m, m, dtype=torch.float64, device=p.device)
        return Shapes(torch.zeros_like(p), p.new_zeros(m), p.new_zeros(n), p.new_zeros(()), gram)

    def scalars(t: Any, *, lr: Any, beta: Any) -> ShapeScalars:
        return ShapeScalars(lr, 1 - beta)

    def update(u: Tensor, slots: Shapes, p: Tensor, s: ShapeScalars) -> Any:
        m = slots.exp_avg.lerp(u, s.share)
        rows = slots.rows.lerp((u * u).mean(1), s.share)
        columns = slots.columns.lerp((u * u).mean(0), s.share)
        largest = torch.maximum(slots.largest, u.abs().amax())
        gram = slots.gram.lerp(u @ u.mT, s.share)
        scale = rows[:, None].sqrt() + columns.sqrt() + largest + gram.diagonal()[:, None].sqrt()
        return -s.lr * m / (scale + 1e-3), Shapes(m, rows, columns, largest, gram)

    hyper = {"lr": lr, "beta": beta}
    return fo.leafwise(init, update, scalars, hyper=hyper, name="shapes")


class Bytes:
    """A codec: 8-bit codes of a whole tensor, and one scale."""

    fields = ("codes", "scale")

    def encode(self, x: Tensor, key: Any = None) -> tuple[Tensor, ...]:
        scale = x.abs().sum().clamp(min=1e-12) / 127
        return ((x / scale).round() + 128).to(torch.uint8), scale

    def decode(self, stored: tuple[Tensor, ...], spec: Any) -> Tensor:
        codes, scale = stored
        assert codes.shape == spec.shape
        return (codes.to(spec.dtype) - 128) * scale.to(spec.dtype)

    def __eq__(self, other: object) -> bool:
        return type(other) is Bytes

    def __hash__(self) -> int:
        return hash(Bytes)


@fo.factory
def packed(lr: Any = 0.1, beta: Any = 0.9) -> Any:
    """Momentum that is stored in 8 bits, and a count in an integer."""

    def init(p: Tensor) -> Packed:
        return Packed(torch.zeros_like(p), p.new_zeros((), dtype=torch.int32))

    def scalars(t: Any, *, lr: Any, beta: Any) -> tuple[Any, Any]:
        return lr, 1 - beta

    def update(u: Tensor, slots: Packed, p: Tensor, lr: Any, a: Any) -> Any:
        m = slots.exp_avg.lerp(u, a)
        return -lr * m, Packed(m, slots.count + 1)

    hyper, storage = {"lr": lr, "beta": beta}, fo.Storage(codecs={"exp_avg": Bytes()})
    return fo.leafwise(init, update, scalars, hyper=hyper, storage=storage, name="packed")


@fo.factory
def refreshing(lr: Any = 0.1, every: int = 3) -> Any:
    """Steps along a basis that is renewed in some steps, by an operation without a kernel."""

    def init(p: Tensor) -> Basis:
        return Basis(torch.eye(p.shape[0], dtype=p.dtype), p.new_zeros(()))

    def cheap(u: Tensor, slots: Basis, p: Tensor, lr: Any) -> Any:
        return -lr * slots.basis.to(u.dtype) @ u, slots

    def dear(u: Tensor, slots: Basis, p: Tensor, lr: Any) -> Any:
        basis, _ = torch.linalg.qr(u @ u.mT + torch.eye(len(u), dtype=u.dtype))
        return -lr * basis @ u, Basis(basis, slots.seen + 1)

    hyper, runs = {"lr": lr}, fo.Runs(choose=lambda t: t % every == 1)
    numbers = lambda t, *, lr: (lr,)  # noqa: E731
    return fo.leafwise(init, (cheap, dear), numbers, hyper=hyper, runs=runs, name="refreshing")


@fo.factory
def unit_rms(scale: Any = 1.0) -> Any:
    """Give each tensor's update a root mean square."""

    def update(u: Tensor, slots: Any, p: Tensor, scale: Any) -> Any:
        squares, size = (u * u).sum(), torch.ones_like(u).sum()
        return scale * u / (squares / size + 1e-12).sqrt(), slots

    numbers = lambda t, *, scale: (scale,)  # noqa: E731
    return fo.leafwise(None, update, numbers, hyper={"scale": scale}, name="unit_rms")
