"""Steps as one graph of torch.compile: what is not made of one-tensor rules alone, and anything by
`backend="torch"`. Graphs, donation, fallbacks."""

import copy
import functools
import pickle
import warnings

import made
import pytest
import torch
from helpers import assert_close, assert_same, clone, make_grads
from sampling import some
from torch.fx.experimental.proxy_tensor import make_fx

import functional_optim as fo
from functional_optim.engine import graph_step
from functional_optim.kernels import callers

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "no_graphs")
COMPILE = torch.compile


@pytest.fixture
def no_graphs(monkeypatch):
    """As if this process had compiled no step, and warned of nothing."""
    monkeypatch.setattr(graph_step, "_shared", {})
    monkeypatch.setattr(callers, "_warned", set())


class Counter:
    """A backend of torch.compile that counts graphs, and runs them as they stand."""

    frame_count = 0

    def __call__(self, graph, inputs):
        self.frame_count += 1
        return graph.forward


@pytest.fixture
def graphs(monkeypatch):
    """Counts the graphs; run without Inductor, which takes seconds for each."""
    counter = Counter()
    monkeypatch.setattr(torch, "compile", functools.partial(COMPILE, backend=counter))
    return counter


def tree():
    return {"a": torch.tensor([1.0, -2.0, 0.5]), "b": torch.tensor([[0.3, 0.1]])}


compiled = functools.partial(fo.compile, backend="torch")


def extra(tx):
    return {"commit": True} if "commit" in tx.required else {}


def stepped(tx, donate, steps=4):
    params, grads = tree(), make_grads(tree(), steps)
    state, step = tx.init(params), None if donate is None else compiled(tx, donate=donate)
    for g in grads:
        if step is None:
            updates, state = tx.update(g, state, params, **extra(tx))
            params = fo.apply_updates(params, updates)
        else:
            params, state = step(g, state, params, **extra(tx))
    return params, state


def noisy(lr, gamma=0.55):
    return fo.chain(fo.flatten(fo.add_noise(0.1, gamma, seed=3)), fo.sgd(lr))


def computing(lr):
    return fo.chain(fo.add_decayed_weights(0.1 * lr), fo.scale_by_lr(lr))


recorded = fo.factory(computing)


NUMBERS = {
    "noise": noisy,
    "leafwise": lambda lr: fo.chain(fo.clip_by_global_norm(1.0), fo.adamw(lr), fo.params_ema(0.9)),
    "leafwise, a schedule": lambda lr: fo.lamb(fo.schedules.linear(lr, 0.01, 5)),
    "several": lambda lr: fo.flatten(fo.adam(lr, betas=(lr, 0.9), weight_decay=lr)),
    "partition": lambda lr: fo.keep_snapshots(fo.partition({"x": fo.sgd(lr)}, {"*": "x"})),
    "schedule": lambda lr: fo.flatten(fo.sgd(fo.schedules.linear(lr, 0.01, 5))),
    "with_schedule": lambda lr: fo.with_schedule(computing, lr=lr),
    "factory": lambda lr: fo.flatten(recorded(lr)),
}


@pytest.mark.parametrize("name", some(NUMBERS, 0, ["noise", "leafwise, a schedule"]))
def test_a_number_is_no_reason_to_compile_again(name, graphs):
    counts = []
    for i in range(3):
        tx = NUMBERS[name](0.1 + 0.01 * i)
        assert_close(stepped(tx, True), stepped(tx, None), 1e-6)
        counts.append(graphs.frame_count)
    assert counts[0] == counts[-1]


@pytest.mark.parametrize(
    ("one", "other"),
    some(
        [
            (fo.flatten(fo.sgd(0.1, momentum=0.0)), fo.flatten(fo.sgd(0.1, momentum=0.9))),
            (noisy(0.1), fo.chain(fo.flatten(fo.add_noise(0.1, 0.55, seed=4)), fo.sgd(0.1))),
            (fo.flatten(fo.sgd(0.1)), fo.flatten(fo.sgd(0.1, maximize=True))),
        ],
        2,
    ),
)
def test_what_chooses_the_graph_is_told_apart(one, other, graphs):
    for tx in (one, other):
        assert_close(stepped(tx, False), stepped(tx, None), 1e-6)
    assert graphs.frame_count == 2


FEW = torch._dynamo.config.patch(recompile_limit=2, accumulated_recompile_limit=3)
"""Graphs of one function after which torch.compile gives up."""


@FEW
def test_any_model_and_any_pattern_of_missing_gradients_is_compiled_once(graphs):
    names, tx = "abc", fo.flatten(fo.sgd(0.5))
    step = fo.compile(tx)
    for _ in range(2):
        for n, bits in ((1, 7), (2, 7), (2, 0), (2, 1)):
            params = {name: torch.zeros(n) for name in names}
            there = {name: bits >> i & 1 for i, name in enumerate(names)}
            grads = {name: torch.ones(n) if there[name] else None for name in names}
            step(grads, tx.init(params), params)
            assert [-2 * params[name][0].item() for name in names] == list(there.values())
    assert graphs.frame_count == 4


def test_old_graphs_are_forgotten_except_by_steps_that_use_them(graphs, monkeypatch):
    monkeypatch.setattr(graph_step, "MOST", 2)
    params, tx = tree(), fo.flatten(fo.sgd(0.5))
    state, step = tx.init(params), compiled(tx)
    for each in (tx, fo.flatten(fo.sgd(0.5, momentum=0.9)), tx, fo.flatten(fo.lion(0.5))):
        stepped(each, True)
        step(params, state, params)
    assert (graphs.frame_count, len(graph_step._shared)) == (3, 2)
    stepped(tx, True)
    assert graphs.frame_count == 4


def rounded(lr):
    """A recipe that cannot do with a tensor."""
    return fo.scale_by_lr(round(lr, 3))


def test_a_number_that_cannot_be_an_input_is_a_constant(graphs):
    for lr in (0.1, 0.2):
        tx = fo.flatten(fo.factory(rounded)(lr))
        assert_close(stepped(tx, True), stepped(tx, None), 1e-6)


NESTED = {
    "noise": noisy(0.1),
    "flatten": fo.flatten(fo.sgd(0.5, momentum=0.9)),
    "snapshots": fo.keep_snapshots(fo.adamw(0.1), last=2),
    "snapshots of the whole": fo.keep_snapshots(fo.flatten(fo.adamw(0.1)), last=3),
    "committed": fo.commit_if(fo.flatten(fo.adam(0.1))),
    "committed snapshots": fo.commit_if(fo.keep_snapshots(fo.adam(0.1))),
    "committed inside": fo.chain(fo.commit_if(fo.adam(0.1)), fo.flatten(fo.scale(0.5))),
    "snapshots of committed": fo.keep_snapshots(fo.commit_if(fo.flatten(fo.adam(0.1)))),
    "accumulate": fo.accumulate(fo.flatten(fo.adam(0.1)), every=2),
    "lookahead": fo.lookahead(fo.flatten(fo.adam(0.1)), sync_period=2),
    "with_schedule": fo.with_schedule(computing, lr=0.3),
    "lbfgs": fo.scale_by_lbfgs(3),
    "local": fo.local_sgd(fo.flatten(fo.adam(0.1)), every=2),
    "diloco": fo.diloco(fo.keep_snapshots(fo.adam(0.1)), fo.sgd(0.1), every=2),
    "frozen": fo.chain(fo.freeze("a"), fo.flatten(fo.adam(0.1))),
    "replaced": fo.adam(0.1)._replace(),
    "leafwise": fo.accumulate(fo.chain(fo.clip_by_global_norm(1.0), fo.adamw(0.1)), 2),
    "leafwise, packed": fo.stored(fo.adafactor(0.1), "int8", min_size=0),
}
KEEP = ("snapshots of the whole", "committed inside", "lookahead", "lbfgs", "diloco", "leafwise")


@pytest.mark.parametrize("name", some(NESTED, keep=KEEP))
def test_a_step_writes_into_the_old_tensors_and_nothing_else_or_changes_none(name, graphs):
    tx, (params, grads) = NESTED[name], (tree(), make_grads(tree(), 3))
    wanted = stepped(tx, None, 3)
    step, state, kept = compiled(tx), tx.init(params), clone(grads)
    known, before = params, dict(params)
    for i, g in enumerate(grads):
        slots = {id(x) for x in fo.tree.leaves(state)}
        params, state = step(g, state, params, **extra(tx))
        assert all(params[name] is known[name] is before[name] for name in known)
        leaves = fo.tree.leaves((params, state))
        assert len({id(x) for x in leaves}) == len(leaves)
        assert i < 1 or {id(x) for x in fo.tree.leaves(state)} == slots
    assert_close((params, state), wanted, 1e-6)
    step, (params, state) = compiled(tx, donate=False), (tree(), tx.init(tree()))
    for g in grads:
        given = clone((state, params))
        after = step(g, state, params, **extra(tx))
        assert_same((state, params), given)
        params, state = after
    assert_close((params, state), wanted, 1e-6)
    assert_same(grads, kept)


def test_a_rollback_after_donating_steps(graphs):
    """The parameters of the last step are in the state: it is not overwritten with the present."""
    tx = fo.keep_snapshots(fo.flatten(fo.sgd(1.0)), last=2)
    w = torch.zeros(2)
    step, state = fo.compile(tx), tx.init(w)
    for g in (1.0, 2.0):
        w, state = step(torch.full((2,), g), state, w)
    assert w.tolist() == [-3.0, -3.0]
    assert fo.rollback(state)[0].tolist() == [-1.0, -1.0]
    assert fo.rollback(state, steps=2)[0].tolist() == [0.0, 0.0]


def test_a_refused_step_changes_nothing(graphs):
    tx, params = fo.commit_if(fo.flatten(fo.adam(0.1))), tree()
    step, state, (g,) = fo.compile(tx), tx.init(params), make_grads(params, 1)
    before = clone((params, state))
    params, state = step(g, state, params, commit=False)
    assert_same((params, state), before)


def test_a_graph_that_is_tried_and_found_to_write_wrongly_is_not_used(monkeypatch):
    """As torch's own did: the same step by a graph that writes nothing is right."""

    def forgetful(graph, inputs):
        for node in [x for x in graph.graph.nodes if x.target == "copy_"]:
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
        graph.recompile()
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(COMPILE, backend=forgetful))
    tx = fo.flatten(fo.adam(0.1))
    assert_close(stepped(tx, True), stepped(tx, None), 1e-6)


RECIPES = {
    "composed": lambda lr: fo.chain(fo.clip_by_global_norm(0.5), fo.adamw(lr), fo.params_ema(0.9)),
    "noise": noisy,
    "rows": fo.adafactor,
    "packed": lambda lr: fo.stored(fo.adamw(lr), "int8", min_size=0),
    "products": lambda lr: fo.masked(fo.soap(lr), "weight"),
}


@pytest.mark.parametrize("name", some(RECIPES))
def test_inductor_trains_a_module_in_place_and_compiles_once(name):
    net, recipe = torch.nn.Linear(4, 3), RECIPES[name]
    params = dict(net.named_parameters())
    expected = {key: p.detach().clone() for key, p in params.items()}
    state, other, by_kernels = [recipe(0.1).init(expected) for _ in range(3)]
    mine, (g,), counts = clone(expected), make_grads(expected, 1), []
    for lr in (0.1, 0.05, 0.02):
        tx = recipe(lr)
        _, state = compiled(tx)(g, state, params)
        mine, by_kernels = fo.compile(tx)(g, by_kernels, mine)
        updates, other = tx.update(g, other, expected)
        expected = fo.apply_updates(expected, updates)
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert_close(dict(net.named_parameters()), expected, 1e-5)
    assert_close(mine, expected, 1e-5)
    assert len(set(counts)) == 1


def test_under_make_fx_and_vmap_it_is_plain_operations(graphs):
    tx = fo.keep_snapshots(fo.sgd(1.0))
    w = torch.zeros(3, 2)
    state = torch.vmap(tx.init)(w)
    moved, after = torch.vmap(fo.compile(tx, donate=False))(torch.ones(3, 2), state, w)
    assert moved.tolist() == [[-1.0, -1.0]] * 3
    assert after.past[0].params.tolist() == w.tolist()
    params = torch.zeros(2)
    own, step = tx.init(params), fo.compile(tx)
    make_fx(lambda g: step(g, own, params)[0])(torch.ones(2))  # tracing is a step, too
    assert params.tolist() == [-1.0, -1.0]
    step, own = fo.compile(tx), tx.init(params)
    step(torch.ones(2), own, params)
    assert params.tolist() == [-2.0, -2.0]


def failing(fn, **options):
    def call(*args):
        raise OSError("g++ is on holiday")

    return call


@pytest.mark.parametrize("donate", [True, False])
def test_without_a_compiler_the_update_runs_and_one_warning_says_so(monkeypatch, donate):
    monkeypatch.setattr(torch, "compile", failing)
    for lr in (0.1, 0.2):
        tx = noisy(lr)
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            got = stepped(tx, donate)
        assert_same(got, stepped(tx, None))
        said = [str(w.message) for w in heard]
        assert len(said) == (lr == 0.1)
        assert all("torch.compile failed (OSError: g++ is on holiday)" in text for text in said)


def test_a_strict_step_raises_and_writes_nothing(monkeypatch):
    tx, params = noisy(0.1), tree()
    state, (g,) = tx.init(params), make_grads(params, 1)
    before = clone((state, params))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "compile", failing)
        step = fo.compile(tx, strict=True)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"a strict step must be compiled, .* holiday"):
                step(g, state, params)
        assert_same((state, params), before)


def test_a_sparse_gradient_runs_eagerly_without_a_word(graphs):
    tx = fo.keep_snapshots(fo.sgd(0.5))
    w = torch.ones(3, 2)
    g = torch.tensor([[0.0, 0.0], [1.0, 1.0], [0.0, 0.0]]).to_sparse(1)
    got, _ = fo.compile(tx)(g, tx.init(w), w)
    assert got is w
    assert w.tolist() == [[1.0, 1.0], [0.5, 0.5], [1.0, 1.0]]
    assert not graphs.frame_count


@pytest.mark.parametrize("way", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copied_step_uses_the_same_graph(way, graphs):
    tx, params = made.WHOLE, tree()
    step, (g,) = fo.compile(tx, donate=False), make_grads(params, 1)
    wanted = step(g, tx.init(params), params)
    assert_same(way(step)(g, tx.init(params), params), wanted)
    assert graphs.frame_count == 1


def test_a_hand_made_pair_is_compiled(graphs):
    def update(grads, state, params=None, *, factor=1.0):
        return fo.tree.map(lambda g: -factor * g, grads), state

    tx = fo.GradientTransformation(lambda params: fo.EmptyState(), update)
    step, params = fo.compile(tx), {"w": torch.zeros(2)}
    for factor in (0.5, 0.25, 0.25):
        step({"w": torch.ones(2)}, fo.EmptyState(), params, factor=factor)
    assert params["w"].tolist() == [-1.0, -1.0]
    assert graphs.frame_count == 1
