"""What a public factory makes can be copied and pickled, and then does the same, bit for bit."""

import copy
import inspect
import pickle

import made
import pytest
import torch
from helpers import assert_same, make_grads, run

import functional_optim as fo
from functional_optim import schedules, search
from functional_optim.core.factory import Reconstructible


def pickled(x):
    return pickle.loads(pickle.dumps(x))


WAYS = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": pickled}
EXAMPLES = made.examples()


MATRICES = ("adamuon", "apollo", "dion2", "galore", "kl_shampoo", "kl_soap", "muon", "normuon")
MATRICES += ("orthogonalize",)


def tree():
    return {"a": torch.tensor([[1.0, -2.0], [0.5, 3.0]]), "b": torch.tensor([0.3, 0.1])}


def transformed(tx, name):
    """Parameters and state after some steps."""
    params = {"a": tree()["a"]} if name.removeprefix("scale_by_") in MATRICES else tree()
    if name in ("differentially_private_aggregate", "dpsgd"):
        grads = [fo.tree.map(lambda x: torch.stack([x, -2 * x]), g) for g in make_grads(params)]
    else:
        grads = make_grads(params)
    extra = dict(made.EXTRA.get(name, {}))
    state = tx.init(params)
    for g in grads:
        if name in ("lbfgs", "ssbfgs", "ssbroyden", "scale_by_backtracking_linesearch"):
            g, value = torch.func.grad_and_value(squares)(params)
            extra = {"value": value, "value_and_grad": value_and_grad}
            extra |= {"grad": g} if name.startswith("scale_by") else {}
        params, state = run(tx, params, [g], state, **extra)
    return params, state


def squares(params):
    return sum((x * x).sum() for x in fo.tree.leaves(params))


def value_and_grad(params):
    return torch.func.grad_and_value(squares)(params)[::-1]


def followed(x, name):
    """All numbers that something gives when it is used."""
    if isinstance(x, fo.GradientTransformation):
        return transformed(x, name)
    if isinstance(x, search.Search):
        candidates, state = x.ask(x.init(tree(), seed=1))
        losses = torch.vmap(lambda p: p["a"].sum() + p["b"].sum())(candidates)
        return x.tell(candidates, losses, state)
    if isinstance(x, fo.estimators.Estimator):
        return x.value_and_grad(lambda p: p["a"].sum())(x.init(tree(), seed=1), tree())
    return [torch.as_tensor(x(n)) for n in (0, 3, 7, torch.tensor(8))]


@pytest.mark.filterwarnings("ignore:.*master_weights keeps more bits:UserWarning")
@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("way", WAYS)
def test_what_a_factory_makes_does_the_same_after_a_round_trip(name, way):
    made_here, kind = EXAMPLES[name], name.rpartition("-")[0]
    twin = WAYS[way](made_here)
    assert type(twin) is type(made_here)
    assert_same(followed(twin, kind), followed(made_here, kind))


@pytest.mark.parametrize("name", made.public_factories())
def test_every_public_factory_records_its_call(name):
    """One that is added later needs the decorator, and a row in `made` if it takes arguments."""
    make = made.public_factories()[name]
    assert make.__wrapped__
    for known, thing in EXAMPLES.items():
        if known.rpartition("-")[0] == name:
            assert isinstance(thing, Reconstructible)
            assert thing.made.factory is make


def test_sharded_over_is_pickled_with_the_default_group_only():
    tx = pickled(fo.sharded_over(made.TX))
    assert all(link.reduce_groups == (None,) for link in tx.placements)


def test_a_tensor_is_copied_with_what_is_made_of_it():
    lr = torch.tensor(0.5)
    module = torch.nn.Module()
    module.register_buffer("lr", lr)
    module.all = [fo.adamw(lr), fo.sgd(schedules.linear(lr, 0.0, 10)), local_lion(lr)]
    for twin in (copy.deepcopy(module), pickled(module.lr and [module.lr, *module.all[:2]])):
        own, *rest = twin if isinstance(twin, list) else [twin.lr, *twin.all]
        own.zero_()
        for tx in rest:
            assert not tx.update(torch.ones(2), tx.init(torch.zeros(2)), torch.zeros(2))[0].any()
    for tx in module.all:
        assert tx.update(torch.ones(2), tx.init(torch.zeros(2)), torch.zeros(2))[0].any()


def local_lion(lr, beta=0.9):
    """A recipe as the README writes them."""

    def init(p):
        return made.SignSlots(torch.zeros_like(p))

    def scalars(t):
        return fo.numeric.at(lr, t), 1 - beta

    def update(g, slots, p, lr, a):
        m = slots.exp_avg + a * (g - slots.exp_avg)
        return -lr * m.sign(), made.SignSlots(m)

    return fo.leafwise(init, update, scalars, name="lion", hyper={"lr": lr})


@fo.factory
def lion(lr, beta=0.9):
    return local_lion(lr, beta)


def test_a_recipe_of_local_functions_is_copied_and_its_pickle_says_what_to_do():
    tx, params = local_lion(0.1), tree()
    assert_same(transformed(copy.deepcopy(tx), ""), transformed(tx, ""))
    sentence = (
        r"leafwise\(…\), whose argument 0 holds the function local_lion.<locals>.init, cannot be "
        r"pickled .* define this function at the top level of a module, or decorate the recipe"
    )
    for thing in (tx, fo.chain(tx), fo.compile(tx), [fo.accumulate(tx, 2)]):
        with pytest.raises(pickle.PicklingError, match=sentence):
            pickle.dumps(thing)
    pair = fo.GradientTransformation(tx.init, lambda *args: args)
    with pytest.raises(pickle.PicklingError, match="at the top level of a module"):
        pickle.dumps(pair)
    assert_same(copy.deepcopy(pair).init(params), pair.init(params))


def test_a_decorated_recipe_is_pickled_by_its_name():
    tx = lion(0.1, beta=0.8)
    text = pickle.dumps(tx)
    assert b"local_lion" not in text
    assert_same(transformed(pickle.loads(text), ""), transformed(tx, ""))
    assert pickled(fo.adamw) is fo.adamw
    assert list(inspect.signature(fo.sgd).parameters)[:2] == ["lr", "momentum"]
    text = "linear(0.1, 0.0, transition_steps=4)"
    assert repr(schedules.linear(0.1, 0.0, transition_steps=4)) == text


def test_the_outermost_factory_is_recorded_and_none_that_returns_what_it_was_given():
    tx = fo.adam(0.1)
    assert fo.chain(tx) is tx
    assert fo.chain(fo.identity(), tx) is tx
    assert tx.made.factory is fo.adam
    pair = fo.GradientTransformation(made.init, made.signum)
    assert fo.chain(pair) is pair
    assert pickled(pair) == pair
    assert fo.factory(lambda f: f)(made.slowing) is made.slowing


def test_a_record_keeps_its_arguments_as_they_were():
    transforms, patterns = {"x": fo.sgd(0.1), "y": fo.sgd(0.2)}, {"*": "x"}
    tx = fo.partition(transforms, patterns)
    transforms["x"], patterns["*"] = fo.sgd(9.0), "y"
    assert_same(transformed(pickled(tx), ""), transformed(tx, ""))


def by_hand(grads, state, params=None):
    return fo.tree.map(torch.neg, grads), state


REPLACED = "adamw-0 chain-1 chain-2 lookahead-1 commit_if-0 local_sgd-0 lbfgs-0"


@pytest.mark.parametrize("name", REPLACED.split())
def test_a_replaced_function_makes_a_plain_pair(name):
    """Links and parts belong to the old function, and must not step in its place."""
    old = EXAMPLES.get(name) or fo.adamw(0.1)
    for tx in (old._replace(update=by_hand), type(old)._make((old.init, by_hand))):
        assert type(tx) is fo.GradientTransformation
        assert tx.init is old.init
        w = torch.ones(2)
        for twin in (tx, fo.chain(tx, fo.scale(1.0)), copy.deepcopy(tx)):
            assert_same(twin.update(w, None, w)[0], -w)


@pytest.mark.parametrize("part", range(3))
def test_the_parts_of_a_chain_are_copied_too(part):
    begin, end = (fo.freeze("b"), fo.trace(0.9)), (fo.trace(0.5), fo.scale(0.1))
    tx = fo.chain(*begin, made.WHOLE, *end).parts[part]
    for twin in (copy.deepcopy(tx), copy.copy(tx)):
        assert_same(transformed(twin, ""), transformed(tx, ""))


def test_steps_of_all_kinds_are_copied_without_what_they_have_seen():
    params = tree()
    for tx in (made.TX, fo.commit_if(made.TX), fo.local_sgd(made.TX, every=2)):
        extra = {"commit": True} if "commit" in str(tx.made.factory) else {}
        step = fo.compile(tx, donate=False, strict=True)
        state, (g,) = tx.init(params), make_grads(params, steps=1)
        wanted = step(g, state, params, **extra)
        for twin in (copy.deepcopy(step), pickled(step)):
            assert type(twin) is type(step)
            assert (twin.donate, twin.options.strict) == (False, True)
            assert_same(twin(g, state, params, **extra), wanted)
