"""One object for Muon and AdamW: its groups, schedulers, checkpoints and text."""

import pytest
import torch
from helpers import assert_close, assert_same, clone, copy_of, run, through_file

import functional_optim as fo
from functional_optim.adapters import MuonAdamW, Optimizer

EXACT = {"ns_dtype": torch.float64, "compile": False}


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv = torch.nn.LayerNorm(4), torch.nn.Linear(4, 12)
        self.mix = torch.nn.Linear(4, 4)


class Net(torch.nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.wte = torch.nn.Embedding(7, 4)
        self.blocks = torch.nn.ModuleList([Block(), Block()])
        self.head = torch.nn.Linear(4, 7, bias=False)
        self.double()


def give_gradients(model, step=0):
    torch.manual_seed(100 + step)
    for p in model.parameters():
        p.grad = torch.randn_like(p)


def stepped(opt, model, steps=3, begin=0):
    for step in range(begin, begin + steps):
        give_gradients(model, step)
        opt.step()
    return copy_of(list(model.parameters()))


def names(group):
    return set(group["param_names"])


def test_the_groups_are_named_and_have_their_own_numbers():
    model = Net()
    opt = MuonAdamW(model.named_parameters(), 0.03, 0.002, 0.2, 0.4, **EXACT)
    muon, adamw = opt.param_groups
    assert names(muon) == {f"blocks.{i}.{x}.weight" for i in (0, 1) for x in ("qkv", "mix")}
    assert names(muon) | names(adamw) == {name for name, _ in model.named_parameters()}
    assert [(x["name"], x["lr"], x["weight_decay"]) for x in (muon, adamw)] == [
        ("muon", 0.03, 0.2),
        ("adamw", 0.002, 0.4),
    ]


@pytest.mark.parametrize("compile", [False, "strict"])
def test_it_steps_as_its_function(compile):
    model, views = Net(), {"*.qkv.weight": {"split": 3}}
    numbers = {"ns_dtype": torch.float64, "weight_decay": 0.1, "views": views}
    opt = MuonAdamW(model.named_parameters(), 0.03, 0.002, compile=compile, **numbers)
    tx = fo.muon_adamw(0.03, 0.002, **numbers)
    params = {name: p.detach().clone() for name, p in model.named_parameters()}
    grads = []
    for step in range(3):
        give_gradients(model, step)
        grads.append({name: p.grad for name, p in model.named_parameters()})
        opt.step()
    params, _ = run(tx, params, grads)
    assert_close([*params.values()], copy_of(list(model.parameters())), 1e-12)
    for name, p in model.named_parameters():
        keys = {"momentum_buffer"} if ".qkv.w" in name or ".mix.w" in name else None
        assert opt.state[p].keys() - {"step"} == (keys or {"exp_avg", "exp_avg_sq"})


def test_each_group_of_the_user_is_divided():
    model = Net()
    pairs = dict(model.named_parameters())
    first = [(n, p) for n, p in pairs.items() if n.startswith("blocks.0")]
    norms = [(n, p) for n, p in pairs.items() if n.startswith("blocks.1.norm")]
    rest = [(n, p) for n, p in pairs.items() if n not in {*dict(first), *dict(norms)}]
    opt = MuonAdamW(
        [
            {"params": first, "lr": 0.5, "adamw_lr": 0.05, "weight_decay": 0.0},
            {"params": norms, "lr": 0.007, "weight_decay": 0.3, "name": "norms"},
            {"params": rest, "adamw_weight_decay": 0.4},
        ],
        **EXACT,
    )
    found = [(x["name"], x["lr"], x["weight_decay"]) for x in opt.param_groups]
    assert found == [
        ("muon", 0.5, 0.0),
        ("adamw", 0.05, 0.01),
        ("norms.adamw", 0.007, 0.3),
        ("muon.1", 0.02, 0.01),
        ("adamw.1", 3e-4, 0.4),
    ]
    assert not any(key.startswith("adamw") for x in opt.param_groups for key in x if key != "adamw")
    twin = MuonAdamW([dict(x) for x in opt.param_groups], **EXACT)
    assert [names(x) for x in twin.param_groups] == [names(x) for x in opt.param_groups]
    assert [(x["lr"], x["weight_decay"]) for x in twin.param_groups] == [x[1:] for x in found]


def test_it_goes_on_from_a_checkpoint_and_a_late_group_has_the_rate_of_the_object():
    through = Net()
    expected = stepped(MuonAdamW(through.named_parameters(), 0.1, 0.01, **EXACT), through, 5)
    model = Net()
    opt = MuonAdamW(model.named_parameters(), 0.1, 0.01, **EXACT)
    stepped(opt, model, 2)
    saved = through_file(opt.state_dict())
    opt = MuonAdamW(model.named_parameters(), 0.7, 0.07, **EXACT)
    opt.load_state_dict(saved)
    assert_same(stepped(opt, model, 3, 2), expected)
    late = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    opt.add_param_group({"params": [("late.bias", late)]})
    assert opt.param_groups[-1]["lr"] == 0.07


def test_a_refused_group_leaves_the_object_as_it_was():
    model = Net()
    opt = MuonAdamW(model.named_parameters(), **EXACT)
    up = torch.nn.Parameter(torch.ones(3, 3))
    for group, error, words in (
        ({"params": [up]}, TypeError, "pass model.named_parameters"),
        ({"params": [("up.weight", up)], "nonsense": 1}, TypeError, "nonsense"),
        (
            {
                "params": [("up.weight", up), ("b", torch.nn.Parameter(torch.ones(2)))],
                "adamw_lr": -1.0,
            },
            ValueError,
            "-1.0",
        ),
        ({"params": [("up.weight", up)], "muon": "up", "adamw": "up"}, ValueError, "as well as"),
        ({"params": {up}}, TypeError, "set"),
        ({"params": [("up.weight", 3)]}, TypeError, "only optimize Tensors, .* is int"),
        ({"params": [(0, up)]}, TypeError, "pass model.named_parameters"),
    ):
        with pytest.raises(error, match=words):
            opt.add_param_group(group)
        assert len(opt.param_groups) == 2
    stepped(opt, model, 1)


def test_what_cannot_be_is_said_when_it_is_built():
    model = Net()
    with pytest.raises(TypeError, match="assigns parameters by name"):
        MuonAdamW(model.parameters())
    with pytest.raises(ValueError, match="found no matrix of a hidden layer"):
        MuonAdamW(model.wte.named_parameters(prefix="wte"))
    with pytest.raises(ValueError, match=r"'blocks\.\*\.up' in muon= .* matches no matrix"):
        MuonAdamW(model.named_parameters(), muon="blocks.*.up")
    with pytest.raises(ValueError, match=r"views= .* matches no leaf of muon"):
        MuonAdamW(model.named_parameters(), views={"head.weight": {"split": 7}})
    with pytest.raises(ValueError, match="-1"):
        MuonAdamW(model.named_parameters(), adamw_lr=-1.0)
    with pytest.raises(ValueError, match="only the number 0"):
        Optimizer(model.parameters(), fo.muon_adamw)


def test_a_recipe_around_it_needs_names_over_all_groups_only():
    model = Net()
    pairs = list(model.named_parameters())
    groups = [
        {"params": [x for x in pairs if x[1].dim() == k], "weight_decay": k / 10} for k in (1, 2)
    ]

    def recipe(weight_decay):
        tx = fo.muon_adamw(weight_decay=weight_decay, ns_dtype=torch.float64)
        return fo.chain(fo.clip_by_global_norm(1.0), tx)

    stepped(Optimizer(groups, recipe, weight_decay=0.0, compile=False), model, 1)


def test_its_text_shows_what_goes_where():
    opt = MuonAdamW(Net().named_parameters(), views={"*.qkv.weight": {"split": 3}}, **EXACT)
    assert repr(opt).splitlines() == [
        "MuonAdamW (",
        "muon: 4 parameters, 128 elements, lr=0.02, weight_decay=0.01",
        "    blocks.*.qkv.weight ×2 (12, 4), 3 × (4, 4)",
        "    blocks.*.mix.weight ×2 (4, 4)",
        "adamw: 10 parameters, 104 elements, lr=0.0003, weight_decay=0.01",
        "    wte.weight (7, 4)",
        "    blocks.*.norm.weight ×2 (4,)",
        "    blocks.*.norm.bias ×2 (4,)",
        "    blocks.*.qkv.bias ×2 (12,)",
        "    blocks.*.mix.bias ×2 (4,)",
        "    head.weight (7, 4)",
        ")",
    ]
    before = clone(opt.state_dict()["param_groups"])
    assert opt.state_dict()["param_groups"] == before


def test_its_text_shows_all_parameters_of_one_name():
    up, down = torch.nn.Linear(2, 3), torch.nn.Linear(3, 2)
    opt = MuonAdamW([*up.named_parameters(), *down.named_parameters()])
    assert repr(opt).splitlines()[1:4] == [
        "muon: 2 parameters, 12 elements, lr=0.02, weight_decay=0.01",
        "    weight (3, 2)",
        "    weight (2, 3)",
    ]


def test_its_text_shows_a_rate_that_a_scheduler_has_rounded_below_0():
    opt = MuonAdamW(Net().named_parameters(), **EXACT)
    for group in opt.param_groups:
        group["lr"] = -2e-19
    assert "lr=-2e-19" in repr(opt)
