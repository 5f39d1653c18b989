"""`offload`: slots in files and in host memory."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import step_object
from torch import Tensor
from ways import random_tree

import functional_optim as fo
from functional_optim import adapters

MAPS = Path("/proc/self/maps")
linux = pytest.mark.skipif(not MAPS.exists(), reason="it asks Linux for its maps")

RECIPES = {
    "clipped": lambda: fo.chain(fo.clip_by_global_norm(1.0), fo.adamw(1e-2), fo.params_ema(0.9)),
    "stored": lambda: fo.stored(fo.adamw(1e-2), "int8", where="*", min_size=0),
    "master": lambda: fo.master_weights(fo.adamw(1e-2), "split8"),
}


SIZES = {"hidden": (64, 96), "bias": (5,), "large": (5000,)}


def model(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return random_tree(0, dtype, SIZES)


def gradients(dtype: torch.dtype) -> list[dict[str, Tensor]]:
    return [random_tree(k + 1, dtype, SIZES) for k in range(3)]


def mapped(x: Tensor) -> bool:
    """Whether the memory of a tensor is that of a file without a name."""
    for line in MAPS.read_text().splitlines():
        span, *_, last = line.split(maxsplit=5)
        start, stop = (int(y, 16) for y in span.split("-"))
        if start <= x.data_ptr() < stop:
            return last.rstrip().endswith("(deleted)")
    return False


def stepped(tx: Any, dtype: torch.dtype, **more: Any) -> tuple[dict[str, Any], Any]:
    params = {k: torch.nn.Parameter(p) for k, p in model(dtype).items()}
    opt = adapters.Optimizer(params.items(), lambda: tx, **more)
    step_object(opt, gradients(dtype))
    return params, opt


@linux
@pytest.mark.parametrize("name", RECIPES)
def test_slots_in_files_are_stepped_as_others(name, tmp_path):
    dtype = torch.bfloat16 if name == "master" else torch.float32
    tx = RECIPES[name]()
    away = fo.offload(tx, tmp_path)
    for compile in (True, False):
        params, opt = stepped(away, dtype, compile=compile)
        others, plain = stepped(tx, dtype, compile=compile)
        for k, p in params.items():
            assert torch.equal(p, others[k])
            for key, x in plain.state[others[k]].items():
                assert torch.equal(opt.state[p][key], x)
                assert mapped(opt.state[p][key]) == (x.numel() >= 4096)
    params, step, state = model(dtype), fo.compile(away), away.init(model(dtype))
    for g in gradients(dtype):
        params, state = step(g, state, params)
    slots = [x["hidden"] for x in state.slots.values() if x["hidden"] is not None]
    assert any(map(mapped, slots))
    assert list(tmp_path.iterdir()) == []


@linux
def test_a_loaded_state_goes_into_files_and_they_go_with_it(tmp_path):
    params, opt = stepped(fo.offload(fo.adamw(1e-2), tmp_path), torch.float32)
    _, plain = stepped(fo.adamw(1e-2), torch.float32)
    opt.load_state_dict(plain.state_dict())
    assert mapped(opt.state[params["hidden"]]["exp_avg"])
    assert str(tmp_path) in MAPS.read_text()
    del params, opt
    gc.collect()
    assert str(tmp_path) not in MAPS.read_text()


def test_slots_in_host_memory_of_another_device():
    import torch._lazy.ts_backend

    torch._lazy.ts_backend.init()
    for name, make in RECIPES.items():
        dtype = torch.bfloat16 if name == "master" else torch.float32
        tx = fo.offload(make(), "cpu", min_size=1000)
        known, plain = stepped(make(), dtype, compile=False)
        params = {k: torch.nn.Parameter(p.to("lazy")) for k, p in model(dtype).items()}
        opt = adapters.Optimizer(params.items(), lambda tx=tx: tx, compile=False)
        step_object(opt, fo.tree.map(lambda g: g.to("lazy"), gradients(dtype)))
        for k, p in params.items():
            torch.testing.assert_close(p.detach().cpu(), known[k].detach(), rtol=1e-2, atol=1e-4)
            for key, x in opt.state[p].items():
                if key != "step":
                    assert x.device.type == ("cpu" if x.numel() >= 1000 else "lazy")
                    assert x.dtype == plain.state[known[k]][key].dtype


@linux
def test_a_full_disk_is_an_error_and_not_the_end(tmp_path, monkeypatch):
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    tx = fo.offload(fo.adamw(1e-2), tmp_path)
    monkeypatch.setattr("os.posix_fallocate", full)
    where = f"No space left on device: offload needs [0-9]+ bytes in {tmp_path}; make room"
    with pytest.raises(OSError, match=where) as error:
        tx.init(model())
    assert error.value.errno == 28
    assert list(tmp_path.iterdir()) == []
