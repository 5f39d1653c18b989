"""A sweep's losses are those of single runs, whatever is done to make them at once."""

import copy
import functools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from helpers import assert_close
from torch import nn
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from torch.func import functional_call, grad_and_value

import functional_optim as fo
from functional_optim.tuning import find_lr as module_of_find_lr
from functional_optim.tuning.find_lr import SweepRuns

STEPS = 4
RATES = [0.01, 0.1, 0.3]
IN_TURN = "vmap fails for the loss or the recipe .RuntimeError.*; they run one after another"


def parameters() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(4, 3, dtype=torch.float64, generator=generator)
    b = torch.zeros(3, dtype=torch.float64)
    return {"layer": {"w": w, "b": b}, "scale": torch.ones((), dtype=torch.float64)}


def batches(count=STEPS):
    generator = torch.Generator().manual_seed(1)
    made = torch.randn(count, 2, 8, 4, dtype=torch.float64, generator=generator)
    return [(x, y[:, :3].tanh()) for x, y in made]


def loss_fn(params, x, y):
    layer = params["layer"]
    return (params["scale"] * (x @ layer["w"] + layer["b"]) - y).square().mean()


def single(tx_factory, value, loss_fn=loss_fn, params=None, given=None):
    """The losses of one run, by hand."""
    params = parameters() if params is None else params
    tx, losses = tx_factory(value), []
    state = tx.init(params)
    for batch in batches() if given is None else given:
        grads, loss = grad_and_value(loss_fn)(params, *batch)
        offered = {
            "value": loss,
            "grad_fn": lambda p, batch=batch: torch.func.grad(loss_fn)(p, *batch),
            "value_and_grad": lambda p, batch=batch: grad_and_value(loss_fn)(p, *batch)[::-1],
        }
        extra = {name: offered[name] for name in tx.extra if name in offered}
        updates, state = tx.update(grads, state, params, **extra)
        params = fo.apply_updates(params, updates)
        losses.append(loss.detach())
    return torch.stack(losses).double()


def runs(tx_factory, values=RATES, **given):
    return torch.stack([single(tx_factory, value, **given) for value in values])


def sweep(tx_factory=fo.adamw, values=RATES, given=None, loss_fn=loss_fn, params=None, **options):
    given = batches() if given is None else given
    params = parameters() if params is None else params
    options = {"steps": STEPS, **options}
    return fo.find_lr(loss_fn, tx_factory, params, given, values=values, **options)


RECIPES = {
    "adamw": fo.adamw,
    "momentum": lambda momentum: fo.sgd(0.1, momentum=momentum),
    "clipped": lambda lr: fo.chain(fo.clip_by_global_norm(0.5), fo.adamw(lr)),
    "warmed": lambda lr: fo.adamw(fo.schedules.warmup_cosine(0.0, lr, 2, 10)),
    "muon_adamw": lambda lr: fo.muon_adamw(
        lr, lr, muon=lambda path, p: p.dim() == 2, ns_dtype=torch.float64
    ),
    "soap": lambda lr: fo.soap(lr, precondition_frequency=1),
    "came": fo.came,
    "parted": lambda lr: fo.partition(
        {"on": fo.adam(lr), "off": fo.freeze()}, {"scale": "off", "*": "on"}
    ),
    "stored": lambda lr: fo.stored(fo.adam(lr), "int8", block_size=16, min_size=0),
    "momo": fo.momo,
    "sam": lambda rho: fo.sam(fo.sgd(0.1), rho),
    "lbfgs": lambda lr: fo.lbfgs(lr, max_iter=2, history_size=2),
    "plateau": lambda lr: fo.chain(fo.sgd(lr), fo.reduce_on_plateau(patience=1)),
}


def views_are_vmapped():
    """Whether torch's vmap sees the bits of a tensor, which torch 2.11's refuses."""
    try:
        torch.vmap(lambda x: x.view(torch.int32))(torch.ones(2, 1))
    except RuntimeError:
        return False
    return True


OLD = pytest.mark.xfail(
    not views_are_vmapped(),
    reason="torch 2.11 cannot vmap packed slots, so that values run in turn, with a warning",
    raises=RuntimeWarning,
)


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=OLD if x == "stored" else ()) for x in RECIPES]
)
def test_losses_are_those_of_single_runs(name):
    assert_close(sweep(RECIPES[name]).losses, runs(RECIPES[name]), 1e-10)


@pytest.mark.parametrize("chunk", [1, 2, 3, 100])
def test_chunks_change_nothing(chunk):
    found = sweep(given=iter(batches()), chunk=chunk)
    assert_close(found.losses, runs(fo.adamw), 1e-12)


def sizes(monkeypatch, **options):
    """How many copies each chunk of a sweep has."""
    found, together = [], SweepRuns._together

    def noted(self, values, show, **more):
        found.append(len(values))
        return together(self, values, show, **more)

    monkeypatch.setattr(SweepRuns, "_together", noted)
    sweep(values=[0.1 * (1 + i) for i in range(7)], **options)
    return found


def test_a_chunk_takes_no_more_memory_than_said(monkeypatch):
    assert sizes(monkeypatch) == [7]
    assert sizes(monkeypatch, chunk=3) == [3, 3, 1]
    params = parameters()
    state = fo.tree.leaves(fo.adamw(0.1).init(params))
    copy_bytes = 2 * sum(x.nbytes for x in state) + 4 * (12 + 3 + 1) * 8
    monkeypatch.setattr(module_of_find_lr, "MEMORY", 4 * copy_bytes)
    assert sizes(monkeypatch) == [4, 3]
    monkeypatch.setattr(module_of_find_lr, "MEMORY", 4 * copy_bytes - 1)
    assert sizes(monkeypatch) == [3, 3, 1]
    monkeypatch.setattr(module_of_find_lr, "MEMORY", 1)
    assert sizes(monkeypatch) == [1] * 7


def test_batches_are_used_again_from_the_first_on_and_no_more_are_taken_than_steps():
    again = sweep(given=iter(batches(2)), steps=5).losses
    first, second = batches(2)
    assert_close(again, sweep(given=[first, second, first, second, first], steps=5).losses, 0.0)
    given = iter(batches(6))
    sweep(given=given)
    assert len(list(given)) == 2


def test_a_batch_is_the_arguments_or_one_argument():
    expected = sweep().losses
    as_lists = sweep(given=[[x, y] for x, y in batches()]).losses
    stacked = sweep(
        given=[torch.cat([x, y], 1) for x, y in batches()],
        loss_fn=lambda params, xy: loss_fn(params, xy[:, :4], xy[:, 4:]),
    )
    named = sweep(
        given=[{"x": x, "y": y, "size": 8} for x, y in batches()],
        loss_fn=lambda params, batch: loss_fn(params, batch["x"], batch["y"]),
    )
    for found in (as_lists, stacked.losses, named.losses):
        assert_close(found, expected, 1e-12)


def test_a_tensor_is_a_tree_and_a_part_of_a_tree_may_be_none():
    p = torch.ones(3, dtype=torch.float64)
    found = fo.find_lr(lambda p, x: (p * x).square().sum(), fo.sgd, p, [p], values=[0.1], steps=2)
    assert_close(found.losses, torch.tensor([[3.0, 3 * 0.8**2]]).double(), 1e-6)
    params = {**parameters(), "absent": None}
    assert_close(sweep(fo.came, params=params).losses, runs(fo.came), 1e-12)


def test_by_default_values_are_in_equal_ratios():
    found = sweep(values=None, steps=1)
    assert (found.name, len(found.values)) == ("lr", 29)
    assert found.values[:5] == (1e-6, 1.778e-6, 3.162e-6, 5.623e-6, 1e-5)
    assert found.values[-1] == 10.0
    named = sweep(values=None, steps=1, low=1, high=4, count=3, name="x")
    assert (named.name, named.values) == ("x", (1.0, 2.0, 4.0))


def test_a_run_that_diverges_does_not_disturb_the_others():
    found = sweep(fo.sgd, [0.1, 1e200, 0.3], steps=STEPS)
    assert found.diverged.tolist() == [False, True, False]
    assert_close(found.losses[::2], runs(fo.sgd, [0.1, 0.3]), 1e-12)


def test_what_is_beside_the_loss_is_left_out():
    for factory, tolerance in ((fo.adamw, 1e-12), (RECIPES["lbfgs"], 1e-10)):
        found = sweep(factory, loss_fn=lambda p, x, y: (loss_fn(p, x, y), {"x": x}), has_aux=True)
        assert_close(found.losses, runs(factory), tolerance)


# ---------------------------------------------------------------- nothing of the user's changes
class Net(nn.Module):
    def __init__(self, *middle: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), *middle, nn.Linear(6, 3)).double()

    def forward(self, x):
        return self.layers(x)


def loss_of(net):
    return lambda params, x, y: (functional_call(net, params, (x,)) - y).square().mean()


def detached(net):
    return {name: p.detach() for name, p in net.named_parameters()}


def in_turn(factory):
    """The context in which values run one after another for a recipe that branches."""
    return pytest.warns(RuntimeWarning, match=IN_TURN) if factory is branching else nullcontext()


@pytest.mark.parametrize("how", ["together", "in turn", "under no_grad"])
def test_a_module_and_its_gradients_stay(how):
    factory, records = branching if how == "in turn" else fo.adamw, how != "under no_grad"
    net = Net(nn.Tanh())
    before, versions = copy.deepcopy(net.state_dict()), [p._version for p in net.parameters()]
    params = dict(net.named_parameters())
    with in_turn(factory), torch.set_grad_enabled(records):
        found = sweep(factory, loss_fn=loss_of(net), params=params)
        assert torch.is_grad_enabled() == records
    assert_close(found.losses, runs(fo.adamw, loss_fn=loss_of(net), params=detached(net)), 1e-12)
    assert_close(net.state_dict(), before, 0.0)
    assert all(p.grad is None and p.requires_grad for p in net.parameters())
    assert [p._version for p in net.parameters()] == versions


@pytest.mark.parametrize("factory", [fo.adamw, RECIPES["lbfgs"], RECIPES["sam"]])
def test_steps_are_not_recorded_for_other_parameters(factory, monkeypatch):
    """Graphs of all steps would be kept until the end."""
    net = Net(nn.Tanh())
    some = {name: p for name, p in net.named_parameters() if "2" in name}
    recorded, step_of = [], SweepRuns._step

    def noted(self, number, params, state, batch):
        recorded.extend([x.requires_grad for x in fo.tree.leaves((params, state))])
        return step_of(self, number, params, state, batch)

    monkeypatch.setattr(SweepRuns, "_step", noted)
    kept: list[Any] = []
    monkeypatch.setattr(module_of_find_lr, "_on_cpu", lambda x: kept.extend(x) or torch.stack(x))
    sweep(factory, loss_fn=loss_of(net), params=some)
    assert recorded
    assert not any([*recorded, *[x.requires_grad for x in kept]])
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize(("vmaps", "chunk"), [(True, None), (True, 1), (True, 2), (False, None)])
def test_all_runs_see_the_same_random_numbers(vmaps, chunk):
    net = Net(nn.Dropout(0.5))
    torch.manual_seed(5)
    before = torch.get_rng_state()
    factory = fo.adamw if vmaps else branching
    with in_turn(factory):
        found = sweep(factory, loss_fn=loss_of(net), params=detached(net), chunk=chunk)
    assert torch.equal(torch.get_rng_state(), before)
    for value, row in zip(found.values, found.losses, strict=True):
        torch.set_rng_state(before)
        expected = single(fo.adamw, value, loss_of(net), detached(net))
        assert_close(row, expected, 1e-12)


def test_a_loader_shuffles_afterwards_as_it_would_have_before():
    data = torch.utils.data.TensorDataset(*map(torch.cat, zip(*batches(), strict=True)))
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
    torch.manual_seed(3)
    found = sweep(given=loader, steps=8)
    after = [x for x, _ in loader]
    torch.manual_seed(3)
    expected = [(x, y) for x, y in loader]
    assert_close(after, [x for x, _ in expected], 0.0)
    assert_close(found.losses, sweep(given=expected, steps=8).losses, 0.0)


def test_batch_norm_is_refused_and_the_advice_works():
    net = Net(nn.BatchNorm1d(6))
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(RuntimeError, match="modifies a tensor that is not in params"):
        sweep(loss_fn=loss_of(net), params=dict(net.named_parameters()))
    # nor where vmap fails before the loss has run
    branches = lambda lr: fo.sgd(lr) if lr > 0.05 else fo.adam(lr)  # noqa: E731
    with pytest.raises(RuntimeError, match="modifies a tensor that is not in params"):
        sweep(branches, loss_fn=loss_of(net), params=dict(net.named_parameters()))

    # nor where the loss reads a value, which vmap does not allow
    def reads(p, x, y):
        factor = 1.0 if min(w.min() for w in p.values()) > 0 else 2.0
        return factor * loss_of(net)(p, x, y)

    with pytest.raises(RuntimeError, match="modifies a tensor that is not in params"):
        sweep(loss_fn=reads, params=dict(net.named_parameters()))
    assert_close(net.state_dict(), before, 0.0)
    other = torch.func.replace_all_batch_norm_modules_(copy.deepcopy(net))
    found = sweep(loss_fn=loss_of(other), params=dict(other.named_parameters()))
    trained = torch.optim.AdamW(net.parameters(), lr=RATES[0])
    for (x, y), loss in zip(batches(), found.losses[0], strict=True):
        expected = (net(x) - y).square().mean()
        assert_close(loss, expected.detach(), 1e-6)
        trained.zero_grad()
        expected.backward()
        trained.step()


# ---------------------------------------------------------------- what vmap refuses
def branching(lr):
    return fo.adamw(lr if lr > 0 else 0.0)


def looking(params, x, y):
    return loss_fn(params, x, y) if params["scale"].item() > -100 else x.sum()


def late(params, x, y):
    return looking(params, x, y) if x[0, 0] == batches()[2][0][0, 0] else loss_fn(params, x, y)


@pytest.mark.parametrize(
    "how", [{"tx_factory": branching}, {"loss_fn": looking, "chunk": 2}, {"loss_fn": late}]
)
def test_a_recipe_or_loss_that_branches_runs_in_turn(how):
    with pytest.warns(RuntimeWarning, match=IN_TURN):
        found = sweep(**how)
    assert_close(found.losses, runs(fo.adamw), 1e-12)


def test_an_error_of_the_loss_is_raised_as_it_is():
    def wrong(params, x, y):
        raise KeyError("no such key")

    with pytest.raises(KeyError, match="no such key") as raised:
        sweep(loss_fn=wrong)
    assert raised.value.__cause__ is None


def test_a_chunk_that_is_too_large_is_said(monkeypatch):
    def full(self, values, show, **more):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(SweepRuns, "_together", full)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        sweep()
    assert raised.value.__notes__ == ["find_lr trained 3 copies at once; pass a smaller chunk=."]


@pytest.mark.parametrize(
    "wrong", [{"loss_fn": lambda p, x, y: x.sum()}, {"tx_factory": lambda lr: fo.adamw(0.1)}]
)
def test_losses_that_are_the_same_for_all_are_said(wrong):
    with pytest.warns(UserWarning, match="the same losses for every lr: tx_factory must use its"):
        sweep(**wrong)


# ---------------------------------------------------------------- compiled
def test_a_compiled_sweep_is_one_graph(monkeypatch):
    """Also with slots that some parameters do without, and a last chunk that is smaller."""
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
    found = sweep(fo.came, compile=True, chunk=2)
    assert_close(found.losses, runs(fo.came), 1e-10)
    assert (found.losses.shape, counter.frame_count) == ((3, STEPS), 1)


def test_there_is_no_limit_to_compiled_sweeps(monkeypatch):
    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
    with torch._dynamo.config.patch(recompile_limit=1):
        for _ in range(2):
            sweep(fo.sgd, compile=True, steps=1)
    assert counter.frame_count == 2


def test_what_cannot_be_compiled_runs_without(monkeypatch):
    def failing(function, **options):
        raise torch._dynamo.exc.Unsupported("some construct:\nthe reason\nand more")

    monkeypatch.setattr(torch, "compile", failing)
    with pytest.warns(RuntimeWarning, match=r"failed .*some construct: the reason\); .* eager"):
        found = sweep(compile=True)
    assert_close(found.losses, runs(fo.adamw), 1e-12)
    with pytest.warns(RuntimeWarning, match="one after another"):
        sweep(branching, compile=True)


# ---------------------------------------------------------------- wrong arguments
@pytest.mark.parametrize(
    ("wrong", "error", "said"),
    [
        ({"values": []}, ValueError, "one finite number or more as values"),
        ({"values": [0.1, float("nan")]}, ValueError, "one finite number or more as values"),
        ({"values": 0.1}, TypeError, "takes a sequence of numbers as values, but got 0.1"),
        ({"values": ["a"]}, TypeError, "takes a sequence of numbers as values"),
        ({"low": 0.0}, ValueError, "0 < low < high, but got low=0.0"),
        ({"low": 2, "high": 1}, ValueError, "0 < low < high"),
        ({"high": float("inf")}, ValueError, "0 < low < high"),
        ({"low": "a"}, ValueError, "0 < low < high"),
        ({"count": 1}, ValueError, "2 or more for count, but got 1"),
        ({"steps": 0}, ValueError, "1 or more for steps, but got 0"),
        ({"compile": "no"}, TypeError, "compile must be True or False, but got 'no'"),
        ({"progress": "no"}, TypeError, "progress must be True or False, but got 'no'"),
        ({"has_aux": "no"}, TypeError, "has_aux must be True or False, but got 'no'"),
        ({"chunk": 0}, ValueError, "1 or more for chunk, but got 0"),
        ({"tx_factory": torch.optim.SGD}, TypeError, "SGD makes an optimizer object"),
        ({"loss_fn": 3}, TypeError, "takes a loss function first, but got a int"),
        ({"loss_fn": fo.adamw()}, TypeError, "takes a loss function first"),
        ({"loss_fn": lambda p, x, y: x}, TypeError, "real 0-dim tensor"),
        ({"tx_factory": fo.adamw(0.1)}, TypeError, "from a number to a transformation second"),
        ({"tx_factory": lambda lr: lr}, TypeError, "returned a float; return e.g. fo.adamw"),
        ({"tx_factory": lambda lr: fo.adamw(-lr)}, ValueError, "Invalid learning rate"),
        ({"tx_factory": lambda lr: fo.commit_if(fo.sgd(lr))}, TypeError, "argument commit, which"),
        ({"params": {}}, ValueError, "params without a tensor"),
        ({"params": nn.Linear(1, 1)}, TypeError, "not a tensor; pass a pytree"),
        ({"params": torch.ones(2, dtype=torch.int64)}, TypeError, "dtype torch.int64"),
        ({"batches": []}, ValueError, "got no batch"),
        ({"batches": iter([])}, ValueError, "that is not used up"),
        ({"batches": 3}, TypeError, "an iterable of batches, but got a int"),
        ({"batches": torch.ones(())}, TypeError, "an iterable of batches, but got a Tensor"),
    ],
)
def test_a_wrong_argument_is_an_error_at_once(wrong, error, said):
    given: dict[str, Any] = {
        **{"loss_fn": loss_fn, "tx_factory": fo.adamw},
        **{"params": parameters(), "batches": batches(), **wrong},
    }
    with pytest.raises(error, match=said):
        fo.find_lr(**given)


def test_the_error_of_a_loader_is_its_own():
    def broken():
        yield batches()[0]
        raise TypeError("of the loader")

    with pytest.raises(TypeError, match="of the loader"):
        sweep(given=broken())
