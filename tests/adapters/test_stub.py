"""OptimizerStub and zero_loss: what passes through a gradient trainer's loop unharmed."""

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


def test_it_is_an_empty_optimizer_with_torchs_state_dicts():
    opt = OptimizerStub()
    assert isinstance(opt, torch.optim.Optimizer)
    assert (opt.param_groups, opt.state, opt.defaults) == ([], {}, {})
    assert OptimizerStub(iter(())).param_groups == []
    assert [opt.step(), opt.step(None), opt.step(closure=None), opt.zero_grad()] == [None] * 4
    assert opt.state_dict() == EMPTY
    assert repr(opt) == "OptimizerStub ()"
    _, opt = with_a_group(lr=0.3)
    groups = opt.state_dict()["param_groups"]
    assert groups == [{"lr": 0.3, "weight_decay": 0.0, "params": [0]}]
    assert "lr: 0.3" in repr(opt)
    with pytest.raises(TypeError, match="should be an iterable of Tensors"):
        OptimizerStub(torch.ones(2))
    with pytest.raises(TypeError, match="a closure or nothing, but got a Tensor"):
        opt.step(torch.ones(()))


def test_groups_can_be_added_and_never_move():
    opt = OptimizerStub()
    w = torch.nn.Parameter(torch.tensor([-0.0, 1.0]))
    before = w.detach().clone()
    opt.add_param_group({"params": [w], "lr": 0.5})
    opt.add_param_group({"params": torch.ones(1)})  # requires no gradient
    assert [group["lr"] for group in opt.param_groups] == [0.5, 0.0]
    assert [group["weight_decay"] for group in opt.param_groups] == [0.0, 0.0]
    w.grad = torch.tensor([torch.nan, 1.0])
    version = w._version
    opt.step()
    assert torch.equal(w.detach().view(torch.int32), before.view(torch.int32))
    assert w._version == version
    assert opt.state == {}
    for params, error, says in (
        ([w], ValueError, "some parameters appear in more than one"),
        ([torch.ones(1).long()], TypeError, "only floating-point and complex"),
    ):
        with pytest.raises(error, match=says):
            opt.add_param_group({"params": params})
    assert len(opt.param_groups) == 2


def of_adam():
    w = torch.nn.Parameter(torch.ones(2))
    adam = torch.optim.Adam([w], lr=0.7)
    w.grad = torch.ones(2)
    adam.step()
    return adam.state_dict()


WRONG = {
    "other groups": (EMPTY, ValueError, "different number of parameter groups"),
    "with state": (of_adam(), ValueError, "keeps no state, but the loaded state dict has 1 "),
    "empty": ({}, ValueError, "has no 'param_groups'"),
    "half": ({"param_groups": []}, ValueError, "has no 'state'"),
    "none": (None, TypeError, "got a NoneType"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_checkpoint_is_an_error_and_changes_nothing(name):
    saved, error, says = WRONG[name]
    mine, opt = with_a_group(lr=0.3)
    group, before = opt.param_groups[0], opt.state_dict()
    with pytest.raises(error, match=says):
        opt.load_state_dict(saved)
    assert opt.state_dict() == before
    assert opt.param_groups[0] is group
    assert group["params"][0] is mine


SCHEDULERS = {
    "StepLR": lambda opt: lr_scheduler.StepLR(opt, 1, gamma=0.5),
    "ReduceLROnPlateau": lambda opt: lr_scheduler.ReduceLROnPlateau(opt, patience=0),
    "OneCycleLR": lambda opt: lr_scheduler.OneCycleLR(
        opt, 0.1, total_steps=5, cycle_momentum="momentum" in opt.defaults
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_step_without_warnings(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for opt in (OptimizerStub(), with_a_group(lr=1.0, momentum=0.9)[1]):
            scheduler, seen = SCHEDULERS[name](opt), []
            for _ in range(3):
                opt.step()
                scheduler.step(*[1.0] * (name == "ReduceLROnPlateau"))
                seen.append([group["lr"] for group in opt.param_groups])
            scheduler.load_state_dict(scheduler.state_dict())
            assert seen[-1] == scheduler.get_last_lr()
            assert len({rate for rates in seen for rate in rates}) == 3 * len(opt.param_groups)
    with pytest.raises(ValueError, match="must support momentum"):
        lr_scheduler.OneCycleLR(OptimizerStub(), 0.1, total_steps=5)


def test_a_zero_loss_has_a_backward():
    model = torch.nn.Linear(3, 2)
    loss = zero_loss(model(torch.full((4, 3), torch.inf)), torch.zeros(4, dtype=torch.int64))
    assert (loss.item(), loss.shape) == (0.0, ())
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


def test_lightning_trains_with_it_by_hand(pl, tmp_path):
    class Hebbian(pl.ByHand):
        def training_step(self, batch, index):
            opt = self.optimizers()
            layer, rate = self.layers[0], opt.param_groups[0]["lr"]
            with torch.no_grad():
                layer.weight += rate * layer(batch[0]).T @ batch[0]
            self.losses.append(opt.step(lambda: zero_loss(layer(batch[0]))).item())

        def on_train_epoch_end(self):
            self.lr_schedulers().step()

    def configure(module):
        opt = OptimizerStub(module.parameters(), lr=0.1)
        return [opt], [lr_scheduler.StepLR(opt, 1, gamma=0.5)]

    module = Hebbian(configure)
    before = pl.values(module)
    trainer = pl.fit(module, max_epochs=2)
    assert not torch.equal(pl.values(module)[0], before[0])
    assert module.losses == [0.0] * 2 * pl.BATCHES
    assert trainer.global_step == 2 * pl.BATCHES
    trainer.save_checkpoint(tmp_path / "all.ckpt")
    (saved,) = torch.load(tmp_path / "all.ckpt", weights_only=True)["optimizer_states"]
    assert saved["state"] == {}
    assert saved["param_groups"][0]["lr"] == 0.025
