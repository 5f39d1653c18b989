"""What algorithms are given that cannot be: an error says so at once, with what was given."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from helpers import assert_same

import functional_optim as fo
from functional_optim import adapters

ONES = torch.ones(2)
COMPLEX = torch.zeros(2, 2, dtype=torch.complex64)

ROWS: list[tuple[Callable[[], Any], str]] = [
    (lambda: fo.adam_mini(blocks={"*": "column"}), "'row' or 'tensor', or the number of equal par"),
    (lambda: fo.adam_mini(blocks={"*": 0}), "a whole number of 1 or more for block"),
    (lambda: fo.adam_mini(blocks=2), "a dict from patterns of paths to blocks"),
    (lambda: fo.adamuon(eps=-1.0), "an eps of 0 or more, but got -1"),
    (lambda: fo.adamuon(momentum=1.0), r"a momentum in \[0, 1\), but got 1"),
    (lambda: fo.adamuon().init(ONES), "takes matrices, but got"),
    (lambda: fo.apollo(growth=0.5), "a growth of 1 or more, but got 0.5"),
    (lambda: fo.apollo(scale=-1.0), "a scale of 0 or more, but got -1"),
    (lambda: fo.apollo(scale_type="row"), "'channel' or 'tensor' as scale_type, but got 'row'"),
    (lambda: fo.apollo(seed=0.5), "needs an integer as its seed"),
    (lambda: fo.apollo(seed=torch.tensor(1)), "a Python integer as its seed"),
    (lambda: fo.apollo(update_proj_gap=0), "1 or more for update_proj_gap"),
    (lambda: fo.dion2(ef_decay=-1.0), "an ef_decay of 0 or more, but got -1"),
    (lambda: fo.dion2(fraction=0.0), r"a Python number in \(0, 1\], but got"),
    (lambda: fo.dion2(fraction=torch.tensor(0.5)), r"a Python number in \(0, 1\], but got"),
    (lambda: fo.dion2(scale="wide"), "or None as scale, but got"),
    (lambda: fo.dpsgd(l2_norm_clip=0.0), r"l2_norm_clip above 0, but got 0\.0"),
    (lambda: fo.dpsgd(lr=-1.0), r"Invalid learning rate: -1\.0"),
    (lambda: fo.galore(rank=0), "a whole number of 1 or more for rank"),
    (lambda: fo.galore(scale=-1.0), "a scale of 0 or more, but got -1"),
    (lambda: fo.galore().init(COMPLEX), "galore takes"),
    (lambda: fo.scale_by_galore().init(ONES), "takes matrices, but got"),
    (lambda: fo.kl_shampoo(eps=-1.0), "Invalid epsilon value: -1.0"),
    (lambda: fo.kl_shampoo(init_factor=0.0), "needs a positive init_factor, not 0.0"),
    (lambda: fo.kl_shampoo(max_clamp_value=0), "1 or more for max_clamp_value"),
    (lambda: fo.kl_shampoo(momentum=1.0), "Invalid momentum value: 1.0"),
    (lambda: fo.kl_soap(shampoo_beta=1.5), "Invalid shampoo_beta value: 1.5"),
    (lambda: fo.kl_soap().init(torch.ones(3)), "kl_basis takes matrices"),
    (lambda: fo.mars().init(COMPLEX), "optimize_1d=True"),
    (lambda: fo.momo(beta=1.0), "Invalid|but got"),
    (lambda: fo.momo(lr=-1.0), "Invalid|but got"),
    (lambda: fo.momo(weight_decay=-1.0), "Invalid|but got"),
    (lambda: fo.momo().update(ONES, fo.momo().init(ONES), ONES), "value"),
    (lambda: fo.momo_adam(eps=-1.0), "Invalid|but got"),
    (lambda: fo.noisy_sgd(eta=-1.0), r"eta of 0 or more, but got -1\.0"),
    (lambda: fo.normuon(beta2=1.0), r"a beta2 in \[0, 1\), but got 1"),
    (lambda: fo.normuon(eps=-1.0), "an eps of 0 or more, but got -1"),
    (lambda: fo.normuon(momentum=-1.0), "a momentum of 0 or more, but got -1"),
    (lambda: fo.psgd_kron(b1=1.0), r"a decay in \[0, 1\), but got 1.0"),
    (lambda: fo.psgd_kron(max_size_triangular=-1), "for max_size_triangular, but got -1"),
    (lambda: fo.psgd_kron(memory_save_mode="x"), "'all_diag' as memory_save_mode, but got 'x'"),
    (lambda: fo.psgd_kron(precond_lr=-1.0), "a precond_lr of 0 or more, but got -1.0"),
    (lambda: fo.psgd_kron(preconditioner_update_probability=0.0), r"in \(0, 1\], but got 0.0"),
    (lambda: fo.psgd_kron(seed=0.5), "0 or more for seed, but got 0.5"),
    (lambda: fo.psgd_kron().init(COMPLEX), "takes real parameters"),
    (lambda: fo.scion(eps=-1.0), "an eps of 0 or more, but got -1"),
    (lambda: fo.scion(norm="bias_rms", normalized=True), "only for the norms of matrices"),
    (lambda: fo.scion(norm="row").init(ONES), "takes matrices, but got"),
    (lambda: fo.scion(norm="spectral_conv").init(ONES), "takes kernels"),
    (lambda: fo.scion(norm="square"), "takes 'auto', 'spectral'"),
    (lambda: fo.scion(radius=-1.0), "a radius of 0 or more, but got -1"),
    (lambda: fo.scion(1.5), r"an lr in \[0, 1\], but got 1.5"),
    (lambda: fo.shampoo(beta3=1.0), r"a beta3 in \[0, 1\), but got 1.0"),
    (lambda: fo.shampoo(betas=(0.9, 1.1)), r"betas\[1\] in \[0, 1\], but got 1.1"),
    (lambda: fo.shampoo(betas=(1.0, 1.0)), r"betas\[0\] in \[0, 1\), but got 1.0"),
    (lambda: fo.shampoo(eps=0.0), "eps above 0, but got 0.0"),
    (lambda: fo.shampoo(exponents=0.5), "exponents of None or two numbers"),
    (lambda: fo.shampoo(grafting="x"), "or 'adam' as grafting, but got 'x'"),
    (lambda: fo.shampoo(grafting_beta2=2.0), "a grafting_beta2 in"),
    (lambda: fo.shampoo(grafting_eps=-1.0), "a grafting_eps of 0 or more"),
    (lambda: fo.shampoo(max_preconditioner_dim=0), "1 or more for max_preconditioner_dim"),
    (lambda: fo.shampoo(refresh="x"), "'together' or 'spread' as refresh, but got 'x'"),
    (
        lambda: fo.shampoo(precondition_frequency=3, start_preconditioning_step=2),
        "3 or more for start_preconditioning_step",
    ),
    (lambda: fo.shampoo(weight_decay_type="corrected"), "without peak_lr"),
    (lambda: fo.shampoo(weight_decay_type="corrected", peak_lr=0.0), "peak_lr above 0"),
    (lambda: fo.shampoo(weight_decay_type="x"), "'independent' as weight_decay_type, but got 'x'"),
    (lambda: fo.shampoo().init(COMPLEX), "takes real parameters"),
]


def lbfgs(grads=ONES, state=None, params=ONES, fn=torch.sum, tx=None):
    """An update of L-BFGS with what may be wrong."""
    tx = fo.lbfgs() if tx is None else tx
    state = tx.init(ONES) if state is None else state
    extra = {"value": ONES.sum(), "value_and_grad": fn} if "value" in tx.extra else {}
    return tx.update(grads, state, params, **extra)


def returned(change):
    """The same, where the function returns other gradients."""
    tree = {"x": ONES}
    return lbfgs(tree, fo.lbfgs().init(tree), tree, lambda x: (x["x"].sum(), change(tree)))


backtracking = fo.scale_by_backtracking_linesearch


def searched(value=2.0, params=ONES, **given):
    """An update of a backtracking line search."""
    tx = backtracking()
    return tx.update(ONES, tx.init(ONES), params, value=value, grad=ONES, **given)


OTHER = "pass the state that init returned for these"
SEARCHES: list[tuple[Callable[[], Any], str]] = [
    (lambda: fo.lbfgs(lr=-1.0), "Invalid learning rate: -1"),
    (lambda: fo.lbfgs(lr=lambda count: 1.0), "lr must be a number or a 0-dim tensor"),
    (lambda: fo.lbfgs(line_search_fn="armijo"), "only 'strong_wolfe' is supported"),
    (lambda: fo.lbfgs(history_size=0), "1 or more for history_size, but got 0"),
    (lambda: fo.scale_by_lbfgs(history_size=0), "scale_by_lbfgs needs a whole number of 1 or more"),
    (lambda: fo.lbfgs().init({"x": torch.ones(0)}), "nothing to optimize"),
    (lambda: fo.lbfgs().init({"x": torch.ones(2, dtype=torch.int64)}), "int64"),
    (lambda: fo.lbfgs(batched=True).init([torch.ones(2, 3), torch.ones(3)]), "one leading dim"),
    (lambda: lbfgs(fn=torch.func.grad_and_value(torch.sum)), "grad_and_value has them in reverse"),
    (lambda: lbfgs(fn=torch.sum), r"return \(value, gradients\)"),
    (lambda: lbfgs(state=()), "a state of type tuple; pass the state"),
    (lambda: lbfgs(state=fo.lbfgs(history_size=7).init(ONES)), "places for 7 pairs, but history_"),
    (lambda: lbfgs(params=None), "needs the parameters"),
    (lambda: lbfgs([ONES], params={"x": ONES}), "different structures"),
    (lambda: lbfgs(params=ONES.to(torch.complex64)), "complex gradient for a complex parameter"),
    (lambda: lbfgs(state=fo.lbfgs().init(torch.ones(3))), OTHER),
    (lambda: lbfgs(state=fo.lbfgs().init(ONES.double())), OTHER),
    (lambda: lbfgs(ONES[None], tx=fo.lbfgs(batched=True), params=ONES[None]), OTHER),
    (lambda: lbfgs(tx=fo.scale_by_lbfgs(), state=fo.scale_by_lbfgs().init(torch.ones(3))), OTHER),
    (lambda: returned(lambda g: [g]), "different structures"),
    (lambda: returned(lambda g: {"x": g["x"][:1]}), r"differ at 'x': \(2,\) against \(1,\)"),
    (lambda: returned(lambda g: {"x": g["x"] * 1j}), "complex gradient for a complex parameter"),
    (lambda: backtracking(max_backtracking_steps=-1), "0 or more for max_backtracking_steps"),
    (lambda: backtracking(slope_rtol=0.0), r"a slope_rtol in \(0, 1\)"),
    (lambda: backtracking(decrease_factor=1.0), r"a decrease_factor in \(0, 1\)"),
    (lambda: backtracking(increase_factor=0.5), "an increase_factor of 1 or more"),
    (lambda: backtracking(max_learning_rate=0.0), "a positive max_learning_rate"),
    (searched, "value_fn"),
    (lambda: searched(value_fn=lambda x: x), r"one number, but got one of shape \(2,\)"),
    (lambda: searched(ONES, value_fn=torch.sum), r"one number, but got one of shape \(2,\)"),
    (lambda: searched(params=None, value_fn=torch.sum), "needs the parameters"),
]


@pytest.mark.parametrize(
    ("call", "sentence"), [pytest.param(*row, id=row[1]) for row in ROWS + SEARCHES]
)
def test_what_cannot_be_is_told(call, sentence):
    with pytest.raises((RuntimeError, TypeError, ValueError), match=sentence):
        call()


def test_a_step_that_cannot_be_changes_nothing():
    w = torch.nn.Parameter(torch.ones(4, 3))
    w.grad = torch.ones(4, 3)
    opt = adapters.Optimizer([w], fo.scale_by_adam_mini, block=3, compile=False)
    with pytest.raises(ValueError, match=r"3 parts, but got a parameter of shape \(4, 3\)"):
        opt.step()
    opt = adapters.Momo([w], compile=False)
    with pytest.raises(RuntimeError, match=r"reads the loss; call opt.step\(closure\)"):
        opt.step()
    assert_same(w.detach(), torch.ones(4, 3))


# ---------------------------------------------------------------- maximize
def taking_maximize() -> dict[str, Any]:
    """The recipes with this argument, and the arguments that they need."""
    found = {}
    for name in dir(fo):
        made = getattr(fo, name)
        known = inspect.signature(made).parameters if inspect.isfunction(made) else {}
        needed = [x.name for x in known.values() if x.default is x.empty and x.kind in (0, 1, 3)]
        if "maximize" in known:
            found[name] = dict.fromkeys([x for x in needed if x != "maximize"], 0.1)
    return found


RECIPES = taking_maximize()


@pytest.mark.parametrize("name", RECIPES)
def test_maximize_takes_true_or_false_and_nothing_else(name):
    assert len(RECIPES) > 30
    for wrong in ("x", "False", None, 2, 0.5):
        with pytest.raises(TypeError, match="maximize must be True or False, but got"):
            getattr(fo, name)(**RECIPES[name], maximize=wrong)
    for flag in (numpy.True_, torch.tensor(True)):
        getattr(fo, name)(**RECIPES[name], maximize=flag)
