"""GradientFree: the functional loop bit for bit, behind torch.optim's contract."""

import copy

import pytest
import search_cases
import torch

import functional_optim as fo
from functional_optim import search
from functional_optim.adapters import AdamW, GradientFree
from functional_optim.estimators import es_gradient, mezo, spsa

ESTIMATORS = {
    "spsa": lambda: spsa(c=0.1, samples=3),
    "spsa-alone": spsa,
    "es_gradient": lambda: es_gradient(population=6, sigma=0.1),
    "mezo": mezo,
}
METHODS = [*search_cases.CASES, *ESTIMATORS]


def sgd(lr):
    return fo.chain(fo.clip_by_global_norm(1.0), fo.trace(0.9), fo.scale_by_lr(lr))


def model_of(dtype=torch.float32):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    return model.to(dtype).requires_grad_(False)


X = torch.linspace(-1, 1, 20).reshape(10, 2)
Y = X.prod(1, keepdim=True)


def loss_of(model):
    return (model(X.to(model[0].weight.dtype)).float() - Y).square().mean()


def made(name, params, seed=0):
    if name in ESTIMATORS:
        return GradientFree(params, ESTIMATORS[name](), tx=sgd, lr=0.05, seed=seed)
    return GradientFree(params, search_cases.make(name), seed=seed)


def steps(opt, model, count):
    return [opt.step(lambda: loss_of(model)) for _ in range(count)]


def values(model):
    return [p.clone() for p in model.parameters()]


def equal(a, b):
    return all(torch.equal(x, y) and x.dtype is y.dtype for x, y in zip(a, b, strict=True))


def functional(name, model, count):
    """The same as `steps`, with the method's own functions, and losses one by one."""

    def losses(candidates):
        n = next(iter(candidates.values())).shape[0]
        each = [{k: x[i] for k, x in candidates.items()} for i in range(n)]
        with torch.no_grad():
            return torch.stack([torch_call(model, one) for one in each])

    params = {k: p.detach().clone() for k, p in model.named_parameters()}
    best = []
    if name in ESTIMATORS:
        est, tx = ESTIMATORS[name](), sgd(0.05)
        state, inner = est.init(params, 0), tx.init(params)
    else:
        method = search_cases.make(name)
        state = method.init(params, 0)
    for _ in range(count):
        if name in ESTIMATORS:
            candidates, state = est.ask(state, params)
            fitness = losses(candidates)
            (_, grads), state = est.tell(candidates, fitness, state)
            updates, inner = tx.update(grads, inner, params)
            params = fo.apply_updates(params, updates)
        else:
            candidates, state = method.ask(state)
            fitness = losses(candidates)
            state = method.tell(candidates, fitness, state)
            params = search.center(state)
        best.append(fitness.min())
    return list(params.values()), best


def torch_call(model, params):
    y = torch.func.functional_call(model, params, (X.to(model[0].weight.dtype),))
    return (y.float() - Y).square().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", METHODS)
def test_it_goes_where_the_functional_loop_goes(name, dtype):
    model = model_of(dtype)
    before = values(model)
    count = 40 if name == "one_plus_one" else 4
    expected, least = functional(name, model, count)
    found = steps(made(name, model.named_parameters()), model, count)
    assert equal(values(model), expected)
    assert torch.equal(torch.stack(found), torch.stack(least))
    assert not equal(before, expected)


@pytest.mark.parametrize("name", ["snes", "cma_es", "mezo"])
def test_a_checkpoint_goes_on_in_another_precision(name):
    model, wide = model_of(), model_of(torch.float64)
    opt, other = made(name, model.parameters()), made(name, wide.parameters())
    steps(opt, model, 2)
    other.load_state_dict(opt.state_dict())
    like = made(name, wide.parameters()).method_state()
    for _ in range(2):
        state = other.method_state()
        for (path, x), y in zip(fo.tree.items(state), fo.tree.leaves(like), strict=True):
            assert x.dtype is y.dtype, path
        steps(other, wide, 1)
    assert state.step == 3


def test_the_best_finite_loss_is_returned_and_others_are_worst():
    w = torch.zeros(2)
    losses = iter([torch.nan, 3.0, -torch.inf, 2, torch.inf, torch.tensor([5], dtype=torch.int32)])
    opt = GradientFree([w], search.random_search(6, 1.0))
    best = opt.step(lambda: next(losses))
    assert best.item() == 2.0
    assert best.shape == ()
    assert torch.equal(w, opt.state[w]["best.0"])
    before = w.clone()
    assert opt.step(lambda: torch.nan).item() == torch.inf
    assert torch.equal(w, before)


def test_losses_are_evaluated_without_gradients_and_returned_as_they_are():
    w = torch.nn.Parameter(torch.ones(3, dtype=torch.float16))
    opt = GradientFree([w], mezo, eps=0.1, tx=fo.sgd, lr=0.1)
    seen = []

    def closure():
        loss = w.square().sum()
        seen.append((loss.requires_grad, w.grad))
        return loss

    assert opt.step(closure).dtype is torch.float16
    assert seen == [(False, None)] * 2
    assert torch.is_grad_enabled()


def test_without_a_closure_or_a_loss_there_is_a_sentence():
    w = torch.ones(2)
    opt = GradientFree([w], search.snes(4, 0.1))
    with pytest.raises(TypeError, match="step needs a closure"):
        opt.step()
    for bad in (None, "0.1", torch.ones(2), torch.tensor(1j)):
        with pytest.raises(TypeError, match="must return the loss, one real number"):
            opt.step(lambda bad=bad: bad)
    assert torch.equal(w, torch.ones(2))
    assert not opt.state
    p = torch.nn.Parameter(torch.ones(2))
    opt = GradientFree([p], search.snes(4, 0.1))
    with pytest.raises(RuntimeError, match="cannot call backward; only return the loss"):
        opt.step(lambda: p.sum().backward())
    with pytest.raises(RuntimeError, match=r"^mine$"):
        opt.step(lambda: (_ for _ in ()).throw(RuntimeError("mine")))


def test_groups_are_one_tree_with_one_set_of_numbers():
    model, other = model_of(), model_of()
    groups = [{"params": [p]} for p in model.parameters()]
    opt = GradientFree(groups, search.snes, population=5, sigma=0.1)
    single = GradientFree(other.parameters(), search.snes, population=5, sigma=0.1)
    assert torch.equal(torch.stack(steps(opt, model, 2)), torch.stack(steps(single, other, 2)))
    assert equal(values(model), values(other))
    with pytest.raises(ValueError, match="has no place for more parameters"):
        opt.add_param_group({"params": [torch.ones(2)]})
    assert len(opt.param_groups) == 4
    fresh = GradientFree([torch.ones(2)], search.snes, population=5, sigma=0.1)
    with pytest.raises(ValueError, match="they have different sigma"):
        fresh.add_param_group({"params": [torch.ones(2)], "sigma": 0.2})
    with pytest.raises(ValueError, match="a finite sigma above 0"):
        fresh.add_param_group({"params": [torch.ones(2)], "sigma": -1.0})
    assert len(fresh.param_groups) == 1
    with pytest.raises(TypeError, match=r"has its own tx, but .* pass tx to GradientFree"):
        GradientFree([{"params": [torch.ones(2)], "tx": fo.adam}], mezo(), tx=fo.sgd, lr=0.1)
    fresh = GradientFree([torch.ones(2)], mezo(), tx=fo.sgd, lr=0.1)
    with pytest.raises(TypeError, match=r"has its own tx, but .* pass tx to GradientFree"):
        fresh.add_param_group({"params": [torch.ones(2)], "tx": fo.adam(1.0)})
    assert len(fresh.param_groups) == 1


def test_numbers_are_those_of_the_method_and_of_the_transformation():
    w = torch.tensor([3.0, 4.0], dtype=torch.float64)
    lr = fo.schedules.linear(0.5, 0.0, 10)
    watch = fo.monitor({"grad_norm": fo.measures.global_norm})
    opt = GradientFree([w], mezo(samples=2), tx=fo.chain(watch, fo.sgd(lr)), seed=3)
    assert opt.numbers("lr", "step") == {"lr": 0.5, "step": 0.0}
    for k in range(3):
        before = w.clone()
        opt.step(lambda: w.square().sum())
        found = opt.numbers()
        assert (found["step"], found["seed"], found["lr"]) == (k + 1, 3, lr(k))
        assert found["grad_norm"] == pytest.approx(float((before - w).norm()) / lr(k), rel=1e-6)
    opt = GradientFree([w], search.cma_es, population=4, sigma=0.5)
    loss, state = opt.step(lambda: w.square().sum()), opt.method_state()
    assert opt.numbers() == fo.numbers(state)
    assert opt.numbers("best_fitness") == {"best_fitness": loss.item()}
    with pytest.raises(KeyError, match="no scalar called 'lr'; it has step, seed, best_fitness"):
        opt.numbers("lr")


def test_a_transformation_is_checked_with_the_parameters_themselves():
    """Their names and shapes, which a recipe of patterns or of matrices needs."""
    named = [("a", torch.ones(3, 3)), ("b", torch.ones(3))]
    parts = fo.partition({"x": fo.muon(0.1), "y": fo.sgd(0.1)}, {"a": "x", "b": "y"})
    before = [p.clone() for _, p in named]
    opt = GradientFree(named, mezo, tx=parts)
    opt.step(lambda: sum(p.square().sum() for _, p in named))
    assert not any(torch.equal(p, old) for (_, p), old in zip(named, before, strict=True))
    with pytest.raises(ValueError, match="Muon only supports 2D parameters"):
        GradientFree(named, mezo, tx=fo.muon(0.1))
    with pytest.raises(TypeError, match="takes parameters, but got a Linear"):
        GradientFree(torch.nn.Linear(1, 1), search.snes(4, 0.1))


def test_the_first_group_may_be_empty():
    w = torch.ones(2)
    opt = GradientFree([{"params": []}, {"params": [w]}], search.snes(4, 0.1))
    opt.add_param_group({"params": [torch.ones(1)]})
    opt.step(lambda: w.square().sum())
    assert opt.method_state().mean.shape == (3,)
    with pytest.raises(ValueError, match="the method has begun"):
        opt.add_param_group({"params": [torch.ones(1)]})


def test_dtypes_may_be_mixed_and_complex():
    a, b = torch.ones(2, dtype=torch.bfloat16), torch.full((2,), 1 + 1j, dtype=torch.complex128)
    for method, more in ((search.cma_es(8, 0.3), {}), (mezo(0.05), {"tx": fo.sgd, "lr": 0.05})):
        a.fill_(1)
        b.fill_(1 + 1j)
        opt = GradientFree([a, b], method, **more)
        for _ in range(60):
            loss = opt.step(lambda: a.double().square().sum() + b.abs().square().sum())
        assert loss < 0.1
        clone = GradientFree([a, b], method, **more)
        clone.load_state_dict(opt.state_dict())
        assert equal(clone.state[a].values(), opt.state[a].values())


def of(method, **more):
    return lambda p: GradientFree(p, method, **more)


FIVE = {"population": 5, "sigma": 0.1}
SNES, SGD = of(search.snes, **FIVE), {"tx": fo.sgd, "lr": 0.1}
OTHERS = {
    "another method": (SNES, of(search.cma_es, **FIVE), "of cma_es, and .* method is snes"),
    "the same fields": (SNES, of(search.cem, **FIVE), "of cem, and .* method is snes"),
    "an estimator": (SNES, of(spsa, **SGD), "of spsa, and .* method is snes"),
    "another estimator": (of(spsa, **SGD), of(mezo, **SGD), "of mezo, and .* method is spsa"),
    "a finished one": (of(mezo(), **SGD), of(spsa(), **SGD), "of spsa, and .* method is mezo"),
    "more samples": (of(spsa(), **SGD), of(spsa, samples=3, **SGD), "weights has shape"),
    "another tx": (
        of(mezo(), tx=fo.sgd(0.1)),
        of(mezo(), tx=fo.adam(0.1)),
        r"has no place for tx\..* with the same tx",
    ),
    "a larger model": (
        SNES,
        lambda p: SNES([torch.ones(9), *list(p)[1:]]),
        "[Ll]oad a checkpoint of",
    ),
    "AdamW": (SNES, AdamW, "[Ll]oad a checkpoint of"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_checkpoint_of_another_is_refused_and_changes_nothing(name):
    make, another, says = OTHERS[name]
    model = model_of()
    opt, other = make(model.parameters()), another(model.parameters())
    steps(opt, model, 1)
    before = copy.deepcopy(opt.state_dict())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    other.step(lambda: loss_of(model))
    with pytest.raises(ValueError, match=says):
        opt.load_state_dict(other.state_dict())
    after = opt.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert equal(after["state"][0].values(), before["state"][0].values())
    steps(opt, model, 1)


def test_a_population_of_another_size_needs_a_state_of_its_own():
    w = torch.ones(2)
    opt = GradientFree([w], search.differential_evolution, population=5, sigma=0.1)
    opt.step(lambda: w.sum())
    opt.param_groups[0]["population"] = 7
    with pytest.raises(ValueError, match="members has shape"):
        opt.step(lambda: w.sum())
    opt = GradientFree([w], search.snes, population=5, sigma=0.1)
    opt.step(lambda: w.sum())
    opt.param_groups[0]["population"] = 7
    calls = []
    opt.step(lambda: (calls.append(1), w.sum())[1])
    assert len(calls) == 7


def test_a_log_of_its_states_replays_the_run():
    w, est = torch.ones(3), mezo()
    opt = GradientFree([w], est, tx=fo.adam, lr=0.1)
    log = []
    for _ in range(5):
        opt.step(lambda: w.square().sum())
        log.append(opt.method_state())
    again, _ = fo.estimators.replay(est, fo.adam(0.1), [torch.ones(3)], log)
    assert torch.equal(again[0], w)


@pytest.mark.parametrize("automatic", [False, True])
def test_lightning_trains_and_resumes_with_it(pl, automatic, tmp_path):
    class Module(pl.Net):
        def training_step(self, batch, index):
            if automatic:
                return self.loss(batch[0])
            self.optimizers().step(lambda: self.loss(batch[0]))
            return None

        def backward(self, loss, *args):
            """There is none."""

    def fit(epochs, resume=None):
        module = Module(lambda m: SNES(m.parameters()))
        module.automatic_optimization = automatic
        return pl.fit(module, max_epochs=epochs, ckpt_path=resume), pl.values(module)

    trainer, half = fit(1)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    _, whole = fit(2)
    _, resumed = fit(2, tmp_path / "half.ckpt")
    assert equal(resumed, whole)
    assert not equal(half, whole)


@pytest.mark.parametrize("name", ["cma_es", "spsa"])
def test_closures_may_return_the_same_memory_each_time(name):
    """As a captured CUDA graph does."""
    plain, same, memory = model_of(), model_of(), torch.zeros(())
    a, b = [made(name, model.parameters()) for model in (plain, same)]
    steps(a, plain, 3)
    for _ in range(3):
        b.step(lambda: memory.copy_(loss_of(same)))
    assert equal(values(plain), values(same))
    assert not equal(values(plain), values(model_of()))
