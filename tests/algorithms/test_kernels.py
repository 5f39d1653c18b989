"""A compiled step of an algorithm is its rule: one of each family, on tensors of all shapes."""

from __future__ import annotations

import pytest
import torch
from helpers import SHAPES
from three_ways import check_compiled, check_no_new_kernel, purely

import functional_optim as fo

RECIPES = {
    "acprop": lambda lr: fo.acprop(lr, weight_decay=0.1),
    "adabelief": lambda lr: fo.adabelief(lr, weight_decay=0.1),
    "adamaxw": lambda lr: fo.adamaxw(lr, weight_decay=0.1),
    "adan": lambda lr: fo.adan(lr, weight_decay=0.1),
    "ademamix": lambda lr: fo.ademamix(lr, beta3_warmup=3, alpha_warmup=3),
    "adopt": lambda lr: fo.adopt(lr, weight_decay=0.1, decoupled_weight_decay=True),
    "laprop": lambda lr: fo.laprop(lr, weight_decay=0.01),
    "lion": lambda lr: fo.lion(lr, weight_decay=0.1),
    "madgrad": lambda lr: fo.madgrad(lr),
    "mars": lambda lr: fo.mars(lr, weight_decay=0.1),
    "optimistic": lambda lr: fo.optimistic_adam_v2(lr),
    "simplified_ademamix": lambda lr: fo.simplified_ademamix(0.01 * lr, alpha=2.0),
    "yogi": lambda lr: fo.yogi(lr),
}
TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-12}
OTHERS = {name: tuple([2 * n + 1 for n in shape]) for name, shape in SHAPES.items()}
ALWAYS = {"adopt", "mars"}
"""One whose first step is another one, and one that measures its tensors."""


# torch.compile itself warns about its own use of a deprecated module in a fresh process
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in ALWAYS else [pytest.mark.full]) for name in RECIPES],
)
def test_the_kernel_of_an_algorithm_is_its_rule(name):
    make = RECIPES[name]
    for dtype, tolerance in TOLERANCES.items():
        expected = purely(make(0.01), 7, dtype, SHAPES)
        check_compiled(make(0.01), 7, dtype, SHAPES, expected, tolerance)
    check_no_new_kernel(make, SHAPES, OTHERS)
