"""The tables of rules, views, storage and sizes are what init and update do."""

import re
import sys

import optree
import pytest
import torch
from cases import able
from torch.utils._python_dispatch import TorchDispatchMode

import functional_optim as fo
from functional_optim import adapters
from functional_optim.core.cells import CELLS
from functional_optim.tuning.tables import WIDTH


def network(layers=3):
    params = {"wte.weight": torch.zeros(16, 4)}
    for i in range(layers):
        params[f"h.{i}.qkv.weight"] = torch.zeros(12, 4)
        params[f"h.{i}.qkv.bias"] = torch.zeros(12)
    return params


def words(text):
    """What a table says, without its frames."""
    return re.sub(r"[\u2500-\u257f]", " ", text).split()


def model():
    sizes = {"embed": (80, 64), "h.0.w": (64, 72), "h.1.w": (64, 72), "h.0.b": (64,)}
    return {name: torch.zeros(*size) for name, size in sizes.items()}


def test_layers_are_one_line_with_their_number():
    table = fo.summary(fo.muon_adamw(views={"*.qkv.weight": {"split": 3}}), network())
    lines = repr(table).splitlines()
    at = lines.index("scale_by_muon → orthogonalize → add_decayed_weights → scale_by_lr")
    assert lines[at + 1] == "momentum_buffer: float32"
    assert lines[at + 2].split("  ")[1] == "parameter"
    assert lines[at + 3].split()[:3] == ["h.*.qkv.weight", "×3", "(12,"]
    assert "3 × (4, 4)" in lines[at + 3]
    assert lines[at + 3].split()[-3:] == ["144", "576", "B"]
    assert len(lines) == 16
    params = network() | {"h.3.qkv.weight": torch.zeros(24, 4)}
    lines = repr(fo.summary(fo.muon_adamw(), params)).splitlines()
    named = [line.split("  ")[1] for line in lines if line.startswith("  ")]
    assert named[:3] == ["parameter", "wte.weight", "h.*.qkv.bias ×3"]
    assert named[3:] == ["parameter", "h.*.qkv.weight ×3", "h.3.qkv.weight"]


@pytest.mark.parametrize("how", ["in full", "int8", "bfloat16"])
@pytest.mark.parametrize("case", able())
def test_entries_and_bytes_are_those_of_the_state(case, how):
    params = case.params(torch.float32)
    tx = case.tx()
    if how != "in full":
        tx = fo.stored(tx, how, block_size=16, min_size=8, where="*")
    table, state = fo.summary(tx, params), tx.init(params)
    kept = optree.tree_leaves(state)
    total = sum(row.bytes for row in table.rows) + table.shared
    assert total == sum(x.numel() * x.element_size() for x in kept)
    slots = optree.tree_leaves(state.slots)
    assert table.state_bytes == sum(x.numel() * x.element_size() for x in slots)
    assert [row.path for row in table.rows] == list(params)
    for row in table.rows:
        own = {key: slot[row.path] for key, slot in state.slots.items()}
        own = {key: x for key, x in own.items() if x is not None}
        assert row.elements == sum(x.numel() for x in own.values())
        codes = [key for key in own if key.rpartition(".")[2] in CELLS]
        packed = {key.rpartition(".")[0] for key in codes}
        blocks = {key.rpartition(".")[0] for key in codes if not key.endswith(".bfloat16")}
        assert {name for name, kind in row.slots if "in blocks of 16" in kind} == blocks
        names = packed | {key for key in own if key not in codes and not key.endswith(".scale")}
        assert {name for name, _ in row.slots} == names
        for name, kind in row.slots:
            if name not in packed:
                assert str(own[name].dtype) == f"torch.{kind}"


MEAN = fo.trace(0.9)
WRAPPED = {
    "flat": lambda: fo.flatten(fo.adam()),
    "behind": lambda: fo.chain(fo.adam(), fo.flatten(fo.trace(0.9)), fo.params_ema(0.9)),
    "lookahead": lambda: fo.lookahead(fo.adam()),
    "mechanize": lambda: fo.mechanize(fo.adam()),
    "accumulate": lambda: fo.accumulate(fo.stored(fo.adam(), "int8"), 2),
    "named": lambda: fo.named_chain(("fast", fo.trace(0.5)), ("slow", fo.stored(MEAN, "int4"))),
    "schedule-free": lambda: fo.stored(fo.schedule_free_adamw(), "int8"),
    "soap": lambda: fo.stored(fo.soap(), {"exp_avg*": "int8", "*_basis": "bfloat16"}),
    "partition": lambda: fo.stored(
        fo.partition({"a": fo.lion(), "b": fo.freeze("*")}, {"h": "a", "*": "b"}), "float8_e4m3fn"
    ),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_bytes_of_recipes(name):
    tx, params = WRAPPED[name](), model()
    kept = optree.tree_leaves(tx.init(params))
    large = [x for x in kept if x.dim()]
    table = fo.summary(tx, params)
    assert table.state_bytes == sum(x.numel() * x.element_size() for x in large)
    assert (table.shared > table.numbers) == (name in ("flat", "behind"))
    assert words(str(table)) == words(repr(table))
    if name == "named":
        kinds = dict(table.rows[1].slots)
        packed = "int4 in blocks of 256"
        assert kinds == {"fast.momentum_buffer": "float32", "slow.momentum_buffer": packed}


def test_what_a_step_moves():
    params = {"w": torch.zeros(64, 64), "half": torch.zeros(64, 64, dtype=torch.bfloat16)}

    def of(tx, *keys):
        table = fo.summary(tx, {key: params[key] for key in keys or ("w",)})
        assert table.step_bytes == sum(row.step_bytes for row in table.rows)
        return table.step_bytes / 4096, table.exact

    assert of(fo.sgd(0.1)) == (12, True)
    assert of(fo.adamw()) == (28, True)
    assert of(fo.adamw(), "half") == (6 + 8, True)
    assert of(fo.stored(fo.adamw(), "int8")) == (16 + 4 * 4 / 256, True)
    assert of(fo.chain(fo.clip_by_global_norm(1.0), fo.adamw())) == (28, False)
    assert of(fo.lamb()) == (28, False)
    assert of(fo.muon()) == (20, False)
    assert of(fo.chain(fo.freeze("w"), fo.adamw()), "w", "half") == (14, True)
    table = fo.summary(fo.adamw(), params)
    assert table.weight_bytes == table.grad_bytes == 6 * 4096
    frozen = fo.summary(fo.chain(fo.freeze("w"), fo.adamw()), params)
    assert (frozen.weight_bytes, frozen.grad_bytes) == (6 * 4096, 2 * 4096)
    assert "read and written in a step  " in repr(table)
    assert "read and written in a step, at least" in repr(fo.summary(fo.muon(), {"w": params["w"]}))


def test_what_is_not_packed_is_said_and_why():
    params = model() | {"z": torch.zeros(64, 72, dtype=torch.complex64)}
    rows = fo.summary(fo.stored(fo.adam(), "int8"), params).rows
    reasons = ["no hidden matrix", "", "", "under 4,096 elements", "complex"]
    assert [row.left_out for row in rows] == reasons
    assert rows[1].storage == "exp_avg, exp_avg_sq: int8 in blocks of 256"
    assert rows[3].storage == "exp_avg, exp_avg_sq: float32 (not packed: under 4,096 elements)"
    some = fo.stored(fo.adam(), {"exp_avg_sq": "int4"}, where="embed", min_size=0, block_size=32)
    rows = fo.summary(some, params).rows
    assert rows[0].storage == "exp_avg: float32; exp_avg_sq: int4 in blocks of 32"
    assert rows[1].left_out == "not in where"
    assert fo.summary(fo.adam(), params).rows[0].left_out == ""


def test_patterns_that_fit_nothing_are_listed():
    tx = fo.chain(fo.freeze("hed"), fo.stored(fo.adam(), "int8", where=("h", "imbed", "*")))
    with pytest.warns(UserWarning, match="matches no leaf"):
        table = fo.summary(tx, model())
    assert table.unfit == ("hed", "imbed")
    assert repr(table).splitlines()[-1] == "patterns that match no parameter: 'hed', 'imbed'"
    assert "'hed', 'imbed'" in str(table)
    assert fo.summary(fo.stored(fo.adam(), "int8", where="h"), model()).unfit == ()


class Sizes(TorchDispatchMode):
    """Remembers the largest tensor with data that operations made."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in optree.tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.device.type != "meta":
                self.largest = max(self.largest, x.numel())
        return out


@pytest.mark.parametrize("make", [fo.adamw, fo.muon, fo.soap, fo.adafactor, fo.lion])
def test_nothing_is_allocated_and_parameters_need_no_data(make):
    params = {"w": torch.zeros(64, 72)}
    tx = fo.stored(make(), "int8")
    text = repr(fo.summary(tx, {key: p.to("meta") for key, p in params.items()}))
    with Sizes() as seen:
        assert repr(fo.summary(tx, params)) == text
    assert seen.largest <= 256  # a block


def test_the_text_is_the_same_without_rich(monkeypatch):
    params = model() | {"a_module_with_a_name." * 6 + "weight": torch.zeros(64, 64)}
    tx = fo.named_chain(("clip", fo.clip_by_global_norm(1.0)), ("adam", fo.adamw()))
    for one in (fo.muon_adamw(), tx, fo.chain(*[fo.clip_by_value(1.0)] * 9, fo.adamw())):
        table = fo.summary(one, params)
        framed = str(table)
        assert "╭" in framed
        assert words(framed) == words(repr(table))
        assert max(map(len, [*framed.splitlines(), *repr(table).splitlines()])) <= WIDTH
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "rich", None)
        assert str(table) == repr(table)


def test_an_optimizer_object_prints_its_tables():
    params = {name: torch.nn.Parameter(p) for name, p in model().items()}
    opt = adapters.AdamW(params.items(), stored="int8")
    text = str(opt)
    assert text.startswith(f"{torch.optim.AdamW.__repr__(opt)}\n")
    assert repr(opt) == torch.optim.AdamW.__repr__(opt)
    tx = fo.stored(fo.adamw(), "int8")
    assert words(text.removeprefix(repr(opt))) == words(str(fo.summary(tx, params)))
    assert not opt.state
    groups = [{"params": [params["embed"]]}, {"params": [params["h.0.w"]], "stored": "int4"}]
    said = words(str(adapters.Adam(groups)))
    assert " ".join(said).count("scale_by_adam") == 2
    assert {"group", "float32", "int4"} <= set(said)
    groups = adapters.MuonAdamW(params.items(), stored="int8")
    said = str(groups)
    assert said.splitlines()[1].startswith("muon: 2 parameters")
    assert "momentum_buffer: int8 in blocks of 256" in said
    assert "h.*.w ×2" in said


def test_printing_an_optimizer_object_never_fails():
    p = torch.nn.Parameter(torch.zeros(4))
    frozen = p.detach()  # a frozen parameter is not checked before its first step
    assert "no summary: scale_by_adamuon takes matrices" in str(adapters.AdaMuon([frozen]))
    opt = adapters.AdamW([p])
    opt.param_groups[0]["lr"] = -2e-19  # of torch's LinearLR
    assert "read and written" in str(opt)
    whole = adapters.Optimizer([("p", p)], lambda: fo.flatten(fo.adam()))
    assert "of it for all parameters together" in str(whole)
    assert str(adapters.OptimizerStub()) == "OptimizerStub ()"


def test_wrappers_and_frozen_leaves():
    params = {"a": torch.zeros(2), "b": torch.zeros(3)}
    whole = fo.flatten(fo.adam())
    rows = fo.summary(fo.chain(fo.freeze("b"), whole, fo.params_ema(0.9)), params).rows
    assert rows[0].rules[-1] == "params_ema"
    assert "flatten(scale_by_adam, scale_by_lr)" in rows[0].rules[0]
    frozen = fo.summary(fo.chain(fo.freeze("b"), fo.adam()), params)
    assert frozen.rows[1].rules == ()
    assert "frozen" in str(frozen)
    assert "(the tensor)" in str(fo.summary(fo.adam(), torch.zeros(2)))
    assert str(fo.summary(fo.adam(), {})) == "no parameters"


def test_matrices_of_several_sizes():
    params = {"qkv": torch.zeros(8, 3), "kernel": torch.zeros(4, 2, 3, 3)}
    views = {"qkv": {"split": (4, 2, 2)}}
    rows = fo.summary(fo.muon_adamw(views=views), params).rows
    assert [row.view for row in rows] == ["(4, 3) + 2 × (2, 3)", "(4, 18)"]


def test_the_old_name_of_elements_warns():
    row = fo.summary(fo.adam(), {"w": torch.zeros(3)}).rows[0]
    with pytest.warns(DeprecationWarning, match="read elements"):
        assert row.entries == row.elements == 6
