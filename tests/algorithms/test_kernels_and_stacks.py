"""Kernels of convolutions and stacks of matrices: how the rules of matrices see them."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from helpers import assert_close, assert_same
from reference.loops import tensors
from torch import Tensor, nn

import functional_optim as fo
from functional_optim import adapters
from functional_optim.core.views import Merged

EXACT = torch.float64
NS: dict[str, Any] = {"ns_dtype": EXACT}
OFTEN: dict[str, Any] = {"precondition_frequency": 2}
LOW: dict[str, Any] = {"rank": 2, "update_proj_gap": 3}

MATRICES: dict[str, Any] = {
    "AdaMuon": (fo.adamuon, NS),
    "APOLLO": (fo.apollo, LOW),
    "Dion2": (fo.dion2, NS),
    "GaLore": (fo.galore, LOW),
    "KLSOAP": (fo.kl_soap, {**OFTEN, "normalize_grads": True}),
    "KLShampoo": (fo.kl_shampoo, OFTEN),
    "MuonAdamW": (fo.muon_adamw, NS),
    "NorMuon": (fo.normuon, NS),
    "PSGDKron": (fo.psgd_kron, {"clip_rms": 0.3}),
    "SOAP": (fo.soap, OFTEN),
    "Scion": (fo.scion, NS),
    "Shampoo": (fo.shampoo, {**OFTEN, "grafting": "adam"}),
}
"""Recipes with `views`, by their classes."""
OTHERS: dict[str, Any] = {
    "AdamMini": (fo.adam_mini, {}),
    "Adafactor": (fo.adafactor, {}),
    "CAME": (fo.came, {}),
}
VARIANTS: dict[str, Any] = {
    "SOAP, merged": (fo.soap, {**OFTEN, "merge_dims": True, "max_precond_dim": 9}),
    "SOAP, normalized": (fo.soap, {**OFTEN, "normalize_grads": True}),
    "Shampoo, blocks": (
        fo.shampoo,
        {**OFTEN, "target_parameter_dimensionality": math.inf, "max_preconditioner_dim": 4},
    ),
}
NO_VECTORS = ("AdaMuon", "Dion2", "KLSOAP", "KLShampoo", "NorMuon")


class Net(nn.Module):
    """Convolutions of one to three dimensions, in groups and transposed, and a linear layer."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.one = nn.Conv1d(2, 6, 3, bias=bias)
        self.two = nn.Conv2d(6, 6, (3, 1), groups=2, bias=bias)
        self.back = nn.ConvTranspose2d(6, 4, 3, groups=2, bias=bias)
        self.three = nn.Conv3d(2, 3, 2, bias=bias)
        self.out = nn.Linear(3, 2, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.one(x))
        x = torch.tanh(self.back(torch.tanh(self.two(x[..., None]))))
        x = x.unflatten(1, (2, 2)).transpose(2, 3).transpose(3, 4)
        return self.out(torch.tanh(self.three(x)).mean((2, 3, 4)))


def net(name: str) -> Net:
    torch.manual_seed(0)
    return Net(bias=name.split(",")[0] not in NO_VECTORS).double()


def loss_of(model: nn.Module) -> Tensor:
    x = torch.linspace(-1, 1, 4 * 2 * 9, dtype=EXACT).sin().reshape(4, 2, 9)
    wanted = torch.stack([x.mean((1, 2)), x[:, 0, 0]], 1)
    return (model(x) - wanted).square().mean()


def made(name: str, views: Any = None) -> Any:
    """A recipe of a table, at a rate at which each of them gets down."""
    recipe, hyper = {**MATRICES, **OTHERS, **VARIANTS}[name]
    own = {} if views is None else {"views": views}
    return partial(recipe, 0.01, **hyper, **own)


def step_update(tx: Any, params: Any, grads: Any) -> Any:
    state = tx.init(params)
    for g in grads:
        updates, state = tx.update(g, state, params)
        params = fo.apply_updates(params, updates)
    return params


def step_compiled(tx: Any, params: Any, grads: Any) -> Any:
    step, state = fo.compile(tx), tx.init(params)
    params = {name: p.clone() for name, p in params.items()}
    for g in grads:
        params, state = step(g, state, params)
    return params


def step_object(tx: Any, params: Any, grads: Any, compile: bool = True) -> Any:
    params = {name: nn.Parameter(p.clone()) for name, p in params.items()}
    opt = adapters.Optimizer(params.items(), lambda: tx, compile=compile)
    for g in grads:
        for name, p in params.items():
            p.grad = g[name].clone()
        opt.step()
    return {name: p.detach() for name, p in params.items()}


WAYS: dict[str, Any] = {
    "update": step_update,
    "compile": step_compiled,
    "object": step_object,
    "eager": partial(step_object, compile=False),
}


def some(shapes: dict[str, tuple[int, ...]], steps: int = 6) -> list[dict[str, Tensor]]:
    torch.manual_seed(0)
    return [{n: torch.randn(s, dtype=EXACT) for n, s in shapes.items()} for _ in range(1 + steps)]


# ---------------------------------------------------------------- nets of convolutions


@pytest.mark.parametrize("name", [*MATRICES, *OTHERS, *VARIANTS])
def test_a_net_of_convolutions_trains_the_same_way_in_each(name):
    model = net(name)
    tx = made(name, None if name in OTHERS else model)()
    params = {n: p.detach() for n, p in model.named_parameters()}
    grads = []
    for _ in range(8):
        loss_of(model).backward()
        grads.append({n: p.grad.clone() for n, p in model.named_parameters()})
        model.zero_grad()
        with torch.no_grad():
            for p, g in zip(model.parameters(), grads[-1].values(), strict=True):
                p -= 0.05 * g
    ends = {way: step(tx, params, grads) for way, step in WAYS.items()}
    for way in ("compile", "object", "eager"):
        assert_close(ends[way], ends["update"], 1e-10)
    assert all(not torch.equal(x, params[n]) for n, x in ends["update"].items())


@pytest.mark.parametrize("name", [*MATRICES, *OTHERS])
def test_an_object_trains_a_net_and_goes_on_from_a_checkpoint_with_the_same_bits(name, tmp_path):
    def optimizer(model: nn.Module) -> Any:
        recipe = made(name)
        hyper = {"lr": 0.01, **recipe.keywords}
        given = model.parameters() if name in OTHERS else model
        return getattr(adapters, name)(given, **hyper)

    def train(model: nn.Module, opt: Any, steps: int) -> float:
        for _ in range(steps):
            opt.zero_grad()
            loss = loss_of(model)
            loss.backward()
            opt.step()
        return loss_of(model).item()

    model = net(name)
    first = loss_of(model).item()
    opt = optimizer(model)
    train(model, opt, 15)
    torch.save([model.state_dict(), opt.state_dict()], tmp_path / "checkpoint.pt")
    last = train(model, opt, 15)
    assert last < 0.97 * first

    other = net(name)
    again = optimizer(other)
    weights, state = torch.load(tmp_path / "checkpoint.pt", weights_only=False)
    other.load_state_dict(weights)
    again.load_state_dict(state)
    train(other, again, 15)
    assert_same(other.state_dict(), model.state_dict())


# ---------------------------------------------------------------- stacks


STACKS = {"experts": (3, 4, 4), "layers": (2, 2, 4, 3)}


def taken_apart(tree: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each matrix of a tree of stacks as a leaf of its own."""
    return {
        f"{name}.{i}": one
        for name, x in tree.items()
        for i, one in enumerate(x.reshape(-1, *x.shape[-2:]))
    }


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [*MATRICES, *VARIANTS])
def test_each_matrix_of_a_stack_is_stepped_as_if_it_were_a_parameter(name, way):
    params, *grads = some(STACKS)
    grads[0]["experts"][1] = 0.0  # an expert that no token has seen
    apart, slopes = taken_apart(params), [taken_apart(g) for g in grads]
    alone = {
        n: step_update(made(name)(), {n: p}, [{n: g[n]} for g in slopes])[n]
        for n, p in apart.items()
    }
    together = WAYS[way](made(name, {"*": {"stack": True}})(), params, grads)
    assert_close(taken_apart(together), alone, 1e-10)
    assert_close(
        WAYS[way](made(name, {"*": {"stack": True, "orientation": "in_out"}})(), params, grads),
        {
            n: x.mT
            for n, x in WAYS[way](
                made(name, {"*": {"stack": True}})(),
                {n: x.mT.contiguous() for n, x in params.items()},
                [{n: x.mT.contiguous() for n, x in g.items()} for g in grads],
            ).items()
        },
        1e-10,
    )


def test_a_stack_has_one_turn_where_renewals_are_spread():
    params, *grads = some({**STACKS, "matrix": (4, 4), "other": (3, 4, 4)}, 8)
    tx = fo.soap(0.1, precondition_frequency=3, refresh="spread", views={"*": {"stack": True}})
    ends = [step(tx, params, grads) for step in WAYS.values()]
    for end in ends[1:]:
        assert_close(end, ends[0], 1e-10)
    together = fo.soap(0.1, precondition_frequency=3, views={"*": {"stack": True}})
    assert not torch.allclose(step_update(together, params, grads)["layers"], ends[0]["layers"])


def test_a_stack_of_fused_projections_is_divided_further():
    params, *grads = some({"qkv": (2, 6, 4)})
    stack = step_update(
        fo.as_matrix(fo.muon(0.1, **NS), stack=True, split=3, heads=2), params, grads
    )
    rows = {"qkv": params["qkv"].reshape(12, 1, 4)}
    alone = step_update(
        fo.as_matrix(fo.muon(0.1, **NS), stack=True),
        rows,
        [{"qkv": g["qkv"].reshape(12, 1, 4)} for g in grads],
    )
    assert_close(stack["qkv"].reshape(12, 1, 4), alone["qkv"], 1e-12)


def test_one_recipe_sees_each_leaf_in_its_own_way():
    shapes = {"conv": (4, 2, 3), "experts": (2, 4, 3), "matrix": (4, 4), "image": (3, 2, 2, 2)}
    params, *grads = some(shapes)
    views = {"conv": {"kernel": "flatten"}, "experts": {"stack": True}}
    found = step_update(fo.soap(0.1, views=views, **OFTEN), params, grads)
    for name, view in {**views, "matrix": {}, "image": {"kernel": "tensor"}}.items():
        alone = step_update(
            fo.as_matrix(fo.soap(0.1, **OFTEN), **view),
            {name: params[name]},
            [{name: g[name]} for g in grads],
        )
        assert_same(found[name], alone[name])


@pytest.mark.parametrize("name", [*MATRICES, *VARIANTS])
def test_torch_compile_takes_stacks_and_kernels_whole(name, fresh_dynamo):
    params, *grads = some({"experts": (2, 3, 4), "image": (3, 2, 2, 2)}, 3)
    tx = made(name, {"experts": {"stack": True}})()
    state, update = tx.init(params), torch.compile(tx.update, backend="eager", fullgraph=True)
    found = params
    for g in grads:
        updates, state = update(g, state, found)
        found = fo.apply_updates(found, updates)
    assert_close(found, step_update(tx, params, grads), 1e-10)


@pytest.mark.parametrize("name", [n for n in MATRICES if n != "MuonAdamW"])
def test_packed_slots_of_stacks_and_kernels(name):
    shapes = {"experts": (3, 16, 16), "image": (16, 4, 2, 2)}
    params, *grads = some(shapes, 3)
    wide = made(name, {"experts": {"stack": True}})
    small = fo.stored(wide(), "int8", min_size=1, block_size=64, where=lambda path, p: True)
    ends = [step(small, params, grads) for step in WAYS.values()]
    for end in ends[1:]:
        assert_close(end, ends[0], 5e-3)
    assert_close(ends[0], step_update(wide(), params, grads), 0.05)


# ---------------------------------------------------------------- against naive loops


@pytest.mark.parametrize(
    ("shape", "hyper"),
    [
        ((4, 3, 3), {}),
        ((5, 4, 3, 3), {}),
        ((5, 4, 3, 3), {"merge_dims": True, "max_precond_dim": 12}),
        ((4, 3, 3), {"max_precond_dim": 3}),
        ((3, 3, 2, 2, 2), {}),
    ],
)
def test_soap_has_a_basis_for_each_dimension(shape, hyper):
    (p, *grads) = [x["w"] for x in some({"w": shape}, 10)]
    tx = fo.as_matrix(fo.soap(0.05, (0.9, 0.95), precondition_frequency=2, **hyper), kernel="auto")
    found = step_update(tx, {"w": p}, [{"w": g} for g in grads])["w"]
    limit = hyper.get("max_precond_dim", 10000)
    merged = Merged(limit)(shape) if "merge_dims" in hyper else shape
    assert_close(
        found, tensors.soap_of_tensors(p, grads, 0.05, merged, max_precond_dim=limit), 1e-10
    )


@pytest.mark.parametrize("soap", [False, True])
@pytest.mark.parametrize("shape", [(4, 3, 3), (4, 3, 3, 1), (3, 2, 2, 3)])
def test_kl_factors_of_each_dimension_estimate_each_other(shape, soap):
    (p, *grads) = [x["w"] for x in some({"w": shape}, 10)]
    recipe = fo.kl_soap if soap else fo.kl_shampoo
    tx = recipe(0.05, (0.9, 0.95) if soap else 0.9, shampoo_beta=0.95, precondition_frequency=2)
    found = step_update(fo.as_matrix(tx, kernel="auto"), {"w": p}, [{"w": g} for g in grads])["w"]
    assert_close(found, tensors.kl_of_tensors(p, grads, 0.05, soap=soap), 1e-10)


@pytest.mark.parametrize("target", [1, 2, math.inf])
@pytest.mark.parametrize(("shape", "limit"), [((4, 3, 2), 1024), ((5, 4, 3, 3), 12)])
def test_shampoo_has_a_factor_for_each_dimension(shape, limit, target):
    (p, *grads) = [x["w"] for x in some({"w": shape}, 10)]
    tx = fo.shampoo(
        0.05,
        (0.9, 0.95),
        1e-6,
        max_preconditioner_dim=limit,
        target_parameter_dimensionality=target,
    )
    found = step_update(fo.as_matrix(tx, kernel="auto"), {"w": p}, [{"w": g} for g in grads])["w"]
    assert_close(
        found, tensors.shampoo_of_tensors(p, grads, 0.05, Merged(limit, target)(shape)), 1e-9
    )


@pytest.mark.parametrize(
    ("shape", "merged", "wanted"),
    [
        ((32, 3, 64, 64), Merged(8192, 1), (96, 4096)),
        ((32, 3, 64, 64), Merged(10**6, 2), (32, 12288)),
        ((1, 2, 5, 1), Merged(10, 1), (10, 1)),
        ((1, 2, 5, 1), Merged(1, 1), (2, 5)),
        ((8, 4, 3, 3), Merged(100, math.inf), (8, 4, 3, 3)),
        ((64, 32, 3, 3), Merged(100), (64, 96, 3)),
        ((64, 2, 3, 3), Merged(128), (128, 9)),
        ((6, 3, 1, 1), Merged(1), (6, 3)),
        ((6, 1), Merged(1), (6, 1)),
        ((5,), Merged(3), (5,)),
    ],
)
def test_dimensions_are_merged_as_the_authors_merge_them(shape, merged, wanted):
    assert merged(shape) == wanted


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
    for g in grads:
        for n, p in model.named_parameters():
            p.grad = g[n].clone()
        opt.step()
    wanted = step_update(fo.soap(0.01, views=model), start, grads)
    assert_close({n: p.detach() for n, p in model.named_parameters()}, wanted, 1e-10)


def test_a_summary_says_how_each_parameter_is_seen():
    params = {"conv": torch.zeros(4, 2, 3), "experts": torch.zeros(2, 4, 3), "w": torch.zeros(4, 4)}
    views = {"conv": {"kernel": "auto"}, "experts": {"stack": True}}
    seen = {row.path: row.view for row in fo.summary(fo.soap(views=views), params).rows}
    assert seen == {"conv": "(4, 2, 3) by dimension", "experts": "2 × (4, 3)", "w": ""}
    seen = {row.path: row.view for row in fo.summary(fo.normuon(views=views), params).rows}
    assert seen == {"conv": "(4, 6)", "experts": "2 × (4, 3)", "w": ""}


WRONG: dict[str, Any] = {
    "either views or other": lambda: fo.as_matrix(fo.muon(), views={}, split=3),
    "a kernel 'flatten', 'batch', 'tensor' or 'auto'": lambda: fo.as_matrix(fo.muon(), kernel="x"),
    "stack=True": lambda: fo.as_matrix(fo.muon(), stack=3),
    "heads or split": lambda: fo.as_matrix(fo.soap(), kernel="tensor", split=3),
    "up to 5 dimensions": lambda: fo.as_matrix(fo.soap(), kernel="auto").init(torch.zeros([2] * 6)),
    "takes for views a dict": lambda: fo.soap(views={"w": {"stacked": True}}),
    "a model without a parameter": lambda: adapters.SOAP(
        [nn.Parameter(torch.zeros(2, 2))], views=nn.Linear(2, 2)
    ),
    "target_parameter_dimensionality": lambda: fo.shampoo(target_parameter_dimensionality=0),
    "takes matrices, so a kernel cannot be a 'tensor'": lambda: fo.psgd_kron(
        views={"w": {"kernel": "tensor"}}
    ),
    "SOAP takes for views a dict": lambda: adapters.SOAP(nn.Linear(2, 2), views=["stack"]),
    "matrix_views takes for views a dict": lambda: fo.matrix_views(nn.Linear(2, 2), {0: {}}),
    "takes a torch.nn.Module": lambda: fo.matrix_views({}),
    "optimize Tensors": lambda: adapters.SOAP([1, 2], views=nn.Linear(2, 2)),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_cannot_be_is_refused(message):
    with pytest.raises((TypeError, ValueError), match=message):
        WRONG[message]()


def update_once(tx: Any, w: Tensor, g: Tensor) -> Tensor:
    return tx.update({"w": g}, tx.init({"w": w}), {"w": w})[0]["w"]


@pytest.mark.parametrize(
    "recipe",
    [
        lambda **views: fo.scion(1.0, 0.0, unconstrained=True, ns_dtype=EXACT, **views),
        lambda **views: fo.shampoo(0.1, target_parameter_dimensionality=2, **views),
        lambda **views: fo.normuon(0.1, ns_dtype=EXACT, **views),
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
    tx = fo.soap(0.1, max_precond_dim=4, views={"qkv": {"split": split}}, **OFTEN)
    cut = [{str(i): x for i, x in enumerate(t["qkv"].split(split))} for t in (params, *grads)]
    alone = step_update(fo.soap(0.1, max_precond_dim=4, **OFTEN), cut[0], cut[1:])
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
    with pytest.warns(UserWarning, match=r"'qkv.wieght' of the views fits no leaf"):
        adapters.SOAP(model.named_parameters(), views={"qkv.wieght": {"split": 3}})
    with pytest.warns(UserWarning, match=r"'qkv.weight' of the views fits no leaf"):
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
    alone = step_update(
        fo.muon_adamw(0.1, **NS), taken_apart(params), list(map(taken_apart, grads))
    )
    assert_close(taken_apart(step_update(tx, params, grads)), alone, 1e-10)


def test_a_model_is_asked_for_what_the_optimizer_has():
    class Odd(nn.Conv2d):
        def __init__(self) -> None:
            super().__init__(2, 4, 3)
            self.experts = nn.Parameter(torch.randn(5, 4, 4))

    with pytest.raises(ValueError, match=r"'0.experts'"):
        fo.matrix_views(nn.Sequential(Odd()))
    normed = nn.utils.parametrizations.weight_norm(nn.Conv1d(2, 4, 3))
    assert set(fo.matrix_views(normed)) == {
        "parametrizations.weight.original0",
        "parametrizations.weight.original1",
    }
    model = nn.ModuleDict({"head": nn.Linear(2, 2), "odd": Odd()})
    adapters.SOAP(model["head"].parameters(), views=model)


def test_torchs_muon_takes_matrices_only():
    with pytest.raises(ValueError, match="only supports 2D"):
        adapters.Muon(nn.Conv2d(2, 4, 3).parameters())
