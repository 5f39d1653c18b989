"""How parameters are seen as matrices: what is said, what a model tells, and what is refused."""

from functools import partial
from typing import Any

import pytest
import torch
from helpers import assert_close, step_object
from matrix_recipes import MATRICES, NS, VARIANTS, WAYS, made, some, step_update, taken_apart
from torch import Tensor, nn

import functional_optim as fo
from functional_optim import adapters


# ---------------------------------------------------------------- what nobody has described
@pytest.mark.parametrize("name", [*MATRICES, *VARIANTS])
def test_three_dimensions_are_refused_with_both_words(name):
    stack = nn.Parameter(torch.zeros(8, 16, 32))
    recipe, hyper = {**MATRICES, **VARIANTS}[name]
    for call in (
        lambda: recipe(**hyper).init({"experts": stack}),
        lambda: adapters.Optimizer([("experts", stack)], partial(recipe, **hyper)),
        lambda: getattr(adapters, name.split(",")[0])([("experts", stack)], **hyper),
    ):
        with pytest.raises(ValueError, match=r"\{'experts': \{'stack': True\}\}") as error:
            call()
        assert "{'experts': {'kernel': 'auto'}}" in str(error.value)


def test_a_model_tells_what_is_a_kernel():
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.utils.parametrizations.weight_norm(nn.Conv1d(2, 4, 3))
            self.back = nn.ConvTranspose1d(4, 2, 3)
            self.experts = nn.Parameter(torch.randn(3, 4, 4))

    model = Mixed()
    with pytest.raises(ValueError, match=r"'experts' .* belongs to no convolution") as error:
        fo.matrix_views(model)
    assert "views={'experts': {'stack': True}}" in str(error.value)
    kernel = {"kernel": "auto"}
    stack = {"experts": {"stack": True}}
    assert fo.matrix_views(model, stack) == {
        **stack,
        "back.weight": {**kernel, "orientation": "in_out"},
        "conv.parametrizations.weight.original0": kernel,
        "conv.parametrizations.weight.original1": kernel,
    }
    with pytest.raises(ValueError, match="belongs to no convolution"):
        adapters.MuonAdamW(model)
    opt = adapters.MuonAdamW(model, views=stack)
    assert "experts (3, 4, 4), 3 × (4, 4)" in repr(opt)
    assert "back.weight (4, 2, 3), (2, 12)" in repr(opt)


@pytest.mark.parametrize("given", ["model", "parameters", "named", "groups", "functional"])
def test_a_model_may_be_given_in_each_way(given):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.Linear(4, 4)).double()
    views = fo.matrix_views(model)
    params = {
        "model": lambda: model,
        "parameters": model.parameters,
        "named": model.named_parameters,
        "groups": lambda: [{"params": [p], "lr": 0.01} for p in model.parameters()],
        "functional": model.named_parameters,
    }[given]()
    more = {"model": None, "functional": views}.get(given, model)
    opt = adapters.SOAP(params, lr=0.01, views=more)
    assert opt.param_groups[0]["views"] == views
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    _, *grads = some({n: tuple(p.shape) for n, p in model.named_parameters()})
    step_object(opt, grads)
    wanted = step_update(fo.soap(0.01, views=model), start, grads)
    assert_close({n: p.detach() for n, p in model.named_parameters()}, wanted, 1e-10)


def test_a_summary_says_how_each_parameter_is_seen():
    params = {"conv": torch.zeros(4, 2, 3), "experts": torch.zeros(2, 4, 3), "w": torch.zeros(4, 4)}
    views = {"conv": {"kernel": "auto"}, "experts": {"stack": True}}
    seen = {row.path: row.view for row in fo.summary(fo.soap(views=views), params).rows}
    assert seen == {"conv": "(4, 2, 3) by dimension", "experts": "2 × (4, 3)", "w": ""}
    seen = {row.path: row.view for row in fo.summary(fo.normuon(views=views), params).rows}
    assert seen == {"conv": "(4, 6)", "experts": "2 × (4, 3)", "w": ""}


def update_once(tx: Any, w: Tensor, g: Tensor) -> Tensor:
    return tx.update({"w": g}, tx.init({"w": w}), {"w": w})[0]["w"]


@pytest.mark.parametrize(
    "recipe",
    [
        lambda **views: fo.scion(1.0, 0.0, unconstrained=True, **NS, **views),
        lambda **views: fo.shampoo(0.1, target_parameter_dimensionality=2, **views),
        lambda **views: fo.normuon(0.1, **NS, **views),
    ],
)
def test_of_a_transposed_convolution_the_second_dimension_counts_outputs(recipe):
    w, g = [x["w"] for x in some({"w": (8, 4, 3, 3)}, 1)]
    views = {"w": {"kernel": "auto", "orientation": "in_out"}}
    turned = [x.transpose(0, 1).contiguous() for x in (w, g)]
    found = update_once(recipe(views=views), w, g).transpose(0, 1)
    assert_close(found.contiguous(), update_once(recipe(), *turned), 1e-10)


@pytest.mark.parametrize("split", [(6, 4, 2), (2, 4, 6), (4, 6, 2)])
def test_parts_of_other_heights_have_what_each_of_them_needs(split):
    params, *grads = some({"qkv": (12, 5)})
    hyper = {"max_precond_dim": 4, "precondition_frequency": 2}
    tx = fo.soap(0.1, views={"qkv": {"split": split}}, **hyper)
    cut = [{str(i): x for i, x in enumerate(t["qkv"].split(split))} for t in (params, *grads)]
    alone = step_update(fo.soap(0.1, **hyper), cut[0], cut[1:])
    for step in WAYS.values():
        assert_close(step(tx, params, grads)["qkv"], torch.cat([*alone.values()]), 1e-10)


@pytest.mark.parametrize("name", [*MATRICES, *VARIANTS])
def test_an_empty_stack_stays_empty(name):
    params, *grads = some({"experts": (0, 4, 3), "matrix": (4, 4)}, 3)
    for step in WAYS.values():
        found = step(made(name, {"experts": {"stack": True}})(), params, grads)
        assert found["experts"].shape == (0, 4, 3)


def test_a_load_leaves_the_views_that_are_there():
    model = nn.ModuleDict({"qkv": nn.Linear(4, 12, bias=False)})
    plain = adapters.SOAP(model)
    model["qkv"].weight.grad = torch.randn(12, 4)
    plain.step()
    views = {"qkv.weight": {"split": 3}}
    other = adapters.SOAP(model, views=views)
    with pytest.raises(ValueError, match="shape"):
        other.load_state_dict(plain.state_dict())
    assert other.param_groups[0]["views"] == views
    other.step()
    wrapped = nn.ModuleDict({"module": model})
    again = adapters.SOAP(wrapped, views={"module.qkv.weight": {"split": 3}})
    again.load_state_dict(other.state_dict())
    assert again.param_groups[0]["views"] == {"module.qkv.weight": {"split": 3}}


def test_a_pattern_that_fits_nothing_is_told():
    model = nn.ModuleDict({"qkv": nn.Linear(4, 12)})
    with pytest.warns(UserWarning, match=r"'qkv.wieght' of the views matches no leaf"):
        adapters.SOAP(model.named_parameters(), views={"qkv.wieght": {"split": 3}})
    with pytest.warns(UserWarning, match=r"'qkv.weight' of the views matches no leaf"):
        adapters.SOAP(model.parameters(), views={"qkv.weight": {"split": 3}})


def test_later_groups_are_seen_as_the_model_says():
    model = nn.Sequential(nn.Linear(4, 4), nn.ConvTranspose2d(2, 4, 3))
    opt = adapters.PSGDKron(model[0].named_parameters(prefix="0"), views=model)
    opt.add_param_group({"params": list(model[1].named_parameters(prefix="1"))})
    own = {"params": list(model[1].named_parameters(prefix="1")), "views": model}
    for one in (opt, adapters.PSGDKron([own])):
        tx = one.transform(one.param_groups[-1])
        params = {n: p.detach() for n, p in model.named_parameters()}
        rows = {row.path: row.view for row in fo.summary(tx, params).rows}
        assert rows["1.weight"] == "(4, 18)"
        assert not isinstance(one.param_groups[-1]["views"], nn.Module)


def test_names_may_be_paths_of_other_parameters():
    model = nn.ModuleDict({"conv": nn.Conv1d(6, 4, 3), "dec": nn.ModuleDict(), "lin": nn.Module()})
    model["dec"]["conv"] = nn.ConvTranspose1d(6, 4, 3)
    model["lin"].conv = nn.Linear(4, 4)
    kernel = {"kernel": "auto"}
    turned = {**kernel, "orientation": "in_out"}
    inside = list(model["dec"].named_parameters())
    one = {"params": inside, "views": model}
    for args, more in (((inside,), {"views": model}), (([one],), {})):
        opt = adapters.PSGDKron(*args, **more)
        assert opt.param_groups[0]["views"] == {"conv.weight": turned, "dec.conv.weight": turned}
    opt = adapters.PSGDKron(model["lin"].named_parameters(), views=model)
    assert opt.param_groups[0]["views"] == {"dec.conv.weight": turned}
    own = {"conv.weight": {"kernel": "batch"}, **dict.fromkeys(("dec.*", "lin.*"), kernel)}
    opt = adapters.PSGDKron(inside, views=fo.matrix_views(model, own))
    assert opt.param_groups[0]["views"] == own
    groups = [{"params": list(x.named_parameters())} for x in (model["dec"], model["lin"])]
    with pytest.raises(ValueError, match=r"two parameters are called 'conv\.weight'"):
        adapters.PSGDKron(groups, views=model)


def test_what_goes_to_adamw_needs_no_word():
    class Vision(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.lin = nn.Conv2d(3, 8, 2), nn.Linear(8, 8)
            self.class_token = nn.Parameter(torch.zeros(1, 1, 8))
            self.pos_embedding = nn.Parameter(torch.zeros(1, 5, 8))

    model = Vision()
    views = {name: {"stack": True} for name in ("class_token", "pos_embedding")}
    for given in (None, views):
        opt = adapters.MuonAdamW(model, views=given)
        sizes = {group["name"]: len(group["params"]) for group in opt.param_groups}
        assert sizes == {"muon": 2, "adamw": 4}
    fo.muon_adamw(views=model).init(dict(model.named_parameters()))


@pytest.mark.parametrize("shape", [(3, 1, 4), (3, 4, 1)])
def test_a_stack_of_vectors_goes_where_each_of_them_would(shape):
    params, *grads = some({"a.weight": shape, "b.weight": (4, 4)})
    tx = fo.muon_adamw(0.1, views={"a.weight": {"stack": True}}, **NS)
    slopes = [taken_apart(g) for g in grads]
    alone = step_update(fo.muon_adamw(0.1, **NS), taken_apart(params), slopes)
    assert_close(taken_apart(step_update(tx, params, grads)), alone, 1e-10)


def test_a_model_is_asked_for_what_the_optimizer_has():
    class Odd(nn.Conv2d):
        def __init__(self) -> None:
            super().__init__(2, 4, 3)
            self.experts = nn.Parameter(torch.randn(5, 4, 4))

    with pytest.raises(ValueError, match=r"'0.experts'"):
        fo.matrix_views(nn.Sequential(Odd()))
    normed = nn.utils.parametrizations.weight_norm(nn.Conv1d(2, 4, 3))
    names = {f"parametrizations.weight.original{i}" for i in (0, 1)}
    assert set(fo.matrix_views(normed)) == names
    model = nn.ModuleDict({"head": nn.Linear(2, 2), "odd": Odd()})
    adapters.SOAP(model["head"].parameters(), views=model)


@pytest.mark.parametrize(("name", "hyper"), [("MuonAdamW", NS), ("SOAP", {}), ("Scion", NS)])
def test_the_linear_layers_of_gpt_2_have_their_inputs_first(name, hyper):
    known = type("Conv1D", (nn.Module,), {"__module__": "transformers.pytorch_utils"})
    torch.manual_seed(0)
    layers = [nn.Linear(4, 12).double(), type("Own", (known,), {})()]
    layers[1].weight = nn.Parameter(layers[0].weight.detach().T.clone())
    layers[1].extra = nn.Parameter(torch.zeros(2, 2))
    found = []
    for layer in layers:
        model = nn.ModuleDict({"c_fc": layer})
        opt = getattr(adapters, name)(model, lr=0.1, **hyper)
        torch.manual_seed(1)
        g = torch.randn(12, 4, dtype=torch.float64)
        for _ in range(3):
            layer.weight.grad = g.clone() if layer is layers[0] else g.T.clone()
            opt.step()
        found.append(layer.weight.detach())
    assert_close(found[1].T.contiguous(), found[0], 1e-10)
    assert fo.matrix_views(nn.ModuleDict({"a": layers[1]})) == {
        "a.weight": {"kernel": "auto", "orientation": "in_out"}
    }


STACK = {"experts": {"stack": True}}
OBJECTS = {
    "model": lambda x: adapters.MuonAdamW(x, views=STACK),
    "views": lambda x: adapters.SOAP(list(x.named_parameters())[1:], views=x),
    "dict": lambda x: adapters.MuonAdamW(x.named_parameters(), views=fo.matrix_views(x, STACK)),
    "masked": lambda x: adapters.MuonAdamW(x, adamw="experts"),
}


@pytest.mark.parametrize("way", OBJECTS)
def test_a_compiled_model_has_the_views_of_its_module(way):
    ends = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.ModuleDict({"conv": nn.Conv1d(4, 8, 3), "back": nn.ConvTranspose2d(4, 8, 3)})
        model.experts = nn.Parameter(torch.randn(3, 4, 4))
        whole = nn.ModuleDict({"_orig_mod": model}) if compiled else model  # as torch.compile does
        opt = OBJECTS[way](whole)
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        opt.step()
        ends.append([p.detach() for p in model.parameters()])
    assert_close(ends[1], ends[0], 0)


def test_a_compiled_model_as_a_tree_has_its_views_too():
    whole = nn.ModuleDict({"_orig_mod": nn.ConvTranspose2d(4, 8, 3)})
    turned = {"kernel": "auto", "orientation": "in_out"}
    assert fo.matrix_views(whole) == {"_orig_mod.weight": turned, "weight": turned}
    with pytest.raises(ValueError, match=r"^the parameter 'weight'"):
        fo.matrix_views(nn.ModuleDict({"_orig_mod": nn.Bilinear(3, 4, 5)}))


def test_what_is_frozen_needs_no_word():
    model = nn.ModuleDict({"experts": nn.Bilinear(3, 4, 5), "up": nn.Linear(4, 4)})
    model["experts"].requires_grad_(False)
    assert fo.matrix_views(model) == {}
    assert adapters.MuonAdamW(model).param_groups[0]["name"] == "muon"
    adapters.SOAP(model)


@pytest.mark.filterwarnings("ignore:.*is deprecated")
@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_the_older_functions_of_torch_rename_a_weight(kind):
    own = {"kernel": "auto"} | ({"orientation": "in_out"} if kind is nn.ConvTranspose2d else {})
    renamed = {nn.utils.spectral_norm: ["weight_orig"]}
    renamed |= {nn.utils.weight_norm: ["weight_g", "weight_v"]}
    for change, names in renamed.items():
        assert fo.matrix_views(change(kind(3, 4, 3))) == dict.fromkeys(names, own)


def test_torchs_muon_takes_matrices_only():
    with pytest.raises(ValueError, match="only supports 2D"):
        adapters.Muon(nn.Conv2d(2, 4, 3).parameters())
