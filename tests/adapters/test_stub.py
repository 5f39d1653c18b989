"""OptimizerStub, row by row (M01 to M18), and what passes through it unharmed."""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch.optim import lr_scheduler

import functional_optim as fo
from functional_optim.adapters import OptimizerStub, zero_loss

EMPTY = {"state": {}, "param_groups": []}


def with_a_group(**hyperparameters):
    """A stub over one parameter of ones."""
    w = torch.nn.Parameter(torch.ones(2))
    return w, OptimizerStub([w], **hyperparameters)


def test_m01_m02_m03_m08_it_is_an_empty_optimizer():
    opt = OptimizerStub()
    assert isinstance(opt, torch.optim.Optimizer)
    assert (opt.param_groups, opt.state, opt.defaults) == ([], {}, {})
    assert OptimizerStub(iter(())).param_groups == []
    with pytest.raises(TypeError, match="should be an iterable of Tensors"):
        OptimizerStub(torch.ones(2))


def test_m04_a_step_without_a_closure_does_nothing():
    opt = OptimizerStub()
    assert opt.step() is None
    assert opt.step(None) is None
    assert opt.step(closure=None) is None


def test_m05_a_closure_is_called_once_with_gradients_enabled():
    seen = []

    def closure():
        seen.append(torch.is_grad_enabled())
        return 0.25

    with torch.no_grad():
        assert OptimizerStub().step(closure) == 0.25
    assert seen == [True]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_m06_zero_grad(set_to_none):
    OptimizerStub().zero_grad()
    w, opt = with_a_group()
    w.grad = torch.ones(2)
    opt.zero_grad(set_to_none)
    assert w.grad is None if set_to_none else torch.equal(w.grad, torch.zeros(2))


def test_m07_groups_can_be_added_and_never_move():
    opt = OptimizerStub()
    w = torch.nn.Parameter(torch.tensor([-0.0, 1.0]))
    before = w.detach().clone()
    opt.add_param_group({"params": [w], "lr": 0.5})
    opt.add_param_group({"params": torch.ones(1)})  # requires no gradient
    assert [group["lr"] for group in opt.param_groups] == [0.5, 0.0]
    w.grad = torch.tensor([torch.nan, 1.0])
    version = w._version
    opt.step()
    assert torch.equal(w.detach().view(torch.int32), before.view(torch.int32))
    assert w._version == version
    assert opt.state == {}
    with pytest.raises(ValueError, match="some parameters appear in more than one"):
        opt.add_param_group({"params": [w]})
    with pytest.raises(TypeError, match="only floating-point and complex"):
        opt.add_param_group({"params": [torch.ones(1, dtype=torch.int64)]})
    assert len(opt.param_groups) == 2


def test_m09_state_dicts_are_torchs_and_round_trip():
    assert OptimizerStub().state_dict() == EMPTY
    _, opt = with_a_group(lr=0.3)
    saved = opt.state_dict()
    assert saved["param_groups"] == [{"lr": 0.3, "weight_decay": 0.0, "params": [0]}]
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    _, other = with_a_group()
    other.load_state_dict(torch.load(file, weights_only=True))
    assert other.state_dict() == saved
    assert other.defaults == {}


WRONG = {
    "of adam": (ValueError, "different number of parameter groups"),
    "with state": (ValueError, "keeps no state, but the loaded state dict has 1 "),
    "empty": (ValueError, "has no 'param_groups'"),
    "half": (ValueError, "has no 'state'"),
    "none": (TypeError, "got a NoneType"),
}


@pytest.mark.parametrize("name", WRONG)
def test_m09_a_wrong_checkpoint_is_an_error_and_changes_nothing(name):
    w = torch.nn.Parameter(torch.ones(2))
    adam = torch.optim.Adam([w], lr=0.7)
    w.grad = torch.ones(2)
    adam.step()
    mine, opt = with_a_group(lr=0.3)
    group, before = opt.param_groups[0], opt.state_dict()
    wrong = {
        "of adam": EMPTY,
        "with state": adam.state_dict(),
        "empty": {},
        "half": {"param_groups": before["param_groups"]},
        "none": None,
    }[name]
    error, match = WRONG[name]
    with pytest.raises(error, match=match):
        opt.load_state_dict(wrong)
    assert opt.state_dict() == before
    assert opt.param_groups[0] is group
    assert group["params"][0] is mine
    if name != "none":
        with pytest.raises(ValueError, match=r".") as raised:
            OptimizerStub().load_state_dict(wrong if wrong != EMPTY else adam.state_dict())
        assert "parameter groups" in str(raised.value) or "has no" in str(raised.value)


def test_m10_all_six_hooks_fire_in_order():
    opt, seen = OptimizerStub(), []

    def note(name):
        return lambda *args: seen.append((name, args[0] is opt))

    handles = [
        opt.register_step_pre_hook(note("step pre")),
        opt.register_step_post_hook(note("step post")),
        opt.register_state_dict_pre_hook(note("save pre")),
        opt.register_state_dict_post_hook(note("save post")),
        opt.register_load_state_dict_pre_hook(note("load pre")),
        opt.register_load_state_dict_post_hook(note("load post")),
    ]
    opt.step(lambda: seen.append(("closure", True)))
    opt.load_state_dict(opt.state_dict())
    expected = ["step pre", "closure", "step post", "save pre", "save post", "load pre"]
    assert seen == [(name, True) for name in [*expected, "load post"]]
    opt.register_state_dict_post_hook(note("first"), prepend=True)
    opt.state_dict()
    assert [name for name, _ in seen[-3:]] == ["save pre", "first", "save post"]
    for handle in handles:
        handle.remove()
    seen.clear()
    opt.step()
    assert seen == []


def test_m11_it_shows_in_profiles_and_can_be_wrapped_by_torch():
    opt = OptimizerStub()
    with torch.profiler.profile(acc_events=True) as profile:
        opt.step()
    assert any(e.key == "Optimizer.step#OptimizerStub.step" for e in profile.key_averages())

    class Patched(OptimizerStub):
        def step(self, closure=None):
            return "mine"

    patched, seen = Patched(), []
    assert Patched.step.hooked
    patched.register_step_post_hook(lambda *args: seen.append(1))
    assert patched.step() == "mine"
    assert seen == [1]
    again = torch.optim.Optimizer.profile_hook_step(lambda self: "profiled")
    assert again(opt) == "profiled"


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_m12_copies_work_like_it(copied):
    for opt in (OptimizerStub(), with_a_group(momentum=0.5)[1]):
        other = copied(opt)
        assert type(other) is OptimizerStub
        assert other.defaults == opt.defaults
        assert other.state == {}
        assert str(other.state_dict()) == str(opt.state_dict())
        assert other.step(lambda: 2.0) == 2.0
        other.zero_grad()
        other.load_state_dict(opt.state_dict())


def test_m13_repr():
    assert repr(OptimizerStub()) == "OptimizerStub ()"
    assert "lr: 0.25" in repr(with_a_group(lr=0.25)[1])


SCHEDULERS = {
    "StepLR": lambda opt: lr_scheduler.StepLR(opt, 1, gamma=0.5),
    "CosineAnnealingLR": lambda opt: lr_scheduler.CosineAnnealingLR(opt, 4),
    "ReduceLROnPlateau": lambda opt: lr_scheduler.ReduceLROnPlateau(opt, patience=0),
    "OneCycleLR": lambda opt: lr_scheduler.OneCycleLR(
        opt, 0.1, total_steps=5, cycle_momentum=False
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_m14_m15_schedulers_step_without_warnings(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for opt in (OptimizerStub(), with_a_group(lr=1.0)[1]):
            scheduler, seen = SCHEDULERS[name](opt), []
            for _ in range(3):
                opt.step()
                scheduler.step(*[1.0] * (name == "ReduceLROnPlateau"))
                seen.append([group["lr"] for group in opt.param_groups])
            scheduler.load_state_dict(scheduler.state_dict())
            assert [list(x) for x in seen][-1] == scheduler.get_last_lr()
            if opt.param_groups:
                assert len({rates[0] for rates in seen}) == 3
            else:
                assert seen == [[], [], []]


def test_m15_one_cycle_takes_a_momentum_or_says_what_is_missing():
    with pytest.raises(ValueError, match="must support momentum"):
        lr_scheduler.OneCycleLR(OptimizerStub(), 0.1, total_steps=5)
    _, opt = with_a_group(momentum=0.9)
    scheduler = lr_scheduler.OneCycleLR(opt, 0.1, total_steps=5)
    opt.step()
    scheduler.step()
    assert 0.85 <= opt.param_groups[0]["momentum"] < 0.95


@pytest.mark.parametrize("given", [False, True])
def test_m16_it_passes_through_a_gradient_trainers_loop(given):
    model = torch.nn.Linear(3, 1)
    opt = OptimizerStub(model.parameters() if given else ())
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(3):
        opt.zero_grad()
        loss = model(torch.ones(2, 3)).square().mean()
        loss.backward()
        assert opt.step(closure=None) is None
        rates = [(group["lr"], group["weight_decay"]) for group in opt.param_groups]
    assert rates == ([(0.0, 0.0)] if given else [])
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_m17_a_trainers_checkpoint_round_trips():
    def trainer():
        model = torch.nn.Linear(2, 1)
        opt = OptimizerStub(model.parameters(), lr=1.0)
        return model, opt, lr_scheduler.StepLR(opt, 1, gamma=0.5)

    parts = trainer()
    parts[1].step()
    parts[2].step()
    file = io.BytesIO()
    torch.save([part.state_dict() for part in parts], file)
    file.seek(0)
    again = trainer()
    for part, saved in zip(again, torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(saved)
    assert again[1].param_groups[0]["lr"] == 0.5
    for model, opt, scheduler in (parts, again):
        opt.step()
        scheduler.step()
        assert opt.param_groups[0]["lr"] == 0.25
        assert torch.equal(model.weight, parts[0].weight)


def test_m18_a_zero_loss_has_a_backward():
    model = torch.nn.Linear(3, 2)
    x = torch.full((4, 3), torch.inf)
    loss = zero_loss(model(x), torch.zeros(4, dtype=torch.int64))
    assert loss.item() == 0.0
    assert loss.shape == ()
    z = torch.ones(2, dtype=torch.complex128, requires_grad=True)
    total = zero_loss({"z": z, "w": [model.weight], "label": 3})
    assert total.dtype is torch.float64
    total.backward()
    assert torch.equal(z.grad, torch.zeros_like(z))
    assert torch.equal(model.weight.grad, torch.zeros(2, 3))
    lone = zero_loss(torch.ones(2, dtype=torch.float64), 1)
    lone.backward()
    assert (lone.item(), lone.dtype) == (0.0, torch.float64)
    zero_loss().backward()
    w = torch.ones(2)
    assert torch.equal(torch.func.grad(lambda w: zero_loss(w))(w), torch.zeros(2))


def test_its_transformation_makes_zeros_of_everything():
    params = {"w": torch.ones(2), "z": torch.ones(2, dtype=torch.complex64), "none": torch.ones(1)}
    grads = {"w": torch.tensor([torch.nan, 1.0]), "z": params["z"], "none": None}
    tx = fo.chain(fo.adam(0.1), fo.set_to_zero())
    updates, state = tx.update(grads, tx.init(params), params)
    assert updates["none"] is None
    assert all((updates[key] == 0).all() for key in ("w", "z"))
    assert int(state.step) == 1
    assert not OptimizerStub().transform({}).init(params).slots


# Lightning and its parts warn of deprecations in packages that they import
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore:.*(num_workers|isinstance|pkg_resources).*:UserWarning")
def test_m16_m17_lightning_trains_with_it_by_hand(tmp_path):
    lightning = pytest.importorskip("lightning")

    class Hebbian(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.layer = torch.nn.Linear(2, 1, bias=False)
            self.losses = []

        def configure_optimizers(self):
            opt = OptimizerStub(self.parameters(), lr=0.1)
            return [opt], [lr_scheduler.StepLR(opt, 1, gamma=0.5)]

        def training_step(self, batch, index):
            opt = self.optimizers()
            rate = opt.param_groups[0]["lr"]
            with torch.no_grad():
                self.layer.weight += rate * self.layer(batch).T @ batch
            self.losses.append(opt.step(lambda: zero_loss(self.layer(batch))))

        def on_train_epoch_end(self):
            self.lr_schedulers().step()

    torch.manual_seed(0)
    model = Hebbian()
    before = model.layer.weight.detach().clone()
    data = torch.utils.data.DataLoader(torch.randn(6, 2), batch_size=3)
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(model, data)
    assert not torch.equal(model.layer.weight, before)
    assert len(model.losses) == 4
    assert trainer.global_step == 4
    trainer.save_checkpoint(tmp_path / "all.ckpt")
    saved = torch.load(tmp_path / "all.ckpt", weights_only=True)["optimizer_states"]
    assert saved[0]["state"] == {}
    assert saved[0]["param_groups"][0]["lr"] == 0.025


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_m16_accelerate_prepares_it():
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model = torch.nn.Linear(2, 1)
    model, opt, empty = accelerator.prepare(
        model, OptimizerStub(model.parameters(), lr=0.1), OptimizerStub()
    )
    before = model.weight.detach().clone()
    for each in (opt, empty):
        accelerator.backward(model(torch.ones(1, 2)).sum())
        each.step()
        each.zero_grad()
        each.load_state_dict(each.state_dict())
    assert torch.equal(model.weight, before)
    assert opt.param_groups[0]["lr"] == 0.1
