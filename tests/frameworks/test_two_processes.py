"""Lightning and Accelerate over two processes on one machine: they go where one process goes.

Both processes are started once, run every part, and leave what they found in a file.
"""

import os
import warnings

import accelerate
import cases
import loops
import processes
import pytest
import torch
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from helpers import assert_close, assert_same
from ranks import WORLD, needs_gloo, results, whole
from torch.distributed.tensor import DTensor
from torch.optim import lr_scheduler as lrs
from torch.utils.data import DataLoader

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


def parted(lr):
    """By the names of the parameters, which Accelerate may replace."""
    parts = {"matrices": fo.adamw(lr), "vectors": fo.sgd(lr)}
    return fo.partition(parts, {"*.weight": "matrices", "*.bias": "vectors"})


CASES = [loops.row(name) for name in ("sgd-momentum", "adamw", "adafactor", "composed")]
CASES += [cases.row("parted", parted, lr=0.1)]
BATCH = 3


def made(case):
    """A row's model, its optimizer and a scheduler."""
    model = loops.make_model(case)
    kind = loops.drop_in if case.stock else loops.general
    opt = kind(case, model.named_parameters())
    return model, opt, lrs.StepLR(opt, 1, 0.7)


def data():
    return torch.cat(loops.batches(6))


# ---------------------------------------------------------------- Lightning, in the two processes
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


# ---------------------------------------------------------------- Accelerate, in the two processes
def prepared(case, **options):
    accelerate.state.AcceleratorState._reset_state()
    accelerate.state.GradientState._reset_state()
    here = accelerate.Accelerator(cpu=True, **options)
    assert here.num_processes == WORLD
    if options:
        here.state.distributed_type = DistributedType.FSDP
        here.state.fsdp_plugin = options["fsdp_plugin"]
    return here, here.prepare(*made(case), DataLoader(data(), batch_size=BATCH))


def accelerated(here, objects):
    """Through a prepared loader, in which every process has its own batches."""
    model, opt, scheduler, loader = objects
    for x in loader:
        here.backward(loops.loss_of(model, x))
        here.clip_grad_norm_(model.parameters(), 0.05)
        opt.step()
        scheduler.step()
        opt.zero_grad()
    return {n.removeprefix("module."): whole(p) for n, p in model.named_parameters()}


def replicated(case, folder):
    """DDP: where it goes, and where it goes on from what it saved."""
    here, objects = prepared(case)
    ended = accelerated(here, objects)
    here.save_state(f"{folder}/{case.name}")
    further = accelerated(here, objects)
    there, others = prepared(case)
    there.load_state(f"{folder}/{case.name}")
    return {"ended": ended, "further": further, "resumed": accelerated(there, others)}


def sharded(case):
    """FSDP2, whose parameters the optimizer gets when it is prepared.

    Accelerate leaves the plugin out on CPUs. Its preparation works there, too, once it is asked.
    """
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
    here, objects = prepared(case, fsdp_plugin=plugin)
    assert all(isinstance(p, DTensor) for p in objects[0].parameters())
    return accelerated(here, objects)


def work(rank: int, folder: str) -> dict[str, object]:
    """What one process does."""
    # with them, Lightning and Accelerate start no processes of their own
    os.environ |= {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": str(WORLD)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "ACCELERATE_USE_CPU": "yes"}
    warnings.simplefilter("ignore")
    import lightning_runs as pl

    parts = {}
    for kind in KINDS:
        parts[f"ddp-{kind}"] = lambda kind=kind: ddp(pl, kind)
    for tensor in (False, True):
        parts[f"divided-{tensor}"] = lambda tensor=tensor: divided(pl, tensor, folder)
    for case in CASES:
        parts[f"replicated-{case.name}"] = lambda case=case: replicated(case, folder)
        parts[f"sharded-{case.name}"] = lambda case=case: sharded(case)
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


@pytest.mark.parametrize("tensor", [False, True], ids=["fully_shard", "tensor parallel"])
def test_a_recipe_over_a_divided_model_is_one_process_and_resumes(pl, tensor, two):
    alone = pl.run(KINDS["recipe"], max_epochs=2)[0][0]
    for mine in results(two, f"divided-{tensor}"):
        assert "DTensor" in mine["placements"]
        assert_close(mine["straight"], alone, EXACT)
        assert_close(mine["resumed"], alone, EXACT)


def passes(case, count=1):
    """The parameters that one process has after each pass over the data, in batches of both."""
    model, opt, scheduler = made(case)
    ends = []
    for _ in range(count):
        for x in data().split(WORLD * BATCH):
            loops.loss_of(model, x).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            opt.step()
            for _ in range(WORLD):  # as Accelerate does: batches are counted
                scheduler.step()
            opt.zero_grad()
        ends.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return ends


@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in CASES])
def test_accelerates_replicas_and_shards_go_where_one_process_goes(case, two):
    first, second = passes(case, 2)
    for mine in results(two, f"replicated-{case.name}"):
        assert_close([mine["ended"], mine["further"]], [first, second], loops.EXACT)
        assert_same(mine["resumed"], mine["further"])
    for mine in results(two, f"sharded-{case.name}"):
        assert_close(mine, first, loops.EXACT)
