"""Test functions for least squares, with starting points and minima of the sum of squares.

Moré, Garbow, Hillstrom, "Testing Unconstrained Optimization Software", ACM Trans. Math. Softw. 7
(1981), https://doi.org/10.1145/355934.355936; numbers in brackets are theirs. All are written for
torch.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

DOUBLE = torch.float64


def count(first: int, last: int) -> Tensor:
    """first, …, last."""
    return torch.arange(first, last + 1, dtype=DOUBLE)


def numbers(text: str) -> Tensor:
    return torch.tensor([float(x) for x in text.split()], dtype=DOUBLE)


class Problem(NamedTuple):
    """minima: of the sum of squares, known ones. start: the standard starting point."""

    fun: Callable[[Tensor], Tensor]
    start: list[float]
    minima: tuple[float, ...]


def freudenstein_roth(x):
    a, b = x
    return torch.stack([-13 + a + ((5 - b) * b - 2) * b, -29 + a + ((b + 1) * b - 14) * b])


def jennrich_sampson(x):
    i = count(1, 10)
    return 2 + 2 * i - (torch.exp(i * x[0]) + torch.exp(i * x[1]))


def helical_valley(x):
    a, b, c = x
    angle = torch.atan(b / a) / (2 * math.pi) + torch.where(a > 0, 0.0, 0.5)
    return torch.stack([10 * (c - 10 * angle), 10 * ((a * a + b * b).sqrt() - 1), c])


BARD = numbers(".14 .18 .22 .25 .29 .32 .35 .39 .37 .58 .73 .96 1.34 2.10 4.39")
GAUSSIAN = numbers(
    ".0009 .0044 .0175 .0540 .1295 .2420 .3521 .3989 .3521 .2420 .1295 .0540 .0175 .0044 .0009"
)
MEYER = numbers(
    "34780 28610 23650 19630 16370 13720 11540 9744 8261 7030 6005 5147 4427 3820 3307 2872"
)
KOWALIK_Y = numbers(".1957 .1947 .1735 .1600 .0844 .0627 .0456 .0342 .0323 .0235 .0246")
KOWALIK_U = numbers("4 2 1 .5 .25 .167 .125 .1 .0833 .0714 .0625")
OSBORNE_1 = numbers(
    ".844 .908 .932 .936 .925 .908 .881 .850 .818 .784 .751 .718 .685 .658 .628 .603 .580 "
    ".558 .538 .522 .506 .490 .478 .467 .457 .448 .438 .431 .424 .420 .414 .411 .406"
)
OSBORNE_2 = numbers(
    "1.366 1.191 1.112 1.013 .991 .885 .831 .847 .786 .725 .746 .679 .608 .655 .616 .606 .602 "
    ".626 .651 .724 .649 .649 .694 .644 .624 .661 .612 .558 .533 .495 .500 .423 .395 .375 "
    ".372 .391 .396 .405 .428 .429 .523 .562 .607 .653 .672 .708 .633 .668 .645 .632 .591 "
    ".559 .597 .625 .739 .710 .729 .720 .636 .581 .428 .292 .162 .098 .054"
)


def bard(x):
    u = count(1, 15)
    v = 16 - u
    return BARD - (x[0] + u / (v * x[1] + u.minimum(v) * x[2]))


def gaussian(x):
    t = (8 - count(1, 15)) / 2
    return x[0] * torch.exp(-x[1] * (t - x[2]) ** 2 / 2) - GAUSSIAN


def meyer(x):
    return x[0] * torch.exp(x[1] / (45 + 5 * count(1, 16) + x[2])) - MEYER


def gulf(x):
    t = count(1, 30) / 100
    y = 25 + (-50 * t.log()) ** (2 / 3)
    return torch.exp(-((y - x[1]).abs() ** x[2]) / x[0]) - t


def box(x):
    t = count(1, 10) / 10
    return torch.exp(-t * x[0]) - torch.exp(-t * x[1]) - x[2] * (torch.exp(-t) - torch.exp(-10 * t))


def powell_singular(x):
    a, b, c, d = x.unflatten(0, (-1, 4)).unbind(1)
    parts = [a + 10 * b, 5**0.5 * (c - d), (b - 2 * c) ** 2, 10**0.5 * (a - d) ** 2]
    return torch.cat(parts)


def wood(x):
    a, b, c, d = x
    both = [10**0.5 * (b + d - 2), (b - d) / 10**0.5]
    return torch.stack([10 * (b - a * a), 1 - a, 90**0.5 * (d - c * c), 1 - c, *both])


def kowalik(x):
    u = KOWALIK_U
    return KOWALIK_Y - x[0] * (u * u + u * x[1]) / (u * u + u * x[2] + x[3])


def brown_dennis(x):
    t = count(1, 20) / 5
    return (x[0] + t * x[1] - t.exp()) ** 2 + (x[2] + x[3] * t.sin() - t.cos()) ** 2


def osborne_1(x):
    t = 10 * count(0, 32)
    return OSBORNE_1 - (x[0] + x[1] * torch.exp(-t * x[3]) + x[2] * torch.exp(-t * x[4]))


def biggs(x):
    t = count(1, 13) / 10
    y = torch.exp(-t) - 5 * torch.exp(-10 * t) + 3 * torch.exp(-4 * t)
    parts = x[2] * torch.exp(-t * x[0]) - x[3] * torch.exp(-t * x[1]) + x[5] * torch.exp(-t * x[4])
    return parts - y


def osborne_2(x):
    t = count(0, 64) / 10
    peaks = [x[i] * torch.exp(-x[i + 4] * (t - x[i + 7]) ** 2) for i in (1, 2, 3)]
    return OSBORNE_2 - (x[0] * torch.exp(-t * x[4]) + peaks[0] + peaks[1] + peaks[2])


def watson(x):
    t = count(1, 29)[:, None] / 29
    j = count(0, len(x) - 1)
    first = (j[1:] * x[1:] * t ** (j[1:] - 1)).sum(1) - (x * t**j).sum(1) ** 2 - 1
    return torch.cat([first, torch.stack([x[0], x[1] - x[0] ** 2 - 1])])


def extended_rosenbrock(x):
    a, b = x.unflatten(0, (-1, 2)).unbind(1)
    return torch.cat([10 * (b - a * a), 1 - a])


def penalty_1(x):
    return torch.cat([1e-5**0.5 * (x - 1), (x * x).sum().reshape(1) - 0.25])


def penalty_2(x):
    n, a = len(x), 1e-5**0.5
    i = count(2, n)
    y = torch.exp(i / 10) + torch.exp((i - 1) / 10)
    middle = a * (torch.exp(x[1:] / 10) + torch.exp(x[:-1] / 10) - y)
    rest = a * (torch.exp(x[1:] / 10) - math.exp(-0.1))
    last = ((n - count(0, n - 1)) * x * x).sum() - 1
    return torch.cat([(x[0] - 0.2).reshape(1), middle, rest, last.reshape(1)])


def variably_dimensioned(x):
    total = (count(1, len(x)) * (x - 1)).sum().reshape(1)
    return torch.cat([x - 1, total, total * total])


def trigonometric(x):
    n, i = len(x), count(1, len(x))
    return n - x.cos().sum() + i * (1 - x.cos()) - x.sin()


def brown_almost_linear(x):
    return torch.cat([(x + x.sum() - (len(x) + 1))[:-1], (x.prod() - 1).reshape(1)])


def around(x):
    """The neighbours before and after, 0 at the ends."""
    zero = torch.zeros(1, dtype=DOUBLE)
    return torch.cat([zero, x[:-1]]), torch.cat([x[1:], zero])


def boundary_value(x):
    h = 1 / (len(x) + 1)
    before, after = around(x)
    return 2 * x - before - after + h * h * (x + h * count(1, len(x)) + 1) ** 3 / 2


def integral_equation(x):
    h = 1 / (len(x) + 1)
    t = h * count(1, len(x))
    cubes = (x + t + 1) ** 3
    low = (t * cubes).cumsum(0)
    high = ((1 - t) * cubes).flip(0).cumsum(0).flip(0) - (1 - t) * cubes
    return x + h * ((1 - t) * low + t * high) / 2


def broyden_tridiagonal(x):
    before, after = around(x)
    return (3 - 2 * x) * x - before - 2 * after + 1


def broyden_banded(x):
    n = len(x)
    i, j = torch.arange(n)[:, None], torch.arange(n)
    near = ((j >= i - 5) & (j <= i + 1) & (j != i)).to(DOUBLE)
    return x * (2 + 5 * x * x) + 1 - near @ (x * (1 + x))


def linear_full(x, m=20):
    rest = torch.zeros(m - len(x), dtype=DOUBLE)
    return torch.cat([x, rest]) - 2 * x.sum() / m - 1


def linear_rank_1(x, m=20):
    return count(1, m) * (count(1, len(x)) * x).sum() - 1


def linear_rank_1_zeros(x, m=20):
    inner = (count(2, len(x) - 1) * x[1:-1]).sum()
    factor = torch.cat([count(0, 0), count(1, m - 2), count(0, 0)])
    return factor * inner - 1


def chebyquad(x):
    n = len(x)
    y = 2 * x - 1
    before, now, found = torch.ones_like(y), y, []
    for i in range(1, n + 1):
        integral = -1 / (i * i - 1) if i % 2 == 0 else 0.0
        found.append(now.mean() - integral)
        before, now = now, 2 * y * now - before
    return torch.stack(found)


RANK_1 = 20 * 19 / (2 * 41)
RANK_1_ZEROS = (400 + 60 - 6) / (2 * 37)
PROBLEMS = {
    "rosenbrock (1)": Problem(extended_rosenbrock, [-1.2, 1.0], (0.0,)),
    "freudenstein and roth (2)": Problem(freudenstein_roth, [0.5, -2.0], (0.0, 48.98425)),
    "powell, badly scaled (3)": Problem(
        lambda x: torch.stack([1e4 * x[0] * x[1] - 1, torch.exp(-x).sum() - 1.0001]),
        [0.0, 1.0],
        (0.0,),
    ),
    "brown, badly scaled (4)": Problem(
        lambda x: torch.stack([x[0] - 1e6, x[1] - 2e-6, x[0] * x[1] - 2]), [1.0, 1.0], (0.0,)
    ),
    "beale (5)": Problem(
        lambda x: numbers("1.5 2.25 2.625") - x[0] * (1 - x[1] ** count(1, 3)), [1.0, 1.0], (0.0,)
    ),
    "jennrich and sampson (6)": Problem(jennrich_sampson, [0.3, 0.4], (124.3622,)),
    "helical valley (7)": Problem(helical_valley, [-1.0, 0.0, 0.0], (0.0,)),
    "bard (8)": Problem(bard, [1.0] * 3, (8.214877e-3, 17.42869)),
    "gaussian (9)": Problem(gaussian, [0.4, 1.0, 0.0], (1.127933e-8,)),
    "meyer (10)": Problem(meyer, [0.02, 4000.0, 250.0], (87.94586,)),
    "gulf (11)": Problem(gulf, [5.0, 2.5, 0.15], (0.0,)),
    "box (12)": Problem(box, [0.0, 10.0, 20.0], (0.0,)),
    "powell, singular (13)": Problem(powell_singular, [3.0, -1.0, 0.0, 1.0], (0.0,)),
    "wood (14)": Problem(wood, [-3.0, -1.0, -3.0, -1.0], (0.0,)),
    "kowalik and osborne (15)": Problem(
        kowalik, [0.25, 0.39, 0.415, 0.39], (3.075056e-4, 1.027345e-3)
    ),
    "brown and dennis (16)": Problem(brown_dennis, [25.0, 5.0, -5.0, -1.0], (85822.20,)),
    "osborne 1 (17)": Problem(osborne_1, [0.5, 1.5, -1.0, 0.01, 0.02], (5.464895e-5,)),
    "biggs (18)": Problem(biggs, [1.0, 2.0, 1.0, 1.0, 1.0, 1.0], (0.0, 5.655650e-3)),
    "osborne 2 (19)": Problem(
        osborne_2, [1.3, 0.65, 0.65, 0.7, 0.6, 3.0, 5.0, 7.0, 2.0, 4.5, 5.5], (4.013774e-2,)
    ),
    "watson, 6 (20)": Problem(watson, [0.0] * 6, (2.287670e-3,)),
    "watson, 9 (20)": Problem(watson, [0.0] * 9, (1.399760e-6,)),
    "extended rosenbrock (21)": Problem(extended_rosenbrock, [-1.2, 1.0] * 4, (0.0,)),
    "extended powell (22)": Problem(powell_singular, [3.0, -1.0, 0.0, 1.0] * 2, (0.0,)),
    "penalty 1 (23)": Problem(penalty_1, [1.0, 2.0, 3.0, 4.0], (2.249978e-5,)),
    "penalty 2 (24)": Problem(penalty_2, [0.5] * 4, (9.376293e-6,)),
    "variably dimensioned (25)": Problem(
        variably_dimensioned, [1 - i / 10 for i in range(1, 11)], (0.0,)
    ),
    "trigonometric (26)": Problem(trigonometric, [0.1] * 10, (0.0, 2.795056e-5)),
    "brown, almost linear (27)": Problem(brown_almost_linear, [0.5] * 10, (0.0, 1.0)),
    "boundary value (28)": Problem(
        boundary_value, [i / 11 * (i / 11 - 1) for i in range(1, 11)], (0.0,)
    ),
    "integral equation (29)": Problem(
        integral_equation, [i / 11 * (i / 11 - 1) for i in range(1, 11)], (0.0,)
    ),
    "broyden, tridiagonal (30)": Problem(broyden_tridiagonal, [-1.0] * 10, (0.0,)),
    "broyden, banded (31)": Problem(broyden_banded, [-1.0] * 10, (0.0,)),
    "linear, full rank (32)": Problem(linear_full, [1.0] * 5, (15.0,)),
    "linear, rank 1 (33)": Problem(linear_rank_1, [1.0] * 5, (RANK_1,)),
    "linear, rank 1, zeros (34)": Problem(linear_rank_1_zeros, [1.0] * 5, (RANK_1_ZEROS,)),
    "chebyquad, 8 (35)": Problem(chebyquad, [i / 9 for i in range(1, 9)], (3.516874e-3,)),
}
