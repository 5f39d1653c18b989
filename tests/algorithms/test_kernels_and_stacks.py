"""Kernels of convolutions and stacks of matrices: how the rules of matrices see them."""

import math
from typing import Any

import pytest
import sampling
import torch
from helpers import assert_close, assert_same
from matrix_recipes import (
    EXACT,
    MATRICES,
    NO_VECTORS,
    NS,
    OFTEN,
    OTHERS,
    STACKS,
    VARIANTS,
    WAYS,
    made,
    some,
    step_update,
    taken_apart,
)
from reference.loops import bases
from torch import Tensor, nn

import functional_optim as fo
from functional_optim import adapters
from functional_optim.core.views import Merged


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
        given = model.parameters() if name in OTHERS else model
        return getattr(adapters, name)(given, lr=0.01, **made(name).keywords)

    def train(model: nn.Module, opt: Any, steps: int) -> float:
        for _ in range(steps):
            opt.zero_grad()
            loss_of(model).backward()
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
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [*MATRICES, *VARIANTS])
def test_each_matrix_of_a_stack_is_stepped_as_if_it_were_a_parameter(name, way):
    params, *grads = some(STACKS)
    grads[0]["experts"][1] = 0.0  # an expert that no token has seen
    apart, slopes = taken_apart(params), [taken_apart(g) for g in grads]
    alone = {
        n: step_update(made(name)(), {n: p}, [{n: g[n]} for g in slopes]) for n, p in apart.items()
    }
    stack, across = ({"*": {"stack": True, **own}} for own in ({}, {"orientation": "in_out"}))
    together = WAYS[way](made(name, stack)(), params, grads)
    assert_close(taken_apart(together), {n: end[n] for n, end in alone.items()}, 1e-10)
    turned = [{n: x.mT.contiguous() for n, x in tree.items()} for tree in (params, *grads)]
    along = WAYS[way](made(name, stack)(), turned[0], turned[1:])
    found = WAYS[way](made(name, across)(), params, grads)
    assert_close(found, {n: x.mT for n, x in along.items()}, 1e-10)


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
    muon = fo.muon(0.1, **NS)
    stack = step_update(fo.as_matrix(muon, stack=True, split=3, heads=2), params, grads)
    rows, *slopes = ({"qkv": x["qkv"].reshape(12, 1, 4)} for x in (params, *grads))
    alone = step_update(fo.as_matrix(muon, stack=True), rows, slopes)
    assert_close(stack["qkv"].reshape(12, 1, 4), alone["qkv"], 1e-12)


def test_one_recipe_sees_each_leaf_in_its_own_way():
    shapes = {"conv": (4, 2, 3), "experts": (2, 4, 3), "matrix": (4, 4), "image": (3, 2, 2, 2)}
    params, *grads = some(shapes)
    views = {"conv": {"kernel": "flatten"}, "experts": {"stack": True}}
    found = step_update(fo.soap(0.1, views=views, **OFTEN), params, grads)
    for name, view in {**views, "matrix": {}, "image": {"kernel": "tensor"}}.items():
        p, *gs = ({name: tree[name]} for tree in (params, *grads))
        alone = step_update(fo.as_matrix(fo.soap(0.1, **OFTEN), **view), p, gs)
        assert_same(found[name], alone[name])


TRACED = ("SOAP", "MuonAdamW")
"""Bases, and a partition. Roots and triangles are traced in test_properties."""


@pytest.mark.parametrize("name", sampling.some([*MATRICES, *VARIANTS], 0, TRACED))
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
        ((5, 4), {}),
        ((4, 4), {"precondition_frequency": 1}),
        ((4, 3, 3), {}),
        ((5, 4, 3, 3), {}),
        ((5, 4, 3, 3), {"merge_dims": True, "max_precond_dim": 12}),
        ((4, 3, 3), {"max_precond_dim": 3}),
        ((3, 3, 2, 2, 2), {}),
    ],
)
def test_soap_has_a_basis_for_each_dimension(shape, hyper):
    limit, hyper = hyper.get("max_precond_dim", 10000), {**BOTH, "eps": 1e-8, **hyper}
    own = {"merge_dims": hyper.pop("merge_dims", False)}
    merged = Merged(limit)(shape) if own["merge_dims"] else shape
    assert_follows(fo.soap, bases.soap, shape, hyper, own, {"shape": merged})


BOTH: dict[str, Any] = {"lr": 0.05, "betas": (0.9, 0.95), "precondition_frequency": 2}


def assert_follows(recipe, loop, shape, hyper, own, its, tolerance=1e-10):
    """Ten steps; own, its: arguments that only one of both has."""
    (p, *grads) = [x["w"] for x in some({"w": shape}, 10)]
    tx = fo.as_matrix(recipe(**hyper, **own), kernel="auto")
    found = step_update(tx, {"w": p}, [{"w": g} for g in grads])["w"]
    wanted = loop(p.numpy(), [g.numpy() for g in grads], **{**hyper, **its})
    assert_close(found, torch.as_tensor(wanted), tolerance)


@pytest.mark.parametrize("soap", [False, True])
@pytest.mark.parametrize("shape", [(4, 3, 3), (4, 3, 3, 1), (3, 2, 2, 3)])
def test_kl_factors_of_each_dimension_estimate_each_other(shape, soap):
    if soap:
        assert_follows(fo.kl_soap, bases.kl_soap, shape, {**BOTH, "shampoo_beta": 0.95}, {}, {})
    else:
        hyper = {"lr": 0.05, "momentum": 0.9, "shampoo_beta": 0.95, "precondition_frequency": 2}
        assert_follows(fo.kl_shampoo, bases.kl_shampoo, shape, hyper, {}, {})


@pytest.mark.parametrize("target", [1, 2, math.inf])
@pytest.mark.parametrize(("shape", "limit"), [((4, 3, 2), 1024), ((5, 4, 3, 3), 12)])
def test_shampoo_has_a_factor_for_each_dimension(shape, limit, target):
    hyper = {"lr": 0.05, "betas": (0.9, 0.95), "eps": 1e-6, "max_preconditioner_dim": limit}
    own, merged = {"target_parameter_dimensionality": target}, Merged(limit, target)(shape)
    assert_follows(fo.shampoo, bases.shampoo, shape, hyper, own, {"shape": merged}, 1e-9)


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
