"""`compile_train_step`: what a loop over gradients and updates does, compiled or not."""

import copy
import pickle
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from compilers import forget
from helpers import assert_close, assert_same, clone
from torch import Tensor
from torch._dynamo.utils import counters
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import functional_optim as fo


def parameters() -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)
    shapes = {"a": (5, 6), "b": (6,), "c": (6, 1)}
    return {
        name: 0.3 * torch.randn(shape, generator=random, dtype=torch.float64)
        for name, shape in shapes.items()
    }


def batches(count: int = 3, size: int = 6) -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(1)
    make = lambda *shape: torch.randn(*shape, generator=random, dtype=torch.float64)  # noqa: E731
    return [(make(size, 5), make(size, 1)) for _ in range(count)]


def loss_fn(params: Any, x: Tensor, y: Tensor) -> Tensor:
    hidden = torch.tanh(x @ params["a"] + params["b"])
    return ((hidden @ params["c"] - y) ** 2).mean()


def recipe(lr: Any = 1e-2) -> Any:
    return fo.chain(fo.clip_by_global_norm(0.1), fo.adamw(lr))


def by_loop(tx: Any, given: Any, params: Any = None, loss: Any = loss_fn) -> Any:
    """Parameters, state and losses of the plain functional loop."""
    params = parameters() if params is None else params
    state, losses = tx.init(params), []
    for batch in given:
        grads, value = torch.func.grad_and_value(loss)(params, *batch)
        updates, state = tx.update(grads, state, params)
        params = fo.apply_updates(params, updates)
        losses.append(value)
    return params, state, losses


def by_step(step: Any, given: Any, params: Any = None) -> Any:
    params = parameters() if params is None else params
    state, losses = step.tx.init(params), []
    for batch in given:
        params, state, value = step(params, state, *batch)
        losses.append(value)
    return params, state, losses


def test_compiled_steps_are_those_of_the_loop_and_compile_once():
    schedule = fo.schedules.linear(1e-2, 1e-3, 10)
    expected = by_loop(recipe(schedule), batches())
    torch._dynamo.reset()
    graphs = []
    for rate, parts in ((schedule, 1), (schedule, 1), (1e-4, 1), (schedule, 2)):
        counters.clear()
        step = fo.compile_train_step(loss_fn, recipe(rate), accumulate=parts, strict=True)
        given = [(torch.cat([x] * parts), torch.cat([y] * parts)) for x, y in batches()]
        found = by_step(step, given)
        graphs.append(counters["stats"]["unique_graphs"])
        if rate is schedule:
            assert_close(found, expected, 1e-12)
    assert graphs == [1, 0, 0, 0]


@pytest.mark.parametrize(
    ("parts", "scale"), [(1, False), (2, False), (3, False), (1, True), (2, True), (3, True)]
)
def test_micro_batches_take_the_step_of_their_mean_with_a_scaled_loss_too(parts, scale):
    """Of a rule that sees how large gradients are."""
    expected, _, values = by_loop(fo.sgd(0.1), batches())
    tx = scaled(fo.sgd(0.1)) if scale else fo.sgd(0.1)
    params, state, losses = by_step(made(loss_fn, tx, accumulate=parts), batches())
    assert_close([params, losses], [expected, values], 1e-12)
    assert not scale or fo.get(state, "loss_scale").item() == 2048.0


def test_a_loss_that_cannot_be_compiled_runs_eagerly_and_says_so(monkeypatch):
    from torch._inductor import config

    def loss(params: Any, x: Tensor, y: Tensor) -> Tensor:  # a graph that no cache has
        return 0.8125 * loss_fn(params, x, y)

    forget(monkeypatch)
    expected = by_loop(recipe(), batches(), loss=loss)
    torch._dynamo.reset()
    step = fo.compile_train_step(loss, recipe())
    with config.patch({"cpp.cxx": ("/nonexistent",), "fx_graph_cache": False}):
        with pytest.warns(RuntimeWarning, match="the loss of a train step runs eagerly"):
            found = by_step(step, batches())
        assert_close(found, expected, 1e-12)
        torch._dynamo.reset()
        strict, params = fo.compile_train_step(loss, recipe(), strict=True), parameters()
        with pytest.raises(RuntimeError, match=r"No working C\+\+ compiler"):
            strict(params, strict.tx.init(params), *batches()[0])
    assert_same(params, parameters())


def test_an_error_of_the_loss_is_its_own():
    def loss(params: Any, x: Tensor, y: Tensor) -> Tensor:
        raise OSError("no data")

    step = fo.compile_train_step(loss, recipe())
    params = parameters()
    for _ in range(2):
        with pytest.raises(OSError, match="no data"):
            step(params, step.tx.init(params), *batches()[0])
    assert step.loss is not loss


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Linear(5, 6)
        self.norm = torch.nn.BatchNorm1d(6)
        self.c = torch.nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.a, x, use_reentrant=False)
        return self.c(self.norm(hidden).relu())


def test_buffers_come_out_beside_the_loss():
    torch.manual_seed(0)
    model = Model().double()
    theirs = copy.deepcopy(model)

    def loss(params: Any, buffers: Any, x: Tensor, y: Tensor) -> Any:
        out = torch.func.functional_call(model, (params, buffers), (x,))
        return ((out - y) ** 2).mean(), buffers

    params = {name: p.detach().clone() for name, p in model.named_parameters()}
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    step = fo.compile_train_step(loss, fo.sgd(0.1), has_aux=True, accumulate=1, compile=False)
    state = step.tx.init(params)
    opt = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for x, y in batches():
        params, state, value, buffers = step(params, state, buffers, x, y)
        opt.zero_grad()
        expected = ((theirs(x) - y) ** 2).mean()
        expected.backward()
        opt.step()
        assert_close(value, expected.detach(), 1e-12)
    assert_close(params, dict(theirs.named_parameters()), 1e-12)
    assert_close(buffers, dict(theirs.named_buffers()), 1e-12)


def test_each_micro_batch_gives_what_it_has_beside_its_loss():
    def loss(params: Any, x: Tensor, y: Tensor, *, factor: float) -> Any:
        value = factor * loss_fn(params, x, y)
        return value, {"size": len(x), "value": value}

    step = fo.compile_train_step(loss, fo.sgd(0.1), has_aux=True, accumulate=2, compile=False)
    params = parameters()
    *_, value, aux = step(params, step.tx.init(params), *batches()[0], factor=2.0)
    assert [x["size"] for x in aux] == [3, 3]
    assert_close(value, (aux[0]["value"] + aux[1]["value"]) / 2, 1e-15)
    assert not any(x["value"].requires_grad for x in aux)


def test_leaves_without_a_gradient_stay_as_they_are():
    tx = fo.chain(fo.freeze("b"), fo.adamw(0.1, weight_decay=0.1))
    params = {**parameters(), "unused": torch.ones(3)}
    step = fo.compile_train_step(loss_fn, tx, compile=False)
    before = clone(params)
    found, _, _ = step(params, tx.init(params), *batches()[0])
    assert_same([found[k] for k in ("b", "unused")], [before[k] for k in ("b", "unused")])
    assert not torch.equal(found["a"], before["a"])


def test_modules_parameters_are_stepped_in_place_and_keep_their_gradients_to_themselves():
    model = torch.nn.Linear(5, 1).double()

    def loss(params: Any, x: Tensor, y: Tensor) -> Tensor:
        return ((torch.func.functional_call(model, params, (x,)) - y) ** 2).mean()

    params = dict(model.named_parameters())
    expected, _, _ = by_loop(recipe(), batches(), clone(params), loss)
    step = fo.compile_train_step(loss, recipe(), compile=False)
    by_step(step, batches(), params)
    assert_close(clone(dict(model.named_parameters())), expected, 1e-12)
    assert model.weight.requires_grad
    assert model.weight.grad is None


def test_a_transformation_that_reads_the_loss_gets_it():
    seen = []

    def scalars(t: Any, *, value: Any) -> tuple[Any]:
        seen.append(float(value))
        return (0.1,)

    rule = fo.leafwise(None, lambda u, slots, p, lr: (-lr * u, slots), scalars)
    step = fo.compile_train_step(loss_fn, rule, compile=False)
    _, _, losses = by_step(step, batches())
    assert list(dict.fromkeys(seen)) == [x.item() for x in losses]


@pytest.mark.parametrize("compile", [True, False])
@pytest.mark.parametrize("donate", [True, False])
def test_the_state_has_the_learning_rate_of_the_last_step(donate, compile):
    tx = recipe(fo.schedules.linear(1e-2, 0.0, 10))
    step = fo.compile_train_step(loss_fn, tx, donate=donate, compile=compile)
    params = parameters()
    state, found = tx.init(params), []
    for batch in batches():
        params, state, _ = step(params, state, *batch)
        found.append(fo.numbers(state, "lr")["lr"])
    assert found == pytest.approx([0.01, 0.009, 0.008])


# ---------------------------------------------------------------- the scale of the loss
def scaled(tx: Any) -> Any:
    return fo.dynamic_loss_scale(tx, init_scale=1024.0, growth_interval=2)


def test_an_overflow_is_left_out_and_halves_the_scale():
    """In float16, whose gradients overflow at this scale; as torch's GradScaler does it."""
    tx = fo.dynamic_loss_scale(fo.sgd(0.25), init_scale=2.0**14, growth_interval=3)
    step = made(lambda params: (params["w"].half() ** 2).sum().float(), tx)
    params, real = {"w": torch.full((4,), 8.0)}, torch.nn.Parameter(torch.full((4,), 8.0))
    state, found, expected = tx.init(params), [], []
    opt = torch.optim.SGD([real], lr=0.25)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=3)
    for _ in range(7):
        params, state, _ = step(params, state)
        found.append((fo.get(state, "loss_scale").item(), params["w"][0].item()))
        opt.zero_grad()
        scaler.scale((real.half() ** 2).sum().float()).backward()
        scaler.step(opt)
        scaler.update()
        expected.append((scaler.get_scale(), real[0].item()))
    assert found == expected
    assert found[0] == (2.0**13, 8.0)


# ---------------------------------------------------------------- traced
def test_a_traced_step_consists_of_operations():
    tx, how = scaled(recipe()), {"accumulate": 2, "donate": False}
    step, eager = fo.compile_train_step(loss_fn, tx, **how), made(loss_fn, tx, **how)
    params, (batch, *_) = parameters(), batches()
    state = step.tx.init(params)
    expected = eager(params, state, *batch)
    graph = make_fx(step, tracing_mode="fake")(params, state, *batch)
    assert_close(graph(params, state, *batch), expected, 1e-12)
    whole = torch.compile(step.__call__, fullgraph=True, backend="aot_eager")
    assert_close(whole(params, state, *batch), expected, 1e-12)


@pytest.mark.parametrize("donate", [False, True])
def test_an_ensemble_is_stepped_by_vmap(donate):
    step = fo.compile_train_step(loss_fn, recipe(), donate=donate)
    members = [parameters(), {k: 2 * p for k, p in parameters().items()}]
    stacked = {k: torch.stack([x[k] for x in members]) for k in members[0]}
    state = torch.vmap(step.tx.init)(stacked)
    found, _, losses = torch.vmap(step, in_dims=(0, 0, None, None))(stacked, state, *batches()[0])
    for i, own in enumerate(members):
        params, _, (loss,) = by_loop(recipe(), batches(1), own)
        assert_close({k: p[i] for k, p in found.items()}, params, 1e-12)
        assert_close(losses[i], loss, 1e-12)


def test_parameters_may_be_dtensors(mesh):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    params = {k: distribute_tensor(p, mesh, [Shard(0)]) for k, p in parameters().items()}
    given = [[distribute_tensor(x, mesh, [Replicate()]) for x in batch] for batch in batches()]
    step = fo.compile_train_step(loss_fn, recipe())
    step.loss = loss_fn  # its compilation is torch's own
    found, _, losses = by_step(step, given, params)
    expected, _, values = by_loop(recipe(), batches())
    assert_close({k: p.full_tensor() for k, p in found.items()}, expected, 1e-12)
    assert_close([x.full_tensor() for x in losses], values, 1e-12)


# ---------------------------------------------------------------- autocast, copies, errors
def test_the_update_does_not_see_autocast():
    params = {"w": torch.randn(8, 6)}
    tx = fo.chain(fo.orthogonalize(), fo.scale_by_lr(0.1))
    state, given = tx.init(params), torch.randn(4, 8)

    def loss(params: Any, x: Tensor) -> Tensor:
        return (x @ params["w"]).float().square().mean()

    step = fo.compile_train_step(loss, tx, donate=False, compile=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, _, _ = step(params, state, given)
        grads = torch.func.grad(loss)(params, given)
    updates, _ = tx.update(grads, state, params)
    assert_same(found, fo.apply_updates(params, updates))


def test_copies_are_steps_of_their_own():
    step = fo.compile_train_step(loss_fn, recipe(), compile=False)
    for other in (copy.deepcopy(step), pickle.loads(pickle.dumps(step))):
        assert other is not step
        assert_same(by_step(other, batches()), by_step(step, batches()))


def unreached(p: Any, x: Tensor, y: Tensor) -> Tensor:
    raise AssertionError


REFUSED: dict[str, Any] = {
    r"returned a tensor of shape \(6, 6\)": (TypeError, lambda p, x, y: x @ p["a"], {}),
    "returned a tuple": (TypeError, lambda p, x, y: (loss_fn(p, x, y), 1), {}),
    r"a pair \(loss, aux\)": (TypeError, loss_fn, {"has_aux": True}),
    "depends on none of the parameters": (ValueError, lambda p, x, y: x.sum(), {}),
    "multiple of 4": (ValueError, loss_fn, {"accumulate": 4}),
    "needs the extra argument value_and_grad": (TypeError, unreached, {"tx": fo.lbfgs()}),
    "needs the extra argument commit": (TypeError, unreached, {"tx": fo.commit_if(fo.sgd(1.0))}),
}


@pytest.mark.parametrize("said", REFUSED)
def test_losses_that_cannot_be_stepped_are_refused(said):
    error, loss, options = REFUSED[said]
    options = {"tx": fo.sgd(0.1), "compile": False, **options}
    step = fo.compile_train_step(loss, **options)
    params = parameters()
    before = clone(params)
    with pytest.raises(error, match=said):
        step(params, step.tx.init(params), *batches()[0])
    assert_same(params, before)


@pytest.mark.parametrize("compile", [True, False])
def test_a_loss_of_the_module_alone_is_refused(compile, monkeypatch):
    """Its parameters require gradients, but are not those of the tree."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    model = torch.nn.Linear(5, 1).double()
    tx = fo.chain(fo.freeze("frozen"), fo.sgd(0.1))
    params = {name: torch.ones(1, dtype=torch.float64) for name in ("frozen", "used", "unused")}
    before = clone(params)
    alone = lambda p, x, y: (model(x) - y).square().mean() + p["frozen"].sum()  # noqa: E731
    step = fo.compile_train_step(alone, tx, compile=compile, accumulate=2)
    with pytest.raises(ValueError, match=r"that tx updates; .*functional_call\(model, params"):
        by_step(step, batches(1), params)
    assert_same(params, before)
    step = fo.compile_train_step(
        lambda p, x, y: alone(p, x, y) + p["used"].sum(), tx, compile=compile, accumulate=2
    )
    found, _, _ = by_step(step, batches(1), params)
    assert_close(found, {**before, "used": before["used"] - 0.1}, 1e-12)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda tx: fo.sam(fo.dynamic_loss_scale(tx)),
        lambda tx: fo.dynamic_loss_scale(fo.sam(tx)),
        lambda tx: fo.sam(fo.chain(fo.dynamic_loss_scale(tx), fo.scale(1.0))),
    ],
    ids=["inside", "outside", "in a chain"],
)
@pytest.mark.parametrize("compile", [True, False])
@pytest.mark.filterwarnings("ignore:functional_optim. torch.compile failed")  # outside, it says so
def test_second_gradients_are_scaled_where_the_first_are(wrap, compile):
    def loss(params: Any, x: Tensor) -> Tensor:
        return (params["w"] * x).square().sum()

    moved = []
    for tx in (wrap(fo.sgd(0.1)), fo.sam(fo.sgd(0.1))):
        params = {"w": torch.ones(3)}
        step, state = fo.compile_train_step(loss, tx, compile=compile), tx.init(params)
        for _ in range(2):
            params, state, _ = step(params, state, torch.ones(3))
        moved.append(params["w"])
    assert (moved[0] - 1).abs().min() > 0.1
    assert_close(moved[0], moved[1], 0.02)


# ---------------------------------------------------------------- shared memory, some leaves
def made(loss: Any, tx: Any, **options: Any) -> Any:
    return fo.compile_train_step(loss, tx, compile=False, **options)


def test_what_shares_memory_with_a_parameter_keeps_its_value():
    def loss(p: Any) -> Any:
        return p["a"], {"whole": p["b"], "part": p["b"][1:], "no": p["b"].detach()}

    tx, p = fo.sgd(0.5), {"a": torch.tensor(1.0), "b": torch.ones(2)}
    _, _, value, aux = made(loss, tx, has_aux=True)(p, tx.init(p))
    assert (p["a"], value) == (0.5, 1.0)
    assert all(torch.equal(x, torch.ones_like(x)) for x in aux.values())


def test_a_refused_state_does_not_decide_whether_the_loss_is_scaled():
    tx, p = fo.dynamic_loss_scale(fo.sgd(1.0), init_scale=4.0), torch.zeros(2)
    step = made(torch.sum, tx)
    with pytest.raises(ValueError, match="open_steps"):
        step(p, fo.sgd(1.0).init(p))
    assert torch.equal(step(p, tx.init(p))[0], torch.full((2,), -1.0))


def test_a_loss_may_have_arguments_called_params_and_state():
    tx, p = fo.sgd(1.0), torch.ones(2)
    step = made(lambda p, *, state: (p * state).sum(), tx)
    assert torch.equal(step(p, tx.init(p), state=2.0)[0], torch.full((2,), -1.0))


@pytest.mark.parametrize("way", ["update", "compile"])
@pytest.mark.parametrize(("bad", "good"), [("nan", 1.0), ("zero", 0.0)])
def test_a_loss_scale_neither_vanishes_nor_becomes_infinite(way, bad, good):
    tx = fo.dynamic_loss_scale(fo.sgd(1.0), growth_interval=1)
    p = torch.zeros(2)
    state, step = tx.init(p), fo.compile(tx)
    g = torch.full((2,), torch.nan if bad == "nan" else 0.0)
    for _ in range(300):
        if way == "compile":
            p, state = step(g, state, p)
        else:
            _, state = tx.update(g, state, p)
    scale = fo.get(state, "loss_scale")
    assert 0 < scale < torch.inf
    u, _ = tx.update(torch.full((2,), good) * scale, state, p)
    torch.testing.assert_close(u, torch.full((2,), -good))


def test_a_loss_scale_for_some_leaves_only_is_refused():
    p = {"x": torch.zeros(2), "y": torch.zeros(2)}
    scaled = fo.dynamic_loss_scale(fo.sgd(1.0), init_scale=4.0)
    rows = ((fo.sgd(1.0), "act on the parameter 'y'"), (scaled, "several loss scales"))
    for beside, said in rows:
        tx = fo.partition({"a": scaled, "b": beside}, {"x": "a", "y": "b"})
        with pytest.raises(ValueError, match=said):
            made(lambda p: p["x"].sum() + p["y"].sum(), tx)(p, tx.init(p))
    tx = fo.partition({"a": scaled, "b": fo.freeze()}, {"x": "a", "y": "b"})
    found, _, _ = made(lambda p: p["x"].sum() + p["y"].sum(), tx)(p, tx.init(p))
    assert torch.equal(found["x"], torch.full((2,), -1.0))


def test_a_slot_called_loss_scale_is_not_a_scale():
    class Slots(NamedTuple):
        loss_scale: torch.Tensor

    tx, p = fo.leafwise(lambda p: Slots(torch.ones_like(p)), lambda u, x, p: (-u, x)), torch.ones(2)
    assert torch.equal(made(torch.sum, tx)(p, tx.init(p))[0], torch.zeros(2))
