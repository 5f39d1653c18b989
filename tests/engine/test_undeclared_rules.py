"""Rules without flags: every way of running one steps it as a naive loop does. Those that cannot be
run, or contradict their arguments, are refused before anything is changed. Slots with a codec, and
rules with variants."""

import math
import random
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import undeclared
from helpers import assert_close, assert_same, clone
from odd_rules import Packed, refreshing
from torch import Tensor
from undeclared import MODELS, ROWS
from undeclared_slots import Momentum, momentum
from ways import (
    WAYS,
    by_eager_object,
    by_function,
    by_object,
    by_update,
    random_tree,
    step_in,
)

import functional_optim as fo
from functional_optim import adapters

LATE = (
    ("float64", "scalar", "large", "strided"),
    ("bfloat16", "vector", "matrix", "pieces"),
)
"""Sets of tensors that rules take by turns in `make test-full` only: of the same shapes in two
dtypes, of one tensor, which is also among those that are together, and of other memory."""


def by_turns() -> Iterator[Any]:
    """Each rule on all sets of tensors but some."""
    for i, row in enumerate(ROWS.values()):
        late = LATE[i % 2]
        if row.strict:  # of which some compute in half types
            yield pytest.param(row, [*MODELS], id=row.name)
            continue
        yield pytest.param(row, [x for x in MODELS if x not in late], id=row.name)
        yield pytest.param(row, [*late], id=f"{row.name}-{late[0]}", marks=pytest.mark.full)


@pytest.mark.parametrize(("row", "models"), [*by_turns()])
def test_a_rule_without_flags_is_the_same_in_every_way(row, models):
    wrong = [*undeclared.outcomes(row, models)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", [x.name for x in ROWS.values() if x.strict])
def test_halves_and_whole_numbers_are_computed_in_kernels(name):
    for shape in ((7,), (6, 8)):
        tx, p = ROWS[name].build(), torch.randn(shape)
        fo.compile(tx, strict=True)(torch.randn(shape), tx.init(p), p)


def test_the_naive_loop_sees_a_rule_whose_tensors_are_joined():
    """The comparison itself: tensors that are joined are far from those of the naive loop."""
    row, model = ROWS["unit_norm"], MODELS["together"]
    params = model.params()
    for grads in model.grads():
        norm = torch.cat([g.flatten() for g in grads.values()]).norm()
        params = {name: p + grads[name] / norm for name, p in params.items()}
    apart, _ = undeclared.worst((params, {}), undeclared.naive(row, model))
    assert apart > 0.1


def test_update_computes_with_numbers_as_precise_as_those_of_scalars():
    def near_one(t):
        return (1 - 1e-6 / t,)

    tx = fo.leafwise(None, lambda u, s, p, b: (1e6 * (1 - b) * u, s), near_one, name="rest")
    params = {"w": torch.zeros(4)}
    updates, _ = tx.update({"w": torch.ones(4)}, tx.init(params), params)
    assert updates["w"].tolist() == pytest.approx([1.0] * 4, rel=1e-6)


def test_large_ints_among_the_numbers_of_a_rule_are_exact():
    n = 2**62 + 12345
    tx = fo.leafwise(None, lambda u, s, p, n: (u * ((n ^ 5) & 255), s), lambda t: (n,), name="hash")
    p = torch.zeros(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        p, _ = fo.compile(tx)(torch.ones(3), tx.init(p), p)
    assert p.tolist() == [(n ^ 5) & 255] * 3


# ---------------------------------------------------------------- refused
class Refusal(NamedTuple):
    """What `fo.leafwise` takes, but for the name, and what the error must say besides that."""

    says: tuple[str, ...]
    arguments: dict[str, Any]


def writes_by_out(u, slots, p):
    torch.mul(u, 2.0, out=u)
    return u, slots


def writes_into_a_view_of_u(u, slots, p):
    u.view(-1)[:1] = 0.0
    return u, slots


def writes_by_foreach(u, slots, p):
    torch._foreach_mul_([u], 2.0)
    return u, slots


def writes_one_of_several_results(u, slots, p):
    torch.sort(2 * u, out=(u, torch.empty(0, dtype=torch.int64)))
    return u, slots


def writes_by_vector_to_parameters(u, slots, p):
    torch.nn.utils.vector_to_parameters(2 * u.flatten(), [u])
    return u, slots


def sets_data(u, slots, p):
    p.data = 0.5 * p.data
    return u, slots


_made: dict[torch.dtype, torch.Tensor] = {}


def keeps_a_tensor_that_it_has_made(u, slots, p):
    if u.dtype not in _made:
        _made[u.dtype] = torch.tensor(0.5)
    return u * _made[u.dtype], slots


SHARED = torch.tensor(0.5)


def closing_over(x: torch.Tensor) -> Callable[..., Any]:
    return lambda u, slots, p: (u * x.sum(), slots)


_generator = np.random.default_rng(0)


def catches(u, slots, p):
    try:
        return (2 * u if u.sum() > 0 else u), slots
    except Exception:
        return u, slots


RULES: dict[str, dict[str, Callable[..., Any]]] = {
    "in place": {
        "writes_into_u": lambda u, slots, p: (u.mul_(0.5), slots),
        "writes_into_a_view_of_u": writes_into_a_view_of_u,
        "writes_by_out": writes_by_out,
        "writes_into_p": lambda u, slots, p: (p.sub_(0.1 * u), slots),
        "writes_by_foreach": writes_by_foreach,
        "writes_one_of_several_results": writes_one_of_several_results,
        "writes_by_a_function_of_python": lambda u, slots, p: (u.apply_(lambda x: 2 * x), slots),
    },
    r"in place \(data\)": {
        "writes_by_vector_to_parameters": writes_by_vector_to_parameters,
        "sets_data": sets_data,
    },
    "closes over a tensor": {
        "keeps_a_tensor_that_it_has_made": keeps_a_tensor_that_it_has_made,
        "closes_over_a_global": lambda u, slots, p: (u * SHARED, slots),
        "closes_over_one_number": closing_over(torch.tensor(2.0)),
        "closes_over_a_vector": closing_over(torch.linspace(0.0, 1.0, 16)),
        "closes_over_a_parameter": closing_over(torch.nn.Parameter(torch.ones(3))),
    },
    "other numbers": {
        "draws_by_python": lambda u, slots, p: (u * random.choice([0.5, 0.5]), slots),
        "draws_by_a_generator_of_numpy": lambda u, slots, p: (
            u * (_generator.random() / len(u)),
            slots,
        ),
    },
    "random": {
        "draws_rand_like": lambda u, slots, p: (u + torch.rand_like(u), slots),
        "draws_randn": lambda u, slots, p: (u + torch.randn(u.shape, dtype=u.dtype), slots),
        "draws_dropout": lambda u, slots, p: (F.dropout(u, 0.5), slots),
        "draws_a_permutation": lambda u, slots, p: (
            u.flatten()[torch.randperm(u.numel())].view_as(u),
            slots,
        ),
    },
    "reads a value": {
        "reads_item": lambda u, slots, p: (u / max(1.0, u.norm().item()), slots),
        "reads_bool": lambda u, slots, p: (u if u.sum() > 0 else 2 * u, slots),
        "reads_float": lambda u, slots, p: (u * float(p.sum()), slots),
        "reads_list": lambda u, slots, p: (u * sum(u.flatten().tolist()), slots),
        "reads_equality": lambda u, slots, p: (2 * u if torch.equal(u, p) else u, slots),
        "reads_closeness": lambda u, slots, p: (2 * u if torch.allclose(u, p) else u, slots),
        "reads_and_catches": catches,
    },
}


def writes_into_a_slot(u, slots, p):
    slots.exp_avg.lerp_(u, 0.1)
    return slots.exp_avg, Momentum(slots.exp_avg)


def reads_while_reducing(u, slots, p):
    return (u.sum() if u.abs().sum() > 1e9 else u.norm(),)


def divided(u, slots, p, x):
    return u / x, slots


REFUSED = {
    **{
        name: Refusal((says,), {"update": update})
        for says, every in RULES.items()
        for name, update in every.items()
    },
    "writes_into_a_slot": Refusal(("in place",), {"init": momentum, "update": writes_into_a_slot}),
    "writes_where_it_has_no_graph": Refusal(
        ("writes in place",),
        {"update": lambda u, slots, p: (u.mul_(getattr(p, "rate", 0.5)), slots)},
    ),
    "reads_in_reduce": Refusal(
        ("reads a value",), {"update": divided, "reduce": reads_while_reducing}
    ),
    "reads_in_its_second_variant": Refusal(
        ("reads a value",),
        {
            "update": (lambda u, slots, p: (u, slots), RULES["reads a value"]["reads_bool"]),
            "runs": fo.Runs(choose=lambda t: 1),
        },
    ),
    "adds_comparisons_of_numbers": Refusal(
        ("adds two comparisons",),
        {
            "update": lambda u, slots, p, a: (u * ((a > 0.5) + (a > 0.9)), slots),
            "scalars": lambda t: (0.95,),
        },
    ),
}


CONTRADICTED = {
    f"batched_{name}": Refusal(
        ("batched", word), {"update": ROWS[name].parts[0].update, "runs": fo.Runs(batched=True)}
    )
    for name, word in {"row_trust_ratio": r"\bp\b", "unit_norm": "norm", "centred": "mean"}.items()
}
"""Rules whose arguments say what their operations deny."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [*REFUSED, *CONTRADICTED])
def test_a_rule_that_cannot_be_run_is_refused_before_anything_is_changed(name, way):
    """The first use raises a sentence that has all it must say, and an advice."""
    refusal = REFUSED.get(name) or CONTRADICTED[name]
    tx = fo.leafwise(**{"init": None, **refusal.arguments}, name=name)
    for model in ("together", "scalar", "matrix", "bfloat16") if name in REFUSED else ("matrix",):
        held = MODELS[model].params(), MODELS[model].grads()[0]
        before, drawn = clone(held), torch.get_rng_state()
        with pytest.raises(ValueError, match=r"; \w+") as error:
            step_in(way, lambda: tx, *held)
        for part in (name, *refusal.says):
            assert re.search(part, str(error.value)), part
        assert_same(held, before)
        assert torch.equal(torch.get_rng_state(), drawn), "numbers were drawn"


def writes_if_large(u: Tensor, slots: Any, p: Tensor) -> Any:
    return (u.mul_(0.5) if u.numel() > 250 else 0.5 * u), slots


def writes_late_if_large(u: Tensor, slots: Any, p: Tensor) -> Any:
    u = u if u.numel() <= 250 else u.mul_(getattr(p, "rate", 0.5))
    return u.cumsum(-1), slots


@pytest.mark.parametrize("update", [writes_if_large, writes_late_if_large])
def test_an_update_refuses_a_rule_that_writes_into_large_tensors_only(update):
    tx, p = fo.leafwise(None, update, name="by_size"), torch.zeros(300)
    tx.update(p[:200], tx.init(p[:200]), p[:200])
    g = torch.ones(300)
    with pytest.raises(ValueError, match="'by_size' writes in place"):
        tx.update(g, tx.init(p), p)
    if update is writes_if_large:
        assert g.tolist() == [1.0] * 300


def test_a_rule_that_reads_sizes_may_have_an_init_that_reads_values():
    def init(p: Tensor) -> Momentum:
        return Momentum(torch.full((), float(p.abs().max())))

    tx = fo.leafwise(init, lambda u, slots, p: (u * u.shape[0] ** 0.5, slots), name="by_size")
    p = torch.ones(40_000)
    assert tx.update(p, tx.init(p), p)[0][0] == 200.0


# ---------------------------------------------------------------- slots
@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.int64])
@pytest.mark.parametrize("way", [by_update, by_function])
def test_a_rule_gets_whole_numbers_in_the_dtype_in_which_they_are_stored(dtype, way):
    def update(u: Tensor, slots: Any, p: Tensor) -> Any:
        return u * (slots.exp_avg.dtype is dtype), Momentum(slots.exp_avg ^ 1)

    large = min(torch.iinfo(dtype).max, 2**60 + 3) - 2
    tx = fo.leafwise(lambda p: Momentum(torch.full(p.shape, large).to(dtype)), update, name="bits")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        params, slots = way(tx, {"w": torch.zeros(2)}, [{"w": torch.ones(2)}] * 2)
    assert slots["exp_avg"]["w"].tolist() == [large] * 2
    assert params["w"].tolist() == [2.0] * 2


class Halves:
    """A codec that loses something each time that a slot is packed again."""

    fields = ("half",)

    def encode(self, x: Tensor, key: Any = None) -> tuple[Tensor, ...]:
        return (0.5 * x,)

    def decode(self, stored: tuple[Tensor, ...], spec: Any) -> Tensor:
        return stored[0]


def halved() -> Any:
    def init(p: Tensor) -> Packed:
        return Packed(torch.ones_like(p), torch.full_like(p, 2**30 + 1, dtype=torch.int64))

    def update(u: Tensor, slots: Packed, p: Tensor) -> Any:
        return u, Packed(slots.exp_avg + u, slots.count)

    return fo.leafwise(init, update, storage=fo.Storage(codecs={"exp_avg": Halves()}))


@pytest.mark.parametrize("compile", ["strict", False])
def test_slots_behind_a_shut_gate_stay_as_they_are_stored(compile):
    tx = fo.accumulate(halved(), every=3)
    p, w = torch.nn.Parameter(torch.ones(2)), torch.ones(2)
    opt = adapters.Optimizer([p], lambda: tx, compile=compile)
    step, state = fo.compile(tx), tx.init(w)
    for _ in range(2):
        p.grad = torch.ones(2)
        opt.step()
        w, state = step(torch.ones(2), state, w)
    for found in (opt.state[p], state.slots):
        assert_same(found["exp_avg.half"], torch.full((2,), 0.5))
        assert_same(found["count"], torch.full((2,), 2**30 + 1))


def test_a_rule_with_a_codec_is_built_and_run_in_one_graph(fresh_dynamo):
    p = torch.ones(2)

    def one_step(g: Tensor) -> Any:
        tx = halved()
        return tx.update(g, tx.init(p), p)[1].slots["exp_avg.half"]

    traced = torch.compile(one_step, fullgraph=True, backend="eager")
    assert_same(traced(p), torch.full((2,), 0.75))


# ---------------------------------------------------------------- variants
@pytest.mark.parametrize("way", [by_update, by_eager_object])
def test_the_chosen_variant_is_run_and_no_other(way, monkeypatch):
    """Where the step is known; a traced step stands behind a condition."""
    calls, real = [], torch.linalg.qr
    monkeypatch.setattr(torch.linalg, "qr", lambda x: calls.append(len(x)) or real(x))
    shapes = {"a": (3, 4), "b": (5, 2)}
    params, *grads = (random_tree(k, torch.float32, shapes) for k in range(8))
    _, slots = way(refreshing(), params, grads)
    # other calls are of small tensors, on which rules are recorded
    assert calls.count(3) == calls.count(5) == slots["seen"]["a"] == 3


def test_wrong_variants_are_refused():
    def update(u: Tensor, slots: Any, p: Tensor) -> Any:
        return u, slots

    w = torch.ones(2)
    for wrong in (2, -1, -2, 0.5, float("nan"), None, torch.tensor(-1)):
        tx = fo.leafwise(None, (update, update), runs=fo.Runs(choose=lambda t, wrong=wrong: wrong))
        for step in (tx.update, fo.compile(tx)):
            with pytest.raises(ValueError, match="; return a whole number from 0 to 1"):
                step(w, tx.init(w), w)


# ---------------------------------------------------------------- gates
GATES: dict[str, Callable[[Any], Any]] = {
    "accumulate": lambda tx: fo.accumulate(tx, every=2, skip_nonfinite=True),
    "apply_if_finite": lambda tx: fo.apply_if_finite(tx, max_consecutive_errors=3),
    "conditionally_mask": lambda tx: fo.conditionally_mask(tx, lambda step: step > 0),
    "dynamic_loss_scale": lambda tx: fo.dynamic_loss_scale(tx, init_scale=2.0),
    "skip_large_updates": lambda tx: fo.skip_large_updates(tx, max_norm=1e3),
    "two gates": lambda tx: fo.apply_if_finite(fo.named_chain(("a", GATES["accumulate"](tx))), 3),
}


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("way", [by_update, by_function, by_object, by_eager_object])
def test_a_rule_with_scalars_runs_behind_a_gate_that_is_closed_in_the_first_step(gate, way):
    tx = GATES[gate](
        fo.leafwise(None, lambda u, slots, p, t: (u / t, slots), lambda t: (t,), name="by_step")
    )
    grads = [{"w": torch.full((2,), g)} for g in (math.nan, 1.0, 1.0, 1.0)]
    params, _ = way(tx, {"w": torch.zeros(2)}, grads)
    taken = 1.0 if gate in ("accumulate", "two gates") else 1 + 1 / 2 + 1 / 3
    assert_close(params["w"], torch.full((2,), taken), 1e-6)


# ---------------------------------------------------------------- slots of another kind
@pytest.mark.parametrize(
    ("dtype", "slot"),
    [
        (torch.float32, torch.complex64),
        (torch.complex64, torch.float32),
        (torch.complex64, torch.int64),
    ],
)
@pytest.mark.parametrize("way", WAYS)
def test_a_slot_like_the_parameter_must_be_complex_if_that_is(dtype, slot, way):
    tx = fo.leafwise(
        lambda p: Momentum(torch.zeros(p.shape, dtype=slot)), lambda u, slots, p: (u, slots)
    )
    params, grads = ({"w": torch.ones(3, dtype=dtype)} for _ in range(2))
    with pytest.raises(TypeError, match="In a custom rule, let init make slots of the parameter's"):
        step_in(way, lambda: tx, params, grads)


# ---------------------------------------------------------------- measurements
def rescaled(u: Tensor, slots: Any, p: Tensor, x: Any) -> Any:
    return -u / x, slots


def test_a_measurement_that_is_no_single_number_is_refused():
    """A kernel would write all of its elements to where there is memory for one."""
    p = torch.ones(3)
    parameter = torch.nn.Parameter(p.clone())
    parameter.grad = p
    for wrong in (lambda u, slots, p: (u * u,), lambda u, slots, p: (u * u).sum()):
        tx = fo.leafwise(None, rescaled, reduce=wrong)
        opt = adapters.Optimizer([parameter], lambda tx=tx: tx)
        trees = (p, tx.init(p), p)
        for step, *given in ((tx.update, *trees), (fo.compile(tx), *trees), (opt.step,)):
            with pytest.raises(TypeError, match=r"reduce of a rule returned .* of 0-dim tensors"):
                step(*given)
    assert_same(parameter.detach(), p)
