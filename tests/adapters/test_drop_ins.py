"""The drop-ins stand in for torch.optim's classes: names, arguments, errors, configurations."""

import contextlib
import copy
import inspect

import pytest
import torch
from helpers import as_parameters, assert_close, copy_of, make_grads, make_params, step_object
from torch.testing._internal.common_optimizers import OptimizerErrorEnum, optim_db

from functional_optim import adapters

INFOS = {
    getattr(adapters, info.optim_cls.__name__): info
    for info in optim_db
    if hasattr(adapters, info.optim_cls.__name__) and not info.step_requires_closure
}
every_drop_in = pytest.mark.parametrize("drop_in", INFOS)


def original(drop_in):
    return INFOS[drop_in].optim_cls


def entries(of):
    """One test per drop-in and entry of torch's own database."""
    return [
        pytest.param(drop_in, entry, id=f"{drop_in.__name__}-{i}")
        for drop_in, info in INFOS.items()
        for i, entry in enumerate(of(info))
    ]


def inputs(drop_in, steps):
    """What torch's class can step: Muon matrices only, none of them an empty tensor."""
    params = {name: p for name, p in make_params().items() if p.numel()}
    if drop_in is adapters.Muon or INFOS[drop_in].only_supports_sparse_grads:
        params = {name: p for name, p in params.items() if p.dim() == 2}
    # with the parameters' strides, as autograd has them: torch's fused Adam needs it
    grads = [
        {name: torch.empty_like(params[name]).copy_(g) for name, g in tree.items()}
        for tree in make_grads(params, steps)
    ]
    if INFOS[drop_in].only_supports_sparse_grads:
        grads = [{name: sparse(g, i) for name, g in tree.items()} for i, tree in enumerate(grads)]
    return params, grads


def sparse(g, i):
    """g with one row missing, another one each time."""
    keep = torch.arange(len(g)) != i % len(g)
    at = keep.nonzero().t()
    return torch.sparse_coo_tensor(at, g[keep], g.shape, check_invariants=True)


def compare(drop_in, steps=10, tolerance=1e-10, **hyper):
    """Torch's class and ours, a few steps from equal parameters."""
    params, grads = inputs(drop_in, steps)
    theirs, ours = as_parameters(params), as_parameters(params)
    step_object(original(drop_in)(theirs, **hyper), grads)
    step_object(opt := drop_in(ours, compile=False, **hyper), grads)
    assert_close(copy_of(ours), copy_of(theirs), tolerance)
    assert not torch.equal(ours[0], params["matrix"])
    return opt


@every_drop_in
def test_is_an_instance_of_torchs_class_and_has_its_defaults(drop_in):
    theirs, ours = (cls([torch.zeros(2, 2)]) for cls in (original(drop_in), drop_in))
    assert isinstance(ours, original(drop_in))
    assert type(ours).__name__ == original(drop_in).__name__
    for other in INFOS:  # an AdamW is an Adam
        assert issubclass(drop_in, other) == issubclass(original(drop_in), original(other))
    assert ours.defaults == theirs.defaults
    for a, b in zip(ours.param_groups, theirs.param_groups, strict=True):
        assert {**a, "params": None} == {**b, "params": None}


@every_drop_in
def test_the_signature_is_torchs_and_two_keywords(drop_in):
    """As it is written in the class, where editors and type checkers read it."""
    theirs, ours = inspect.signature(original(drop_in)), inspect.signature(drop_in)
    assert "__signature__" not in vars(drop_in)
    written = inspect.signature(vars(drop_in)["__init__"])
    assert list(written.parameters)[1:] == list(ours.parameters)
    known = {name: x for name, x in ours.parameters.items() if name not in ("compile", "stored")}
    assert list(known.values()) == list(theirs.parameters.values())
    *_, last, more = [None, *ours.parameters.values()]
    if drop_in is not adapters.SparseAdam:
        assert (more.name, more.kind, more.default) == ("stored", more.KEYWORD_ONLY, None)
        last, more = more, last
    assert (more.name, more.kind, more.default) == ("compile", more.KEYWORD_ONLY, True)


def other(x):
    """Another value that an argument with default x takes."""
    if isinstance(x, tuple):
        return tuple(other(y) for y in x)
    return x * (0.9 if x < 1 else 1.5) if isinstance(x, float) else x


@every_drop_in
def test_arguments_are_taken_by_position(drop_in):
    _, *rest = inspect.signature(original(drop_in)).parameters.values()
    given = [other(p.default) for p in rest if p.kind is p.POSITIONAL_OR_KEYWORD]
    theirs, ours = (cls([torch.zeros(2, 2)], *given) for cls in (original(drop_in), drop_in))
    assert ours.defaults == theirs.defaults != drop_in([torch.zeros(2, 2)]).defaults


@pytest.mark.parametrize(
    ("drop_in", "entry"), entries(lambda info: info.optim_inputs_func(device="cpu"))
)
def test_every_configuration_of_torchs_tests(drop_in, entry):
    # torch computes with a tensor lr in the tensor's own dtype, here float32
    as_tensor = any(isinstance(x, torch.Tensor) for x in entry.kwargs.values())
    compare(drop_in, tolerance=1e-6 if as_tensor else 1e-10, **entry.kwargs)


FLAGS = [{flag: value} for flag in ("foreach", "fused") for value in (True, False)]
FLAGS.append({"fused": True, "capturable": True})  # torch's fused step is the same, captured or not
FLAGGED = [
    pytest.param(drop_in, flags, id=f"{drop_in.__name__}-{flags}")
    for drop_in in INFOS
    for flags in FLAGS
    if flags.keys() <= inspect.signature(drop_in).parameters.keys()
]


@pytest.mark.parametrize(("drop_in", "flags"), FLAGGED)
def test_flags_of_torchs_implementation_change_nothing(drop_in, flags):
    opt = compare(drop_in, tolerance=1e-6, **flags)  # torch's foreach ASGD counts in float32
    leaves_steps_out = getattr(opt, "_step_supports_amp_scaling", False)
    assert leaves_steps_out == bool(flags.get("fused"))


def failure(make, params, step=False, **hyper):
    """The type and the text of the error that making an optimizer, or its first step, raises."""
    if step:
        for p in params:
            p.grad = torch.ones_like(p)
        make = make(params, **hyper).step
        params, hyper = None, {}
    with pytest.raises(Exception) as info:  # noqa: PT011 — compared with torch's own
        make(params, **hyper)
    return info.type, str(info.value)


@pytest.mark.parametrize(
    ("drop_in", "entry"),
    entries(lambda info: info.optim_error_inputs_func(device="cpu", dtype=torch.float32)),
)
def test_every_error_of_torchs_tests(drop_in, entry):
    given = entry.optimizer_error_input
    params = [torch.zeros(2, 2)] if given.params is None else given.params
    hyper = {"step": entry.error_on is OptimizerErrorEnum.STEP_ERROR, **given.kwargs}
    kind, words = failure(drop_in, params, **hyper)
    assert (kind, words) == failure(original(drop_in), params, **hyper)
    assert issubclass(kind, entry.error_type)


@pytest.mark.parametrize(
    "hyper", [{"lr": -1.0}, {"eps": -1.0}, {"weight_decay": -1.0}, {"nesterov": 1}, {"b": 1}]
)
@every_drop_in
def test_hyperparameters_are_refused_before_parameters_are_read(drop_in, hyper):
    kind, words = failure(drop_in, None, **hyper)
    theirs, said = failure(original(drop_in), None, **hyper)
    if "object is not" in said:  # Python's error in torch's code; ours names the argument
        assert "object is not" not in words
        return
    assert (kind, words.partition("; it takes ")[0]) == (theirs, said)


# torch's own Adagrad makes a sparse tensor without saying whether to check it
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize("hyper", [{}, {"momentum": 0.9}], ids=str)
@every_drop_in
def test_a_sparse_gradient_does_what_it_does_in_torch(drop_in, hyper):
    results = []
    known = hyper.keys() <= inspect.signature(drop_in).parameters.keys()
    for cls, more in ((original(drop_in), {}), (drop_in, {"compile": False})):
        w = torch.nn.Parameter(torch.ones(3, 2, dtype=torch.float64))
        opt = cls([w], lr=0.1, **more, **(hyper if known else {}))
        try:
            for i in range(4):
                w.grad = sparse(torch.full((3, 2), 0.5, dtype=torch.float64), i)
                opt.step()
            results.append(w.detach())
        except (RuntimeError, NotImplementedError) as error:
            results.append((type(error), str(error)))
    theirs, ours = results
    if isinstance(theirs, torch.Tensor):
        assert_close(ours, theirs, 1e-10)
    else:
        assert ours == theirs


def as_of_old(state):
    """The state of every parameter as torch once kept it: counts and the like as Python numbers."""
    numbers = {"step", "eta", "mu", "mu_product"}
    return {
        i: {key: float(x) if key in numbers else x.clone() for key, x in slots.items()}
        for i, slots in state.items()
    }


@every_drop_in
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("kept", [copy.deepcopy, as_of_old], ids=["today", "as_of_old"])
def test_a_checkpoint_whose_groups_lack_keys_loads_where_torchs_class_loads_it(
    drop_in, steps, kept
):
    """Older versions of torch had fewer keys: each one alone, and all that torch does without."""
    params, grads = inputs(drop_in, 4)
    step_object(source := original(drop_in)(as_parameters(params)), grads[:steps])
    saved = source.state_dict()

    def go_on(cls, lacking, **flags):
        groups = [
            {key: x for key, x in group.items() if key not in lacking}
            for group in saved["param_groups"]
        ]
        opt = cls(mine := as_parameters(params), **flags)
        opt.load_state_dict({"state": kept(saved["state"]), "param_groups": groups})
        step_object(opt, grads[2:])
        return copy_of(mine)

    expected = {}
    for key in sorted(saved["param_groups"][0].keys() - {"params"}):
        with contextlib.suppress(KeyError, TypeError):
            expected[(key,)] = go_on(original(drop_in), {key})
    optional = tuple(key for (key,) in expected)
    expected[optional] = go_on(original(drop_in), optional)
    newer = {"maximize", "foreach", "capturable", "differentiable", "fused"}
    assert newer & set(optional) or drop_in is adapters.Muon
    for lacking, after in expected.items():
        assert_close(go_on(drop_in, lacking, compile=False), after, 1e-10)


@pytest.mark.parametrize(
    ("how", "entry", "later"),
    [
        ({"nesterov": True}, {}, 0.0),
        ({"dampening": 0.5}, {"momentum_buffer": None}, 0.9),
        ({"dampening": 0.5}, {"of_the_user": 1}, 0.9),
    ],
    ids=str,
)
def test_a_momentum_that_is_lacking_or_becomes_0_steps_as_in_torch(how, entry, later):
    """Whatever else is in the state: older versions of torch saved None for a momentum of 0."""
    found = []
    for cls in (torch.optim.SGD, adapters.SGD):
        w = torch.nn.Parameter(torch.ones(2))
        opt = cls([w], lr=0.1, momentum=0.9, **how)
        opt.state[w].update(entry)
        for momentum in (0.9, later, later):
            opt.param_groups[0]["momentum"] = momentum
            w.grad = torch.ones(2)
            opt.step()
        found.append(w.detach())
    assert_close(*found, 1e-6)


def test_a_parameter_that_is_appended_to_a_named_group_steps():
    a, b = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    opt = adapters.AdamW([("a", a)])
    opt.param_groups[0]["params"].append(b)
    a.grad = b.grad = torch.ones(2)
    opt.step()
    assert_close(a.detach(), b.detach(), 1e-6)


@pytest.mark.parametrize(
    ("flag", "dtype", "error"),
    [("capturable", torch.float32, AssertionError), ("fused", torch.complex64, RuntimeError)],
)
def test_a_flag_that_a_group_gets_later_is_checked_at_the_next_step(flag, dtype, error):
    opt = adapters.Adam([torch.ones(2, dtype=dtype)], compile=False)
    (p,) = opt.param_groups[0]["params"]
    p.grad = torch.ones_like(p)
    opt.step()
    opt.param_groups[0][flag] = True
    for _ in range(2):
        with pytest.raises(error, match=flag):
            opt.step()
    opt.param_groups[0][flag] = False
    opt.step()
    assert opt.state[p]["step"] == 2
