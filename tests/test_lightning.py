"""Lightning's automatic optimization with what `configure_optimizers` returns: ours, or torch's."""

from __future__ import annotations

import copy

import cases
import pytest
import torch
from helpers import assert_close, assert_same
from torch.optim import lr_scheduler as lrs

import functional_optim as fo
from functional_optim import adapters
from functional_optim.adapters.optimizer import Runs

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
    if isinstance(opt, Runs):
        opt.compile = False
    return opt


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


def recipe(lr, decay=0.9):
    return fo.chain(fo.clip_by_global_norm(0.5), fo.adamw(lr), fo.params_ema(decay))


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


# ---------------------------------------------------------------- hooks and the wrapper


def adamw(module):
    return adapters.AdamW(module.parameters(), lr=0.05, compile=False)


def stock(module):
    return torch.optim.AdamW(module.parameters(), lr=0.05)


def test_every_hook_of_a_module_about_its_optimizer(pl):
    calls = []

    class Hooked(pl.Net):
        def on_before_optimizer_step(self, optimizer):
            norm = torch.stack([p.grad.norm() for p in self.parameters()]).norm()
            calls.append(("before", type(optimizer).__name__, norm.item()))

        def optimizer_zero_grad(self, epoch, index, optimizer):
            calls.append(("zero", index))
            optimizer.zero_grad(set_to_none=False)

        def configure_gradient_clipping(self, optimizer, gradient_clip_val, **kwargs):
            assert gradient_clip_val is None
            self.clip_gradients(optimizer, 0.1, "value")

        def optimizer_step(self, epoch, index, optimizer, closure):
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * (index + 1)
            if index != 2:
                optimizer.step(closure=closure)
            else:
                closure()

    runs = []
    for make in (stock, adamw):
        calls.append("—")
        runs.append(pl.run(make, Hooked))
    pl.assert_agree(runs[1], runs[0])
    half = calls.index("—", 1)
    assert len(calls[1:half]) == 2 * pl.BATCHES - 1
    assert calls[1] == ("zero", 0)
    assert [c[:2] for c in calls[1:half]] == [c[:2] for c in calls[half + 1 :]]
    assert_close(
        [c[2:] for c in calls[1:half] if c[0] == "before"],
        [c[2:] for c in calls[half + 1 :] if c[0] == "before"],
        1e-10,
    )
    assert runs[1][0][2][0][0]["step"] == pl.BATCHES - 1


def test_the_optimizers_own_hooks_fire_once_a_step(pl):
    calls = []

    def configure(module):
        opt = adamw(module)
        opt.register_step_pre_hook(lambda *_: calls.append("pre"))
        opt.register_step_post_hook(lambda *_: calls.append("post"))
        return opt

    pl.run(configure)
    assert calls == ["pre", "post"] * pl.BATCHES


@pytest.mark.parametrize("as_recipe", [False, True], ids=["AdamW", "recipe"])
def test_lightnings_wrapper_stands_for_the_optimizer(pl, as_recipe):
    def configure(module):
        if as_recipe:
            return adapters.Optimizer(module.parameters(), recipe, lr=0.05, compile=False)
        return adamw(module)

    module = pl.Net(configure)
    trainer = pl.fit(module)
    (opt,), wrapper = trainer.optimizers, module.optimizers()
    cls = adapters.Optimizer if as_recipe else adapters.AdamW
    assert type(opt) is cls
    assert isinstance(wrapper, cls)
    assert type(wrapper).__name__ == f"Lightning{cls.__name__}"
    assert wrapper.optimizer is opt
    assert wrapper.state is opt.state
    assert repr(wrapper).splitlines()[1:] == repr(opt).splitlines()[1:]
    assert_same(wrapper.state_dict()["state"], opt.state_dict()["state"])
    assert wrapper.compile is opt.compile
    wrapper.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    assert len(opt.param_groups) == 2
    copied = copy.deepcopy(opt)
    assert_same(copied.state_dict()["state"], opt.state_dict()["state"])
    assert len(copy.deepcopy(wrapper).param_groups) == 2


def test_a_copied_module_and_trainer_train_on(pl):
    module = pl.Net(adamw)
    pl.fit(module)
    other = copy.deepcopy(module)
    assert_same(pl.values(other), pl.values(module))
    pl.fit(module)
    pl.fit(other)
    assert_same(pl.values(other), pl.values(module))


@pytest.mark.parametrize(
    "args", [{"overfit_batches": 2, "max_epochs": 3}, {"fast_dev_run": 2}, {"limit_train_batches": 3}]
)
def test_short_runs(pl, args):
    runs = [pl.run(make, **args) for make in (stock, adamw)]
    pl.assert_agree(runs[1], runs[0])
    pl.assert_moved(runs[1])


def test_validation_between_batches_and_after(pl):
    class Checked(pl.Net):
        def validation_step(self, batch, index):
            assert not torch.is_grad_enabled()
            self.log("val", self.loss(batch[0]))

    logged = []
    runs = []
    for make in (stock, adamw):
        module = Checked(make)
        trainer = pl.trainer(2, val_check_interval=3)
        trainer.fit(module, pl.loader(), pl.loader(2))
        runs.append(pl.found(module, trainer))
        (after,) = trainer.validate(module, pl.loader(2), verbose=False)
        logged.append(after["val"])
        trainer.fit_loop.max_epochs = 3
        trainer.fit(module, pl.loader(), pl.loader(2))
        runs.append(pl.found(module, trainer))
    pl.assert_agree(runs[2], runs[0])
    pl.assert_agree(runs[3], runs[1])
    assert_close(logged[1], logged[0], 1e-10)
