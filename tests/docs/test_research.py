"""The examples of docs/research.md do what they say, each against a plain loop or exact values."""

import copy
import importlib
import re
from pathlib import Path

import pytest
import torch
from helpers import assert_close, clone

import functional_optim as fo

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:sklearn")


@pytest.fixture
def load(monkeypatch):
    pytest.importorskip("sklearn")
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("ensemble", r"lr  1\.0e-05 .*\nThe best learning rate is"),
        ("learned_lr", r"momentum 0\.\d+\nThe loss at the end of a run fell"),
        ("dp_sgd", r"noise  0\.0 .*\nnoise  1\.0 "),
        ("in_backward", r"in backward .*\nSaved: [89]\d% of the \d"),
        ("convolutions", r"AdamW .*\nMuonAdamW .*\nSOAP .* accuracy \d"),
        ("experts", r"AdamW .*\nMuonAdamW .*\nSOAP .* accuracy \d"),
    ],
)
def test_a_program_runs_and_says_what_it_found(load, capsys, name, said):
    load(name).main(["--quick"])
    assert re.search(said, capsys.readouterr().out, re.DOTALL)
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 100


# ---------------------------------------------------------------- an ensemble
@pytest.fixture
def batches():
    torch.manual_seed(0)
    return [(torch.randn(8, 64, dtype=torch.float64), torch.randint(10, (8,))) for _ in range(5)]


def test_an_ensemble_is_a_loop_over_its_members_and_compiles_once(load, batches, fresh_dynamo):
    ensemble = load("ensemble")
    lrs = ensemble.rates(16)
    params, state = ensemble.start(lrs, torch.float64)
    members = [fo.tree.map(lambda x, i=i: x[i].clone(), (params, state)) for i in range(16)]
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    step = torch.compile(ensemble.ensemble_step, backend=backend, fullgraph=True)
    for x, y in batches:
        losses = step(params, state, lrs, x, y)
        for i, lr in enumerate(lrs):
            *members[i], loss = ensemble.member_step(*members[i], lr, x, y)
            assert_close(losses[i], loss, 1e-12)
    assert len(graphs) == 1
    for i, (p, s) in enumerate(members):
        found = fo.tree.map(lambda x, i=i: x[i], (params, state))
        assert_close(found, (p, s), 1e-12)
    spread = [float((params["0.weight"][i] - params["0.weight"][i - 1]).norm()) for i in (1, 15)]
    assert min(spread) > 0.1


def test_a_pure_ensemble_step_compiles_once_from_a_vmapped_init(fresh_dynamo):
    """The step count that `init` makes under vmap is laid out as that of later steps."""
    tx = fo.chain(fo.add_noise(0.1, 0.5, 0), fo.adam(0.1))
    params = torch.randn(4, 3, dtype=torch.float64)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    @torch.compile(backend=backend, fullgraph=True)
    @torch.vmap
    def step(params, state):
        updates, state = tx.update(params, state, params)
        return fo.apply_updates(params, updates), state

    state = torch.vmap(tx.init)(params)
    for _ in range(3):
        params, state = step(params, state)
    assert len(graphs) == 1


# ---------------------------------------------------------------- learning rates that are learnt
@pytest.fixture
def unrolled(load):
    """The example's run of 20 steps, as a function of its numbers, in float64."""
    learned = load("learned_lr")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    learned.MODEL = model.double().requires_grad_(False)
    data = [(torch.randn(6, 3, dtype=torch.float64), torch.randint(2, (6,))) for _ in range(21)]
    params = dict(model.named_parameters())
    numbers = learned.first_numbers(params)

    def loss(numbers):
        return learned.run(numbers, params, data[:-1], data[-1])

    yield loss, numbers
    importlib.reload(learned)


def test_the_meta_gradient_is_the_finite_difference(unrolled):
    loss, numbers = unrolled
    slopes = torch.func.grad(loss)(numbers)
    for path, slope in fo.tree.items(slopes):
        ends = []
        for h in (1e-4, -1e-4):
            moved = clone(numbers)
            dict(fo.tree.items(moved))[path].add_(h)
            ends.append(loss(moved))
        assert slope.abs() > 1e-6
        assert_close(slope, (ends[0] - ends[1]) / 2e-4, 1e-7)


def test_meta_gradients_are_vmapped(unrolled):
    loss, numbers = unrolled
    shifts = torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)

    def slope(shift):
        return torch.func.grad(loss)(fo.tree.map(lambda x: x + shift, numbers))

    together = torch.vmap(slope)(shifts)
    for i, shift in enumerate(shifts):
        assert_close(fo.tree.map(lambda x, i=i: x[i], together), slope(shift), 1e-12)


def test_meta_steps_lower_the_loss(load):
    _, losses = load("learned_lr").learn(20, 20)
    assert losses[-1] < 0.6 * losses[0]


# ---------------------------------------------------------------- gradients of single examples
def test_the_mean_of_the_examples_gradients_is_the_batchs(load, batches):
    dp = load("dp_sgd")
    model = load("digits").network().double()
    params = dict(model.named_parameters())
    x, y = batches[0]
    each = dp.each_gradient(params, x, y)
    whole = torch.func.grad(load("digits").loss_of, argnums=1)(model, params, x, y)
    assert_close(fo.tree.map(lambda g: g.mean(0), each), whole, 1e-13)


def test_the_private_network_learns(load):
    dp = load("dp_sgd")
    assert dp.train(dp.recipe(0.3, 1.0), 40) > 0.8


# ---------------------------------------------------------------- Hessian-vector products
@pytest.fixture
def curved(load):
    """The example, a function, where it is evaluated, and its Hessian there."""
    module = load("hessian_vector")
    torch.manual_seed(0)
    x, y = torch.randn(9, 3, dtype=torch.float64), torch.randn(9, 2, dtype=torch.float64)
    flat = torch.randn(8, dtype=torch.float64)

    def tree(flat):
        return {"w": flat[:6].reshape(3, 2), "b": flat[6:]}

    def loss(params):
        return (torch.tanh(x @ params["w"] + params["b"]) - y).square().sum()

    hessian = torch.func.hessian(lambda flat: loss(tree(flat)))(flat)
    return module, loss, tree, flat, hessian


def test_products_and_diagonals_are_the_hessians(curved):
    module, loss, tree, flat, hessian = curved
    v = torch.randn(8, dtype=torch.float64)
    assert_close(module.hessian_vector(loss, tree(flat), tree(v)), tree(hessian @ v), 1e-12)
    random = torch.Generator().manual_seed(0)
    diagonal = module.hessian_diagonal(loss, tree(flat), random, probes=4000)
    error = (hessian.square().sum(1) - hessian.diagonal().square()).sqrt() / 4000**0.5
    trees = (diagonal, tree(hessian.diagonal()), tree(error))
    for found, exact, sigma in zip(*map(fo.tree.leaves, trees), strict=True):
        assert ((found - exact).abs() < 4 * sigma).all()


def test_the_curvature_reaches_its_link_and_no_other(curved, capsys):
    module, loss, tree, flat, hessian = curved
    params = tree(flat)
    grads = torch.func.grad(loss)(params)
    tx = fo.chain(fo.clip_by_global_norm(1e9), module.scale_by_curvature(0.9, 0.0), fo.scale(2.0))
    given = tree(hessian.diagonal())
    updates, state = tx.update(grads, tx.init(params), params, hessian_diagonal=given)
    assert_close(updates, fo.tree.map(lambda g, h: 2 * g / h.abs(), grads, given), 1e-12)
    with pytest.raises(TypeError, match=r"extra argument diagonal, .* takes: hessian_diagonal"):
        tx.update(grads, state, params, diagonal=given)
    module.main([])
    ends = dict(re.findall(r"^(\w+) .*: (\S+)$", capsys.readouterr().out, re.MULTILINE))
    assert float(ends["curvature"]) < 1e-6 < 1 < min(float(ends["sgd"]), float(ends["adam"]))
    assert len((EXAMPLES / "hessian_vector.py").read_text().splitlines()) < 100


# ---------------------------------------------------------------- steps inside the backward pass
def test_steps_inside_backward_save_the_gradients_memory(load):
    module = load("in_backward")
    found = [module.compare(8, 256) for _ in range(2)]
    assert found[0] == found[1]  # nothing is left to chance
    sizes = found[0]
    saved = (sizes["usual"] - sizes["in backward"]) / sizes["gradients"]
    assert 0.8 < saved <= 1.0  # no more than there is: what is saved is gradients
    a = module.model_of(3, 8)
    b = copy.deepcopy(a)
    steps = module.usual(a, compile=False), module.in_backward(b, compile=False)
    for x in torch.randn(4, 5, 8):
        for step in steps:
            step(x)
    assert_close(list(a.parameters()), list(b.parameters()), 0.0)


def test_the_peak_is_what_was_alive_at_once(load):
    def run():
        a = torch.ones(1000)
        b = torch.ones(2000)
        del a
        return torch.ones(500) + b[:500]

    assert load("in_backward").peak(run) == 4 * 3000
