"""Lightning over two processes on one machine: they go where one process goes.

Both processes are started once, run every part, and leave what they found in a file.
"""

from __future__ import annotations

import os
import warnings

import processes
import pytest
import torch
from helpers import assert_close
from ranks import WORLD, needs_gloo, results, whole

import functional_optim as fo
from functional_optim import adapters

pytestmark = needs_gloo

EXACT = 1e-12
HERE = {"use_distributed_sampler": False}


def recipe(lr, decay=0.9):
    return fo.chain(fo.clip_by_global_norm(0.05), fo.adamw(lr), fo.params_ema(decay))


KINDS = {
    "AdamW": lambda m: adapters.AdamW(m.parameters(), lr=0.05, compile=False),
    "recipe": lambda m: adapters.Optimizer(m.parameters(), recipe, lr=0.05, compile=False),
}


# ---------------------------------------------------------------- in the two processes


def halves(pl):
    """Half of every batch for each process, in order: Lightning's own sampler would shuffle."""
    rows = pl.loader().dataset
    sampler = torch.utils.data.DistributedSampler(rows, shuffle=False)
    return torch.utils.data.DataLoader(rows, batch_size=pl.ROWS // WORLD, sampler=sampler)


def ddp(pl, kind):
    module = pl.Net(KINDS[kind])
    args = {"gradient_clip_val": 0.05} if kind == "AdamW" else {}
    pl.fit(module, halves(pl), 2, strategy="ddp", devices=WORLD, **HERE, **args)
    return pl.values(module)


def divided(pl, tensor, folder):
    """fully_shard, or tensor parallelism, under ModelParallelStrategy; from a checkpoint, too."""
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    class Divided(pl.Net):
        divided = False

        def configure_model(self):
            if self.divided:
                return
            self.divided = True
            if tensor:
                gathered = ColwiseParallel(output_layouts=Replicate())
                plan = {"0": gathered, "2": gathered}
                parallelize_module(self.layers, self.device_mesh["tensor_parallel"], plan)
            else:
                fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

    sizes = (1, WORLD) if tensor else (WORLD, 1)

    def fitted(epochs, path=None):
        module = Divided(KINDS["recipe"])
        strategy = ModelParallelStrategy(*sizes)
        batches = pl.loader() if tensor else halves(pl)
        trainer = pl.fit(module, batches, epochs, path, strategy=strategy, devices=WORLD, **HERE)
        return module, trainer

    module, trainer = fitted(1)
    trainer.save_checkpoint(f"{folder}/saved-{tensor}")
    resumed, _ = fitted(2, f"{folder}/saved-{tensor}")
    straight, _ = fitted(2)
    return {
        "straight": [whole(p) for p in straight.parameters()],
        "resumed": [whole(p) for p in resumed.parameters()],
        "placements": [type(p).__name__ for p in module.parameters()],
    }


def fabric(pl, kind):
    import lightning

    made = lightning.Fabric(accelerator="cpu", devices=WORLD, strategy="ddp")
    made.launch()
    net = pl.Net(None).layers
    model, opt = made.setup(net, KINDS[kind](net))
    for x in pl.data().split(pl.ROWS):
        mine = x[made.global_rank :: WORLD]
        opt.zero_grad()
        with made.no_backward_sync(model, enabled=False):
            made.backward((model(mine) - mine.sum(1, keepdim=True)).square().mean())
        opt.step()
    return [whole(p) for p in model.parameters()]


def work(rank: int, folder: str) -> dict[str, object]:
    """What one process does."""
    os.environ["LOCAL_RANK"] = str(rank)  # so Lightning starts no processes of its own
    warnings.simplefilter("ignore")
    import lightning_runs as pl

    parts = {}
    for kind in KINDS:
        parts[f"ddp-{kind}"] = lambda kind=kind: ddp(pl, kind)
        parts[f"fabric-{kind}"] = lambda kind=kind: fabric(pl, kind)
    for tensor in (False, True):
        parts[f"divided-{tensor}"] = lambda tensor=tensor: divided(pl, tensor, folder)
    return processes.attempt_all(parts)


# ---------------------------------------------------------------- and in this one


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """The results of the two processes."""
    folder = tmp_path_factory.mktemp("ranks")
    return processes.collect(WORLD, work, str(folder), folder=folder)


@pytest.mark.parametrize("kind", KINDS)
def test_ddp_on_two_halves_of_a_batch_is_one_process_on_all_of_it(pl, kind, two):
    args = {"gradient_clip_val": 0.05} if kind == "AdamW" else {}
    alone = pl.run(KINDS[kind], max_epochs=2, **args)[0][0]
    for mine in results(two, f"ddp-{kind}"):
        assert_close(mine, alone, EXACT)


@pytest.mark.parametrize("kind", KINDS)
def test_fabric_with_ddp_is_one_process(pl, kind, two):
    alone = pl.run(KINDS[kind])[0][0]
    for mine in results(two, f"fabric-{kind}"):
        assert_close(mine, alone, EXACT)


@pytest.mark.parametrize("tensor", [False, True], ids=["fully_shard", "tensor parallel"])
def test_a_recipe_over_a_divided_model_is_one_process_and_resumes(pl, tensor, two):
    alone = pl.run(KINDS["recipe"], max_epochs=2)[0][0]
    for mine in results(two, f"divided-{tensor}"):
        assert "DTensor" in mine["placements"]
        assert_close(mine["straight"], alone, EXACT)
        assert_close(mine["resumed"], alone, EXACT)


def test_lightning_itself_has_no_fsdp_strategy_without_a_gpu(pl):
    with pytest.raises(ValueError, match="`fsdp` requires a GPU accelerator"):
        pl.trainer(strategy="fsdp", devices=WORLD)
