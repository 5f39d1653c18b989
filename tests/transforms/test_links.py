"""Every link that no algorithm has, and every combination, through every way of running it."""

import pickle

import optree
import pytest
import torch
from cases import CASES
from helpers import assert_close, assert_same, clone, through_file
from links import COMBINED, LINKS, READING, SHAPES, all_but_vectors, inside, rows
from torch._dynamo.testing import CompileCounterWithBackend

import functional_optim as fo
from functional_optim import adapters, projections
from functional_optim.core.leafwise import Leafwise

REAL = (torch.float64, torch.float32, torch.bfloat16)
REFUSING = [case for case in LINKS if case.real]
LATE = ("box", "hypercube", "linf_ball", "l1_ball", "l1_sphere", "l2_sphere", "ema-biased")
LATE += ("momo-corrected", "momo-fstar", "momo_adam", "sign", "decay-independent", "apply_delta")
LATE += ("cautious_weight_decay", "set_to_zero", "clip_by_trust_ratio", "keep_params_nonnegative")
LATE += ("monitor-around", "cautious-masked")
"""Whose graphs are those of other rows, but for an operation."""
GRAPHS = [
    pytest.param(x, marks=[pytest.mark.full] if x.name in LATE else [], id=x.name)
    for x in (*LINKS, *READING, *COMBINED)
]
TAKING = [case for case in (*LINKS, *READING) if not case.real]


# ---------------------------------------------------------------- the functional loop
@pytest.mark.parametrize("case", rows(*LINKS, *READING))
def test_arguments_are_untouched_and_states_keep_their_form(case):
    for dtype in REAL if case.real else (*REAL, torch.complex64):
        tx, params = case.recipe(), case.params(dtype)
        (grads,) = case.grads(params, 1)
        state = tx.init(params)
        before = clone((grads, state, params))
        updates, after = tx.update(grads, state, params, **case.given(0))
        moved = fo.apply_updates(params, updates)
        assert_same((grads, state, params), before)
        for old, new in ((state, after), (params, moved)):
            assert optree.tree_structure(old) == optree.tree_structure(new)
            for x, y in zip(optree.tree_leaves(old), optree.tree_leaves(new), strict=True):
                assert (x.dtype, x.shape) == (y.dtype, y.shape)
                assert torch.isfinite(y).all()


# a mask may ask for the number of dimensions
@pytest.mark.parametrize("case", [c for c in rows(*TAKING) if c.id != "decay-masked"])
def test_complex_numbers_are_pairs(case):
    params = case.params(torch.complex128)
    grads = case.grads(params, 3)
    views = optree.tree_map(torch.view_as_real, (params, grads))
    got, _ = case.run(case.recipe(), params, grads)
    expected, _ = case.run(case.recipe(), *views)
    assert_same(optree.tree_map(torch.view_as_real, got), expected)


@pytest.mark.parametrize("case", rows(*REFUSING))
def test_complex_parameters_are_refused_where_they_make_no_sense(case):
    params = case.params(torch.complex64)
    with pytest.raises((TypeError, RuntimeError), match=r"real parameters|complex parameters"):
        case.recipe().init(params)
    mine = [torch.nn.Parameter(p) for p in params.values()]
    for p in mine:
        p.grad = torch.ones_like(p)
    if case.name == "orthogonalize":  # a rule for matrices refuses at construction
        with pytest.raises(TypeError, match="real parameters"):
            adapters.Optimizer(mine, case.recipe)
        return
    opt = adapters.Optimizer(mine, case.recipe, compile=False)
    for _ in range(2):  # it must not pass the second time
        with pytest.raises((TypeError, RuntimeError), match=r"real parameters|complex parameters"):
            opt.step()


@pytest.mark.usefixtures("doubles")
@pytest.mark.parametrize("case", rows(*LINKS, *READING, *COMBINED))
def test_an_ensemble_equals_the_loop(case):
    """vmap goes over states, too, but not over the None of a missing slot."""
    tx, members = case.recipe(), [case.params(seed=i) for i in range(3)]
    grads = [case.grads(case.params(seed=5 * i), case.steps)[i:] for i in range(3)]
    grads = [own[: case.steps - 2] for own in grads]  # so that gates open at other times

    def go(p, g, *state):
        return case.run(tx, p, g, *state)[: 2 if state else 1]

    each = list(zip(members, grads, strict=True))
    given = [(p, g, tx.init(p)) if case.batched else (p, g) for p, g in each]
    together = torch.vmap(go)(*optree.tree_map(lambda *xs: torch.stack(xs), *given))
    for i, own in enumerate(given):
        got = optree.tree_map(lambda x, i=i: x[i], together)
        assert_close(got, go(*own), case.rounding)


@pytest.mark.usefixtures("doubles")
@pytest.mark.parametrize("case", rows(*LINKS, *READING, *COMBINED))
def test_a_batch_of_learning_rates_equals_the_loop(case):
    params = case.params()
    grads = case.grads(params, case.steps - 2)
    lrs = torch.tensor([0.1, 0.03], dtype=torch.float64)
    state = case.recipe().init(params)
    together = torch.vmap(lambda lr: case.run(case.recipe(lr), params, grads, state)[0])(lrs)
    for i, lr in enumerate(lrs):
        alone, _ = case.run(case.recipe(lr), params, grads)
        assert_close(optree.tree_map(lambda x, i=i: x[i], together), alone, case.rounding)


# ---------------------------------------------------------------- graphs and kernels
@pytest.mark.usefixtures("fresh_dynamo")
def test_paths_in_a_graph_are_those_outside():
    def paths(params):
        found = []
        fo.tree.map_with_path(lambda path, x: found.append(path), params)
        return found

    x = torch.ones(1)
    params = {"b": [x, (x, {3: x})], "a": {"c": x}}
    traced = torch.compile(paths, backend="eager", fullgraph=True)(params)
    assert sorted(traced) == paths(params) == ["a.c", "b.0", "b.1.0", "b.1.1.3"]


@pytest.mark.usefixtures("fresh_dynamo", "doubles")
@pytest.mark.parametrize("case", GRAPHS)
def test_one_full_graph_equals_eager(case):
    def step(lr, params, state, grads, given):
        updates, state = case.recipe(lr).update(grads, state, params, **given)
        return fo.apply_updates(params, updates), state

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, backend=counter, fullgraph=True)
    every = case.params()
    few = {*every} - {"cube", "kernel", *(["vector"] if case.name != "decay-masked" else [])}
    params = {name: p for name, p in every.items() if name in few}
    eager = traced = (params, case.recipe().init(params))
    frames = []
    for i, whole in enumerate(case.grads(every, case.steps)):
        grads = {name: whole[name] for name in params}
        lr = torch.tensor(0.1 / (1 + i), dtype=torch.float64)
        eager = step(lr, *eager, grads, case.given(i))
        traced = compiled(lr, *traced, grads, case.given(i))
        assert_close(traced, eager, case.rounding)
        frames.append(counter.frame_count)
    # Dynamo traces twice before the first step ends if a Python float turns out to be a constant
    assert frames == [frames[0]] * case.steps


def around(*links):
    return lambda: fo.chain(*links, fo.scale_by_lr(0.1))


def after(*links):
    return lambda: fo.chain(fo.scale_by_lr(0.1), *links)


def bounded(*these):
    return [fo.named_chain((f"n{i}", inside(fn, **own)())) for i, (fn, own) in enumerate(these)]


COMPILED = {
    "elementwise": around(
        *(fo.zero_nans(), fo.clip_by_value(2.0), fo.ema(0.9), fo.add_decayed_weights(0.1)),
        *(fo.sign(), fo.monitor({"l1": lambda x: x.abs().sum(), "mean": fo.measures.mean})),
        *(fo.normalize(0.5), fo.snapshot("size", fo.measures.rms, of="params")),
    ),
    "sets": after(
        fo.add_decayed_weights(0.1, independent=True, mask=all_but_vectors),
        fo.keep_params_nonnegative(),
        *bounded(
            (projections.box, {"lower": 0.1, "upper": 0.9}),
            (projections.l2_ball, {"scale": 1.1}),
            (projections.simplex, {"scale": 0.9}),
        ),
    ),
    "shapes": around(
        *(fo.centralize(), fo.adaptive_grad_clip(0.1), fo.clip_by_block_rms(0.5)),
        *(fo.cautious(fo.scale_by_adam()), fo.scale_by_trust_ratio(eps=1e-3)),
    ),
    "matrix": around(fo.orthogonalize(scale="match_rms_adamw")),
    "polyak": around(fo.scale_by_polyak(0.1)),
    "momo": lambda: fo.momo(0.2, weight_decay=0.1),
    "momo_adam": lambda: fo.momo_adam(0.2, weight_decay=0.1),
}
MIXED = {"cube": torch.float32, "matrix": torch.float64, "vector": torch.bfloat16}
ROUNDING = {torch.float32: 1e-5, torch.complex64: 1e-5, torch.float64: 1e-9, torch.bfloat16: 1e-2}


# torch.compile itself warns about its own use of a deprecated module in a fresh process
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.usefixtures("fresh_dynamo", "doubles")
@pytest.mark.parametrize("name", COMPILED)
def test_kernels_equal_the_functional_loop(name):
    tx = COMPILED[name]()
    dtypes = {"matrix": torch.float32} if name == "matrix" else dict(MIXED)
    if name.startswith("momo"):  # whose numbers depend on sums over all
        dtypes = dict.fromkeys(MIXED, torch.float64)
    if name in ("elementwise", "polyak"):
        dtypes["kernel"] = torch.complex64
    torch.manual_seed(3)
    trees = [
        {n: torch.randn(SHAPES[n], dtype=dtype) for n, dtype in dtypes.items()} for _ in range(4)
    ]
    params, grads = trees[0], trees[1:]
    if name == "elementwise":
        grads[1]["cube"][0, 1, 1] = torch.nan
    step = fo.compile(tx, strict=isinstance(tx, Leafwise))
    mine, state = clone(params), tx.init(params)
    theirs, expected = params, tx.init(params)
    for g in grads:
        given = {"value": torch.tensor(2.0)} if "value" in tx.extra else {}
        updates, expected = tx.update(g, expected, theirs, **given)
        theirs = fo.apply_updates(theirs, updates)
        mine, state = step(g, state, mine, **given)
        for key, dtype in dtypes.items():
            assert_close(mine[key], theirs[key], 2e-2 if name == "matrix" else ROUNDING[dtype])
    if isinstance(state, fo.State):
        assert_close(state.carry, expected.carry, 1e-5)


# ---------------------------------------------------------------- the optimizer object
def make_object(case, params):
    mine = {name: torch.nn.Parameter(p.detach().clone()) for name, p in params.items()}
    return adapters.Optimizer(mine.items(), case.recipe, compile=False), mine


def step(case, opt, mine, grads, at=0):
    for i, g in enumerate(grads, start=at):
        for name, p in mine.items():
            p.grad = g[name].clone()
        opt.step(lambda i=i: case.given(i).get(case.extra, 0.0))


@pytest.mark.usefixtures("doubles")
@pytest.mark.parametrize("case", rows(*LINKS, *READING, *COMBINED))
def test_the_object_equals_the_loop_and_resumes(case):
    """From a file, and from a pickle where the recipe stands in a module."""
    for dtype in (torch.float64, torch.bfloat16):
        params, half = case.params(dtype), case.steps // 2 + 1
        grads = case.grads(params, case.steps)
        moved, state = case.run(case.recipe(), params, grads)
        opt, mine = make_object(case, params)
        step(case, opt, mine, grads[:half])
        loaded, own = make_object(case, mine)
        loaded.load_state_dict(through_file(opt.state_dict()))
        copies = [(loaded, own)]
        copies += [pickle.loads(pickle.dumps((opt, mine)))] if case in COMBINED else []
        step(case, opt, mine, grads[half:], half)
        ends = {name: p.detach() for name, p in mine.items()}
        for other, tensors in copies:
            step(case, other, tensors, grads[half:], half)
            assert_same({name: p.detach() for name, p in tensors.items()}, ends)
        if dtype is torch.float64 or case not in COMBINED:
            assert_close(ends, moved, case.rounding)
        slots = state.slots.items() if isinstance(case.recipe(), Leafwise) else ()
        for key, name, x in [(key, *pair) for key, own in slots for pair in own.items()]:
            kept = opt.state.get(mine[name], {}).get(key)
            assert (kept is None) == (x is None)
            if dtype is torch.float64 and x is not None:
                assert_close(kept, x, case.rounding)


def test_an_object_hands_its_closures_loss_to_a_link_that_needs_a_value():
    w = torch.nn.Parameter(torch.tensor([3.0, -4.0]))
    opt = adapters.Optimizer([w], fo.polyak_sgd)

    def closure():
        opt.zero_grad()
        loss = w.square().sum() / 2
        loss.backward()
        return loss

    opt.step(closure)
    assert w.tolist() == [1.5, -2.0]  # a step of f / |g|² = 12.5 / 25
    with pytest.raises(RuntimeError, match=r"call opt\.step\(closure\)"):
        opt.step()


def test_a_row_stands_for_every_link():
    """Here, or in the table of algorithms."""
    known = {"scale_by_lr", "scale_by_lbfgs", "scale_by_backtracking_linesearch"}
    known |= {"scale_by_path", "scale_by_soap"}  # made of others
    known |= {"scale_by_gauss_newton"}  # which reads residuals, see tests/least_squares
    made = [*[case.recipe() for case in LINKS], *[case.tx() for case in CASES]]
    known |= {x.name for tx in made for x in getattr(tx, "placements", ())}
    assert {name for name in dir(fo) if name.startswith("scale_by_")} <= known
