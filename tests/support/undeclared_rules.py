"""The table of rules for one tensor as a user writes them, without a flag that says what they are.

`undeclared.py` steps them in every way and compares each with a naive loop.
"""

import contextlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import functional_optim as fo

PRODUCTS = 1e-4
"""The tolerance of rules with products or factorisations of matrices."""

PAIRS = ("complex64",)
"""The set whose tensors arrive as pairs: slots of other shapes than the parameter's do not fit."""


class Part(NamedTuple):
    """A rule and what `fo.leafwise` takes with it. known: the library's rule of the same formula.

    where: the tensors on which it acts.
    """

    name: str
    update: Callable[..., Any]
    init: Callable[[Tensor], Any] | None = None
    scalars: Callable[..., Any] | None = None
    reduce: Callable[..., Any] | None = None
    hyper: Mapping[str, Any] | None = None
    carry: Any = None
    known: Callable[[], Any] | None = None
    where: Callable[[str, Tensor], bool] = lambda path, p: True

    def tx(self) -> Any:
        """The transformation, without any flag."""
        if self.known is not None:
            return self.known()
        given = {"reduce": self.reduce, "hyper": self.hyper, "carry": self.carry}
        return fo.leafwise(self.init, self.update, self.scalars, **given, name=self.name)

    def on(self, where: Callable[[str, Tensor], bool]) -> "Part":
        """The same for some of the tensors."""
        return self._replace(where=where)


class Row(NamedTuple):
    """A recipe: how it is built, and its rules, in their order, for the naive loop.

    without: the sets of tensors that it does not take. tolerance: relative to the largest element.
    strict: whether kernels must take it.
    """

    name: str
    build: Callable[[], Any]
    parts: tuple[Part, ...]
    without: frozenset[str] = frozenset()
    tolerance: float = 1e-5
    strict: bool = False


ROWS: dict[str, Row] = {}


def add(
    name: str,
    build: Callable[[], Any],
    *parts: Part,
    without: Sequence[str] = (),
    tolerance: float = 1e-5,
    strict: bool = False,
) -> None:
    """Add a row to the table."""
    assert name not in ROWS
    ROWS[name] = Row(name, build, parts, frozenset(without), tolerance, strict)


def rule(
    *, without: Sequence[str] = (), tolerance: float = 1e-5, strict: bool = False, **more: Any
) -> Callable[[Callable[..., Any]], Part]:
    """Add a rule to the table, under the name of its `update`."""

    def added(update: Callable[..., Any]) -> Part:
        part = Part(update.__name__, update, **more)
        add(part.name, part.tx, part, without=without, tolerance=tolerance, strict=strict)
        return part

    return added


def rules(functions: dict[str, Callable[[Tensor, Tensor], Tensor]], **more: Any) -> dict[str, Part]:
    """Add rules without slots: from the update and the parameter to the new update."""

    def named(name: str, function: Callable[[Tensor, Tensor], Tensor]) -> Part:
        def update(u: Tensor, slots: Any, p: Tensor) -> Any:
            return function(u, p), slots

        update.__name__ = name
        return rule(**more)(update)

    return {name: named(name, function) for name, function in functions.items()}


# ------------------------------------------------- numbers of a whole tensor, its rows or columns
def top_k(u, p):
    least = u.abs().flatten().topk(max(1, u.numel() // 4)).values[-1]
    return torch.where(u.abs() >= least, u, 0.0)


def row_squares_by_einsum(u, p):
    if u.dim() == 0:
        return u
    rows = torch.einsum("i...,i...->i", u, u) if u.dim() < 3 else u.flatten(1).square().sum(1)
    return u / (1.0 + rows.view(-1, *[1] * (u.dim() - 1)))


def tangential(u, p):
    flat = p.flatten()
    return u - (flat @ u.flatten()) / (flat @ flat + 1e-8) * p


NUMBERS = rules(
    {
        "unit_norm": lambda u, p: u / u.norm(),
        "centred": lambda u, p: u - u.mean(),
        "by_largest": lambda u, p: u / u.abs().max(),
        "between_amin_and_amax": lambda u, p: (u - u.amin()) / (u.amax() - u.amin() + 1e-3),
        "standardised": lambda u, p: (u - u.mean()) / (u.std(correction=0) + 1e-3),
        "by_median": lambda u, p: u / (u.abs().median() + 1e-3),
        "clipped_at_quantile": lambda u, p: u.clamp(*[x * u.abs().quantile(0.75) for x in (-1, 1)]),
        "softmax_of_all": lambda u, p: u.flatten().softmax(0).view_as(u),
        "by_logsumexp": lambda u, p: u / u.abs().flatten().logsumexp(0),
        "top_k": top_k,
        "rolled_all": lambda u, p: u.roll(1),
        "row_norm": lambda u, p: u / (u.norm(dim=-1, keepdim=True) + 1e-8),
        "column_norm": lambda u, p: u / (u.norm(dim=0, keepdim=True) + 1e-8),
        "mean_over_rows": lambda u, p: u - u.mean(0),
        "mean_over_columns": lambda u, p: u - u.mean(-1, keepdim=True),
        "centralised": lambda u, p: (
            u if u.dim() < 2 else u - u.mean(tuple(range(1, u.dim())), keepdim=True)
        ),
        "max_over_rows": lambda u, p: u / (u.abs().max(0).values + 1e-3),
        "amax_over_columns": lambda u, p: u / (u.abs().amax(-1, keepdim=True) + 1e-3),
        "softmax_over_rows": lambda u, p: u.softmax(-1),
        "log_softmax_over_columns": lambda u, p: u.log_softmax(0),
        "row_std": lambda u, p: u / (u.std(-1, keepdim=True, correction=0) + 1.0),
        "column_var": lambda u, p: u / (u.var(0, correction=0) + 1.0),
        "layer_norm": lambda u, p: F.layer_norm(u, u.shape[-1:], eps=1e-3) if u.dim() else u,
        "normalize": lambda u, p: F.normalize(u, dim=-1),
        "row_median": lambda u, p: u - u.median(-1, keepdim=True).values,
        "row_quantile": lambda u, p: u - u.quantile(0.25, dim=-1, keepdim=True),
        "transposed_mean": lambda u, p: u if u.dim() < 2 else u - u.mT.mean(-1).unsqueeze(-2),
        "row_squares_by_einsum": row_squares_by_einsum,
        "by_outer_product": lambda u, p: (
            u / (torch.outer(u.abs().mean(1), u.abs().mean(0)) + 0.1) if u.dim() == 2 else u
        ),
        "trust_ratio": lambda u, p: u * (p.norm() / (u.norm() + 1e-8)),
        "row_trust_ratio": lambda u, p: (
            u * p.norm(dim=-1, keepdim=True) / (u.norm(dim=-1, keepdim=True) + 1e-3)
        ),
    }
)
rules(
    {"spectral_norm": lambda u, p: u / torch.linalg.matrix_norm(u, 2) if u.dim() == 2 else u},
    without=("pieces",),
    tolerance=PRODUCTS,
)


# ------------------------------------------------- order and place of elements, shapes
def ranks(u, p):
    order = torch.argsort(u, dim=-1, stable=True) if u.dim() else torch.zeros_like(u)
    place = torch.argsort(order, dim=-1) if u.dim() else order
    return place.to(u.dtype) / (u.shape[-1] if u.dim() else 1)


def pairs_normalised(u, p):
    if u.numel() % 2:
        return u
    pairs = u.reshape(-1, 2)
    return (pairs / (pairs.norm(dim=1, keepdim=True) + 1e-3)).view(u.shape)


def own_copy_written(u, p):
    v = u.clone()
    if v.dim():
        v[0] = 0.0
    return v.mul_(2.0)


def by_aspect_ratio(u, p):
    rows, columns = (u.shape[-2], u.shape[-1]) if u.dim() >= 2 else (1, 1)
    return u * max(1.0, rows / columns) ** 0.5


PLACES = rules(
    {
        "sorted_rows": lambda u, p: u.sort(-1).values,
        "ranks": ranks,
        "gathered_backwards": lambda u, p: u.gather(-1, u.argsort(dim=-1, descending=True)),
        "rolled_rows": lambda u, p: u.roll(1, 0) if u.dim() else u,
        "flipped": lambda u, p: u.flip(-1),
        "cumulated_rows": lambda u, p: u.cumsum(-1),
        "differences": lambda u, p: F.pad(u[..., 1:] - u[..., :-1], (1, 0)) if u.dim() else u,
        "windows": lambda u, p: (
            torch.cat([u, u[..., -1:]], -1).unfold(-1, 2, 1).mean(-1) if u.dim() else u
        ),
        "minus_first": lambda u, p: u - u[0] if u.dim() else u,
        "lower_triangle": lambda u, p: u.tril() if u.dim() >= 2 else u,
        "chunks_centred": lambda u, p: (
            torch.cat([x - x.mean() for x in u.chunk(2)]) if u.dim() else u
        ),
        "pairs_normalised": pairs_normalised,
        "weighted_by_place": lambda u, p: (
            u * torch.linspace(0.5, 1.5, u.shape[-1], dtype=u.dtype) if u.dim() else u
        ),
        "without_diagonal": lambda u, p: (
            u * (1 - torch.eye(*u.shape, dtype=u.dtype, device=u.device)) if u.dim() == 2 else u
        ),
        "positives_masked": lambda u, p: u.masked_fill(u > 0, 0.5) - torch.where(u > 1, u, 0.0),
        "sum_of_positives": lambda u, p: u - u[u > 0].sum() / u.numel(),
        "by_number_of_positives": lambda u, p: u / (1 + len((u > 0).nonzero())),
        "by_number_of_selected": lambda u, p: u / (1 + u[u > 0].numel()),
        "by_number_of_signs": lambda u, p: u / u.sign().unique().numel(),
        "own_copy_written": own_copy_written,
        "by_root_of_rows": lambda u, p: u * (u.shape[0] if u.dim() else 1) ** 0.5,
        "by_dimensions": lambda u, p: u * u.dim(),
        "by_size": lambda u, p: u / u.numel() ** 0.5,
        "by_aspect_ratio": by_aspect_ratio,
        "large_tensors_only": lambda u, p: u.sign() if u.numel() > 1000 else u,
        "both_sides_large": lambda u, p: u.sign() if min(u.shape, default=0) > 32 else u,
        "even_sizes_only": lambda u, p: u if u.numel() % 2 else 2 * u,
        "by_length_of_p": lambda u, p: u * (len(p) if p.dim() else 1) ** -0.5,
    }
)


# ------------------------------------------------- products of matrices
def cubed(u):
    m = u.flatten(1) / u.norm()
    return (1.5 * m - 0.5 * m @ m.T @ m).view(u.shape)


def orthogonal_by_qr(u, p):
    if u.dim() < 2:
        return u
    m = u.flatten(1)
    tall = m if m.shape[0] >= m.shape[1] else m.T
    q = torch.linalg.qr(tall).Q
    return (q if tall is m else q.T).reshape(u.shape)


def solved(u, p):
    if u.dim() != 2:
        return u
    return torch.linalg.solve(u @ u.T + torch.eye(len(u), dtype=u.dtype, device=u.device), u)


MATRICES = rules(
    {
        "tangential": tangential,
        "cubic": lambda u, p: u if u.dim() < 2 else cubed(u),
        "cubic_by_einsum": lambda u, p: (
            torch.einsum("ij,kj,kl->il", u, u, u) / u.numel() if u.dim() == 2 else u
        ),
        "orthogonal_by_qr": orthogonal_by_qr,
        "solved": solved,
    },
    tolerance=PRODUCTS,
)


# ------------------------------------------------- what is not the same for large tensors
MANY = 1000
"""Between the elements of recorded tensors and those of large ones."""


def permuted_by_size(u, p):
    order = [*range(u.dim())][:: -1 if u.numel() > MANY else 1]
    x = u.permute(order)
    x = x / (1 + x.abs().sum(-1, keepdim=True))
    return x.permute([order.index(i) for i in range(u.dim())])


def joined_by_size(u, p):
    if u.dim() < 2:
        return u
    x = u.reshape(len(u), -1) if u.numel() > MANY else u.reshape(-1, u.shape[-1])
    return (x / (1 + x.abs().sum(-1, keepdim=True))).reshape(u.shape)


def side(u):
    return u.shape[0 if u.numel() > MANY else -1] if u.dim() else 3


def catches_an_error_of_sizes(u, p):
    with contextlib.suppress(RuntimeError):
        return u * u.reshape(3, -1).shape[1]
    return 0.5 * u


def a_variance_of_few(u, p):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that there are none left
        return u + 1 / (1 + u.var(dim=-1, correction=40, keepdim=True))


def a_row_written_into_a_matrix(u, p):
    row = u.mean(0) if u.dim() else u
    return u + 1e-3 * torch.zeros_like(u).copy_(row).sum(-1, keepdim=True)


def integers(u, p):
    n = (1e6 * u).long() & 0xFFFFFF
    m = torch.addcmul(torch.add(n, n, alpha=3), n, n) + n.round() + (~n >> 70) + (n << (n & 127))
    return u + ((m + n**3) & 0xFF).to(u.dtype)


def powers_of_integers(u, p):
    n = (10 * u).int() & 7
    return u + (n**5 + 3**n + n**n).to(u.dtype)


def mapped_over_rows(u, p):
    rows = u if u.dim() else u[None]
    return torch.vmap(lambda row: row / (1 + row.norm()))(rows).reshape(u.shape)


def columns_and_a_number_of_all_of_them(u, p):
    c = u.abs().sum(0, keepdim=True) if u.dim() else u.abs()
    return u + c * (c > 0.5).any().to(u.dtype).clamp(0, 1) + c / c.mean()


def functions_of_columns(u, p):
    c = u.sum(0, keepdim=True) if u.dim() else u
    return u + c.tanh() + c.sin() + torch.atan2(c, c + 1) + c.exp().log1p()


rules(
    {
        "permuted_by_size": permuted_by_size,
        "joined_by_size": joined_by_size,
        "filled_by_size": lambda u, p: u + 0.01 * torch.ones(side(u)).sum(),
        "places_by_size": lambda u, p: u * torch.arange(side(u)).sum().sqrt(),
        "reduced_by_size": lambda u, p: (
            u - u.mean((0,) if u.numel() > MANY else (-1,), keepdim=True)
        ),
        "asks_whether_sizes_are_the_same": lambda u, p: (
            u * (2.0 if u.is_same_size(u.mT if u.dim() == 2 else u) else 0.5)
        ),
        "counts_bytes": lambda u, p: u * (2.0 if u.nbytes > 8 * MANY else 0.5),
        "catches_an_error_of_sizes": catches_an_error_of_sizes,
        "asks_whether_it_is_contiguous": lambda u, p: u * (1.0 if p.is_contiguous() else 3.0),
        "reads_strides": lambda u, p: u * sum(p.stride()),
        "reads_an_attribute_that_none_has": lambda u, p: u * getattr(p, "lr_mult", 0.5),
        "constants_of_the_size_of_a_recorded_one": lambda u, p: (
            u * torch.ones(11).sum().sqrt() + torch.arange(17).sum() / 100
        ),
        "any_of_no_dimension": lambda u, p: u * (u > 0).any(dim=()),
        "a_row_written_into_a_matrix": a_row_written_into_a_matrix,
        "a_variance_of_few": a_variance_of_few,
        "integers": integers,
        "powers_of_integers": powers_of_integers,
        "bits_of_another_size": lambda u, p: (
            (2 * u).reshape(-1).view(torch.int8).view(u.dtype).reshape(u.shape)
        ),
        "mapped_over_rows": mapped_over_rows,
        "columns_and_a_number_of_all_of_them": columns_and_a_number_of_all_of_them,
        "functions_of_columns": functions_of_columns,
    }
)
rules(
    {
        "counts_rows_by_unbind": lambda u, p: (
            u * len(u.reshape(-1, 2 if u.numel() % 2 == 0 else 1).unbind(0))
        ),
        "counts_rows_as_they_come": lambda u, p: u * sum(1 for _ in u.flatten()),
        "counts_pieces": lambda u, p: u * len(u.flatten().split(4)),
    },
    without=("pieces",),  # of which Python would make a hundred thousand tensors
)
