"""What optimizer objects and their recipes are given that cannot be: a sentence says what to do."""

import copy
import re
from typing import Any

import pytest
import torch

import functional_optim as fo
from functional_optim import adapters, search

TREE = {"w": torch.ones(3)}
LINEAR = fo.schedules.linear(1.0, 0.0, 10)
SGD: dict[str, Any] = {"tx": fo.sgd, "lr": 0.1}


def p() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(3))


def linear() -> torch.nn.Module:
    return torch.nn.Linear(2, 2)


def consumed() -> Any:
    parameters = (x for x in [p()])
    list(parameters)
    return parameters


def of_two() -> Any:
    return adapters.AdamW([p(), p()]).state_dict()


def of(recipe: Any, **hyper: Any) -> Any:
    return adapters.Optimizer([("w", p())], recipe, compile=False, **hyper)


def parted(lr: float = 0.1) -> Any:
    return fo.partition({"a": fo.sgd(lr)}, {"body": "a"})


def free(method: Any, **more: Any) -> Any:
    return adapters.GradientFree([torch.ones(2)], method, **more)


def tolerant(**changed: Any) -> Any:
    given = {"coordinator": fo.replicas.Local(), "optimizer": torch.optim.SGD([p()], 0.1)}
    return adapters.FaultTolerantOptimizer(**{**given, **changed})


def one_step(opt: Any) -> Any:
    return opt.step(lambda: torch.ones(()))


def searched(opt: Any) -> Any:
    """Its state dict after a step."""
    (w,) = opt.param_groups[0]["params"]

    def closure() -> Any:
        opt.zero_grad()
        loss = (w - 3).square().sum()
        loss.backward()
        return loss

    opt.step(closure)
    return opt.state_dict()


def changed(opt: Any, **hyper: Any) -> None:
    """A step with other hyperparameters than the step before."""
    for more in ({}, hyper):
        opt.param_groups[0].update(more)
        for p in opt.param_groups[0]["params"]:
            p.grad = torch.ones(3)
        opt.step()


def written(recipe: Any = fo.nadam, **state: Any) -> None:
    """A step with other entries in the state, or with another state."""
    changed(opt := adapters.Optimizer([p()], recipe, compile=False))
    (w,) = opt.state
    opt.state[w] = state["all"] if "all" in state else {**opt.state[w], **state}
    changed(opt)


def gated() -> Any:
    return fo.apply_if_finite(fo.adam(), 3)


def scheduled(opt: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(opt, 3)


def reloaded(opt: Any) -> Any:
    opt.load_state_dict(opt.state_dict())
    return opt


TYPES = [
    (lambda: of(lambda: fo.local_sgd(fo.sgd(0.1), 2)), "use functional_optim.replicas.Replica"),
    (lambda: fo.chain(torch.optim.SGD([p()], 0.1)), "takes a transformation, but got a SGD"),
    (lambda: adapters.AdamW(linear()), "but got a Linear; pass model.parameters()"),
    (lambda: adapters.Optimizer(linear(), fo.adamw), "takes parameters, but got a Linear"),
    (lambda: fo.sgd(0.1).init(linear()), "named_parameters()"),
    (lambda: adapters.AdamW(torch.ones(3)), "should be an iterable of Tensors"),
    (lambda: adapters.AdamW([p()], lr="0.1"), "a 0-dim tensor as lr, but got '0.1'"),
    (lambda: adapters.AdamW([p()], lr=LINEAR), "adapters.Optimizer(params, fo.adamw, lr=schedule)"),
    (lambda: adapters.AdamW([p()], stored=8), "needs a storage format"),
    (lambda: adapters.AdamW([p()], stored=lambda tx: 3), "returned a int"),
    (lambda: adapters.SparseAdam([p()], stored="int8"), "stored"),
    (lambda: of(lambda: fo.flatten(fo.adam()), stored="int8"), "made of one-tensor rules"),
    (lambda: of(lambda stored=None: fo.adam(), stored="int8"), "has a parameter called stored"),
    (lambda: of(0.1), "recipe must be a function from hyperparameters to"),
    (lambda: of(fo.adamw(1e-3)), "but got a Leafwise"),
    (lambda: of(lambda lr: lr, lr=0.1), "recipe returned a float; it must"),
    (lambda: of(lambda lr: torch.optim.SGD, lr=0.1), "it must return a transformation"),
    (lambda: of(lambda lr, /: fo.sgd(lr), lr=0.1), "takes its hyperparameters by name"),
    (lambda: of(lambda lr: fo.sgd(lr)), "pass lr=… to"),
    (lambda: of(fo.adamw, learning_rate=0.1), "learning_rate (it takes: lr, betas"),
    (lambda: of(fo.lbfgs), "use adapters.LBFGS"),
    (lambda: of(torch.optim.AdamW), "a transformation, but AdamW makes an optimizer object"),
    (lambda: fo.masked(fo.adam(), lambda params: params), "called for each leaf"),
    (lambda: fo.sgd(None), "a schedule as lr, but got None"),
    (lambda: adapters.LBFGS([torch.ones(2).long()]), "int64"),
    (lambda: adapters.LBFGS([p()]).step(3), "so step needs a closure"),
    (lambda: adapters.LBFGS([p()]).step(lambda: None), "one real number, but it returned a None"),
    (lambda: adapters.LBFGS([p()]).step(lambda: torch.ones(2)), "a Tensor of shape (2,)"),
    (lambda: adapters.AdamW(None), "AdamW takes parameters, but got None"),
    (lambda: adapters.Optimizer(3, fo.adamw), "Optimizer takes parameters, but got 3"),
    (lambda: adapters.SSBFGS(linear()), "SSBFGS takes parameters, but got a Linear"),
    (lambda: adapters.OptimizerStub(3), "OptimizerStub takes parameters, but got 3"),
    (lambda: adapters.AdamW([p()], lr=None), "as lr, but got None"),
    (lambda: adapters.AdamW([p()], betas=0.9), "betas must be a pair of numbers"),
    (lambda: free(3), "method must be a population method or an estimator, but got a int"),
    (lambda: free(lambda: 3), "the method returned a int"),
    (lambda: free(search.snes, population=4), "needs the hyperparameter sigma"),
    (lambda: free(search.snes, population=4, sigma=1.0, mu=1.0), "not take the hyperparameter mu"),
    (lambda: free(search.snes(4, 0.1), **SGD), "leave tx out"),
    (lambda: free(search.openai_es, population=4, sigma=1.0), "pass tx=fo.adam"),
    (lambda: free(fo.spsa), "pass tx=fo.sgd"),
    (lambda: free(fo.spsa, tx=3), "tx must be a transformation or a function"),
    (lambda: free(fo.spsa, tx=lambda: 3), "tx returned a int"),
    (lambda: free(fo.spsa, tx=fo.lbfgs()), "tx's update needs"),
    (lambda: free(fo.mezo, tx=fo.adam, lr=0.1), "the method and tx both take eps"),
    (lambda: free(fo.estimators.forward_gradient, **SGD), "a closure cannot be"),
    (lambda: free(search.snes(4, 0.1), seed=0.5), "needs an integer as its seed"),
    (lambda: adapters.AveragingOptimizer([p()], fo.sgd, lr=0.1), "schedule_free or gpa"),
    (lambda: free(search.snes(4, 0.1)).step(3), "so step needs a"),
    (lambda: tolerant(average_gradients="no"), "average_gradients must be True or False, but got"),
    (lambda: tolerant(coordinator=3), "a coordinator or a torchft Manager"),
    (lambda: tolerant(optimizer=3), "torch optimizer is needed"),
    (lambda: tolerant(optimizer=torch.optim.LBFGS([p()])), "several trial points"),
    (lambda: tolerant(optimizer=adapters.LBFGS([p()])), "several trial points"),
    (lambda: tolerant(optimizer=adapters.SSBFGS([p()])), "SSBFGS cannot be fault tolerant"),
    (lambda: tolerant(optimizer=adapters.GaussNewton([p()])), "several trial points"),
    (lambda: tolerant(optimizer=free(search.snes, population=4, sigma=1.0)), "several trial"),
    (lambda: tolerant(optimizer=adapters.SAM([p()], lr=0.1)), "SAM cannot be fault tolerant"),
    (lambda: tolerant(optimizer=adapters.Momo([p()])), "its recipe reads the loss"),
    (lambda: tolerant(optimizer=tolerant()), "already"),
    (lambda: of(fo.gauss_newton), "adapters.GaussNewton, LevenbergMarquardt or Dogleg for resid"),
    (lambda: changed(adapters.AdamW([p()]), lr="x"), "a schedule as lr, but got 'x'"),
    (lambda: changed(adapters.Lion([p()]), lr=[1.0]), "a schedule as lr, but got a tuple"),
    (lambda: changed(of(lambda rate: fo.sgd(rate), rate=0.1), rate=None), "as lr, but got None"),
    (lambda: changed(of(fo.adamw), lr="x", weight_decay=-1.0), "as lr, but got 'x'"),
    (lambda: written(step=None), "'step' in the state of parameter '0' is a NoneType; put a 0-dim"),
    (lambda: written(step=torch.ones(2)), "is a tensor of float32, shape (2,); put a 0-dim"),
    (lambda: written(gated, step=torch.ones(2)), "'step' in the state of parameter '0' is a tens"),
    (lambda: written(gated, optimizer_step=torch.ones(2)), "'optimizer_step' in the state of par"),
    (lambda: written(step=torch.tensor(True)), "'0' is a tensor of bool, shape (); put a 0-dim"),
    (lambda: written(mu_product=0.5), "'mu_product' in the state of parameter '0' is a float; put"),
    (lambda: written(all=[1]), "the state of parameter '0' is a list, not a dict; delete"),
]


VALUES = [
    (lambda: adapters.NorMuon([p()]), "scale_by_normuon takes matrices, but got a parameter of"),
    (lambda: of(fo.kl_soap), "kl_basis takes matrices and kernels, but got a"),
    (lambda: adapters.AdamW([]), "got an empty parameter list"),
    (lambda: written(step=-1.0), "'step' in the state of parameter '0' is -1.0; put the number"),
    (lambda: written(step=torch.tensor(torch.nan)), "is nan; put the number of finished steps"),
    (lambda: adapters.AdamW(consumed()), "got an empty parameter list"),
    (lambda: adapters.SGD([p() * 2]), "non-leaf Tensor"),
    (lambda: adapters.AdamW([p()]).load_state_dict(of_two()), "load a checkpoint of this model"),
    (lambda: of(fo.adamw, lr=-1.0), "Invalid learning rate: -1.0"),
    (lambda: of(parted), "no answer for the leaf 'w'"),
    (lambda: adapters.Optimizer([p()], parted), "the leaf '0'; "),
    (lambda: adapters.Optimizer([p()], parted), "pass model.named_parameters()"),
    (lambda: fo.adamw(0.1).update(TREE, fo.sgd(0.1).init(TREE), TREE), "this chain's own init"),
    (lambda: adapters.LBFGS([p()], history_size=0), "a whole number of 1 or more for history_size"),
    (lambda: adapters.LBFGS([p()], history_size=2.5), "1 or more for history_size, but got 2.5"),
    (lambda: adapters.LBFGS([p()], max_iter=-1), "a whole number of 0 or more for max_iter"),
    (lambda: adapters.LBFGS([p()], max_eval=-1), "a whole number of 0 or more for max_eval"),
    (lambda: one_step(adapters.LBFGS([{"params": []}])), "nothing to optimize"),
    (
        lambda: adapters.SSBroyden([p()]).load_state_dict(searched(adapters.SSBFGS([p()]))),
        "inverse_hessian, but needs broyden_inverse_hessian",
    ),
    (lambda: one_step(adapters.LBFGS([torch.ones(0, 2)])), "nothing to optimize"),
    (lambda: adapters.LBFGS([p()]).add_param_group({"params": [p()]}), "per-parameter options"),
    (lambda: fo.chain(fo.schedule_free(fo.trace(0.9)), fo.scale_by_lr(0.1)), "works on the step"),
    (lambda: fo.schedule_free(fo.sgd(0.1), momentum=0.0), "but got"),
    (lambda: fo.schedule_free(fo.sgd(0.1), r=-1.0), "but got"),
    (lambda: fo.gpa(fo.sgd(0.1), train_interp_coeff=1.5), "but got"),
    (lambda: fo.gpa(fo.sgd(0.1), eval_interp_coeff=-0.1), "but got"),
    (lambda: fo.schedule_free_adamw(betas=(0.0, 0.9)), "but got"),
    (lambda: fo.schedule_free_adamw(warmup_steps=-1), "but got"),
    (lambda: fo.scale_by_second_moment(1.0), "but got"),
    (lambda: tolerant(heal="all"), "heal"),
    (lambda: tolerant(nonfinite="skip"), "nonfinite"),
    (lambda: fo.prodigy(d0=0.0), "d0 above 0"),
    (lambda: fo.prodigy(growth_rate=0.9), "growth_rate of 1 or more"),
    (lambda: fo.prodigy(d_coef=0.0), "d_coef above 0"),
    (lambda: fo.prodigy(beta3=1.0), "beta3 in"),
    (lambda: fo.dadapt_adam(d0=-1.0), "d0 above 0"),
    (lambda: fo.dadapt_adam(weight_decay=-1.0), "Invalid weight_decay"),
]


NAMES = [(lambda: adapters.Adamw, "did you mean 'AdamW'?")]
KEYS = [
    (lambda: scheduled(adapters.SSBFGS([p()])), "no hyperparameter lr; it has max_iter, max_eval"),
    (lambda: scheduled(copy.deepcopy(adapters.SSBroyden([p()]))), "leave out the LR scheduler"),
    (lambda: scheduled(reloaded(adapters.SSBFGS([p()]))), "leave out the LR scheduler"),
    (lambda: scheduled(adapters.LevenbergMarquardt([p()])), "it has damping, geodesic"),
    (lambda: adapters.AdamW([{"param": [p()]}]), "under the key params; it has param"),
]
KINDS = ((TypeError, TYPES), (ValueError, VALUES), (AttributeError, NAMES), (KeyError, KEYS))


@pytest.mark.parametrize(
    ("kind", "make", "said"), [(kind, *row) for kind, rows in KINDS for row in rows]
)
def test_what_cannot_be_is_told(kind, make, said):
    with pytest.raises(kind, match=re.escape(said)):
        make()


def test_more_names_than_parameters_are_refused_where_names_select():
    """A pattern would act on another parameter."""

    def recipe(lr):
        return fo.partition({"s": fo.sgd(lr), "f": fo.freeze()}, {"a": "f", "*": "s"})

    def as_tree(lr):
        return fo.GradientTransformation(fo.sgd(lr).init, fo.sgd(lr).update)

    for tx in (fo.sgd, recipe, as_tree):
        a, b = p(), p()
        opt = adapters.Optimizer([("a", a), ("b", b)], tx, lr=0.1)
        b.grad = torch.ones(3)
        opt.step()
        opt.param_groups[0]["params"].pop(0)
        if tx is not fo.sgd:
            with pytest.raises(ValueError, match=r"fewer parameters \(1\) than names \(2"):
                opt.step()
            opt.param_groups[0]["param_names"].remove("a")
        opt.step()
        assert a.tolist() == [1.0] * 3
        torch.testing.assert_close(b.detach(), torch.full((3,), 0.8))
