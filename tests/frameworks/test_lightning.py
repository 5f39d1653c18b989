"""Lightning's automatic optimization with what `configure_optimizers` returns: ours, or torch's."""

from __future__ import annotations

import cases
import pytest
import torch
from helpers import assert_close
from torch.optim import lr_scheduler as lrs
from voting import recipe

import functional_optim as fo
from functional_optim import adapters
from functional_optim.adapters.base import OptimizerBase

every_row = pytest.mark.parametrize("case", cases.with_torch())


def both(case, **more):
    """`configure_optimizers` with torch's class, and with ours."""

    def theirs(module):
        return case.stock(module.parameters(), **case.hyper, **more)

    def ours(module):
        return case.drop_in(module.parameters(), compile=False, **case.hyper, **more)

    return theirs, ours


def eager(opt):
    """torch's, or ours without kernels."""
    if isinstance(opt, OptimizerBase):
        opt.compile = False
    return opt


def adamw(module):
    return adapters.AdamW(module.parameters(), lr=0.05, compile=False)


def stock(module):
    return torch.optim.AdamW(module.parameters(), lr=0.05)


# ---------------------------------------------------------------- the drop-ins


@every_row
def test_automatic_optimization_equals_torchs(pl, case):
    runs = [
        pl.run(make, bias=case.dim is None, max_epochs=2, gradient_clip_val=0.5)
        for make in both(case)
    ]
    pl.assert_agree(runs[1], runs[0], max(1e-10, case.rounding))
    pl.assert_moved(runs[1])


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs_evaluates_the_training_step_many_times(pl, search):
    def runs_of(kind):
        return pl.run(lambda m: kind(m.parameters(), lr=0.5, max_iter=4, line_search_fn=search))

    theirs, ours = runs_of(torch.optim.LBFGS), runs_of(adapters.LBFGS)
    pl.assert_agree(ours, theirs)
    assert len(ours[0][1]) > 3 * pl.BATCHES


def test_sparse_adam_over_an_embedding(pl):
    class Words(pl.Net):
        def __init__(self, kind):
            super().__init__(lambda m: kind(m.table.parameters(), lr=0.1))
            with torch.random.fork_rng():
                self.table = torch.nn.Embedding(20, 4, sparse=True, dtype=torch.float64)

        def training_step(self, batch, index):
            self.losses.append(float(index))
            return self.layers(self.table(torch.tensor([index, index + 3]))).square().sum()

    runs = []
    for kind in (torch.optim.SparseAdam, adapters.SparseAdam):
        torch.manual_seed(0)
        module = Words(kind)
        start = module.table.weight.detach().clone()
        runs.append(pl.found(module, pl.fit(module)))
        moved = (module.table.weight != start).any(1)
        assert moved.nonzero().squeeze(1).tolist() == list(range(pl.BATCHES + 3))
    pl.assert_agree(runs[1], runs[0])


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`:UserWarning")
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_a_training_step_that_returns_none_is_skipped_as_with_torchs(pl, name):
    class Skipping(pl.Net):
        def training_step(self, batch, index):
            return None if index in (0, 3) else super().training_step(batch, index)

    runs = []
    for kind in getattr(torch.optim, name), getattr(adapters, name):
        runs.append(pl.run(lambda m, k=kind: eager(k(m.parameters(), lr=0.1)), Skipping))
    pl.assert_agree(runs[1], runs[0])
    assert len(runs[1][0][1]) == pl.BATCHES - 2
    if name == "AdamW":
        assert runs[1][0][2][0][0]["step"] == pl.BATCHES - 2


# ---------------------------------------------------------------- recipes


def by_hand(pl, tx, batches=None, value=False):
    """The functional loop over the same batches: parameters and state."""
    module = pl.Net(None)
    params = dict(module.named_parameters())
    state = tx.init({name: p.detach() for name, p in params.items()})
    for batch in pl.data().split(pl.ROWS) if batches is None else batches:
        loss = module.loss(batch)
        grads = dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))
        plain = {name: p.detach() for name, p in params.items()}
        extra = {"value": loss.detach()} if value else {}
        updates, state = tx.update(grads, state, plain, **extra)
        with torch.no_grad():
            for name, p in params.items():
                p.add_(updates[name])
    return pl.values(module), state


@pytest.mark.parametrize("names", [False, True])
def test_a_recipe_goes_where_the_functional_loop_goes(pl, names):
    def configure(module):
        params = module.named_parameters() if names else module.parameters()
        return adapters.Optimizer(params, recipe, lr=0.05, compile=False)

    (weights, _, (kept,)), _ = pl.run(configure)
    params, state = by_hand(pl, recipe(0.05))
    assert_close(weights, params, 1e-12)
    average = list(state.slots["params_ema"].values())
    assert_close([kept[i]["params_ema"] for i in range(4)], average, 1e-12)


def test_a_recipe_that_clips_is_the_trainer_that_clips(pl):
    def clipping(lr):
        return fo.chain(fo.clip_by_global_norm(0.3, eps=1e-6), fo.adamw(lr))

    def inside(module):
        return adapters.Optimizer(module.parameters(), clipping, lr=0.05, compile=False)

    def plain(module):
        return torch.optim.AdamW(module.parameters(), lr=0.05)

    ours = pl.run(inside)
    theirs = pl.run(plain, gradient_clip_val=0.3)
    assert_close(ours[0], theirs[0], 1e-10)
    assert not torch.equal(pl.run(plain)[0][0][0], ours[0][0][0])


def test_a_recipe_that_accumulates_is_the_trainer_that_accumulates(pl):
    def collecting(lr):
        return fo.accumulate(fo.adamw(lr), every=3)

    def inside(module):
        return adapters.Optimizer(module.parameters(), collecting, lr=0.05, compile=False)

    def plain(module):
        return torch.optim.AdamW(module.parameters(), lr=0.05)

    ours, theirs = pl.Net(inside), pl.Net(plain)
    steps = pl.fit(ours).global_step, pl.fit(theirs, accumulate_grad_batches=3).global_step
    assert steps == (pl.BATCHES, pl.BATCHES // 3)  # Lightning counts calls of step
    assert_close(pl.values(ours), pl.values(theirs), 1e-12)


def test_a_schedule_inside_the_recipe_is_torchs_scheduler(pl):
    schedule = fo.schedules.warmup_cosine(0.01, 0.1, warmup_steps=3, decay_steps=10)

    def inside(module):
        return adapters.Optimizer(module.parameters(), lambda: fo.adamw(schedule), compile=False)

    def outside(module):
        opt = torch.optim.AdamW(module.parameters(), lr=1.0)
        scheduler = lrs.LambdaLR(opt, lambda i: float(schedule(i)))
        return [opt], [{"scheduler": scheduler, "interval": "step"}]

    assert_close(pl.run(inside, max_epochs=2)[0], pl.run(outside, max_epochs=2)[0], 1e-10)


def plateau(lr):
    return fo.chain(fo.adamw(lr), fo.reduce_on_plateau(0.5, patience=1))


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("made", "hyper"), [(fo.polyak_sgd, {}), (plateau, {"lr": 0.1})], ids=["polyak", "plateau"]
)
def test_a_recipe_that_reads_the_loss_gets_the_closures(pl, made, hyper, compile):
    def configure(module):
        return adapters.Optimizer(module.parameters(), made, compile=compile, **hyper)

    (weights, losses, _), _ = pl.run(configure)
    params, state = by_hand(pl, made(**hyper), value=True)
    assert_close(weights, params, 1e-10)
    assert len(set(losses)) == pl.BATCHES
    if made is plateau:
        assert fo.get(state, "scale") < 1.0


def test_with_accumulation_the_loss_is_the_last_micro_batchs_share(pl):
    seen = []

    def watching(lr):
        def scalars(t, *, value):
            seen.append(float(value))
            return ()

        watch = fo.leafwise(None, lambda g, slots, p: (g, slots), scalars, name="watch")
        return fo.chain(watch, fo.sgd(lr))

    def configure(module):
        return adapters.Optimizer(module.parameters(), watching, lr=0.1, compile=False)

    (_, losses, _), _ = pl.run(configure, accumulate_grad_batches=2)
    assert seen == [loss / 2 for loss in losses[1::2]]


@pytest.mark.parametrize("as_recipe", [False, True], ids=["AdamW", "recipe"])
def test_compiled_kernels_go_where_eager_rules_go(pl, as_recipe):
    def configure(compile):
        if as_recipe:
            return lambda m: adapters.Optimizer(m.parameters(), recipe, compile=compile, lr=0.05)
        return lambda m: adapters.AdamW(m.parameters(), compile=compile, lr=0.05)

    args = {"max_epochs": 2, "accumulate_grad_batches": 2}
    pl.assert_agree(pl.run(configure("strict"), **args), pl.run(configure(False), **args), 1e-12)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_module_trains_as_with_torchs(pl, backend, fresh_dynamo):
    class Quiet(pl.Net):
        def training_step(self, batch, index):
            return self.loss(batch[0])  # in one graph

    ends = []
    for make in (stock, adamw):
        module = Quiet(make)
        pl.fit(torch.compile(module, backend=backend, fullgraph=True))
        ends.append(pl.values(module))
    assert_close(ends[1], ends[0], 1e-10)
