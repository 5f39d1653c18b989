"""Slots of DTensors that are packed: each process packs its own part."""

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_close, assert_same
from ranks import needs_gloo, results, whole
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import state_dict as sd
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from ways import by_eager_object, by_object, by_update

import functional_optim as fo
from functional_optim import adapters
from functional_optim.core.cells import Compensated, Split

pytestmark = [needs_gloo, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]

STEPS = 3
KINDS = ("int8", "int4", "float8_e4m3fn", "bfloat16")
MATRICES = ("muon", "soap")
"""One whose slots belong to an element-wise rule, and one of a rule that takes batches."""

EXACT = {
    "split16": ("weight_low16", Split(16)),
    "kahan": ("weight_compensation", Compensated()),
}
"""Master weights without random numbers: their slots and cells."""

DIVIDED = {
    "rows": ((40, 48), Shard(0)),
    "uneven rows": ((41, 50), Shard(0)),
    "columns": ((30, 47), Shard(1)),
    "replicated": ((20, 30), Replicate()),
    "one row": ((1, 300), Shard(0)),  # the second process has nothing of it
}


def tensors(seed):
    torch.manual_seed(seed)
    return {name: torch.randn(shape) for name, (shape, _) in DIVIDED.items()}


def stored(kind="int8", lr=1e-2, block=64):
    return fo.stored(fo.adamw(lr), kind, block_size=block, min_size=0, where="*")


def optimizer(params, recipe):
    return adapters.Optimizer(params.items(), recipe, compile=False)


def step(opt, params, divide, times):
    for i in times:
        for name, x in tensors(i + 1).items():
            params[name].grad = divide(name, x)
        opt.step()


# ---------------------------------------------------------------- in the two processes
def divider(mesh):
    return lambda name, x: distribute_tensor(x, mesh, [DIVIDED[name][1]])


def parameters(divide):
    return {name: torch.nn.Parameter(divide(name, x)) for name, x in tensors(0).items()}


def here(x: Any) -> Any:
    """What this process has of a tensor, as a plain one."""
    return x.to_local().detach().clone() if isinstance(x, DTensor) else x.detach().clone()


def step_parts(kind, mesh):
    """Parameters after steps of DTensors, in three ways, and of plain tensors like their parts."""
    divide = divider(mesh)
    ways = {"object": by_eager_object, "compiled": by_object, "update": by_update}
    ways |= {"parts": by_eager_object, "compiled parts": by_object}
    ends = {}
    for way, step in ways.items():
        own = (lambda name, x: here(divide(name, x))) if "parts" in way else divide
        trees = [{n: own(n, x) for n, x in tensors(i).items()} for i in range(1 + STEPS)]
        params, _ = step(stored(kind), trees[0], trees[1:])
        ends[way] = {name: here(p) for name, p in params.items()}
    return ends


def model_of(params):
    return torch.nn.ParameterDict({name.replace(" ", "_"): p for name, p in params.items()})


def new(divide, recipe=stored):
    params = parameters(divide)
    return params, model_of(params), optimizer(params, recipe)


def save_and_load(kind, mesh, folder):
    """The end of a run, and of the same run through a checkpoint on disk in its middle."""
    divide, path = divider(mesh), f"{folder}/packed-{kind}"
    recipe = functools.partial(stored, kind)
    params, model, opt = new(divide, recipe)
    step(opt, params, divide, range(STEPS))
    held = {"model": model.state_dict(), "opt": sd.get_optimizer_state_dict(model, opt)}
    dcp.save(held, checkpoint_id=path)
    saved = gathered(held["opt"])["state"] if "float8" not in kind else None  # gloo sends none
    step(opt, params, divide, range(STEPS, 2 * STEPS))
    others, other, twin = new(divide, recipe)
    loaded = {"model": other.state_dict(), "opt": sd.get_optimizer_state_dict(other, twin)}
    dcp.load(loaded, checkpoint_id=path)
    other.load_state_dict(loaded["model"])
    sd.set_optimizer_state_dict(other, twin, loaded["opt"])
    step(twin, others, divide, range(STEPS, 2 * STEPS))
    found = []
    for o, ps in ((opt, params), (twin, others)):
        states = {name: {k: here(x) for k, x in o.state[p].items()} for name, p in ps.items()}
        found.append(({name: here(p) for name, p in ps.items()}, states))
    return {"through": found[0], "resumed": found[1], "saved": saved, "path": path}


def save_decoded(mesh, folder):
    """A checkpoint for other numbers of processes; its state, whole, and that of the parts."""
    divide = divider(mesh)
    params, model, opt = new(divide)
    step(opt, params, divide, range(STEPS))
    packed = sd.get_optimizer_state_dict(model, opt)
    dcp.save({"opt": packed}, checkpoint_id=f"{folder}/in-parts")
    opt.register_state_dict_post_hook(adapters.decode_slots)
    saved = sd.get_optimizer_state_dict(model, opt)
    dcp.save({"opt": saved}, checkpoint_id=f"{folder}/decoded")
    others, other, twin = new(divide)
    before = {name: {k: here(x) for k, x in opt.state[p].items()} for name, p in params.items()}
    sd.set_optimizer_state_dict(other, twin, saved)
    after = {name: {k: here(x) for k, x in twin.state[p].items()} for name, p in others.items()}
    return {
        "folder": folder,
        "decoded": gathered(saved),
        "packed": gathered(packed),
        "before": before,
        "after": after,
    }


def gathered(saved):
    state = {name: {k: whole(x) for k, x in own.items()} for name, own in saved["state"].items()}
    return {**saved, "state": state}


def where_counts(mesh):
    """Which parameters are packed of a small one, and of matrices of which parts are small."""
    shapes = {"small.weight": (16, 16), "large.weight": (64, 64), "long.bias": (5000,)}
    params = {
        name: distribute_tensor(torch.ones(s), mesh, [Shard(0)]) for name, s in shapes.items()
    }
    slots = fo.stored(fo.adamw(), "int8").init(params).slots
    return [name for name, x in slots["exp_avg.int8"].items() if x is not None]


def functions(mesh, folder):
    """States of DTensors: on disk and back, whole, and from plain tensors."""
    divide, tx = divider(mesh), stored()
    params = {name: divide(name, x) for name, x in tensors(0).items()}
    grads = {name: divide(name, x) for name, x in tensors(1).items()}
    _, state = tx.update(grads, tx.init(params), params)
    dcp.save(fo.state_dict(state, params), checkpoint_id=f"{folder}/packed-state")
    new = tx.init(params)
    held = fo.state_dict(new, params)
    dcp.load(held, checkpoint_id=f"{folder}/packed-state")
    loaded = fo.load_state_dict(new, held, params)
    decoded = fo.decoded(tx, state, params)
    plain = {key: whole(x) for key, x in fo.state_dict(decoded, params).items()}
    states = {
        "state": state,
        "loaded": loaded,
        "encoded": fo.encoded(tx, decoded, params),
        "from plain": fo.load_state_dict(new, plain, params),
    }
    return {
        "plain": plain,
        **{
            k: {key: here(y) for key, y in fo.state_dict(x, params).items()}
            for k, x in states.items()
        },
    }


def matrices(name, mesh):
    """Matrices that are computed whole, with momenta that are packed in parts."""

    def recipe(owned):
        tx = fo.stored(getattr(fo, name)(0.02), "int8", block_size=64, min_size=0, where="*")
        return fo.matrix_owners(tx) if owned else tx

    ends = []
    for way, owned in ((True, True), (True, False), (False, False)):
        x = torch.randn(20, 20, generator=torch.Generator().manual_seed(0))
        p = torch.nn.Parameter(distribute_tensor(x, mesh, [Shard(0)]) if way else x.clone())
        new = functools.partial(adapters.Optimizer, compile=False, owned=owned)
        opt = new([("w", p)], recipe)
        for i in range(STEPS):
            g = torch.randn(20, 20, generator=torch.Generator().manual_seed(1 + i))
            p.grad = distribute_tensor(g, mesh, [Shard(0)]) if way else g
            opt.step()
        new([("w", p)], recipe).load_state_dict(opt.state_dict())
        ends.append(whole(p))
    return ends


def one_row(kind, mesh):
    """A row that the operations of CAME gather, of a DTensor and of a plain tensor."""
    recipe = fo.stored(fo.came(1e-2), kind, block_size=64, min_size=0, where="*")
    divide, name = divider(mesh), "one row"
    ends = []
    for own in (divide, lambda name, x: x):
        trees = [{name: own(name, tensors(i)[name])} for i in range(1 + STEPS)]
        ends.append({name: whole(by_eager_object(recipe, trees[0], trees[1:])[0][name])})
    return ends


def wide_weights(kind, mesh):
    """This process's part of float32 weights, of DTensors by two ways and of plain tensors."""
    divide, (key, cells) = divider(mesh), EXACT[kind]
    ends = []
    for own, step in ((divide, by_eager_object), (divide, by_update), (None, by_update)):
        trees = [{n: x.bfloat16() for n, x in tensors(i).items()} for i in range(1 + STEPS)]
        held = [{n: own(n, x) if own else x for n, x in tree.items()} for tree in trees]
        params, slots = step(fo.master_weights(fo.adafactor(0.02), kind), held[0], held[1:])
        bits = slots[key]
        if own:
            assert all(bits[n].placements == p.placements for n, p in params.items())
        weights = {n: cells.decode((here(p), here(bits[n]))) for n, p in params.items()}
        ends.append(weights if own else {n: here(divide(n, x)) for n, x in weights.items()})
    return ends


def in_files(mesh, folder):
    """Parameters of a recipe whose slots are in files, and without; files after some steps."""
    divide, ends = divider(mesh), []
    for recipe in (fo.adamw, lambda lr: fo.offload(fo.adamw(lr), folder, min_size=1)):
        params = parameters(divide)
        opt = adapters.Optimizer(params.items(), recipe, lr=1e-2)
        step(opt, params, divide, range(STEPS))
        ends.append({name: here(p) for name, p in params.items()})
    maps = Path("/proc/self/maps")
    return ends, maps.read_text().count(f"{folder}/tmp") if maps.exists() else None


def parts(mesh, folder) -> dict[str, Any]:
    found: dict[str, Any] = {"in files": functools.partial(in_files, mesh, folder)}
    for kind in EXACT:
        found[f"wide-{kind}"] = functools.partial(wide_weights, kind, mesh)
    for kind in KINDS:
        found[f"packed-{kind}"] = functools.partial(step_parts, kind, mesh)
        found[f"packed-row-{kind}"] = functools.partial(one_row, kind, mesh)
        found[f"packed-saved-{kind}"] = functools.partial(save_and_load, kind, mesh, folder)
    found["packed-decoded"] = functools.partial(save_decoded, mesh, folder)
    found["packed-functions"] = functools.partial(functions, mesh, folder)
    found["packed-where"] = functools.partial(where_counts, mesh)
    for name in MATRICES:
        found[f"packed-{name}"] = functools.partial(matrices, name, mesh)
    return found


# ---------------------------------------------------------------- and in this one
@pytest.mark.parametrize("kind", KINDS)
def test_parts_are_stepped_as_plain_tensors(kind, both):
    first, second = results(both, f"packed-{kind}")
    for ends in (first, second):
        for way in ("object", "update"):
            assert_same(ends[way], ends["parts"])
        assert_same(ends["compiled"], ends["compiled parts"])
    start = tensors(0)["rows"]
    assert (first["object"]["rows"] - start[:20]).abs().min() > 0
    assert not second["object"]["one row"].numel()


@pytest.mark.parametrize("kind", KINDS)
def test_slots_of_one_row_are_packed_where_its_parameter_is(kind, both):
    """The first process has all of it: its blocks are those of a plain tensor."""
    for divided, alone in results(both, f"packed-row-{kind}"):
        assert_close(divided, alone, 1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_of_two_processes_goes_on_bitwise_in_two(kind, both):
    for mine in results(both, f"packed-saved-{kind}"):
        assert_same(mine["resumed"], mine["through"])
        _, states = mine["through"]
        assert f"exp_avg.{kind}" in states["rows"]


def test_decoded_shards_are_packed_as_they_were_by_the_same_processes(both):
    """But for a code that was rounded by chance: it may lie between two of a new scale."""
    for mine in results(both, "packed-decoded"):
        for name, state in mine["before"].items():
            assert state.keys() == mine["after"][name].keys()
            for key, x in state.items():
                same = torch.isclose(x.float(), mine["after"][name][key].float(), atol=1)
                assert same.float().mean() > 0.99


def in_one_process(kind="int8"):
    """Parameters and an optimizer of them, whose state torch has made."""
    params = {name: torch.nn.Parameter(x) for name, x in tensors(0).items()}
    return params, model_of(params), optimizer(params, lambda: stored(kind))


def test_a_decoded_checkpoint_is_loaded_by_another_number_of_processes(both):
    found = results(both, "packed-decoded")[0]
    params, model, opt = in_one_process()
    handle = opt.register_state_dict_post_hook(adapters.decode_slots)
    held = {"opt": sd.get_optimizer_state_dict(model, opt)}
    dcp.load(held, checkpoint_id=f"{found['folder']}/decoded")
    handle.remove()
    assert_same(held["opt"]["state"], found["decoded"]["state"])
    sd.set_optimizer_state_dict(model, opt, held["opt"])
    again = opt.state_dict(decoded=True)["state"]
    for i, (name, p) in enumerate(params.items()):
        assert opt.state[p]["exp_avg.int8"].dim() == 2
        wanted = found["decoded"]["state"][name.replace(" ", "_")]["exp_avg"]
        assert (again[i]["exp_avg"] - wanted).norm() / wanted.norm() < 0.02


def test_slots_in_bfloat16_are_loaded_by_any_number_of_processes(both):
    found = results(both, "packed-saved-bfloat16")[0]
    _, model, opt = in_one_process("bfloat16")
    held = {"opt": sd.get_optimizer_state_dict(model, opt)}
    dcp.load(held, checkpoint_id=found["path"])
    assert_same(held["opt"]["state"], found["saved"])
    assert "exp_avg.bfloat16" in found["saved"]["rows"]


def test_functional_states_are_packed_in_parts(both):
    for mine in results(both, "packed-functions"):
        assert_same(mine["loaded"], mine["state"])
        assert_same(mine["from plain"], mine["encoded"])
        assert mine["plain"]["state.rows.exp_avg"].shape == (40, 48)
        assert mine["state"]["state.rows.exp_avg.int8"].shape == (1, 1, 15, 64)


def test_parts_are_refused_by_another_number_of_processes(both):
    found = results(both, "packed-decoded")[0]
    _, model, opt = in_one_process()
    held = {"opt": sd.get_optimizer_state_dict(model, opt)}
    before = copy.deepcopy(opt.state_dict())
    with pytest.raises(dcp.api.CheckpointException, match=r"(?i)size mismatch"):
        dcp.load(held, checkpoint_id=f"{found['folder']}/in-parts")
    wanted = r"'rows' is packed in int8, in 15 blocks of 64 in each of 2 parts, .*decoded=True"
    with pytest.raises(ValueError, match=wanted):
        sd.set_optimizer_state_dict(model, opt, found["packed"])
    assert_same(opt.state_dict()["state"], before["state"])


def test_the_whole_tensor_tells_whether_it_is_packed(both):
    for packed in results(both, "packed-where"):
        assert packed == ["large.weight"]


@pytest.mark.parametrize("name", MATRICES)
def test_matrices_are_computed_whole_beside_packed_parts(name, both):
    """And loaded again. Blocks and random numbers are others than those of one process."""
    for owned, parts, alone in results(both, f"packed-{name}"):
        assert_same(owned, parts)
        start = torch.randn(20, 20, generator=torch.Generator().manual_seed(0))
        assert 0 < (parts - alone).norm() < 0.05 * (alone - start).norm()


@pytest.mark.parametrize("kind", EXACT)
def test_bits_of_weights_are_divided_as_their_parameters(kind, both):
    """Also of one row, which the operations of a rule gather."""
    for *parts, alone in results(both, f"wide-{kind}"):
        for mine in parts:
            assert_close(mine, alone, 1e-5)


def test_slots_of_shards_are_offloaded_to_files(both):
    for rank, ((plain, offloaded), files) in enumerate(results(both, "in files")):
        assert_same(offloaded, plain)
        assert files in (None, 2 * (len(DIVIDED) - rank))  # the second has nothing of one row
