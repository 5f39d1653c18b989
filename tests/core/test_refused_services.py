"""Calls of trees, schedules, estimators, searches and replicas that cannot be meant: each ends.

One row is a call, and what its error says, as in test_refused_calls.
"""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import functional_optim as fo
from functional_optim import estimators, search
from functional_optim import schedules as s
from functional_optim.replicas import Delay, Kill, Local, Replica, Scripted, Simulation

W = torch.ones(2)
SNES, SPSA = search.snes(4, 0.1), fo.spsa()
ADAM, SYNCED = fo.adam(), fo.local_sgd(fo.adam(), 2)
diloco = partial(fo.diloco, fo.adam(), fo.sgd())
flat = s.constant(1)
NO = "must be True or False, but got 'no'"


def told(fitness: Any, given: Any = None) -> Any:
    candidates, state = SNES.ask(SNES.init(W))
    return SNES.tell(candidates if given is None else given, fitness, state)


STEP_LR = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.zeros(1)]), 3)

VALUES: list[Any] = [
    # schedules
    (lambda: s.linear(0.0, 1.0, 0), "linear needs transition_steps of at least 1.* 0"),
    (lambda: s.linear(0, 1, 5, -1), "transition_begin of at least 0, but got -1"),
    (lambda: s.polynomial(0, 1, 0.0, 5), "polynomial needs a positive power, but got 0.0"),
    (lambda: s.polynomial(0, 1, 2, 0), "polynomial needs transition_steps of at least 1"),
    (lambda: s.cosine(1.0, -3), "cosine_decay needs decay_steps .* 1, but got -3"),
    (lambda: s.cosine_decay(1, 5, exponent=0), "cosine_decay needs a positive exponent"),
    (lambda: s.exponential_decay(1, 0, 0.5), "exponential_decay needs transition_steps of"),
    (lambda: s.exponential_decay(1, 5, 0.0), "needs a positive decay_rate, but got 0.0"),
    (lambda: s.exponential_decay(1, 5, 0.5, -2), "transition_begin of at least 0"),
    (lambda: s.piecewise_constant(1, {-1: 0.5}), "boundaries of at least 0, but got -1"),
    (lambda: s.piecewise_constant(1, {1: -0.5}), "scales of at least 0, but got -0.5"),
    (lambda: s.piecewise_interpolate("cubic", 1), "'cosine' as interpolate_type, but got 'cubic'"),
    (lambda: s.piecewise_interpolate("linear", 1, {2: -1}), "scales of at least 0"),
    (lambda: s.linear_onecycle(0, 1), "linear_onecycle needs transition_steps of at least"),
    (lambda: s.linear_onecycle(9, 1, 0.9), "pct_start=0.9, pct_final=0.85"),
    (lambda: s.linear_onecycle(9, 1, div_factor=0), "a positive div_factor, but got 0"),
    (lambda: s.cosine_onecycle(9, 1, 1.5), r"a pct_start in \[0, 1\], but got 1.5"),
    (lambda: s.cosine_onecycle(9, 1, final_div_factor=-1), "a positive final_div_factor"),
    (lambda: s.sgdr([]), "sgdr needs at least one cycle, but got none"),
    (lambda: s.warmup(flat, -1), "warmup needs warmup_steps of at least 0"),
    (lambda: s.warmup(flat, 5, kind="fast"), "'exponential' as kind, but got 'fast'"),
    (lambda: s.warmup(flat, 5, 0, "exponential"), "a positive init_value"),
    (lambda: s.warmup_constant(0, 1, -1), "warmup_constant needs warmup_steps of at least 0"),
    (lambda: s.warmup_cosine_decay(0, 1, 9, 9), "0 <= warmup_steps < decay_steps"),
    (lambda: s.warmup_cosine_decay(0, 1, 1, 9, exponent=0), "a positive exponent"),
    (lambda: s.warmup_exponential_decay(0, 1, -1, 5, 0.5), "warmup_steps of at least 0"),
    (lambda: s.warmup_stable_decay(0, 1, 5, -1, 5), "stable_steps of at least 0"),
    (lambda: s.warmup_stable_decay(0, 1, 5, 5, 0), "decay_steps of at least 1"),
    (lambda: s.warmup_stable_decay(0, 1, 5, 5, 5, kind="sqrt"), "'1-sqrt' as kind, but got 'sqrt'"),
    (lambda: s.warmup(s.constant(-1), 5, 0.1, "exponential")(2), "peak above 0, but got -1.0"),
    (lambda: s.from_torch(STEP_LR, "a"), "group from 0 to 0 of the scheduler, but got 'a'"),
    (lambda: s.inverse_square_root(1, 0), "inverse_square_root needs warmup_steps of at"),
    (lambda: s.join([], []), "one boundary fewer than schedules, but got 0 schedules and 0"),
    (lambda: s.join([flat] * 3, [5, 4]), r"in rising order, but got \[5, 4\]"),
    (lambda: s.join([flat] * 2, [-5]), r"of at least 0 in rising .* got \[-5\]"),
    # estimators
    *[
        (lambda make=make, x=x: make().init(x), "got a tree without parameters")
        for make in (fo.spsa, fo.mezo, fo.es_gradient, fo.forward_gradient)
        for x in ({}, {"w": None})
    ],
    (lambda: fo.spsa(c=0.0), "positive c, but got 0.0"),
    (lambda: fo.spsa(gamma=-1.0), "gamma of 0 or more"),
    (lambda: fo.spsa(samples=0), "a whole number of 1 or more for samples"),
    (lambda: fo.mezo(eps=-1.0), "positive eps"),
    (lambda: fo.mezo(samples=1.5), "for samples, but got 1.5"),
    (lambda: fo.es_gradient(5), "even population, but got 5"),
    (lambda: fo.es_gradient(4, sigma=0.0), "positive sigma"),
    (lambda: fo.forward_gradient(0), "for directions"),
    (lambda: fo.forward_gradient(distribution="cauchy"), "but got 'cauchy'"),
    (lambda: estimators.spsa_gain(0.0), "positive a"),
    (lambda: estimators.spsa_gain(1.0, -1.0), "stability"),
    (lambda: estimators.spsa_gain(1.0, alpha=0.0), "positive alpha"),
    (lambda: SPSA.tell(W, torch.ones(3), SPSA.init(W[0])), r"its 2 candidates .* but got \(3,\)"),
    # searches
    (lambda: search.snes(1, 0.1), "population of 2 or more, but got 1"),
    (lambda: search.cma_es(2, 0.1), "population of 3 or more, but got 2"),
    (lambda: search.differential_evolution(3, 0.1), "population of 4 or more, but got 3"),
    (lambda: search.random_search(0, 0.1), "population of 1 or more, but got 0"),
    (lambda: search.cma_es(8, -1.0), "finite sigma above 0, but got -1"),
    (lambda: search.one_plus_one(0.1, factor=1.0), "factor above 1, but got 1.0"),
    (lambda: search.cem(8, 0.1, elites=9), r"integer in \[1, 8\] as its elites, but got 9"),
    (lambda: search.cem(8, 0.1, elites=2.5), "integer in .* as its elites, but got 2.5"),
    (lambda: search.cem(8, 0.1, elites=True), "integer in .* as its elites, but got True"),
    (lambda: search.cem(8, 0.1, smoothing=0.0), "smoothing in"),
    (lambda: search.differential_evolution(8, 0.1, strategy="best/2"), "as strategy, but got"),
    (lambda: search.annealing(1, 0.1, -1.0), "temperature of 0 or more"),
    (lambda: search.pgpe(8, 0.1, fo.sgd(0.1), max_change=1.0), "max_change in"),
    (lambda: told(torch.zeros(3)), r"shape \(4,\), but got \(3,\)"),
    (lambda: told([0.0] * 4), r"shape \(4,\), but got list"),
    (lambda: told(torch.zeros(4), torch.zeros(3, 2)), "differ at"),
    # replicas
    (lambda: fo.local_sgd(ADAM, 0), "1 or more for every"),
    (lambda: fo.local_sgd(ADAM, 1.5), "1 or more for every, but got 1.5"),
    (lambda: fo.local_sgd(SYNCED, 2), "inside another"),
    (lambda: fo.diloco(fo.chain(fo.scale(2.0), SYNCED), fo.sgd(), 2), "inside"),
    (lambda: fo.diloco(ADAM, SYNCED, 2), "inside another"),
    (lambda: fo.diloco(ADAM, fo.polyak_sgd(), 2), "needs value in update"),
    (lambda: diloco(5, fragments=2), "a multiple of 2, but is 5"),
    (lambda: diloco(4, fragments=0), "1 fragment or more"),
    (lambda: diloco(4, fragments=[]), "1 fragment or more"),
    (lambda: diloco(4, fragments=2, delay=2), "from 0 to 1"),
    (lambda: diloco(4, delay=-1), "from 0 to 3"),
    (lambda: diloco(4, alpha=1.5), "from 0 .* to 1"),
    (lambda: diloco(2, fragments=2).init(W), "fragment 0 has no leaf"),
    (lambda: diloco(2, fragments=["*", "w"]).init({"w": W}), "fragment 1 has no leaf"),
    (lambda: diloco(2, fragments=["w"]).init({"v": W}), "'v' is in no fragment"),
    (lambda: Replica(Local(), fo.chain(fo.scale(2.0), SYNCED)), "inside another"),
    (lambda: Local(max_retries=-1), "max_retries must be None, or 0 or more"),
    (lambda: Scripted([fo.replicas.Decision(True, True, 1, 2)]), "there is no peer to heal from"),
    (lambda: fo.replicas.Coordinator(bucket_bytes=0), "bucket_bytes must be 1 or more"),
    (lambda: Replica(Local(), fo.sgd(0.1), nonfinite="maybe"), "takes 'commit' or 'refuse' as non"),
    (lambda: Simulation(0), "min_replicas=1 cannot form out of 0"),
    (lambda: Simulation(2, min_replicas=3), "min_replicas=3 cannot form out of 2"),
    (lambda: Simulation(timeout=0.0), "timeout must be more than 0 s"),
    (lambda: Simulation(errors="ignore"), "takes 'raise' or 'crash' as errors"),
    (lambda: Simulation(faults=[Kill(3)]), "ranks 0 to 2"),
    (lambda: Simulation(faults=[Kill(0, 0, "somewhere")]), "a point is one of before start"),
    (lambda: Simulation(faults=[Delay(0, seconds=-1.0)]), "seconds must be 0 or more"),
    (
        lambda: ADAM.update(W, ADAM.init(W)._replace(step=torch.tensor(-2)), W),
        "the step of the state is -2; it must be the number of finished steps, 0 or more",
    ),
]

KINDS: list[Any] = [
    (lambda: s.join(flat, [3]), "join takes a list as schedules, but got "),
    (lambda: s.join([0.1, flat], [5]), r"join takes schedules.*0\.1; use constant"),
    (lambda: s.join([lambda: 1.0, flat], [5]), "join takes a schedule"),
    (lambda: s.constant(W), r"constant takes a number or .* got a Tensor of shape \(2,\)"),
    (lambda: s.constant(W[0] * 1j), "constant .* as value, but got a Tensor, which is not real"),
    (lambda: s.linear(np.complex64(1j), 0.0, 9), "init_value, but got a complex64, .* not real"),
    (lambda: fo.sgd(W[0] * 1j), "as lr, but got a Tensor, which is not real"),
    (lambda: s.warmup(lambda n: W[0] * 1j, 5)(1), r"a Tensor of shape \(\) in torch.complex64; it"),
    (lambda: s.warmup(0.1, 5), r"warmup takes schedules, .* 0\.1; use constant"),
    (lambda: s.sgdr([{"init_value": 0.0}]), "decay_steps"),
    (lambda: s.sgdr({"init_value": 0.0}), "sgdr takes a list of dicts, one for each cycle"),
    (lambda: s.sgdr(None), "sgdr takes a list of dicts, one for each cycle, but got None"),
    (lambda: s.join([flat, flat], ["3"]), "numbers of steps as boundaries, but got '3'"),
    (lambda: s.join([lambda n: None, flat], [5])(1), "a schedule returned None; it must return"),
    (lambda: s.warmup(lambda n: W, 5)(1), r"a schedule returned a Tensor of shape \(2,\)"),
    (lambda: s.piecewise_constant(1.0, {None: 1.0, 3: 0.5}), "must be a number, .* got None"),
    (lambda: s.sgdr([{"init_value": 0.0, "speed": 1}]), "speed"),
    (lambda: s.piecewise_constant(1.0, [10]), "takes a dict from boundaries"),
    (lambda: s.piecewise_constant(1.0, {"a": 0.5}), "but got {'a': 0.5}"),
    # estimators
    (lambda: fo.spsa(fo.sgd(0.1)), "or a schedule as c, but got a Leafwise"),
    (lambda: fo.spsa().init(W, 0.5), "integer as its seed, but got 0"),
    (lambda: fo.spsa().init(torch.ones(3, dtype=torch.int64)), "only floating-point"),
    (lambda: fo.forward_gradient().ask(SPSA.init(W), W), "cannot use its values"),
    (lambda: estimators.hutchinson("x"), "hutchinson takes a loss function first"),
    (lambda: estimators.gauss_newton_bartlett(W), "takes a logits function first, but got"),
    (lambda: estimators.replay(fo.mezo(), None, W, []), "replay takes a transfo"),
    (lambda: estimators.replay(fo.mezo(), fo.sgd(), W, [W]), "the state of an est"),
    # searches
    (lambda: search.snes(8.0, 0.1), "integer as its population"),
    (lambda: search.openai_es(8, 0.1, fo.adam), "takes a transformation"),
    (lambda: search.one_plus_one(fo.adamw()), "a 0-dim tensor as sigma, but got a Leafwise"),
    (lambda: SNES.init(torch.arange(3)), "dtype torch.int64"),
    (lambda: SNES.init(W, seed=0.5), "snes needs an integer as its seed"),
    (lambda: SNES.ask(search.cma_es(4, 0.1).init(W)), "snes takes the state"),
    (lambda: SNES.tell(W, torch.ones(4), 3), "init or tell returned, but got a int"),
    (lambda: search.best(fo.adamw()), "best takes the state of a search method"),
    *[
        (lambda x=x: search.center(x), "center takes the state of a search method, which")
        for x in (fo.adamw(), W, {"w": W})
    ],
    # replicas
    (lambda: fo.local_sgd(fo.adam, 2), "local_sgd takes a transf"),
    (lambda: fo.diloco(ADAM, fo.sgd, 2), "diloco takes a transf"),
    (lambda: diloco(4, fragments="w"), "a list with a mask"),
    (lambda: Replica(Local(), fo.sgd), "Replica takes a transformation"),
    (lambda: fo.replicas.as_coordinator(3), "a coordinator or a torchft Manager is needed"),
    (
        lambda: Simulation(faults=["kill"]),
        "a fault is a Kill, Delay, CutOff or Slow, but got a str",
    ),
    (lambda: Replica(Local(), fo.sgd(), compile="no"), f"compile {NO}"),
    (lambda: Simulation(2, heals_at_start="no"), f"heals_at_start {NO}"),
    (lambda: Simulation(2, init_sync="no"), f"init_sync {NO}"),
    (lambda: Scripted([True], heals_at_start="no"), f"heals_at_start {NO}"),
    (lambda: fo.replicas.TorchFT(object(), quantize="no"), f"quantize {NO}"),
    (lambda: fo.apply_updates(W, 1j * W), "float32 cannot take an update of dtype torch.complex64"),
    (lambda: fo.apply_updates(W.long(), W), "int64 cannot take an update of dtype torch.float32"),
    (lambda: fo.layerwise_decay(0.8, {"w": W}), r"layerwise_decay\(params, decay\)"),
    (lambda: search.evaluate(W, torch.sum), r"evaluate\(loss_fn, candidates, ...\)"),
]


@pytest.mark.parametrize(
    ("kind", "call", "words"),
    [*[(ValueError, *row) for row in VALUES], *[(TypeError, *row) for row in KINDS]],
)
def test_a_value_or_another_kind_of_argument_is_refused(kind, call, words):
    with pytest.raises(kind, match=words):
        call()
