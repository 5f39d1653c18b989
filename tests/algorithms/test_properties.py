"""Every case through every property that it can have."""

import optree
import pytest
import torch
from cases import ABILITIES, CASES, able
from helpers import (
    as_parameters,
    assert_close,
    assert_finite,
    assert_same,
    clone,
    copy_of,
    make_grads,
    run,
    step_object,
    through_file,
)
from sampling import some
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import functional_optim as fo
from functional_optim import adapters, schedules

REAL = (torch.float64, torch.float32)
HALF = (torch.bfloat16, torch.float16)
COMPLEX = (torch.complex128, torch.complex64)
EXACT = 1e-12
"""Float64 rounding over a few steps; every effect tested here is above 1e-3."""
LEAST = 1e-5
"""More than Rprop moves in three steps of its least size, 1e-6."""


def each_tensor(x: float) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


# ---------------------------------------------------------------- pure functions
@pytest.mark.parametrize("case", able())
def test_arguments_are_untouched(case):
    tx, params = case.tx(), case.params()
    _, state = run(tx, params, make_grads(params, 2))
    arguments = (make_grads(params, 1)[0], state, params)
    before, versions = clone(arguments), [x._version for x in optree.tree_leaves(arguments)]
    tx.init(params)
    updates, _ = tx.update(*arguments)
    fo.apply_updates(params, updates)
    assert_same(arguments, before)
    assert [x._version for x in optree.tree_leaves(arguments)] == versions


@pytest.mark.parametrize("case", able())
def test_a_new_state_owns_its_memory(case):
    params = case.params()
    tensors = [x for x in optree.tree_leaves((case.tx().init(params), params)) if x.numel()]
    assert len({x.data_ptr() for x in tensors}) == len(tensors)


@pytest.mark.parametrize(
    ("case", "dtypes", "others"),
    [
        pytest.param(*row.values, dtypes, others, id=f"{row.id}-{str(dtypes[0])[6:]}")
        for dtypes, others, needs in (
            (REAL, HALF, ()),
            (HALF, REAL, ("half",)),
            (COMPLEX, COMPLEX[::-1], ("complex",)),
        )
        for row in able(*needs)
    ],
)
def test_structure_and_dtypes_stay(case, dtypes, others):
    """For gradients of the parameters' dtype, and of another."""
    for dtype, other in zip(dtypes, others, strict=True):
        for own in (dtype, other):
            check_structure(case, dtype, own)


def check_structure(case, dtype, grad_dtype):
    tx, params = case.tx(), case.params(dtype)
    state = tx.init(params)
    for grads in make_grads(params, 2, dtype=grad_dtype):
        updates, after = tx.update(grads, state, params)
        moved = fo.apply_updates(params, updates)
        for old, new in ((state, after), (params, moved)):
            assert optree.tree_structure(old) == optree.tree_structure(new)
            for x, y in zip(optree.tree_leaves(old), optree.tree_leaves(new), strict=True):
                assert (x.dtype, x.shape, x.device) == (y.dtype, y.shape, y.device)
        assert_finite((after, moved))
        state, params = after, moved


def check_half(case):
    """A half precision step is the float32 step rounded once."""
    for dtype in HALF:
        params = case.params(dtype)
        (grads,) = make_grads(params, 1)
        wide = optree.tree_map(lambda x: x.float(), (params, grads))
        got, _ = run(case.tx(), params, [grads])
        exact, _ = run(case.tx(), wide[0], [wide[1]])
        assert_same(got, optree.tree_map(lambda x, dtype=dtype: x.to(dtype), exact))


# ---------------------------------------------------------------- trees
def nested(p):
    return {"a": [p[0], (p[1], {"x": None})], "b": {"c": p[2:]}}


@pytest.mark.parametrize(
    "shape", [nested, list, tuple, lambda p: {f"k{i}": x for i, x in enumerate(p)}]
)
@pytest.mark.parametrize("case", able())
def test_every_tree_of_the_same_leaves_moves_alike(case, shape):
    params = case.params()
    grads = make_grads(params)
    flat, flat_state = run(case.tx(), params, grads)
    tree, state = run(
        case.tx(), shape(list(params.values())), [shape(list(g.values())) for g in grads]
    )
    assert_same(optree.tree_leaves(tree), list(flat.values()))
    assert_same(optree.tree_leaves(state), optree.tree_leaves(flat_state))


@pytest.mark.parametrize("case", able())
def test_a_tensor_is_a_tree(case):
    p, grads = case.params()["matrix"], make_grads(case.params())
    alone, _ = run(case.tx(), p, [g["matrix"] for g in grads])
    assert_same(alone, run(case.tx(), [p], [[g["matrix"]] for g in grads])[0][0])


# ---------------------------------------------------------------- hyperparameters as arguments
@pytest.mark.parametrize("case", able())
def test_a_tensor_hyperparameter_is_its_number(case):
    params = case.params()
    grads = make_grads(params)
    tensors = case.tx(**case.knobs(each_tensor))
    assert_close(run(tensors, params, grads), run(case.tx(), params, grads), EXACT)


def check_schedule(case):
    """A constant schedule is its number."""
    params = case.params()
    grads = make_grads(params)
    constant = case.tx(**case.knobs(schedules.constant))
    assert_close(run(constant, params, grads), run(case.tx(), params, grads), EXACT)


def check_vmap(case):
    """A batch of hyperparameters equals the loop."""
    params = case.params()
    grads = make_grads(params)
    factors = (0.9, 1.0, 0.95)
    batch = case.knobs(lambda x: torch.tensor([x * f for f in factors], dtype=torch.float64))
    together = torch.vmap(lambda knobs: run(case.tx(**knobs), params, grads))(batch)
    for i, f in enumerate(factors):
        alone = run(case.tx(**case.knobs(lambda x, f=f: x * f)), params, grads)
        assert_close(optree.tree_map(lambda x, i=i: x[i], together), alone, case.rounding)


def check_ensemble(case):
    """An ensemble equals the loop."""
    tx, members = case.tx(), [case.params(seed=i) for i in range(3)]
    grads = [make_grads(p, 2, seed=i) for i, p in enumerate(members)]
    states = [tx.init(p) for p in members]
    stack = optree.tree_map(lambda *xs: torch.stack(xs), *zip(members, grads, states, strict=True))
    together = torch.vmap(lambda p, g, s: run(tx, p, g, s))(*stack)
    for i, p in enumerate(members):
        got = optree.tree_map(lambda x, i=i: x[i], together)
        assert_close(got, run(tx, p, grads[i]), case.rounding)


def check_meta(case):
    """The meta gradient is the finite difference."""
    params = case.params()
    grads = make_grads(params)
    knobs = case.knobs(lambda x: each_tensor(x).requires_grad_())
    # a difference cannot be seen through an iteration in bfloat16
    knobs = knobs if case.rounding == EXACT else {"lr": knobs["lr"]}
    leaves, spec = optree.tree_flatten(knobs)

    def loss(*values: Tensor) -> Tensor:
        moved, state = run(case.tx(**optree.tree_unflatten(spec, values)), params, grads)
        # slots count too, or an average's decay would not matter
        return sum(x.square().sum() for x in optree.tree_leaves((moved, state.slots)))

    # the dtype of carried numbers, whose rounding a difference sees
    torch.set_default_dtype(torch.float64)
    assert torch.autograd.gradcheck(loss, leaves, eps=1e-6, atol=1e-6, rtol=1e-6)
    torch.set_default_dtype(torch.float32)
    lr = each_tensor(case.hyper["lr"]).requires_grad_()
    moved, _ = run(case.tx(lr=lr), params, grads)
    assert abs(torch.autograd.grad(sum(p.sum() for p in moved.values()), lr)[0]) > 1e-3


# ---------------------------------------------------------------- complex numbers, graphs
def check_complex(case):
    """Complex numbers are pairs."""
    params = case.params(torch.complex128)
    grads = make_grads(params)
    pairs = optree.tree_map(torch.view_as_real, (params, grads))
    got, state = run(case.tx(), params, grads)
    real, real_state = run(case.tx(), *pairs)
    parts = lambda x: torch.view_as_real(x) if x.is_complex() else x  # noqa: E731
    views = optree.tree_map(parts, (got, state.slots))
    assert_same(views, (real, real_state.slots))


FUNCTIONALISED = ("sgd", "adam", "adafactor", "muon", "soap", "composed")
"""Whose graphs are also taken apart into operations that write nothing."""


def check_graph(case):
    """One graph serves all hyperparameters and equals eager."""
    torch._dynamo.reset()  # all recipes share the code of one update
    recipe, static = case.recipe, case.static

    def step(knobs, params, state, grads):
        updates, state = recipe(**static, **knobs).update(grads, state, params)
        return fo.apply_updates(params, updates), state

    check_one_graph(case, step, "aot_eager" if case.name in FUNCTIONALISED else "eager")


def check_one_graph(case, step, backend):
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(step, backend=counter, fullgraph=True)
    params = {n: p for n, p in case.params().items() if n in ("scalar", "transposed")}
    eager = traced = (params, case.tx().init(params))
    frames = []
    for i, grads in enumerate(make_grads(params, 4)):
        grads = {n: torch.empty_like(params[n]).copy_(g) for n, g in grads.items()}
        knobs = case.knobs(lambda x, i=i: each_tensor(x * (1 - i / 10)))
        eager, traced = step(knobs, *eager, grads), compiled(knobs, *traced, grads)
        assert_close(traced, eager, case.rounding)
        frames.append(counter.frame_count)
    # Dynamo traces twice before the first step ends if a Python float turns out to be a constant
    assert frames == [frames[0]] * 4


GRAPHS = able("graph")


@pytest.mark.xfail(
    torch.__version__ < "2.12", reason="torch 2.11 cannot return a NamedTuple that it has replaced"
)
@pytest.mark.parametrize("case", some(GRAPHS, 8, [x for x in GRAPHS if x.id == "normuon"]))
def test_one_graph_serves_all_hyperparameters_of_a_state(case, fresh_dynamo):
    """Of a transformation that is made outside of the graph."""
    tx = case.tx()

    def step(knobs, params, state, grads):
        updates, state = tx.update(grads, state, params)
        smaller = {key: 0.9 * x for key, x in state.hyper.items()}
        return fo.apply_updates(params, updates), state._replace(hyper=smaller)

    check_one_graph(case, step, "eager")


# ---------------------------------------------------------------- the optimizer object
def make_object(case, params, *, groups=1):
    size = -(-len(params) // groups)
    cut = [{"params": params[i : i + size]} for i in range(0, len(params), size)]
    return adapters.Optimizer(cut, case.recipe, compile=False, **case.hyper)


def check_object(case):
    """The object equals the functional loop."""
    params = case.params()
    grads = make_grads(params, 5)
    moved, state = run(case.tx(), params, grads)
    mine = as_parameters(params)
    opt = make_object(case, mine)
    step_object(opt, grads)
    assert_close(copy_of(mine), list(moved.values()), EXACT)
    for key, tree in state.slots.items():
        assert_close([opt.state[p].get(key) for p in mine], list(tree.values()), EXACT)
    assert all(opt.state[p]["step"] == 5 for p in mine)


@pytest.mark.parametrize("case", able("object"))
def test_groups_of_equal_settings_are_one_group(case):
    params = case.params()
    one, three = as_parameters(params), as_parameters(params)
    step_object(a := make_object(case, one), make_grads(params))
    step_object(b := make_object(case, three, groups=3), make_grads(params))
    assert len(b.param_groups) == 3
    summed = any(placement.rule.reduce for placement in case.tx().placements)
    tolerance = EXACT if summed else 0.0  # of a sum that is put together from those of groups
    assert_close(copy_of(one), copy_of(three), tolerance)
    assert_close([a.state[p] for p in one], [b.state[p] for p in three], tolerance)


@pytest.mark.parametrize("case", able("object"))
def test_resumed_is_uninterrupted(case):
    params = case.params()
    grads = make_grads(params, 6)
    through = as_parameters(params)
    step_object(a := make_object(case, through), grads)

    first = as_parameters(params)
    step_object(opt := make_object(case, first), grads[:3])
    loaded = through_file({"params": copy_of(first), "opt": opt.state_dict()})
    second = [torch.nn.Parameter(p) for p in loaded["params"]]
    b = make_object(case, second)
    b.load_state_dict(loaded["opt"])
    step_object(b, grads[3:])
    assert_same(copy_of(second), copy_of(through))
    assert_same([b.state[p] for p in second], [a.state[p] for p in through])


# ---------------------------------------------------------------- edges
@pytest.mark.parametrize("case", able())
def test_a_missing_gradient_leaves_its_leaf_alone(case):
    """Some may be missing, or all, and there may be no parameter."""
    tx, params = case.tx(), case.params()
    params, state = run(tx, params, make_grads(params, 2))
    (grads,) = make_grads(params, 1, seed=7)
    for missing in (params.keys() & {"cube", "scalar", "transposed"}, params.keys()):
        updates, after = tx.update(grads | dict.fromkeys(missing), state, params)
        moved = fo.apply_updates(params, updates)
        for name in missing:
            assert updates[name] is None
            assert_same(moved[name], params[name])
            for key, tree in state.slots.items():
                assert_same(after.slots[key][name], tree[name])
        assert torch.equal(moved["matrix"], params["matrix"]) == ("matrix" in missing)
        assert after.step == state.step + 1
    assert tx.update({}, tx.init({}), {})[0] == {}


@pytest.mark.parametrize("case", able())
def test_strides_do_not_matter(case):
    tx, params = case.tx(), case.params()
    grads = make_grads(params)
    apart = {
        name: torch.stack([p, p], dim=-1)[..., 0] if p.dim() else p for name, p in params.items()
    }
    columns = [
        {n: g.mT.contiguous().mT if g.dim() > 1 else g for n, g in tree.items()} for tree in grads
    ]
    assert_close(run(tx, apart, columns), run(tx, params, grads), EXACT)


@pytest.mark.parametrize("case", able())
def test_zero_gradients_make_no_nan(case):
    for dtype in REAL if "half" in case.cannot else REAL + HALF:
        params = case.params(dtype)
        zeros = [optree.tree_map(torch.zeros_like, params)] * 3
        assert_finite(run(case.tx(), params, zeros))
        null = optree.tree_map(torch.zeros_like, params)
        assert_finite(run(case.tx(), null, zeros))


def check_rest(case):
    """A learning rate of zero moves nothing."""
    params = case.params()
    for zero in (0.0, each_tensor(0.0)):
        moved, state = run(case.tx(lr=zero), params, make_grads(params))
        assert_close(moved, params, LEAST)
        assert_finite(state)


@pytest.mark.parametrize("case", able("object", "rest"))
def test_an_object_survives_zero_gradients_and_no_gradients(case):
    mine = as_parameters(case.params(torch.float32))
    opt = adapters.Optimizer(mine, case.recipe, compile=False, **{**case.hyper, "lr": 0.0})
    before = copy_of(mine)
    step_object(opt, [[None] * len(mine)])
    assert not opt.state
    step_object(opt, [[torch.zeros_like(p) for p in mine]] * 2)
    assert_close(copy_of(mine), before, LEAST)
    assert_finite([opt.state[p] for p in mine])


@pytest.mark.parametrize("case", able())
def test_converges_on_a_quadratic(case):
    params, target = case.params(seed=0), case.params(seed=1)

    def height(p):
        return sum(0.5 * (1 + i) * (p[n] - target[n]).square().sum() for i, n in enumerate(p))

    tx = case.tx()
    state, start = tx.init(params), height(params)
    for i in range(200):
        if i % 25 == 0 and height(params) < 0.05 * start:
            return
        grads = torch.func.grad(lambda p: -case.sign * height(p))(params)
        updates, state = tx.update(grads, state, params)
        params = fo.apply_updates(params, updates)
    assert height(params) < 0.05 * start


# ---------------------------------------------------------------- what a case can and cannot do
LIKE_ADAM = (
    "adabelief", "adadelta", "adagrad", "adamax", "adan", "ademamix", "adopt", "asgd", "cocob",
    "fromage", "laprop", "lion", "mars", "nadam", "radam", "rmsprop", "sophia", "sparse_adam",
    "stable_adamw", "yogi",
)  # fmt: skip
"""Whose graphs, a second each, are those of Adam's but for its operations."""
LIKE_OTHERS = ("adamuon", "apollo", "dadapt_adam", "dion2", "kl_shampoo", "muon_adamw", "normuon")
"""Whose graphs, of two to ten seconds, are those of Muon, GaLore, Prodigy, Shampoo and KL-SOAP."""
LATE = (*LIKE_ADAM, *LIKE_OTHERS)
CHECKS = {name: globals()[f"check_{name}"] for name in sorted(ABILITIES)}


@pytest.mark.parametrize(
    ("case", "ability"),
    [
        pytest.param(*row.values, ability, id=f"{row.id}-{ability}", marks=[*row.marks, *late])
        for ability in CHECKS
        for row in able(ability, costly=ability == "graph")
        for late in [[pytest.mark.full] if ability == "graph" and row.id in LATE else []]
    ],
)
def test_what_a_case_can_do(case, ability):
    CHECKS[ability](case)


@pytest.mark.parametrize(
    ("case", "ability"),
    [pytest.param(c, a, id=f"{c.name}-{a}") for c in CASES for a in sorted(c.cannot)],
)
def test_what_a_case_cannot_do_raises(case, ability):
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        CHECKS[ability](case)


def test_the_table_is_sound():
    assert len({case.name for case in CASES}) == len(CASES)
    assert all(case.cannot <= ABILITIES for case in CASES)
    assert all("lr" in case.hyper for case in CASES)
