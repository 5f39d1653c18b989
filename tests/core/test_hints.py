"""Names, arguments and values of other libraries: each error says what to use here."""

import re

import numpy
import pytest
import torch

import functional_optim as fo
from functional_optim import adapters
from functional_optim.core.base import check_transformation

W = torch.ones(2)
MODEL = torch.nn.Linear(2, 1)


def adamw():
    return adapters.AdamW(MODEL.parameters(), compile=False)


SAYS = {
    "schedule": (
        lambda: fo.schedules.warmup_cosine_decay_schedule,
        "for optax's warmup_cosine_decay_schedule there is functional_optim.schedules.warmup_cos",
    ),
    "capital": (lambda: fo.schedules.Cosine, "did you mean 'cosine'?"),
    "norm": (lambda: fo.tree.norm, "for optax's norm there is functional_optim.tree.global_norm"),
    "sub": (lambda: fo.tree.sub, "there is functional_optim.tree.map(torch.sub, a, b)"),
    "eval": (lambda: fo.schedule_free_eval_params, "there is functional_optim.eval_params"),
    "fit": (lambda: fo.curve_fit, "for scipy's curve_fit there is functional_optim.least_squares"),
    "scalar": (lambda: fo.root_scalar, "for scipy's root_scalar there is nothing: use scipy"),
    "torch": (lambda: fo.clip_grad_norm_, "for torch's clip_grad_norm_ there is functional_"),
    "scheduler": (lambda: fo.schedules.StepLR, "there is functional_optim.schedules.exponential_"),
    "b1": (lambda: fo.schedule_free(fo.sgd(0.1), 0.1, b1=0.9), "'b1'; pass momentum."),
    "decay of squares": (lambda: fo.rmsprop(1e-3, decay=0.9), "'decay'; pass alpha."),
    "power": (lambda: fo.adafactor(decay_rate=0.8), "pass beta2_decay, with a minus sign."),
    "power of others": (lambda: fo.adamw(decay_rate=0.8), "'decay_rate'; it takes lr, betas, eps"),
    "betas": (lambda: fo.adam(b1=0.9), "'b1'; pass betas=(b1, b2), one tuple."),
    "object": (lambda: adapters.Lion(MODEL.parameters(), b1=0.9), "'b1'; pass betas=(b1, b2)"),
    "no lr": (lambda: fo.sign(learning_rate=1), "'learning_rate'; it takes ."),
    "memory": (lambda: fo.lbfgs(memory_size=10), "'memory_size'; pass history_size."),
    "search": (lambda: fo.lbfgs(linesearch=None), 'pass line_search_fn="strong_wolfe", or None.'),
    "params": (lambda: fo.adam(params=W), "nothing: parameters go to init and update, or to an"),
    "rate": (
        lambda: adapters.Optimizer(MODEL.parameters(), fo.adamw, 1e-3),
        "but 4 were given; pass the others by name: lr=, compile=, stored=, capturable=.",
    ),
    "positions": (lambda: fo.leafwise(None, None, None, None), "by name: reduce=, before=, "),
    "value": (lambda: fo.momo().update(W, fo.momo().init(W), W), "of step(closure) as value."),
    "mask": (lambda: fo.add_decayed_weights(0.1, "w"), "by name: independent=, mask=."),
    "decay": (lambda: fo.add_decayed_weights(-0.1), "and independent=True after a learning rate."),
    "stored": (
        lambda: fo.stored(adamw(), "int8"),
        "got a AdamW; pass e.g. stored(adam(lr=1e-3), ...), in the recipe of adapters.Optimizer(",
    ),
    "list": (
        lambda: check_transformation("masked", [fo.adam()], "masked(adam(), where)"),
        "got a list; join several by chain(*transformations).",
    ),
    "model": (lambda: fo.adam().init(MODEL), "the parameters are a Linear, not a tensor; pass a"),
    "array": (lambda: fo.adam().init(numpy.ones(2)), "or torch.from_numpy(x) for an array."),
    "floats": (lambda: fo.adam().init([1.0]), "parameter '0' is a float, not a tensor"),
}


@pytest.mark.parametrize("case", SAYS)
def test_an_error_says_what_to_use_here(case):
    call, words = SAYS[case]
    with pytest.raises((AttributeError, TypeError, ValueError), match=re.escape(words)):
        call()


def test_private_names_and_missing_arguments_have_no_hint():
    assert not hasattr(fo.tree, "__path__")
    with pytest.raises(AttributeError, match=r"'_mean'$"):
        _ = fo.tree._mean
    with pytest.raises(TypeError, match=r"1 was given$"):
        fo.sign(1)
