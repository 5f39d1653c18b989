"""Compiled steps of models with tensors of all kinds, of trees that look like those of the last
step, and of optimizer objects."""

import functools
import gc
import threading
import types
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import cases
import optree
import pytest
import torch
from helpers import assert_close, assert_same, clone, copy_of, make_grads, run
from objects import ADAM, BOTH, Pair, check_edit, edits

import functional_optim as fo
from functional_optim import adapters, kernels, tree
from functional_optim.engine.plan import filling

SIZES = {"small": 20, "medium": 5_000, "large": 40_000}  # serial, summed in cascades, parallel
# bfloat16 may round to the other neighbour; float64 shows a norm that float32 leaves are part of
TOLERANCE = {torch.float32: 1e-5, torch.complex64: 1e-5, torch.float64: 1e-7, torch.bfloat16: 8e-3}


@pytest.fixture(autouse=True)
def two_threads(seed_and_thread):
    """So that kernels of large tensors are parallel."""
    torch.set_num_threads(2)


def model(seed=0, more=0):
    """A tensor of every kind: size class, dtype, layout. more: longer by this."""
    torch.manual_seed(seed)
    params = {name: torch.randn(n + more) for name, n in SIZES.items()}
    params |= {f"row{i}": torch.randn(i + more + 1) for i in range(3)}
    params["scalar"] = torch.randn(())
    params["empty"] = torch.randn(0, 3)
    params["transposed"] = torch.randn(3 + more, 4).t()
    params["apart"] = torch.randn(6, 4 + more)[:, ::2]
    params |= {
        str(dtype): torch.randn(7 + more, dtype=dtype)
        for dtype in (torch.float64, torch.bfloat16, torch.complex64)
    }
    return params


def assert_near(got, wanted):
    """Equal to the rounding of each leaf's dtype."""
    for x, y in zip(fo.tree.leaves(got), fo.tree.leaves(wanted), strict=True):
        tolerance = TOLERANCE.get(x.dtype, 0.0)
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


def composed(lr=0.02):
    return cases.composed(lr, max_norm=0.5, decay=0.9)


def momentum(lr=0.05):
    return fo.sgd(lr, momentum=0.9)


# ---------------------------------------------------------------- fo.compile
def test_a_model_of_all_kinds_steps_as_by_the_update():
    tx, params = composed(), model()
    step, grads = fo.compile(tx), make_grads(params, 5)
    wanted = run(tx, params, grads)
    got, state = clone(params), tx.init(params)
    for g in grads:
        got, state = step(g, state, got)
    assert_near((got, state), wanted)
    assert kernels.count() > 0


def test_numbers_that_somebody_else_has_written_are_read_again():
    tx, params = fo.nadam(0.1), {"w": torch.ones(3)}
    state, step = tx.init(params), fo.compile(tx)
    (grads,) = make_grads(params, 1)
    for count in (0, 1, 7):
        state.step.fill_(count)
        for carried in state.carry.values():
            carried.fill_(0.5 + 0.1 * count)
        wanted = run(tx, clone(params), [grads], clone(state))
        params, state = step(grads, state, params)
        assert_near((params, state), wanted)


def test_a_view_of_every_other_column_leaves_its_neighbours_alone():
    """Plain SGD has no slot whose layout would betray that of the parameter."""
    whole = torch.randn(3, 8)
    before, params = whole.clone(), {"w": whole[:, ::2]}
    tx, (grads,) = fo.sgd(0.1), make_grads(params, 1)
    fo.compile(tx)(grads, tx.init(params), params)
    assert_near(whole[:, ::2], before[:, ::2] - 0.1 * grads["w"])
    assert_same(whole[:, 1::2], before[:, 1::2])


def test_a_learning_rate_tensor_is_read_at_every_step():
    lr = torch.tensor(0.05, dtype=torch.float64)
    tx, params = momentum(lr), model()
    step, state, known = fo.compile(tx), tx.init(params), None
    wanted, reference = clone(params), tx.init(params)
    for i, g in enumerate(make_grads(params, 4)):
        lr.fill_(0.05 / (1 + i))
        wanted, reference = run(tx, wanted, [g], reference)
        params, state = step(g, state, params)
        known = known or kernels.count()
    assert_near((params, state), (wanted, reference))
    assert kernels.count() == known


def test_donated_tensors_are_the_ones_returned():
    tx, params = composed(), model()
    state = tx.init(params)
    (grads,) = make_grads(params, 1)
    before, given = clone(grads), optree.tree_leaves((params, state))
    pointers, versions = [x.data_ptr() for x in given], [x._version for x in given]
    returned = optree.tree_leaves(fo.compile(tx)(grads, state, params))
    assert all(x is y for x, y in zip(returned, given, strict=True))
    assert [x.data_ptr() for x in returned] == pointers
    constants = {id(x) for x in state.hyper.values()}
    stepped = [i for i, x in enumerate(returned) if id(x) not in constants]
    assert all(returned[i]._version > versions[i] for i in stepped)
    assert_same(grads, before)


def test_without_donation_the_arguments_stay():
    tx, params = composed(), model()
    step, (grads,) = fo.compile(tx, donate=False), make_grads(params, 1)
    arguments = (grads, tx.init(params), params)
    before, versions = clone(arguments), [x._version for x in optree.tree_leaves(arguments)]
    first = step(*arguments)
    assert_same(arguments, before)
    assert [x._version for x in optree.tree_leaves(arguments)] == versions
    assert_same(step(*arguments), first)
    assert_near(first, run(tx, params, [grads]))


def test_matrices_of_one_shape_share_a_kernel_and_a_transposed_one_runs_eagerly():
    def update(u, slots, p):
        return u.mean(-1, keepdim=True) - u, slots

    tx = fo.leafwise(None, update, name="centred rows")
    params = {"a": torch.randn(3, 4), "b": torch.randn(4, 3).t(), "c": torch.randn(5, 6)}
    (grads,) = make_grads(params, 1)
    before, wanted = kernels.count(), run(tx, params, [grads] * 3)
    step, state = fo.compile(tx), tx.init(params)
    for _ in range(3):
        params, state = step(grads, state, params)
    assert_near((params, state), wanted)
    assert kernels.count() == before + 1


# ---------------------------------------------------------------- threads
def train(seed, turn=None):
    """Steps over large tensors, with gradients that depend on where they have come to."""
    random = torch.Generator().manual_seed(seed)
    shapes = [(300, 200), (100,), (70_000,)]
    params = [torch.nn.Parameter(torch.randn(s, generator=random)) for s in shapes]
    opt = adapters.AdamW(params, lr=0.01 * (seed + 1), weight_decay=0.1)
    pull = torch.randn((), generator=random)
    for i in range(200):
        for p in params:
            p.grad = p.detach() * pull + 0.1 * i
        if turn is not None and i % 20 == 0:
            turn.wait()
        opt.step()
    return copy_of(params), [dict(opt.state[p]) for p in params]


def test_two_optimizers_step_at_once_as_each_would_alone():
    alone, turn, found = [train(seed) for seed in (0, 1)], threading.Barrier(2), {}

    def note(seed):
        found[seed] = train(seed, turn)

    threads = [threading.Thread(target=note, args=(seed,)) for seed in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_same([found[seed] for seed in (0, 1)], alone)


# ---------------------------------------------------------------- the optimizer object
COMPILED = Pair("AdamW", adapters.AdamW, torch.optim.AdamW, ADAM, BOTH)


@pytest.mark.parametrize(("pair", "edit"), edits([COMPILED]))
def test_an_edit_counts_from_the_next_compiled_step(pair, edit):
    check_edit(pair, edit, 1e-10)


def configuration():
    flags = torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_threads()
    return *flags, [*warnings.filters]


def test_compiling_changes_no_setting_of_torch():
    def rule(u, slots, p, c):
        return c * u.cos(), slots  # new to this process

    before, known = configuration(), kernels.count()
    tx = fo.leafwise(None, rule, lambda t: (-0.1,), name="cosine")
    params = {"w": torch.randn(10), "v": torch.randn(40_000)}
    fo.compile(tx)(clone(params), tx.init(params), params)
    assert kernels.count() > known
    assert configuration() == before


# ---------------------------------------------------------------- trees that look like the last
class Branch(NamedTuple):
    first: torch.Tensor
    second: list[torch.Tensor]


TREES = {
    "list": lambda x: [x(3), x(2, 3)],
    "dict": lambda x: {"b": x(3), "a": x(2, 3)},
    "nested": lambda x: {
        "b": Branch(x(3), [x(2), x(4)]),
        "a": (x(2, 3), OrderedDict(z=x(1), y=x(2))),
    },
    "none": lambda x: {"a": None, "b": [x(3)], "c": ()},
}


def stepped(make, steps=3):
    """A step of a tree, and what it goes on with."""
    tx = fo.adam(0.1)
    params = make(torch.ones)
    state, step = tx.init(params), fo.compile(tx)
    grads = tree.map(torch.ones_like, params)
    for _ in range(steps):
        params, state = step(grads, state, params)
    return tx, step, grads, state, params


@pytest.mark.parametrize("kind", TREES)
def test_steps_of_the_same_trees(kind):
    tx, _, grads, state, params = stepped(TREES[kind])
    start = TREES[kind](torch.ones)
    assert_close((params, state), run(tx, start, [grads] * 3), 1e-6)


OTHERS: dict[str, Callable[[Any, Any], Any]] = {
    "one leaf more": lambda g, p: ({**g, "more": torch.ones(1)}, p),
    "one leaf less": lambda g, p: ({name: g[name] for name in list(g)[:-1]}, p),
    "another mapping": lambda g, p: (OrderedDict(g), p),
    "deeper": lambda g, p: ({**g, "a": [g["a"]]}, p),
    "no gradient": lambda g, p: ({**g, "a": None}, p),
    "another parameter": lambda g, p: (g, {**p, "a": 2 * p["a"]}),
    "another layout": lambda g, p: ({**g, "a": g["a"].t().contiguous().t()}, p),
    "another dtype": lambda g, p: ({**g, "a": g["a"].double()}, p),
    "another shape": lambda g, p: ({**g, "a": g["a"].t()}, p),
    "another order of keys": lambda g, p: (dict(reversed(g.items())), dict(reversed(p.items()))),
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_smallest_difference_is_seen(name):
    """Trees that are not those of the last step end where the pure update does, or are refused."""
    tx, step, grads, state, params = stepped(TREES["dict"])
    grads, params = OTHERS[name](grads, params)
    before = clone((params, state))
    try:
        wanted = run(tx, clone(params), [grads], clone(state))
    except ValueError:
        with pytest.raises(ValueError, match="params and grads"):
            step(grads, state, params)
        wanted = before
    else:
        step(grads, state, params)
    assert_close((params, state), wanted, 1e-6)


OBJECTS = {
    "adamw": adapters.AdamW,
    "nadam": adapters.NAdam,
    "clipped": lambda params: adapters.Optimizer(
        params, lambda: fo.chain(fo.clip_by_global_norm(1.0), fo.adam(0.1))
    ),
}


@pytest.mark.parametrize("kind", OBJECTS)
def test_an_optimizer_is_freed_when_the_last_name_is_deleted(kind):
    """Its plan does not hold it: its slots would stay until the next garbage collection. Each of
    its steps raises the versions of what it writes."""
    params = [torch.nn.Parameter(torch.ones(n)) for n in (3, 5)]
    opt = OBJECTS[kind](params)
    for p in params:
        p.grad = torch.ones_like(p)
    for _ in range(3):
        before = [p._version for p in params]
        opt.step()
        assert all(p._version > x for p, x in zip(params, before, strict=True))
    there = weakref.ref(opt)
    gc.collect()
    gc.disable()
    try:
        del opt
        assert there() is None
    finally:
        gc.enable()


def test_a_write_of_a_number_is_in_c_where_no_subclass_sees_it():
    """For `commit`, which makes such writes without letting a signal handler between."""
    plain = filling(torch.zeros(2), 1.0)
    assert isinstance(plain, functools.partial)
    assert isinstance(plain.func, types.BuiltinFunctionType)
    other = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    write = filling(other, 1.0)
    assert not isinstance(write, functools.partial)
    write()
    assert other.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("donate", [True, False])
def test_a_step_on_the_meta_device_has_shapes_only(donate):
    params = {"w": torch.ones(2, 3, device="meta"), "b": torch.ones((), device="meta")}
    tx = fo.apply_if_finite(fo.chain(fo.clip_by_global_norm(1.0), fo.adam(0.1)), 2)
    step, state = fo.compile(tx, donate=donate), tx.init(params)
    for _ in range(2):
        params, state = step(params, state, params)
    assert [(x.device.type, x.shape) for x in params.values()] == [("meta", (2, 3)), ("meta", ())]
    assert state.step.is_meta


@pytest.mark.parametrize("inference", [False, True])
def test_the_state_has_the_numbers_of_its_last_step_whoever_wrote_it_before(inference):
    """Two compiled steps by turns on one state, and a state that was loaded."""
    with torch.inference_mode(inference):
        params, grads = {"w": torch.ones(3)}, {"w": torch.ones(3)}
        for make in (fo.sgd, fo.adamw):
            txs = {rate: make(rate) for rate in (0.1, 0.5)}
            steps = {rate: fo.compile(tx) for rate, tx in txs.items()}
            state = txs[0.1].init(params)
            for rate in (0.1, 0.5, 0.1, 0.1, 0.5, 0.5):
                steps[rate](grads, state, params)
                assert fo.get(state, "lr") == rate
            other = fo.load_state_dict(txs[0.1].init(params), fo.state_dict(state, params), params)
            steps[0.5](grads, other, params)
            assert fo.get(other, "lr") == 0.5
