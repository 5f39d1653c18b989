"""Rules without flags in half types, with slots, measurements or several parts: more rows of
`undeclared_rules`."""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from undeclared_rules import (
    MANY,
    MATRICES,
    NUMBERS,
    PAIRS,
    PLACES,
    PRODUCTS,
    Part,
    add,
    cubed,
    rule,
    rules,
)

import functional_optim as fo

# ------------------------------------------------- half types, and numbers that are no floats
HALVES = (torch.bfloat16, torch.float16)


def norms_in_half(u, p):
    x = (200 * u).half()
    found = x.norm() + x.norm(1) + x.norm(dim=-1, keepdim=True)
    return u + found.float().clamp(max=6e4) / 2e4


def softmax_in_half(u, p):
    x = u.bfloat16().reshape(-1)
    return u + (x.softmax(0) + F.log_softmax(x, 0)).float().reshape(u.shape)


def spread_in_half(u, p):
    x = (300 * u).half()
    return u + (x.var(correction=0).sqrt() + x.std(correction=0)).float() / 300


def places_in_half(u, p):
    found = [torch.arange(u.numel(), dtype=dtype).float() for dtype in HALVES]
    return u + 1e-4 * sum(found).reshape(u.shape)


def sums_in_half(u, p):
    x = torch.full_like(u, 1.003)
    return u + x.sum(dtype=torch.bfloat16).float() / u.numel() + x.mean(dtype=torch.half)


def integers_of_larger_numbers(u, p):
    """Casts modulo the range of a short integer, as ATen's."""
    found = [
        (x * u).to(kind) for x, kind in ((3e2, torch.uint8), (3e2, torch.int8), (5e4, torch.int16))
    ]
    return u + 1e-3 * sum([x.to(u.dtype) for x in found])


rules(
    {
        "norms_in_half": norms_in_half,
        "softmax_in_half": softmax_in_half,
        "spread_in_half": spread_in_half,
        "places_in_half": places_in_half,
        "sums_in_half": sums_in_half,
        "integers_of_larger_numbers": integers_of_larger_numbers,
        "sums_of_whole_parts": lambda u, p: u + (10 * u).sum(dtype=torch.int64),
    },
    strict=True,
)


@rule(scalars=lambda t: (0.1,), strict=True)
def half_beside_numbers(u, slots, p, number):
    found = u
    for dtype in HALVES:
        x = torch.full_like(u, 0.1).to(dtype)
        found = found + (x == 0.1) + (x == number) + (x + 0.1003).float() + (x * 0.1003).float()
        found = found + 2 * (x >= number) + (x - number).float() + (number - x).float()
    return found, slots


@rule(scalars=lambda t: (3, True, 0.5), strict=True)
def numbers_that_are_whole(u, slots, p, k, flag, x):
    n = ((u > 0).long() + 1_000_000_001) * k + k - 3_000_000_006
    found = n + ((u > 0) + flag) + k / 7 + flag * x + 2 * k + (k + flag) * x
    return u + found.to(u.dtype), slots


@rule(scalars=lambda t: (t if t < 2 else int(t),), strict=True)
def a_number_that_becomes_whole(u, slots, p, k):
    return u + ((u > 0).long() + k).to(u.dtype) * (k / 7), slots


@rule(scalars=lambda t: (0.3,), strict=True)
def bounds_of_which_one_is_a_number(u, slots, p, bound):
    x = u.clamp(0.0, bound) + u.clamp(min=-0.1, max=bound) + torch.clip(u, bound, 2.0)
    return x + u.clamp(-bound, bound) + u.clamp(max=bound), slots


@rule(scalars=lambda t: (0.3,), strict=True)
def fills_by_a_number(u, slots, p, number):
    return u.masked_fill(u > 0, number) + torch.masked_fill(u, u < 0, value=number), slots


@rule(scalars=lambda t: (3, 5, True), strict=True)
def an_int_number_that_divides(u, slots, p, n, total, flag):
    return u * (1 / n) + u * n**-0.5 + u * (1 - n / total) * (1.0 / (total - n)) * flag, slots


@rule(strict=True)
def fills_without_dimensions(u, slots, p):
    return u + u.new_full((), 2.0) - u.new_zeros(()) - u.new_ones(u.shape[:1]).mean(), slots


@rule(strict=True, without=(*PAIRS, "float64"), tolerance=1e-3)
def numbers_without_dimensions_beside_halves(u, slots, p):
    x, c = u.half(), torch.tensor(0.3)
    found = torch.add(x, c, alpha=0.3) + c / (x.abs() + 1) + c * x + x / c
    return found.float() + torch.addcmul(x, x, c, value=0.3), slots


@rule(scalars=lambda t: (0.3,), strict=True)
def numbers_beside_bools(u, slots, p, number):
    x, y = (u > 0) * number, torch.where(u > 0, number, 0.0)
    found = u / x.clamp(min=torch.finfo(x.dtype).eps) + u / y.clamp(min=torch.finfo(y.dtype).eps)
    return 1e-7 * found + u * (u.norm() * number) + y * (u > 0).sum() * number, slots


@rule(scalars=lambda t: (2.5,))
def counts_beside_a_number(u, slots, p, least):
    return u * ((u > 0).sum(-1, keepdim=True) >= least), slots


@rule(scalars=lambda t: (0.5,))
def a_mask_times_a_number(u, slots, p, lr):
    x = (u > 0) * lr
    return u.clamp(min=torch.finfo(x.dtype).eps) + x, slots


@rule(scalars=lambda t: (0.5,) * int(t))
def more_numbers_in_each_step(u, slots, p, *numbers):
    return u * sum(numbers), slots


@rule(scalars=lambda t: (0.5,))
def the_root_by_a_number(u, slots, p, half):
    return u + u.abs() ** half, slots


@rule(scalars=lambda t: (0.3,))
def numbers_where_torch_takes_python_numbers(u, slots, p, lr):
    x = torch.add(u, p, alpha=lr) + torch.full_like(u, lr) + u.new_full(u.shape, lr)
    return torch.addcmul(x.sub(p, alpha=lr), u, p, value=lr), slots


@rule(scalars=lambda t: (1 / (1 + t),))
def softmax_at_temperature(u, slots, p, rate):
    return rate * (u * rate).softmax(-1), slots


# ------------------------------------------------- slots
class Momentum(NamedTuple):
    exp_avg: Any


class Factored(NamedTuple):
    rows: Any
    columns: Any
    whole: Any


class Size(NamedTuple):
    size: Any


class Two(NamedTuple):
    first: Any
    second: Any


def momentum(p):
    return Momentum(torch.zeros_like(p))


def factored(p):
    if p.dim() < 2:
        return Factored(None, None, torch.zeros_like(p))
    zero = torch.zeros_like(p)
    return Factored(zero.amax(-1, keepdim=True), zero.amax(-2, keepdim=True), None)


def size(p):
    return Size(p.new_zeros(()))


def counted(p):
    rows = torch.zeros(p.shape[:1], dtype=torch.int32, device=p.device)
    return Two(torch.zeros_like(p, dtype=torch.int64), rows)


def two(p):
    return Two(torch.zeros_like(p), torch.ones_like(p))


def integers_and_bools(p):
    like = torch.view_as_real(p) if p.is_complex() else p
    return Two(torch.full(like.shape, 2**24), torch.zeros(like.shape, dtype=torch.bool))


@rule(init=momentum)
def row_normalised_momentum(u, slots, p):
    m = slots.exp_avg + 0.1 * (u - slots.exp_avg)
    return m / (m.norm(dim=-1, keepdim=True) + 1e-3), Momentum(m)


@rule(init=momentum)
def sorted_momentum(u, slots, p):
    m = 0.9 * slots.exp_avg + u
    return m.sort(-1).values, Momentum(m)


@rule(init=momentum)
def centred_momentum(u, slots, p):
    m = 0.9 * slots.exp_avg + (u - u.mean())
    return m * (u.shape[0] if u.dim() else 1) ** 0.5, Momentum(m)


@rule(init=momentum, tolerance=PRODUCTS)
def cubic_momentum(u, slots, p):
    m = 0.9 * slots.exp_avg + u
    return m if m.dim() < 2 else cubed(m), Momentum(m)


@rule(init=lambda p: Momentum(torch.zeros_like(p, dtype=torch.bfloat16)), without=PAIRS)
def slot_in_bfloat16(u, slots, p):
    m = slots.exp_avg + 0.5 * (u - slots.exp_avg)
    return m / (m.norm(dim=-1, keepdim=True) + 1e-3), Momentum(m)


@rule(init=factored, without=PAIRS)
def factored_second_moment(u, slots, p):
    if u.dim() < 2:
        v = 0.9 * slots.whole + 0.1 * u.square()
        return u / (v.sqrt() + 1e-3), Factored(None, None, v)
    rows = 0.9 * slots.rows + 0.1 * u.square().mean(-1, keepdim=True)
    columns = 0.9 * slots.columns + 0.1 * u.square().mean(-2, keepdim=True)
    v = rows * columns / rows.mean(-2, keepdim=True)
    return u / (v.sqrt() + 1e-3), Factored(rows, columns, None)


@rule(init=size, without=PAIRS)
def slot_of_one_number(u, slots, p):
    v = 0.9 * slots.size + 0.1 * u.square().mean()
    return u / (v.sqrt() + 1e-3), Size(v)


@rule(init=size)
def keeps_one_number(u, slots, p):
    return u * (1 + slots.size), Size(slots.size + 1)


@rule(init=lambda p: Size(p.new_zeros(p.shape[:1])), without=PAIRS)
def slot_per_row(u, slots, p):
    new = u.square() if u.dim() == 0 else u.reshape(u.shape[0], -1).square().mean(1)
    v = 0.9 * slots.size + 0.1 * new
    wide = v if u.dim() == 0 else v.view(-1, *[1] * (u.dim() - 1))
    return u / (wide.sqrt() + 1e-3), Size(v)


@rule(init=counted, without=PAIRS)
def slots_that_count(u, slots, p):
    counts = slots.first + (u > 0)
    most = (u > 0).flatten(1).sum(1) if u.dim() > 1 else (u > 0).to(u.dtype)
    rows = slots.second + most
    wide = rows if u.dim() == 0 else rows.view(-1, *[1] * (u.dim() - 1))
    return u / (1 + counts) + wide / (1 + wide), Two(counts, rows)


@rule(init=lambda p: Size(torch.zeros_like(p, dtype=torch.bool)), without=PAIRS)
def slot_of_bools(u, slots, p):
    known = torch.logical_or(slots.size, u > 0.5)
    return torch.where(known, u - u.mean(-1, keepdim=True), 0.1 * u), Size(known)


@rule(init=integers_and_bools)
def slots_of_integers_and_bools(u, slots, p):
    count = slots.first + 1
    x = torch.where(slots.second, 2 * u, u) * (1 + (count & 1)) + (count - 2**24)
    return x, Two(count, slots.second | ~slots.second)


@rule(init=two)
def keeps_the_last_gradient_and_the_last_parameter(u, slots, p):
    x = u.flatten().sort().values.reshape(u.shape)
    return -0.1 * (x + slots.first + slots.second), Two(u, p)


@rule(init=two)
def swaps_its_slots(u, slots, p):
    return -0.1 * (u.sort(-1).values + slots.first), Two(slots.second, slots.first)


@rule(init=two)
def swaps_its_slots_by_element(u, slots, p):
    return -0.1 * (u + slots.first), Two(slots.second, u + p)


@rule(init=lambda p: Size(p.new_zeros(p.shape[::-1] if p.numel() > MANY else [1] * p.dim())))
def a_slot_whose_shape_depends_on_the_size(u, slots, p):
    return u * (slots.size + 1).mean(), Size(slots.size + 1)


@rule(init=lambda p: Size(p.new_zeros(min(p.shape, default=1))))
def a_slot_of_the_smaller_side(u, slots, p):
    return u * (slots.size + 1).sum(), Size(slots.size + 1)


@rule(init=lambda p: Two(torch.zeros(()), torch.zeros(p.shape[-1:])), strict=True, without=PAIRS)
def a_slot_that_reads_a_smaller_one(u, slots, p):
    mean = u if u.dim() < 2 else u.flatten(0, -2).mean(0)
    return 0.1 * u, Two(u.square().mean(), (slots.first + 0.5) * slots.second + mean)


@rule(init=lambda p: Size(torch.zeros(11)))
def a_slot_of_the_size_of_a_recorded_one(u, slots, p):
    return u * (slots.size + 1).sum(), Size(slots.size + 1)


# ------------------------------------------------- measurements, hyperparameters, carried numbers
def norm_of_one(u, slots, p):
    return (u.norm(),)


@rule(reduce=norm_of_one)
def sum_of_norms(u, slots, p, total):
    return u / total, slots


@rule(reduce=lambda u, slots, p: (u.square().sum(), torch.ones(())))
def mean_of_squares_of_tensors(u, slots, p, squares, count):
    return u * count / (1 + squares), slots


@rule(reduce=lambda u, slots, p: ((u > 0).sum(), torch.ones_like(u).sum()))
def share_of_positives(u, slots, p, positive, every):
    return u * (positive / every), slots


@rule(reduce=lambda u, s, p: (u.norm(dim=-1).max() * (u.shape[0] if u.dim() else 1),))
def sum_of_largest_rows(u, slots, p, total):
    return (u - u.mean(-1, keepdim=True)) / total, slots


def two_scalars(t, *, lr, beta):
    return lr, 1 - beta**t


@rule(init=momentum, scalars=two_scalars, hyper={"lr": 0.5, "beta": 0.9})
def corrected_rows(u, slots, p, lr, correction):
    m = 0.9 * slots.exp_avg + 0.1 * u
    return -lr * m / correction / (m.norm(dim=-1, keepdim=True) + 1e-3), Momentum(m)


class Smoothed(NamedTuple):
    norm: float
    steps: int


def smoothed(t, carry, total, *, beta):
    norm = beta * carry.norm + (1 - beta) * total[0]
    steps = carry.steps + 1
    return (norm / steps,), Smoothed(norm, steps)


@rule(scalars=smoothed, reduce=norm_of_one, hyper={"beta": 0.5}, carry=Smoothed(norm=1.0, steps=0))
def carried_norm(u, slots, p, norm):
    return (u - u.mean()) / norm, slots


# ------------------------------------------------- recipes of several rules
def is_matrix(path: str, p: Tensor) -> bool:
    """Whether the parameter has rows and columns."""
    return p.dim() >= 2


def is_vector(path: str, p: Tensor) -> bool:
    """Whether it does not."""
    return p.dim() < 2


def label(path: str, p: Tensor) -> str:
    return "rows" if p.dim() >= 2 else "all"


class Moments(NamedTuple):
    exp_avg: Any
    exp_avg_sq: Any


def adam(u, slots, p, correction1, correction2):
    m = 0.9 * slots.exp_avg + 0.1 * u
    v = 0.99 * slots.exp_avg_sq + 0.01 * u * u
    return (m / correction1) / ((v / correction2).sqrt() + 1e-3), Moments(m, v)


CLIP = Part(
    "clip",
    lambda u, slots, p, factor: (u * factor, slots),
    scalars=lambda t, total: (min(1.0, 1.0 / math.sqrt(total[0])),),
    reduce=lambda u, slots, p: (u.square().sum(),),
    known=lambda: fo.clip_by_global_norm(1.0),
)
ADAM = Part(
    "adam",
    adam,
    lambda p: Moments(torch.zeros_like(p), torch.zeros_like(p)),
    lambda t: (1 - 0.9**t, 1 - 0.99**t),
    known=lambda: fo.scale_by_adam((0.9, 0.99), 1e-3),
)
DECAY = Part(
    "decay",
    lambda u, slots, p: (u + 0.1 * p, slots),
    known=lambda: fo.add_decayed_weights(0.1),
)
RATE = Part("rate", lambda u, slots, p: (-0.5 * u, slots), known=lambda: fo.scale_by_lr(0.5))
KNOWN = {"clip": CLIP, "adam": ADAM, "decay": DECAY, "rate": RATE, **NUMBERS, **PLACES, **MATRICES}
KNOWN |= {x.name: x for x in (sum_of_norms, factored_second_moment)}


def chained(names: str, **more: Any) -> None:
    """Add a chain of rules that are known by these names."""
    parts = [KNOWN[name] for name in names.split(", ")]
    add(f"chain: {names}", lambda: fo.chain(*[part.tx() for part in parts]), *parts, **more)


chained("row_norm, mean_over_columns, rate")
chained("clip, row_norm, rate")
chained("adam, unit_norm, decay, rate")
chained("clip, adam, decay, trust_ratio, rate")
chained("centralised, adam, by_root_of_rows, rate")
chained("softmax_over_rows, clip, sorted_rows, decay")
chained("row_norm, sum_of_norms, cubic", tolerance=PRODUCTS)
chained("factored_second_moment, clip, flipped, rate", without=PAIRS)

row_norm, softmax_over_rows = NUMBERS["row_norm"], NUMBERS["softmax_over_rows"]
unit_norm, centred = NUMBERS["unit_norm"], NUMBERS["centred"]

add(
    "partition: rows of matrices, norm of others",
    lambda: fo.partition(
        {"rows": fo.chain(row_norm.tx(), RATE.tx()), "all": unit_norm.tx()}, label
    ),
    row_norm.on(is_matrix),
    RATE.on(is_matrix),
    unit_norm.on(is_vector),
)
add(
    "partition: momentum of rows, centred others, measured",
    lambda: fo.chain(
        fo.partition(
            {
                "rows": row_normalised_momentum.tx(),
                "all": fo.chain(sum_of_norms.tx(), centred.tx()),
            },
            label,
        ),
        RATE.tx(),
    ),
    row_normalised_momentum.on(is_matrix),
    sum_of_norms.on(is_vector),
    centred.on(is_vector),
    RATE,
)
add(
    "masked: softmax of matrices",
    lambda: fo.chain(fo.masked(softmax_over_rows.tx(), is_matrix), DECAY.tx(), RATE.tx()),
    softmax_over_rows.on(is_matrix),
    DECAY,
    RATE,
)
