"""Sparse gradients, beside torch's own classes."""

import math
from typing import NamedTuple

import pytest
import torch
from helpers import assert_close, assert_same, run, step_object
from ways import WAYS, step_in

import functional_optim as fo
from functional_optim import adapters

EXACT = 1e-12
STEPS = 14

SGD = [{}, {"maximize": True}, {"momentum": 0.9}, {"momentum": 0.9, "dampening": 0.4}]
SGD += [{"momentum": 0.9, "nesterov": True}]
ADAGRAD = [{}, {"lr_decay": 0.1, "initial_accumulator_value": 0.2}, {"maximize": True}]
ADAM = [{}, {"betas": (0.5, 0.8), "eps": 1e-3}, {"maximize": True}]
SETTINGS = [
    pytest.param(name, {"lr": 0.1, **hyper}, id=f"{name}-{'-'.join(hyper) or 'plain'}")
    for name, every in (("SGD", SGD), ("Adagrad", ADAGRAD), ("SparseAdam", ADAM))
    for hyper in every
]
every_setting = pytest.mark.parametrize(("name", "hyper"), SETTINGS)
dense = [s for s in SETTINGS if s.values[0] != "SparseAdam"]
dense_too = pytest.mark.parametrize(("name", "hyper"), dense)
TOUCHED = 5
"""Of 6 rows: the last one never has a gradient."""
LAYOUTS = {"vector": ((6,), 1), "rows": ((6, 3), 1), "entries": ((6, 3), 2)}
LAYOUTS |= {"slabs": ((6, 2, 3), 1), "fibres": ((6, 2, 3), 2)}
"""Shapes, and how many of their dimensions are sparse; the others are dense (hybrid tensors)."""

# torch's own Adagrad makes a sparse tensor without saying whether to check it
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")


def make_sparse(shape, dims, count, at=None):
    """An uncoalesced gradient of `count` values, in which indices occur more than once."""
    limits = (TOUCHED, *shape[1:dims])
    index = torch.stack([torch.randint(limit, (count,)) for limit in limits])
    if count > 1:
        index[:, -1] = index[:, 0]
    values = torch.randn(count, *shape[dims:], dtype=torch.float64)
    return torch.sparse_coo_tensor(index, values, shape, check_invariants=True)


def gradients(shape, dims):
    """One a step, of various counts; one of them has no value at all."""
    torch.manual_seed(1)
    return [make_sparse(shape, dims, 0 if i == 5 else 2 + i % 4) for i in range(STEPS)]


def both(name, params, hyper):
    """Torch's class and ours, each over its own copy."""
    mine, other = ([torch.nn.Parameter(p.clone()) for p in params] for _ in range(2))
    ours = getattr(adapters, name)(mine, compile=False, **hyper)
    return [(getattr(torch.optim, name)(other, **hyper), other), (ours, mine)]


def assert_states_close(ours, mine, theirs, other):
    """Of the slots, and of what a sparse slot of torch's is where it is dense."""
    for p, q in zip(mine, other, strict=True):
        a, b = ours.state.get(p, {}), theirs.state.get(q, {})
        assert a.keys() == b.keys()
        for key, x in b.items():
            whole = x.to_dense() if isinstance(x, torch.Tensor) and x.is_sparse else x
            assert_close(a[key], whole, EXACT)


@pytest.mark.parametrize("layout", LAYOUTS)
@every_setting
def test_duplicate_indices_and_hybrid_tensors_step_as_in_torch(name, hyper, layout):
    shape, dims = LAYOUTS[layout]
    torch.manual_seed(0)
    start = torch.randn(shape, dtype=torch.float64)
    (theirs, (q,)), (ours, (p,)) = both(name, [start], hyper)
    for g in gradients(shape, dims):
        assert not (g._nnz() and g.is_coalesced())
        kept, mine = p.detach().clone(), g.clone()
        for opt, x, own in ((theirs, q, g), (ours, p, mine)):
            x.grad = own
            opt.step()
        assert p.grad is mine
        assert_same((mine._indices(), mine._values()), (g._indices(), g._values()))
        assert_close(p.detach(), q.detach(), EXACT)
        assert_states_close(ours, [p], theirs, [q])
        if not hyper.get("momentum"):
            untouched = (g.to_dense() == 0).reshape(6, -1).all(1)
            assert untouched.any()
            assert_same(p.detach()[untouched], kept[untouched])
    assert_same(p.detach()[TOUCHED:], start[TOUCHED:])
    assert not torch.equal(p[:TOUCHED], start[:TOUCHED])


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
@dense_too
def test_a_dense_and_a_sparse_parameter_in_one_optimizer_take_turns(name, hyper, compile):
    start = torch.ones(6, 3, dtype=torch.float64)
    (theirs, other), (ours, mine) = both(name, [start, start], hyper)
    ours.compile = compile
    for i, g in enumerate(gradients((6, 3), 1)):
        dense, first = torch.randn(6, 3, dtype=torch.float64), int(i % 3 == 0)
        if hyper.get("momentum"):
            first = 0  # torch keeps a buffer that is sparse
        for opt, params in ((theirs, other), (ours, mine)):
            params[first].grad, params[1 - first].grad = g.clone(), dense.clone()
            opt.step()
        assert_close([p.detach() for p in mine], [q.detach() for q in other], EXACT)


# ---------------------------------------------------------------- recipes
@pytest.mark.parametrize(
    ("recipe", "name"), [(fo.sgd, "SGD"), (fo.adagrad, "Adagrad"), (fo.sparse_adam, "SparseAdam")]
)
def test_the_functional_loop_equals_torch(recipe, name):
    start = torch.ones(6, 3, dtype=torch.float64)
    grads = gradients((6, 3), 1)
    theirs, (q,) = both(name, [start], {"lr": 0.1})[0]
    for g in grads:
        q.grad = g.clone()
        theirs.step()
    moved, _ = run(recipe(lr=0.1), {"w": start}, [{"w": g} for g in grads])
    assert_close(moved["w"], q.detach(), EXACT)
    assert_same(moved["w"][TOUCHED:], start[TOUCHED:])


@pytest.mark.parametrize("as_object", [False, True], ids=["functional", "object"])
def test_a_global_norm_adds_duplicates_before_it_squares(as_object):
    def recipe(lr, max_norm):
        return fo.chain(fo.clip_by_global_norm(max_norm), fo.sgd(lr))

    hyper = {"lr": 0.1, "max_norm": 0.5}
    starts = [torch.ones(6, 3, dtype=torch.float64), torch.ones(4, dtype=torch.float64)]
    grads = [[g, torch.randn(4, dtype=torch.float64)] for g in gradients((6, 3), 1)]
    dense = [[g.to_dense(), x] for g, x in grads]
    assert all(torch.cat([x.flatten() for x in pair]).norm() > 0.5 for pair in dense)
    results = []
    for some in (grads, dense):
        if not as_object:
            results.append(run(recipe(**hyper), starts, some)[0])
            continue
        mine = [torch.nn.Parameter(p.clone()) for p in starts]
        opt = adapters.Optimizer(mine, recipe, compile=False, **hyper)
        step_object(opt, some)
        results.append([p.detach() for p in mine])
    assert_close(*results, EXACT)


# ---------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("name", "hyper", "dense"),
    [
        ("Adagrad", {"weight_decay": 0.1}, False),
        ("Adam", {}, False),
        ("AdamW", {"amsgrad": True}, False),
        ("RAdam", {}, False),
        ("SparseAdam", {}, True),
        ("SGD", {"fused": True}, False),
        ("SGD", {"fused": True, "momentum": 0.9}, False),
        ("Adagrad", {"fused": True}, False),
        ("Adagrad", {"fused": True, "weight_decay": 0.1}, False),
        ("Adam", {"fused": True}, False),
    ],
)
def test_what_torch_refuses_beside_a_good_gradient_is_refused_in_its_words(name, hyper, dense):
    torch.manual_seed(0)
    told = []
    for opt, (p, q) in both(name, [torch.ones(6, 3), torch.ones(6, 3)], {"lr": 0.1, **hyper}):
        good, bad = make_sparse((6, 3), 1, 3).float(), torch.ones(6, 3)
        p.grad, q.grad = (good, bad) if dense else (bad, good)
        with pytest.raises(Exception) as info:  # noqa: PT011 — compared with torch's own
            opt.step()
        told.append((info.type, str(info.value)))
    assert told[0] == told[1]


@pytest.mark.parametrize("name", ["SparseAdam", "Adagrad"])
def test_a_sparse_parameter_is_refused_in_torchs_words(name):
    told = []
    for cls in (getattr(torch.optim, name), getattr(adapters, name)):
        with pytest.raises(Exception) as info:  # noqa: PT011 — compared with torch's own
            cls([torch.ones(2, 2).to_sparse()])
        told.append((info.type, str(info.value)))
    assert told[0] == told[1]


class Columns(NamedTuple):
    columns: torch.Tensor


def columns(p):
    """Slots that have no rows."""
    return Columns(p.new_zeros(p.shape[1:]))


WHOLE = {
    "accumulate": lambda: fo.accumulate(fo.sgd(1.0), 2),  # each batch has other rows
    "monitor": lambda: fo.monitor({"n": fo.measures.global_norm}, per_tensor=True),
    # averages of weights also move in rows that have no gradient now
    "params_ema": lambda: fo.chain(fo.sgd(0.1), fo.params_ema(0.9)),
    "polyak_average": lambda: fo.chain(fo.sgd(0.1), fo.polyak_average(0.0)),
    "asgd": fo.asgd,
    "lookahead": lambda: fo.lookahead(fo.sgd(0.1)),
    "schedule_free": fo.schedule_free_sgd,
    "gpa": lambda: fo.gpa(fo.sgd(0.1)),
    # behind the first step slots differ in rows that have no gradient now
    "dowg": fo.dowg,
    "prodigy": fo.prodigy,
    "dadapt_adam": fo.dadapt_adam,
    "muon": lambda: fo.muon(0.1),
    "normuon": lambda: fo.normuon(0.1),
    "adamuon": lambda: fo.adamuon(0.1),
    "dion2": lambda: fo.dion2(0.1),
    "scion": lambda: fo.scion(0.1),
    "scion of kernels": lambda: fo.scion(0.1, norm="spectral_conv"),
    "soap": lambda: fo.soap(0.1),
    "packed": lambda: fo.stored(fo.adam(0.1), "int8", where="*", min_size=0),
    "columns": lambda: fo.leafwise(columns, lambda u, x, p: (u, Columns(x.columns + u.sum(0)))),
    "a norm": lambda: fo.leafwise(None, lambda u, x, p: (u / u.norm(), x), name="unit"),
    "cautious": lambda: fo.cautious(fo.flatten(fo.trace(0.9))),
    "parts of a matrix": lambda: fo.as_matrix(fo.muon(0.1), split=2),
}


HIDING = {
    "closed gate": lambda tx: (fo.apply_if_finite(tx(0.1), 3), math.inf),
    "decay of 0": lambda tx: (tx(fo.schedules.linear(0.0, 0.2, 4)), 1.0),
}


@pytest.mark.parametrize("case", HIDING.values(), ids=HIDING)
def test_a_first_step_that_changes_nothing_does_not_let_later_ones_pass(case):
    """What rules need was found out once, with the numbers of the first step."""
    clip = fo.clip_by_global_norm(1.0)
    tx, first = case(lambda decay: fo.chain(fo.add_decayed_weights(decay), clip, fo.sgd(0.1)))
    w = torch.ones(4, 2)
    state = tx.init(w)
    _, state = tx.update(
        torch.sparse_coo_tensor([[1]], torch.full((1, 2), first), (4, 2)), state, w
    )
    with pytest.raises(RuntimeError, match="clip_by_global_norm does not take sparse gradients"):
        tx.update(torch.sparse_coo_tensor([[1]], torch.ones(1, 2), (4, 2)), state, w)


@pytest.mark.parametrize("step", [0, 1])
def test_each_variant_of_a_rule_is_asked(step):
    def rows(u, slots, p):
        return -0.1 * u, slots

    def mixed(u, slots, p):
        return -0.1 * u.sort(0).values, slots

    runs = fo.Runs(choose=lambda t: fo.numeric.where(t > 1, 1, 0))
    tx = fo.leafwise(None, (rows, mixed), runs=runs, name=f"mixed from {step}")
    g, w = torch.sparse_coo_tensor([[1, 3]], torch.ones(2, 2), (5, 2)), torch.ones(5, 2)
    state = tx.init(w)._replace(step=torch.tensor(step))
    if step == 0:
        _, state = tx.update(g, state, w)
    with pytest.raises(RuntimeError, match="does not take sparse gradients"):
        tx.update(g, state, w)


def test_a_large_number_does_not_hinder_a_sparse_gradient():
    tx = fo.leafwise(None, lambda u, slots, p, n: (u, slots), lambda t: (2**70,), name="large")
    g, w = torch.sparse_coo_tensor([[1]], torch.ones(1, 2), (5, 2)), torch.ones(5, 2)
    assert_same(tx.update(g, tx.init(w), w)[0].to_dense(), g.to_dense())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", WHOLE)
def test_a_rule_that_must_see_all_rows_refuses_some_of_them(name, way):
    params = {"dense": torch.ones(6, 4), "sparse": torch.ones(6, 4)}
    grads = {"dense": torch.eye(6, 4), "sparse": make_sparse((6, 4), 1, 2).float()}
    with pytest.raises(RuntimeError, match="does not take sparse gradients, since it"):
        step_in(way, WHOLE[name], params, grads)
    for p in params.values():
        assert_same(p, torch.ones(6, 4))


AROUND_TREES = {
    "flag": lambda tx: fo.commit_if(tx),
    "finite": lambda tx: fo.apply_if_finite(tx, 2),
    "mask": lambda tx: fo.conditionally_mask(tx, lambda step: step != 1),
    "transform": lambda tx: fo.conditionally_transform(tx, lambda step: step != 1),
    "scale": lambda tx: fo.dynamic_loss_scale(tx, 2.0),
}


@pytest.mark.parametrize("inner", [fo.sgd(0.1), fo.flatten(fo.sgd(0.1))], ids=["rows", "whole"])
@pytest.mark.parametrize("name", AROUND_TREES)
def test_a_gate_around_a_transformation_of_trees_takes_rows(name, inner):
    tx = AROUND_TREES[name](fo.GradientTransformation(inner.init, inner.update))
    params, grads = torch.ones(6, 4), [make_sparse((6, 4), 1, k).float() for k in (2, 0, 3, 2)]
    grads[2] = grads[2] * float("nan") if name == "finite" else grads[2]
    ends = []
    for own in (grads, [g.to_dense() for g in grads]):
        p, state = params, tx.init(params)
        for k, g in enumerate(own):
            flag = {"commit": torch.tensor(k != 1)} if name == "flag" else {}
            p, state = run(tx, p, [g], state, **flag)
        ends.append((p, state))
    assert_close(*ends, 1e-6)


@pytest.mark.parametrize("rows", [1, 2])
def test_a_sparse_complex_update_is_added(rows):
    """torch adds the real parts of a single row with the number next to them."""
    p, values = torch.randn(5, 1, dtype=torch.complex128), torch.randn(rows, 1) + 1j
    g = torch.sparse_coo_tensor(torch.arange(rows)[None], values.to(p.dtype), (5, 1))
    tx = fo.sgd(0.1)
    u, _ = tx.update(g, tx.init(p), p)
    assert torch.equal(fo.apply_updates(p, u), p + u.to_dense())
