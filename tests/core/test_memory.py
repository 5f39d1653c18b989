"""Tensors that a step writes in place share no memory: neither parameters nor their slots."""

import re
from typing import NamedTuple

import pytest
import torch

import functional_optim as fo
from functional_optim import adapters
from functional_optim.core import memory


def places(tensors):
    return {x.untyped_storage().data_ptr() for x in tensors}


def names(i):
    return f"tensor {i}"


def views(x):
    return {
        "the same": (x, x),
        "equal views": (x[:4], x[:4]),
        "in part": (x[:4], x[2:]),
        "the last element": (x[:4], x[3:]),
        "one inside another": (x, x[3:4]),
        "a column and a row": (x.view(2, 4)[:, 1], x.view(2, 4)[1]),
        "other strides": (x[::2], x[::3]),
        "another dtype": (x, x.view(torch.uint8)[4:6]),
        "a third behind a short one": (x[::2], x[1:2], x[4:5]),
        "folded": (x[:3].as_strided((2, 2), (1, 1)),),
        "expanded": (x[:1].expand(3),),
    }


def apart(x):
    return {
        "halves": (x[:4], x[4:]),
        "interleaved": (x[::2], x[1::2]),
        "columns": tuple(x.view(2, 4).unbind(1)),
        "interleaved pairs": (x.view(2, 2, 2)[:, 0], x.view(2, 2, 2)[:, 1]),
        "transposed": (x.view(2, 4).t(), torch.zeros(3)),
        "nothing": (x[:0], x, x[3:3]),
        "without memory": (x.to("meta"), x.to("meta")),
        "strides that fold nothing": (x.as_strided((2, 2), (3, 2)),),
    }


@pytest.mark.parametrize("kind", [*views(torch.zeros(8)), *apart(torch.zeros(8))])
def test_shared_memory_is_found_and_nothing_else(kind):
    x = torch.zeros(8)
    if kind in views(x):
        words = r"tensor [01] (and tensor [12] share|has several).*\.$"
        with pytest.raises(ValueError, match=words):
            memory.check_apart(views(x)[kind], names)
    else:
        memory.check_apart(apart(x)[kind], names)


def test_overlaps_are_what_writing_finds():
    """Random views of one storage, against the elements that each of them changes."""
    torch.manual_seed(0)
    both = set()
    for _ in range(300):
        x, found = torch.zeros(32, dtype=torch.int64), []
        for _ in range(2):
            shape = torch.randint(1, 4, (2,)).tolist()
            strides = torch.randint(0, 6, (2,)).tolist()
            found.append(x.as_strided(shape, strides, int(torch.randint(0, 8, ()))))
        for view in found:
            x.index_add_(0, view_places(x, view), torch.ones(view.numel(), dtype=torch.int64))
        shared = bool((x > 1).any())
        both.add(shared)
        try:
            memory.check_apart(found, names)
        except ValueError:
            assert shared
        else:
            assert not shared
    assert both == {True, False}


def view_places(x, view):
    places = torch.arange(x.numel())
    return places.as_strided(view.shape, view.stride(), view.storage_offset()).reshape(-1)


@pytest.mark.parametrize("kind", ["in part", "other strides", "equal views"])
def test_a_compiled_step_refuses_parameters_that_overlap(kind):
    x = torch.zeros(8)
    params = dict(zip("ab", views(x)[kind], strict=True))
    grads = {name: torch.ones(p.shape) for name, p in params.items()}
    tx = fo.sgd(1.0)
    with pytest.raises(ValueError, match=r"parameter 'a' and parameter 'b' share their memory"):
        fo.compile(tx)(grads, tx.init(params), params)
    assert not x.any()
    new, _ = fo.compile(tx, donate=False)(grads, tx.init(params), params)
    assert new["a"].tolist() == [-1.0] * len(new["a"])
    assert not x.any()


@pytest.mark.parametrize("how", [True, False, "strict", "recorded"])
@pytest.mark.parametrize("kind", ["in part", "equal views", "one inside another"])
def test_an_optimizer_refuses_parameters_that_overlap(kind, how):
    x = torch.zeros(8)
    params = [torch.nn.Parameter(v) for v in views(x)[kind]]
    for p in params:
        p.grad = torch.ones(p.shape)
    if how == "recorded":
        opt = adapters.Adam(params, lr=1.0, differentiable=True)
        for p in params:
            p.requires_grad_(False)
    else:
        opt = adapters.Adam(params, lr=1.0, compile=how)
    for _ in range(2):
        with pytest.raises(ValueError, match=re.escape("parameter '0' and parameter '1' share")):
            opt.step()
    assert not x.any()
    assert not opt.state
    params[1].grad = None
    opt.step()
    assert (x[:4] == -1).all()


def test_tied_data_is_refused_across_groups_and_recipes():
    a, b = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
    b.data = a.data
    for p in (a, b):
        p.grad = torch.ones(3)
    for recipe in (fo.sgd, lambda lr: fo.flatten(fo.sgd(lr))):
        groups = [{"params": [a]}, {"params": [b]}]
        with pytest.raises(ValueError, match=r"share their memory"):
            adapters.Optimizer(groups, recipe, lr=1.0).step()
    assert not a.any()


@pytest.mark.parametrize("whose", ["parameter", "other slot"])
def test_a_slot_with_the_memory_of_something_else_is_refused(whose):
    tx, params = fo.adam(0.1), {"w": torch.ones(3)}
    state = tx.init(params)
    other = params["w"] if whose == "parameter" else state.slots["exp_avg"]["w"]
    state.slots["exp_avg_sq"] = {"w": other}
    with pytest.raises(ValueError, match=r"the slot 'exp_avg_sq' of parameter 'w' share"):
        fo.compile(tx)({"w": torch.ones(3)}, state, params)
    assert params["w"].tolist() == [1.0] * 3


class Previous(NamedTuple):
    previous: torch.Tensor


KEPT = {
    "the gradient": lambda u, p: u,
    "a view of the gradient": lambda u, p: u[:],
    "the parameter": lambda u, p: p,
    "an expanded tensor": lambda u, p: u[:1].clone().expand(4),
}


@pytest.mark.parametrize(
    ("kept", "mapped"),
    [*[(kept, False) for kept in KEPT], ("the gradient", True), ("the parameter", True)],
)
def test_a_slot_that_a_rule_is_given_is_copied(kept, mapped):
    """Gradients and parameters change in place after an update, but a state does not."""
    tx = fo.leafwise(Previous, lambda u, s, p: (u - s.previous, Previous(KEPT[kept](u, p))))
    g, p = torch.ones(4), torch.zeros(4)
    state = tx.init(p)
    if mapped:
        _, (_, _, slots, _) = torch.vmap(lambda g: tx.update(g, state, p))(g[None])
        found = slots["previous"][0]
    else:
        _, state = tx.update(g, state, p)
        found = state.slots["previous"]
        fo.compile(tx)(torch.full((4,), 5.0), state, p.clone())
        found = tx.update(torch.ones(4), tx.init(p), p)[1].slots["previous"]
    wanted = found.tolist()
    assert g.tolist() == [1.0] * 4
    g.zero_()
    p.fill_(7.0)
    assert found.tolist() == wanted
    assert tx.init(p).slots["previous"].data_ptr() != p.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize(
    "tx",
    [
        fo.accumulate(fo.sgd(0.1), 4),
        fo.masked(fo.accumulate(fo.sgd(0.1, momentum=0.9), 2), "w"),
        fo.chain(fo.sgd(0.1), fo.params_ema(0.0)),
        fo.lookahead(fo.sgd(0.1), 2, 1.0),
    ],
)
def test_a_state_has_no_memory_of_gradients_or_parameters(tx, dtype):
    """Nor in a repeated step, which copies only tensors that are lent."""
    p = {"w": torch.ones(4, dtype=dtype)}
    state = tx.init(p)
    for _ in range(5):
        g = {"w": torch.ones(4, dtype=dtype)}
        _, state = tx.update(g, state, p)
        assert not places(fo.tree.leaves(state)) & places([g["w"], p["w"]])


class Shared(NamedTuple):
    scale: torch.Tensor


def of_batches():
    """A rule whose slot is one matrix for all of a batch."""

    def init(p):
        return Shared(torch.zeros(p.shape[-1], p.shape[-1]))

    def update(u, slots, p):
        return u, Shared(torch.eye(u.shape[-1]).expand_as(slots.scale))

    return fo.leafwise(init, update, runs=fo.Runs(batched=True), name="of_batches")


@pytest.mark.parametrize("shape", [(3, 2), (4, 3, 2)], ids=["matrices", "stack"])
@pytest.mark.parametrize(
    "make", [of_batches, lambda: fo.scale_by_apollo(1, 2)], ids=["custom", "apollo"]
)
def test_slots_of_a_batch_have_memory_of_their_own(make, shape):
    """Also those that are equal, and in a repeated step: a step in place writes to each."""
    tx = fo.as_matrix(make(), stack=True) if len(shape) > 2 and make is not of_batches else make()
    p = {"a": torch.ones(shape), "b": torch.ones(shape)}
    state = tx.init(p)
    for k in range(3):
        _, state = tx.update(fo.tree.map(torch.randn_like, p), state, p)
        slots = fo.tree.leaves(state.slots)
        memory.check_apart(slots, names)
        assert k < 2 or fo.compile(tx)(fo.tree.map(torch.randn_like, p), state, p)


@pytest.mark.parametrize(
    "recipe",
    [
        lambda x: fo.schedule_free(fo.sgd(0.1), momentum=x),
        lambda x: fo.gpa(fo.sgd(0.1), x),
        lambda x: fo.asgd(x, t0=1),
    ],
    ids=["schedule_free", "gpa", "asgd"],
)
def test_a_state_has_no_memory_of_a_hyperparameter(recipe, monkeypatch):
    """A rate that is filled later would change what the last step has carried."""
    monkeypatch.setattr(torch, "get_default_dtype", lambda: torch.float64)
    x, w = torch.tensor(0.8, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    tx = recipe(x)
    state = tx.init(w)
    for _ in range(3):
        assert not places(fo.tree.leaves(state)) & places([x])
        _, state = tx.update(torch.ones_like(w), state, w)


class LastRate(NamedTuple):
    last: torch.Tensor


def test_a_slot_that_keeps_a_scalar_has_no_memory_of_its_hyperparameter():
    lr, w = torch.tensor(0.5, dtype=torch.float64), torch.ones(2, dtype=torch.float64)

    def update(u, slots, p, lr):
        return -slots.last * u, LastRate(lr)

    tx = fo.leafwise(
        lambda p: LastRate(torch.zeros((), dtype=p.dtype)),
        update,
        lambda t, *, lr: (lr,),
        hyper={"lr": lr},
        name="last_rate",
    )
    _, state = tx.update(torch.ones_like(w), tx.init(w), w)
    lr.fill_(0.1)
    assert tx.update(torch.ones_like(w), state, w)[0].tolist() == [-0.5, -0.5]
