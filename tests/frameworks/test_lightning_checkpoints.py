"""Lightning's checkpoints: resumed bitwise, ours and torch's in turn, read safely, cut short."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import cases
import pytest
import torch
from helpers import assert_same
from torch.optim import lr_scheduler as lrs
from voting import recipe

import functional_optim as fo
from functional_optim import adapters

pytestmark = pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")


def whole(lr):
    """A recipe with a part that is not made of one-tensor rules."""
    return fo.flatten(recipe(lr))


def noisy(lr):
    return fo.chain(fo.accumulate(fo.adam(lr), every=2), fo.add_noise(0.1, 0.5, seed=3))


RECIPES = {"recipe": recipe, "flatten": whole, "accumulate": noisy}


def scheduled(make):
    def configure(module):
        opt = make(module)
        scheduler = lrs.OneCycleLR(opt, 0.1, total_steps=24, cycle_momentum=False)
        return [opt], [{"scheduler": scheduler, "interval": "step"}]

    return configure


def of_row(case, ours=True):
    def make(module):
        if ours:
            return case.drop_in(module.parameters(), compile=False, **case.hyper)
        return case.stock(module.parameters(), **case.hyper)

    return scheduled(make)


def of_recipe(name):
    return scheduled(
        lambda m: adapters.Optimizer(m.parameters(), RECIPES[name], lr=0.05, compile=False)
    )


def saving(pl, folder, **kwargs):
    from lightning.pytorch.callbacks import ModelCheckpoint

    every = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, **kwargs)
    return {"callbacks": [every], "enable_checkpointing": True}


def resumes(pl, configure, folder, **own):
    """A run of two epochs, and one that a checkpoint from the middle of the first goes on with."""
    module = pl.Net(configure, **own)
    args = saving(pl, folder, every_n_train_steps=4)
    end = pl.found(module, pl.fit(module, pl.Resumable(), 2, **args))
    other = pl.Net(configure, **own)
    trainer = pl.fit(other, pl.Resumable(), 2, folder / "step=4.ckpt")
    assert trainer.global_step == 2 * pl.BATCHES
    assert len(other.losses) == 2 * pl.BATCHES - 4
    pl.assert_ended_alike(pl.found(other, trainer), end)


@pytest.mark.parametrize("case", cases.with_torch())
def test_resuming_in_the_middle_of_an_epoch_is_bitwise(pl, case, tmp_path):
    resumes(pl, of_row(case), tmp_path, bias=case.dim is None)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_resumes_bitwise(pl, name, tmp_path):
    resumes(pl, of_recipe(name), tmp_path)


def test_lbfgs_resumes_bitwise(pl, tmp_path):
    def configure(module):
        opt = adapters.LBFGS(module.parameters(), lr=0.5, max_iter=3, history_size=4)
        return opt

    module = pl.Net(configure)
    end = pl.found(module, pl.fit(module, max_epochs=2))
    first, second = pl.Net(configure), pl.Net(configure)
    pl.fit(first).save_checkpoint(tmp_path / "half.ckpt")
    trainer = pl.fit(second, max_epochs=2, ckpt_path=tmp_path / "half.ckpt")
    pl.assert_ended_alike(pl.found(second, trainer), end)


def test_compiled_kernels_resume_bitwise(pl, tmp_path):
    resumes(
        pl,
        scheduled(lambda m: adapters.AdamW(m.parameters(), lr=0.05, compile="strict")),
        tmp_path,
    )


@pytest.mark.parametrize("ours_first", [False, True])
@pytest.mark.parametrize("case", cases.with_torch())
def test_a_checkpoint_of_torchs_trainer_goes_on_with_ours_and_back(pl, case, ours_first, tmp_path):
    bias = case.dim is None
    first = pl.Net(of_row(case, ours_first), bias=bias)
    pl.fit(first).save_checkpoint(tmp_path / "half.ckpt")
    end = pl.Net(of_row(case, ours_first), bias=bias)
    end = pl.found(end, pl.fit(end, max_epochs=2))
    other = pl.Net(of_row(case, not ours_first), bias=bias)
    trainer = pl.fit(other, max_epochs=2, ckpt_path=tmp_path / "half.ckpt")
    found = pl.found(other, trainer)  # torch's own loading makes its carried numbers float64
    pl.assert_ended_alike(found, end, max(1e-10, case.rounding), check_dtype=False)


@pytest.mark.parametrize("name", [*RECIPES, "AdamW", "SparseAdam"])
def test_checkpoints_are_read_without_running_code(pl, name, tmp_path):
    """torch.load(weights_only=True) takes tensors and plain values only; so does fit, here."""
    if name in RECIPES:
        configure = of_recipe(name)
    elif name == "AdamW":
        configure = scheduled(lambda m: adapters.AdamW(m.parameters(), lr=0.05, compile=False))
    else:
        configure = lambda m: adapters.SparseAdam(m.layers[0].parameters())  # noqa: E731

    class Sparse(pl.Net):
        def on_before_optimizer_step(self, optimizer):
            for p in self.layers[0].parameters():
                p.grad = p.grad.to_sparse()

    module = (Sparse if name == "SparseAdam" else pl.Net)(configure)
    pl.fit(module).save_checkpoint(tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert len(saved["optimizer_states"]) == 1
    trainer = pl.trainer(2)
    trainer.fit(module, pl.loader(), ckpt_path=tmp_path / "a.ckpt", weights_only=True)
    assert trainer.global_step == 2 * pl.BATCHES


def test_weights_alone_have_no_optimizer(pl, tmp_path):
    args = saving(pl, tmp_path, every_n_train_steps=3, save_weights_only=True)
    module = pl.Net(of_recipe("recipe"))
    pl.fit(module, **args)
    saved = torch.load(tmp_path / "step=6.ckpt", weights_only=True)
    assert "optimizer_states" not in saved
    other = pl.Net(of_recipe("recipe"))
    other.load_state_dict(saved["state_dict"])
    assert_same(pl.values(other), pl.values(module))
    with pytest.raises(KeyError, match="checkpoint contains only the model"):
        pl.fit(other, max_epochs=2, ckpt_path=tmp_path / "step=6.ckpt")


def test_another_optimizers_checkpoint_is_refused_by_name(pl, tmp_path):
    row = {case.name: case for case in cases.CASES}
    pl.fit(pl.Net(of_row(row["adamw"]))).save_checkpoint(tmp_path / "a.ckpt")
    other = pl.Net(of_row(row["rmsprop"]))
    with pytest.raises(ValueError, match="groups have no 'alpha', which RMSprop needs"):
        pl.fit(other, max_epochs=2, ckpt_path=tmp_path / "a.ckpt")
    assert not other.losses


def test_a_checkpoint_without_counts_is_refused_by_the_parameter(pl, tmp_path):
    """torch's own Adam says KeyError: 'step'."""

    def made(kind, **more):
        return lambda m: kind(m.named_parameters(), lr=0.1, **more)

    pl.fit(pl.Net(made(torch.optim.SGD, momentum=0.9))).save_checkpoint(tmp_path / "a.ckpt")
    other = pl.Net(made(adapters.Adam, compile=False))
    wanted = (
        r"parameter 'layers.0.weight' of the loaded state has \['momentum_buffer'\], no 'step', "
        "which Adam needs"
    )
    with pytest.raises(ValueError, match=wanted):
        pl.fit(other, max_epochs=2, ckpt_path=tmp_path / "a.ckpt")
    assert not other.losses


KILLED = """
import os, signal, sys
import torch
import fsspec.implementations.local as local
import lightning_runs as pl
from test_lightning_checkpoints import of_recipe, saving
from pathlib import Path

folder = Path(sys.argv[1])
written = local.LocalFileOpener.write

def write(self, data):
    if Path(folder, "step=2.ckpt").exists():  # so this is the second checkpoint
        written(self, data[: len(data) // 2])
        self.f.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    return written(self, data)

local.LocalFileOpener.write = write
args = saving(pl, folder, every_n_train_steps=2)
pl.fit(pl.Net(of_recipe("recipe")), pl.Resumable(), 2, **args)
print("not killed")
"""


def test_a_kill_while_it_saves_leaves_the_last_checkpoint(pl, tmp_path):
    folder = tmp_path / "kept"
    here = Path(__file__).parent
    folders = [str(here), str(here.parent / "support"), os.environ.get("PYTHONPATH")]
    path = os.pathsep.join(filter(None, folders))
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, str(folder)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr[-2000:]
    assert [p.name for p in folder.glob("*.ckpt")] == ["step=2.ckpt"]
    other = pl.Net(of_recipe("recipe"))
    trainer = pl.fit(other, pl.Resumable(), 2, folder / "step=2.ckpt")
    end = pl.run(of_recipe("recipe"), max_epochs=2)
    pl.assert_ended_alike(pl.found(other, trainer), end)
