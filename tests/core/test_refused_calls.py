"""Calls that cannot be meant: each ends at once, in a sentence that names the cause.

One row is a call, and what its error says. What steps refuse is in test_errors.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from odd_rules import packed
from torch import Tensor, nn

import functional_optim as fo
from functional_optim import adapters
from functional_optim.measures import Measure

W = torch.ones(2)
PARAMS = {"w": torch.ones(3, 4), "b": torch.ones(4)}
NAMED = {f"{name}.weight": torch.ones(4, 4) for name in ("up", "down", "head")}
NAMED |= {"up.bias": torch.ones(4)}
MATRIX = torch.ones(12, 4)
NAN, MEAN = math.nan, fo.trace(0.9)
BASIS = fo.shampoo_basis()
HALF = {"w": W.bfloat16()}
flat = fo.schedules.constant(1)


def stepped(tx: Any, grads: Any = W, params: Any = W, **extra: Any) -> None:
    tx.update(grads, tx.init(W), params, **extra)


def observed(hessian: Any) -> None:
    fo.estimators.observe_hessian(fo.sophia().init(W), hessian)


def opaque() -> Any:
    """A transformation of whole trees."""
    return fo.GradientTransformation(lambda p: (), lambda grads, state, params=None: (grads, state))


class Slots(NamedTuple):
    momentum_buffer: Tensor


class Step(NamedTuple):
    step: Tensor


def rule(name: str = "", slots: Any = Slots, last: bool = False) -> Any:
    runs = fo.Runs(after="step" if last else None)
    return fo.leafwise(lambda p: slots(p), lambda u, x, p: (u, x), name=name, runs=runs)


def turning(hyper: Any = None, **more: Any) -> Any:
    def update(u: Any, x: Any, p: Any) -> Any:
        return u, x

    runs = fo.Runs(**{"choose": lambda t, *, turn: 0, "turns": 2, **more})
    return fo.leafwise(None, (update, update), name="mine", runs=runs, hyper=hyper)


def model() -> Any:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def adamw(**more: Any) -> Any:
    return adapters.AdamW(model().parameters(), **more)


def walk(params: Any, noise: Any) -> Any:
    return params + noise


def total(params: Any) -> Any:
    return params["w"].sum()


def times(u: Any, slots: Any, p: Any, a: Any) -> Any:
    return a * u, slots


train = fo.compile_train_step
mine = partial(fo.leafwise, name="mine")
qk_clip = partial(fo.qk_clip, torch.ones(8, 5), torch.ones(8, 5))
split = partial(fo.as_matrix, fo.muon())
parts = {"slow": fo.sgd(0.1), "fast": fo.adam(0.1)}
tied = {"*.b": "slow", "*": "fast"}
two_rates = r"it would go uphill\. Leave one out: adam\(lr\)"
growth = "stands after scale_by_lr.* growth of the weights; .* pass independent=True"
leafwise = ".* but got a Leafwise"
LONE = fo.GradientTransformation(lambda params: (), lambda grads, state, params: grads)

NUMBERS: list[Any] = [
    # algorithms
    (lambda: fo.adam(betas=(1.0, 0.9)), "Invalid beta parameter at index 0: 1.0"),
    (lambda: fo.sgd(W), r"Tensor lr must be 1-element.*shape \(2,\); for several rates at once"),
    (lambda: observed(torch.ones(1)), "an estimate like the parameters, .* but got"),
    (lambda: observed({"w": W}), "an estimate like the parameters, .* but got"),
    (lambda: fo.masked(fo.sgd(), W).init(W), r"mask gives tensor\(.*; it must be one of True, Fa"),
    (lambda: fo.sgd(nesterov=True), "Nesterov momentum requires a momentum and zero dampening"),
    # transforms
    (lambda: fo.ema(1.0), "decay in .0, 1., but got 1.0"),
    (lambda: fo.params_ema(1.5), "needs a decay in"),
    (lambda: fo.apply_delta(-1.0), "Invalid learning rate: -1"),
    (lambda: fo.cautious_weight_decay(-1.0), r"Invalid weight_decay value: -1\.0"),
    (lambda: fo.normalize(eps=-1.0), "eps of 0 or more, but got -1.0"),
    (lambda: fo.clip_by_global_norm(0.0), "needs a positive max_norm"),
    (lambda: fo.clip_by_block_rms(0.0), "positive threshold, but got 0.0"),
    (lambda: fo.adaptive_grad_clip(0.0), "positive clipping, but got 0.0"),
    (lambda: fo.adaptive_grad_clip(1.0, 0.0), "positive eps, but got 0.0"),
    (lambda: fo.scale_by_trust_ratio(-1.0), "min_norm of 0 or more, but got -1.0"),
    (lambda: fo.clip_by_trust_ratio(0.0), "positive trust_coefficient, but got"),
    (lambda: fo.keep_norms_within(0.0), "positive factor, but got 0.0"),
    (lambda: fo.hyperball(-1.0), "Invalid learning rate: -1.0"),
    (lambda: fo.orthogonalize(scale="x"), "but got .x."),
    (lambda: fo.orthogonalize(ns_steps=100), "less than 100"),
    (lambda: fo.orthogonalize((1.0, 2.0)), "exactly 3 values"),
    (lambda: fo.orthogonalize(2.0), "finite numbers, but got 2.0"),
    (lambda: fo.orthogonalize((3.0, -4.0, math.inf)), "finite numbers, but got"),
    (lambda: fo.orthogonalize(eps=-1.0), "at least eps, so not by -1.0"),
    (lambda: fo.orthogonalize().init(W), r"takes matrices, but .* \(2,\); .* rule by functional_"),
    (lambda: fo.kl_soap().init(W), r"kernels, but got .* \(2,\); .* in the recipe of adapters.Opt"),
    (lambda: fo.scale_by_polyak(max_learning_rate=0.0), "but got 0.0"),
    (lambda: fo.scale_by_polyak(eps=-1.0), "eps of 0 or more"),
    (lambda: fo.scale_by_polyak(variant="x"), "as variant, but got 'x'"),
    (lambda: fo.add_noise(-1.0, 0.5, 0), "needs an eta of 0 or more, but got -1.0"),
    (lambda: fo.add_noise(1.0, -0.5, 0), "needs a gamma of 0 or more, but got -0.5"),
    (lambda: fo.add_noise(1.0, 0.5, 2**63), "seed in"),
    (lambda: fo.differentially_private_aggregate(0.0, 1.0, 0), "l2_norm_clip above 0, but got 0"),
    (lambda: fo.differentially_private_aggregate(1.0, -1.0, 0), "noise_multiplier of 0 or more"),
    (lambda: fo.metropolis(walk, -1.0), "temperature of 0 or more, but got -1"),
    (lambda: stepped(fo.metropolis(walk), params=None, value=1.0), "needs the parameters"),
    (lambda: stepped(fo.metropolis(walk), value=W), r"must be one number, .* of shape \(2,\)"),
    (lambda: stepped(fo.metropolis(lambda p, z: z[:1]), value=1.0), "Return one tensor for each"),
    (lambda: stepped(fo.metropolis(walk), params=MATRIX, value=1.0), "Pass what init was called"),
    (lambda: fo.reduce_on_plateau(factor=1.0), r"factor in \(0, 1\), but got 1.0"),
    (lambda: fo.reduce_on_plateau(patience=0), "patience of at least 1, but got 0"),
    (lambda: fo.reduce_on_plateau(rtol=-0.1), r"rtol in \[0, 1\], but got -0.1"),
    (lambda: fo.reduce_on_plateau(atol=-0.1), "atol of at least 0, but got -0.1"),
    (lambda: fo.reduce_on_plateau(cooldown=-1), "cooldown of at least 0, but got -1"),
    (lambda: fo.reduce_on_plateau(accumulation_size=0), "accumulation_size of at least 1, but got"),
    (lambda: fo.reduce_on_plateau(min_scale=2.0), r"min_scale in \[0, 1\], but got 2.0"),
    (lambda: fo.reduce_on_plateau(rtol=0.0), "an rtol or an atol above 0"),
    (lambda: fo.monitor({"a b": fo.measures.mean}), "cannot be called 'a b'"),
    (lambda: fo.monitor({"for": fo.measures.mean}), "cannot be called 'for'"),
    (lambda: fo.snapshot("x", fo.measures.mean, of="loss"), "as of, but got 'loss'"),
    (lambda: fo.snapshot("x", fo.measures.cosine), "pass that transformation"),
    (lambda: fo.monitor({"x": Measure(abs, of=("loss",))}), "has the inputs 'loss'"),
    (lambda: fo.monitor({"x": Measure(abs, steps=0)}), "steps"),
    (lambda: fo.measures.averaged(fo.measures.mean, 0), "averaged"),
    (lambda: fo.in_basis(fo.shampoo_basis(), fo.scale_by_nadam()), "which scale_by_nadam does"),
    (lambda: fo.in_basis(BASIS, fo.chain(MEAN, fo.named_chain(("b", MEAN)))), "two slots called"),
    (
        lambda: fo.in_basis(BASIS, fo.chain(fo.scale(0.5), fo.scale(0.25))),
        "two hyperparameters called factor",
    ),
    (lambda: fo.shampoo_basis(refresh="x"), "takes 'together' or 'spread' as refresh, but got 'x'"),
    (lambda: fo.shampoo_basis(precondition_frequency=0), "a whole number of 1 or more"),
    (lambda: fo.soap(precondition_frequency=1.5), "a whole number of 1 or more, but got 1.5"),
    (lambda: fo.shampoo_basis(1.0), "Invalid shampoo_beta value: 1.0"),
    (lambda: fo.shampoo_basis(max_precond_dim=0), "1 or more for max_precond_dim"),
    (lambda: fo.soap().init(torch.ones(2, 2, 2)), "which may be a stack of 2 matrices"),
    (lambda: qk_clip(torch.ones(4), tau=0.0), "a positive tau, but got 0"),
    (lambda: qk_clip(torch.ones(4), alpha=1.5), r"an alpha in \[0, 1\], but got 1.5"),
    (lambda: qk_clip(torch.ones(3)), "3 heads of queries and 3 of keys, for projections to 8"),
    (lambda: qk_clip(torch.tensor(1.0)), "of each head, a vector"),
    (lambda: qk_clip(torch.ones(4), key_heads=3), "4 heads of queries and 3 of keys"),
    (lambda: qk_clip(torch.ones(4), key_heads=0), "a whole number of 1 or more for key_heads"),
    (lambda: qk_clip(torch.ones(4), key_heads=2), "to 8 and 8 outputs; .* of one size"),
    (lambda: fo.layerwise_decay({"a": W, "b": W}, 0.5), "one stack of numbered .* found none"),
    (lambda: fo.layerwise_decay({"enc.0.w": W, "dec.0.w": W}, 0.5), "but found 'enc' and 'dec'"),
    (lambda: fo.layerwise_decay({"b": {"w": W}}, 0.1, ["a"]), r"no layer for the .* 'b\.w'"),
    (lambda: fo.layerwise_decay({"a.0": W}, 1.5), r"a decay in \(0, 1\], but got 1\.5"),
    (lambda: fo.mup({"a": W}, {"a": W, "b": W}), "some lack 'b'"),
    (lambda: fo.mup({"w": MATRIX}, {"w": W}), r"different dimensions for 'w'"),
    (lambda: fo.mup({"w": torch.ones(2, 2, 2)}, {"w": torch.ones(1, 1, 1)}), "but 'w' has 3"),
    (lambda: fo.mup({"w": W}, {"w": W}, rule="x"), "takes 'adam' or 'sgd' as rule, but got 'x'"),
    (lambda: fo.projections.box(PARAMS, 2.0, 1.0), "box needs an upper of at least 2.0, but"),
    (lambda: fo.projections.simplex(PARAMS, -1.0), "simplex needs a scale above 0, but got -1"),
    (lambda: fo.projections.l2_ball(PARAMS, 0), "l2_ball needs a scale above 0"),
    (lambda: fo.projections.l2_sphere(PARAMS, -1), "l2_sphere needs a scale above 0"),
    (lambda: fo.projections.l1_ball(PARAMS, math.nan), "l1_ball needs a scale above 0"),
    (lambda: fo.projections.l1_sphere(PARAMS, -1), "l1_sphere needs a scale above 0"),
    # combinators
    (lambda: fo.accumulate(fo.sgd(0.1), every=W[0] - 1), "1 or more for every, but got 0"),
    (lambda: fo.accumulate(fo.sgd(0.1), every=True), "1 or more for every, but got True"),
    (lambda: fo.keep_snapshots(fo.sgd(0.1), last=0), "1 or more for last, but got 0"),
    (lambda: fo.rollback(fo.keep_snapshots(fo.sgd(0.1)).init(W), -1), "more for steps, but got -1"),
    (lambda: fo.apply_if_finite(fo.sgd(0.1), 1.5), "more for max_consecutive_errors, but got 1.5"),
    (lambda: fo.lookahead(fo.adam(), 0), "1 or more for sync_period"),
    (lambda: fo.lookahead(fo.adam(), 5, 1.5), r"slow_step_size in \[0, 1\]"),
    (lambda: stepped(fo.keep_snapshots(fo.sgd(0.1)), params=None), "needs the parameters"),
    (lambda: fo.cautious(fo.sgd(0.1)), "a learning rate reverses"),
    (lambda: fo.cautious(fo.trace(0.9), eps=0.0), "eps in .0, 1., but got 0.0"),
    (lambda: fo.mechanize(fo.sgd(0.1), betas=0.9), "a tuple of at least one beta"),
    (lambda: fo.mechanize(fo.sgd(0.1), betas=()), "a tuple of at least one beta"),
    (lambda: fo.mechanize(fo.sgd(0.1), betas=(0.9, 1.0)), r"betas in \(0, 1\), but got 1.0"),
    (lambda: fo.mechanize(fo.sgd(0.1), s_init=0.0), "s_init above 0"),
    (lambda: fo.sam(fo.sgd(0.1), -1.0), "sam needs a rho of 0 or more, but got -1"),
    (lambda: adapters.ASAM([nn.Parameter(W)], eta=-0.1), "asam needs an eta of 0 or more"),
    (lambda: fo.partition({}, "*"), "at least one label"),
    (lambda: fo.partition({"x": fo.adam()}, {"*": "y"}), "gives 'y' for the patt"),
    (lambda: fo.masked(fo.adam(), {"a": "yes"}), "one of True, False"),
    (lambda: fo.partition({"x": fo.adam()}, {"w": "x"}).init(PARAMS), r"leaf 'b'; .* has: 'w'\)"),
    (lambda: fo.partition({"x": fo.adam()}, {}).init(PARAMS), "no pattern at all"),
    (lambda: fo.partition({"x": fo.adam()}, lambda *_: "y").init(PARAMS), "'y' for the leaf 'b'"),
    (lambda: split(kernel="x"), "'batch', 'tensor' or 'auto' as kernel, but got 'x'"),
    (lambda: split(views={}, split=3), "either views or other"),
    (lambda: split(stack=3), "stack=True"),
    (lambda: fo.as_matrix(fo.soap(), kernel="tensor", split=3), "heads or split"),
    (lambda: fo.as_matrix(fo.soap(), kernel="auto").init(torch.ones([2] * 6)), "up to 5 dim"),
    (lambda: fo.soap(views={"w": {"split": 5}}).init(PARAMS), r"'w' of shape \(3, 4\) has 3"),
    (lambda: fo.shampoo(target_parameter_dimensionality=0), "target_parameter_dimensionality"),
    (lambda: fo.psgd_kron(views={"w": {"kernel": "tensor"}}), "a kernel cannot be a 'tensor'"),
    (lambda: adapters.SOAP([MATRIX], views=model()), "a model without a parameter"),
    (lambda: split(orientation="x"), "'out_in' or 'in_out' as orientation, but got 'x'"),
    (lambda: split(heads=0), "for heads a number of 1 or more"),
    (lambda: split(split=()), "for split a number of 1 or more"),
    (lambda: split(split=5).init(MATRIX), "has 12 outputs"),
    (lambda: split(split=(5, 7), heads=(1, 1, 1)).init(MATRIX), "one number of heads, or one for"),
    (lambda: split(heads=5).init(MATRIX), "parts of 12 outputs"),
    (lambda: split().init(torch.ones(4)), "only supports 2D parameters"),
    (lambda: fo.as_matrix(fo.adam(0.1)), "without a rule that takes batches"),
    (lambda: fo.muon().init(PARAMS), "use muon_adamw, or adapters.MuonAdamW"),
    (lambda: fo.muon_adamw(muon="body.*").init(NAMED), r"'body\.\*' in muon= .* are 'down|'up"),
    (lambda: fo.muon_adamw(muon="up.bias").init(NAMED), "'up.bias' in muon= .* matches no matrix"),
    (lambda: fo.muon_adamw(adamw=("head", "tail")).init(NAMED), "'tail' in adamw= .* no parameter"),
    (lambda: fo.muon_adamw(muon="up", adamw="*.weight").init(NAMED), "'up.weight' for muon as"),
    (lambda: fo.muon_adamw(adamw="*").init(NAMED), "found no matrix of a hidden layer among"),
    (lambda: fo.muon_adamw(views={"head*": {"split": 2}}).init(NAMED), r"'head\*' in views= .* no"),
    (lambda: fo.muon_adamw(views={"up*": {"split": 3}}).init(NAMED), "has 4 outputs"),
    (lambda: fo.muon_adamw().init([MATRIX]), r"only the number 0; pass model.named_parameters\(\)"),
    (lambda: train(total, fo.sgd(0.1), accumulate=0), "1 or more for accumulate"),
    *[
        (lambda key=key, x=x: fo.dynamic_loss_scale(fo.sgd(0.1), **{key: x}), words)
        for key, x, words in (
            ("init_scale", 0.0, "init_scale above 0"),
            ("init_scale", math.inf, "init_scale .*inf"),
            ("init_scale", 1e40, "init_scale .*1e.40"),
            ("growth_factor", 1.0, "growth_factor above 1"),
            ("backoff_factor", 1.0, "backoff_factor between 0 and 1"),
            ("growth_interval", 0, "whole number of 1 or more for growth_interval"),
        )
    ],
    # storage
    (lambda: fo.stored(fo.adam(), "int7"), "does not support 'int7'"),
    (lambda: fo.stored(fo.adam(), {"mu": "int8"}), "matches no slot"),
    (lambda: fo.stored(fo.adam(), "int8", block_size=100), "power of two"),
    (lambda: fo.stored(fo.adam(), "int8", min_size=-1), "min_size"),
    (lambda: fo.stored(fo.params_ema(0.9), {"params_ema": "int8"}), "average or a copy of the"),
    (lambda: fo.stored(fo.stored(fo.adam(), "int8"), "int4"), "has already packed scale_by_adam"),
    (lambda: fo.stored(fo.adam(), "bfloat16", seed=None), "it would never fall"),
    (lambda: fo.stored(fo.params_ema(0.999), {"*": "bfloat16"}, seed=None), "it would stand still"),
    (lambda: fo.slot_dtypes(fo.adam(), mu=torch.float16), "no slot called mu; it has exp_avg"),
    (lambda: fo.slot_dtypes(fo.adam(), exp_avg_sq=torch.bfloat16), "it would never fall"),
    (lambda: fo.slot_dtypes(fo.params_ema(0.9), params_ema=torch.float8_e5m2), "average or a copy"),
    (lambda: fo.slot_dtypes(fo.params_ema(0.999), params_ema=torch.bfloat16), "would stand still"),
    (lambda: fo.master_weights(fo.sgd(0.1), "split4"), "no kind 'split4'; pass one of split16"),
    (lambda: fo.master_weights(fo.master_weights(fo.sgd(0.1))), "use it once"),
    (lambda: fo.master_weights(fo.sgd(0.1)).init(W.half()), "float16, whose bits"),
    (lambda: fo.chain(*[fo.master_weights(fo.scale(0.1))] * 2), "two master_weights"),
    (lambda: fo.stored(fo.master_weights(MEAN), {"weight_low16": "bfloat16"}), "matches no slot"),
    (lambda: fo.chain(fo.master_weights(MEAN), fo.flatten(fo.sign())), "sign comes after"),
    (lambda: fo.full_weights({"v": HALF["w"]}, fo.master_weights(MEAN).init(HALF)), "weight_low16"),
    (lambda: fo.offload(fo.adam(), ""), "a folder that exists"),
    (lambda: fo.offload(fo.adam(), "/proc"), "cannot write files into"),
    (lambda: fo.offload(fo.adam(), "cpu", min_size=-1), "min_size"),
    # chains and rules
    (lambda: fo.chain(rule(), rule()), "slot called 'momentum_buffer' and no names"),
    (lambda: fo.chain(rule("a"), rule()), "name them with named_chain"),
    (lambda: fo.chain(fo.params_ema(0.9), fo.scale(2.0)), "scale stands after params_ema.* last"),
    (lambda: fo.chain(rule("t", last=True), rule("u")), "u stands after t, .*put t last"),
    (lambda: fo.chain(fo.params_ema(0.9), opaque()), "params_ema"),
    (lambda: fo.chain(fo.adam(0.1), fo.scale_by_lr(0.1)), two_rates),
    (lambda: fo.chain(fo.sgd(0.1), fo.add_decayed_weights(0.1), fo.sgd(0.1)), two_rates),
    (lambda: fo.chain(fo.masked(fo.adam(0.1), "w"), fo.scale_by_lr(0.1)), two_rates),
    (lambda: fo.chain(fo.adam(0.1), fo.masked(fo.sgd(0.1), "w")), two_rates),
    (lambda: fo.chain(fo.partition(parts, {"*": "slow"}), fo.scale_by_lr(0.1)), two_rates),
    (lambda: fo.chain(fo.adam(0.1), opaque(), fo.sgd(0.1)), two_rates),
    (lambda: fo.chain(fo.adam(0.1), fo.add_decayed_weights(0.1)), growth),
    (lambda: fo.chain(fo.adam(0.1), opaque(), fo.add_decayed_weights(0.1, mask="w")), growth),
    (lambda: fo.chain(fo.scale_by_lr(0.1), fo.cautious_weight_decay(0.1)), growth),
    (lambda: rule(slots=Step), "slot called 'step'"),
    (lambda: fo.named_chain(("a", MEAN), ("b", MEAN), ("a", MEAN)), r"but got \['a', 'b', 'a'\]"),
    (
        lambda: fo.leafwise(None, walk, storage=fo.Storage(nonnegative=("v",))),
        "says that v is nonnegative, but its slots are none",
    ),
    *[(lambda n=n: turning(turns=n), "'mine' needs a whole number of 1") for n in (0, 2.0, True)],
    (lambda: turning(choose=lambda t: 0), "must have a keyword-only parameter called turn"),
    (lambda: turning(hyper={"turn": 1.0}), "called turn that is no hyperparameter"),
    (lambda: turning(turns=None), "takes a turn, but there are no turns"),
    (lambda: turning(absent=lambda slots: slots), "has `absent` and turns"),
    (lambda: mine(None, walk, runs=fo.Runs(turns=2)), "turns=2 and no choose"),
    (lambda: mine(None, (walk, walk)), "2 variants of update and no choose"),
    (lambda: mine(None, walk, runs=fo.Runs(choose=lambda t: 0)), "1 variants of update and choose"),
    (lambda: mine(None, walk, runs=fo.Runs(absent=lambda slots: slots)), "shared=True"),
    (lambda: mine(Slots, walk, storage=fo.Storage(codecs={"m": 0})), "codec for m, .* momentum_b"),
    (lambda: stepped(turning(choose=lambda t, *, turn: turn + 1)), "returned 2; .* from 0 to 1"),
    (lambda: mine(None, walk, hyper={"lr": 0.1}), "'mine' lists lr, but it has no function that"),
]

KINDS: list[Any] = [
    # what is no number
    (lambda: fo.adamw("x"), "adamw takes a number, a 0-dim tensor or a schedule as lr, .* got 'x'"),
    (lambda: fo.sgd([0.1, 0.2]), "sgd takes a number, .* a schedule as lr, but got a list"),
    (lambda: fo.gpa(fo.sgd(), 1j), "gpa takes .* as train_interp_coeff, but got a complex"),
    (lambda: fo.sgd(torch.half), "sgd takes a number, .* a schedule as lr, but got a dtype"),
    (lambda: fo.dynamic_loss_scale(fo.sgd(), None), "needs an init_scale above 0 .* got None"),
    (lambda: fo.dynamic_loss_scale(fo.sgd(), 2.0, W), "needs a growth_factor above 1, but got"),
    (lambda: stepped(fo.reduce_on_plateau()), r"call update.*value="),
    (lambda: stepped(fo.reduce_on_plateau(), value=W), r"one number .* of shape \(2,\)"),
    (lambda: stepped(fo.reduce_on_plateau(), value=1j), "one number as value, .* a complex"),
    (lambda: fo.get(fo.sgd().init(W), 0), "get takes names, but got 0; pass strings"),
    (lambda: stepped(fo.sgd(), params=fo.sgd()), "expected a tree of parameters, but got a Leaf"),
    (lambda: rule(3), "name of a rule must be a string, but got 3"),
    (lambda: fo.leafwise(None, walk, carry=(0.0,), name="x"), "carry of the rule 'x' must be a Na"),
    (lambda: fo.partition(W, {"*": "a"}), "a dict from labels to transformations, but got a Tens"),
    (lambda: fo.sgd(fo.scale(0.1)), "or a schedule as lr, but got a Leafwise"),
    (lambda: fo.clip_by_global_norm(None), "takes a number, .* as max_norm"),
    (lambda: fo.skip_large_updates(fo.sgd(0.1), "1"), "takes a number, .* as max_norm"),
    (lambda: fo.orthogonalize(eps=None), "takes a number.* but got None"),
    (lambda: fo.scale_by_schedule(0.1), r"a function of the step count, but got 0\.1; use scale"),
    (lambda: fo.scale(torch.ones(3)), r"as factor, but got a Tensor of shape \(3,\)"),
    (lambda: fo.sgd(0.1).init({"w": numpy.ones(2)}), "'w' is a ndarray, not a tensor"),
    (lambda: fo.soap(betas=0.9), "betas"),
    (lambda: fo.add_noise(1.0, 0.5, 0.5), "integer as its seed, but got 0.5"),
    (lambda: fo.add_noise(1.0, 0.5, torch.tensor(0.5)), "one integer .* torch.float32"),
    (lambda: fo.add_noise(1.0, 0.5, torch.tensor([1, 2])), "under torch.vmap"),
    (lambda: fo.differentially_private_aggregate(1.0, 1.0, 0.5), "needs an integer"),
    (lambda: fo.metropolis(walk, seed="a"), "integer as its seed, but got 'a'"),
    (lambda: fo.stored(fo.adam(), "int8", seed=0.5), "integer as its seed"),
    (lambda: fo.master_weights(fo.sgd(0.1), seed="1"), "seed"),
    (lambda: qk_clip([200.0, 1.0]), "a tensor for max_logits, but got a list"),
    (lambda: fo.scale_by_path(0.5), r"takes a dict from path patterns .* but got 0\.5"),
    (lambda: fo.layerwise_decay([W], 0.5), "names in the order of the layers"),
    (lambda: fo.muon_adamw(views={"*.qkv": 3}), "takes for views a dict from path patterns"),
    (lambda: fo.muon_adamw(views={"*.qkv": {"spilt": 3}}), "spilt"),
    (lambda: fo.soap(views={"w": {"stacked": True}}), "takes for views a dict"),
    (lambda: adapters.SOAP(model(), views=["stack"]), "SOAP takes for views a dict"),
    (lambda: fo.matrix_views(model(), {0: {}}), "matrix_views takes for views a dict"),
    (lambda: fo.matrix_views({}), "takes a torch.nn.Module"),
    (lambda: adapters.SOAP([1, 2], views=model()), "optimize Tensors"),
    (lambda: fo.stored(fo.adam(), 8), "needs a storage format"),
    (lambda: fo.slot_dtypes(fo.adam(), exp_avg=torch.int8), "floating-point dtype for exp_avg"),
    (lambda: fo.slot_dtypes(packed(), **{"exp_avg.scale": torch.float64}), "which a codec stores"),
    (lambda: fo.offload(fo.adam(), 3), 'takes "cpu" or a folder, but got a int'),
    (lambda: fo.soap().init(torch.ones(2, dtype=torch.complex64)), "takes real parameters"),
    # what is no function of these arguments
    (lambda: fo.sgd(lambda: 0.1), "a schedule as lr, a function of the number of"),
    (lambda: fo.chain(fo.adamw(lambda a, b: 0.1)), "does not take one argument"),
    (lambda: fo.scale_by_schedule(lambda: 0.1), "scale_by_schedule takes a schedule as"),
    (lambda: fo.conditionally_mask(fo.sgd(), lambda: True), "as condition, a func"),
    (lambda: fo.accumulate(fo.sgd(), lambda: 4), "accumulate takes a schedule as every"),
    (lambda: fo.with_schedule(fo.sgd, lr=lambda: 1.0), "with_schedule takes a schedule"),
    (lambda: fo.with_schedule(lambda lr: None, lr=flat).init(W), "with_schedule returned a None"),
    (lambda: mine(None, 3), r"the rule 'mine' needs update, a function \(u, slots, p"),
    (lambda: mine(None, None), "but got None"),
    (lambda: mine(3, walk), "init of the rule 'mine' must be a function or None"),
    (lambda: mine(lambda: 3, walk), "called with one argument, the parameter; write"),
    (lambda: mine(None, times, reduce=3), "reduce of the rule 'mine' must be a func"),
    (lambda: mine(None, times, lambda: (1.0,)), r"write scalars\(t, \*, lr\)"),
    (lambda: mine(None, times, hyper=[1.0]), "must be a dict from names to"),
    (lambda: mine(None, walk, flat=False), "argument flat for the rule 'mine'; leave it out"),
    (lambda: mine(None, walk, elementwis=False), "argument elementwis .*check the spelling"),
    (lambda: stepped(mine(None, walk)), r"update\(u, slots, p"),
    (lambda: stepped(mine(None, times)), "with 0 scalars"),
    (lambda: stepped(mine(None, times, lambda t: (1.0, 1.0))), "with 2 scalars"),
    (lambda: stepped(mine(None, times, lambda t: 1)), "scalars .* 'mine' must return a tuple"),
    (lambda: stepped(mine(None, times, lambda t: (W,))), r"returned a tensor of shape \(2,\);"),
    (
        lambda: stepped(mine(None, times, lambda t, *, b: (b,), hyper={"a": 1.0})),
        "hyper lists a, which scalars does not take",
    ),
    (lambda: stepped(fo.chain(LONE, fo.sgd())), "in this chain returned a Tensor; return a pair"),
    (
        lambda: stepped(fo.keep_params_in(lambda x: 3)),
        r"the projection of keep_params_in returned 3 for a tensor of shape \(2,\)",
    ),
    (lambda: fo.keep_params_in(fo.projections.box, lower=0.0), "the arguments lower, but"),
    (lambda: fo.metropolis(lambda p: p), r"noise\), but got a function of other argum"),
    # what is no tree, no matrix and no number
    (lambda: fo.monitor(3), "a dict from names to measures, but got 3"),
    (lambda: fo.named_chain((1, fo.sgd())), "pairs of a name and a transformation"),
    (lambda: fo.partition({"a": fo.sgd()}, None), "labels must not be None"),
    (lambda: fo.masked(fo.sgd, "w"), "masked takes a transformation, but got a func"),
    (lambda: fo.stored(fo.adam, "int8"), r"call the factory, e.g. stored\(adam\("),
    (lambda: fo.freeze(3), "or a tree of bools, but got 3"),
    (
        lambda: stepped(fo.momo(0.1), value=None),
        "momo needs one number as value, such as the loss, but got a NoneType",
    ),
    (lambda: stepped(fo.polyak_sgd(), value=W), "got a Tensor of"),
    (lambda: fo.numbers(adamw()), r"opt.numbers\(\)"),
    (lambda: fo.linalg.newton_schulz(torch.ones(3)), r"but got a tensor of shape \(3,\)"),
    (lambda: fo.linalg.eigh(3), "eigh takes a matrix, or a batch of matrices, but got 3"),
    (lambda: fo.apply_updates(fo.sgd(), W), f"expected a tree of parameters{leafwise}"),
    (lambda: fo.apply_updates(W, fo.sgd()), f"expected a tree of parameters{leafwise}"),
    (lambda: fo.partition({"a": fo.sgd()}, fo.sgd()), f"labels must not be{leafwise}"),
    (lambda: fo.stored(fo.adam(), "int8", where=fo.sgd()), f"a mask must not be{leafwise}"),
    (lambda: fo.full_weights({"w": W}, {W: {}}), r"full_weights\(params, optimizer\)"),
    # what is no function, and no flag
    (lambda: fo.keep_params_in("box"), "takes a projection, but got 'box'"),
    (lambda: fo.metropolis(0.5), r"a function propose\(params, noise\), but got a float"),
    (lambda: fo.monitor({"x": 3}), "the measure 'x' is a int"),
    (lambda: fo.sgd(0.1, 0.9, nesterov="no"), "nesterov must be True or False, but got 'no'"),
    (lambda: fo.adam(amsgrad="no"), "amsgrad must be True or False, but got 'no'"),
    (lambda: fo.adabelief(rectify="no"), "rectify must be True or False, but got 'no'"),
    (lambda: fo.ema(0.9, debias="no"), "debias must be True or False, but got 'no'"),
    (lambda: fo.accumulate(fo.sgd(0.1), 2, mean=torch.ones(2)), "mean must be True or False"),
    (lambda: stepped(fo.commit_if(fo.sgd(0.1)), commit="yes"), "commit must be .* is a str"),
    (lambda: stepped(fo.commit_if(fo.sgd(0.1)), commit=W), r"commit must be .* of shape \(2,\)"),
    (lambda: stepped(fo.sam(fo.sgd(0.1)), grad_fn=W), "grad_fn must be a function.*got a Tensor"),
    # what is no transformation
    (lambda: fo.chain(fo.adamw), "takes a transformation, but got a function; call the factory"),
    (lambda: fo.chain(fo.sgd(), 0.1), "got a float"),
    (lambda: fo.compile(fo.adamw), r"compile takes a transformation, .* factory"),
    (lambda: fo.partition({"x": fo.adam}, {"*": "x"}), "call the factory"),
    (lambda: fo.cautious(fo.scale_by_adam), "but got a function"),
    (lambda: fo.sam(fo.sgd), "got a function"),
    (lambda: fo.flatten(fo.adam), "call the factory"),
    (lambda: fo.lookahead(fo.adam), "lookahead takes a transformation"),
    (lambda: fo.commit_if(fo.sgd), "commit_if takes a transformation"),
    (lambda: fo.keep_snapshots(3), "keep_snapshots takes a transformation"),
    (lambda: fo.monitor({}, around=3), "adamw"),
    (lambda: fo.mechanize(fo.adamw), r"mechanize\(adamw\(1.0\)\)"),
    (lambda: fo.with_schedule(fo.adam(), lr=0.1), "not fo.adamw"),
    (lambda: fo.rollback(fo.sgd(0.1).init(W)), "rollback takes the state"),
    (lambda: fo.full_weights(PARAMS, PARAMS), "full_weights needs the state"),
    (lambda: fo.full_weights({"w": 1.0}, fo.sgd(0.1).init(W)), "not a tensor"),
    (lambda: fo.summary(fo.adam, PARAMS), "summary"),
    *[
        (lambda wrap=wrap: wrap(fo.flatten(fo.adam())), "one-tensor rules")
        for wrap in (
            *(fo.mechanize, fo.slot_dtypes, fo.master_weights, partial(fo.stored, storage="int8")),
            *(partial(fo.offload, to="cpu"), lambda tx: fo.monitor({}, around=tx)),
        )
    ],
    (lambda: rule("mine", slots=lambda p: (p,)), "rule 'mine' returned a tuple; return a NamedTu"),
    # arguments in another order
    (lambda: fo.in_basis(fo.scale_by_adam(), fo.shampoo_basis()), "takes a basis first"),
    (lambda: fo.masked("*w", fo.adam(0.1)), r"masked\(adam\(1e-3\), '\*.w'\)"),
    (lambda: fo.masked(fo.adam(), None), "must not be None"),
    (lambda: fo.partition(tied, parts), "the transformations first and the labels second"),
    (lambda: fo.freeze(fo.adam(0.1)), "freeze takes the leaves to freeze"),
    (lambda: fo.selective_transform("*w", freeze_mask=fo.adam(0.1)), "the transformation first"),
    (lambda: fo.accumulate(2, fo.adam(0.1)), "accumulate takes a transformation, but got a int"),
    (lambda: fo.lookahead(6, fo.adam(0.1)), "lookahead takes a transformation, but got a int"),
    (lambda: fo.sharded_over(fo.adam(), 3), "a process group .* but got 3; pass what .*new_group"),
    (lambda: fo.sharded_over(fo.adam(), [0, 1]), r"or None for the default group"),
    (lambda: fo.matrix_owners(fo.muon(), "each", "gloo"), "matrix_owners takes a process group"),
    (lambda: fo.named_chain({"a": fo.sgd(0.1)}), r"pass \*d.items\(\)"),
    (lambda: fo.state_dict(PARAMS, fo.adamw().init(PARAMS)), "state_dict takes the state first"),
    (lambda: fo.adam().init(fo.sgd(0.1)), "expected a tree of parameters, but got a Leafwise"),
    # objects
    (lambda: fo.get(adamw(), "lr"), r"an optimizer object has its slots in opt.state\[p\]"),
    (lambda: fo.state_dict(adamw()), r"call the method of the object, opt.state_dict\(\)"),
    (lambda: adamw().step(torch.ones(())), "a closure or nothing, but got a Tensor"),
    (lambda: train(model(), fo.sgd(0.1)), "a module with parameters of its own"),
    (lambda: train(fo.sgd(0.1), total), "takes a loss function first"),
    (lambda: train(total, fo.sgd), "takes a transformation"),
    (lambda: train(lambda p: p["w"], fo.sgd())(PARAMS, fo.sgd().init(PARAMS)), "a real 0-dim te"),
    (lambda: fo.report(fo.adamw()), "report takes a list of dicts, but got a Leafwise"),
    (lambda: adapters.SAM([nn.Parameter(W)], rho=flat), "as rho, but got a schedule"),
    (lambda: adapters.SAM([nn.Parameter(W)], fo.sgd, nesterovv=True), "nesterovv"),
    (lambda: adapters.Optimizer([W], lambda: fo.sam(fo.sgd(0.1))), r"use .*adapters\.SAM for sam"),
    # keyword arguments that have another name here
    (lambda: fo.adamw(learning_rate=0.1), "'learning_rate'; pass lr: a number, a 0-dim tensor or"),
    (lambda: fo.adamw(b1=0.1), r"'b1'; pass betas=\(b1, b2\), one tuple"),
    (lambda: fo.adamw(beta2=0.1), r"'beta2'; pass betas=\(b1, b2\), one tuple"),
    (lambda: fo.adamw(epsilon=0.1), "'epsilon'; pass eps"),
    (lambda: fo.adamw(mask="*"), "'mask'; pass functional_optim.masked, around the transformation"),
    (lambda: fo.adamw(warmup=5), r"lr=functional_optim.schedules.warmup\(...\)"),
    (lambda: fo.adamw(mu_dtype=torch.half), "pass functional_optim.slot_dtypes"),
    (lambda: fo.adamw(nonsense=1), "'nonsense'; it takes lr, betas, eps, weight_decay, amsgrad"),
    (lambda: adamw(learning_rate=0.1), "'learning_rate'; pass lr"),
    (lambda: adapters.MuonAdamW(model().parameters(), b1=0.9), r"'b1'; pass betas=\(b1, b2\)"),
    (lambda: adapters.Lion(model().parameters(), speed=0.1), "'speed'; it takes params, lr"),
    (lambda: adapters.SSBFGS(model().parameters(), lr=1.0), r"^SSBFGS\.__init__\(\) got .*'lr'"),
    (lambda: fo.accumulate(fo.sgd(0.1), every_k_schedule=4), "'every_k_schedule'; pass every"),
    (lambda: stepped(fo.polyak_sgd(), value="1.0"), "needs one number as value, .* but got a str"),
]


@pytest.mark.parametrize(("call", "words"), NUMBERS)
def test_a_value_that_cannot_be_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize(("call", "words"), KINDS)
def test_another_kind_of_argument_is_refused(call, words):
    with pytest.raises(TypeError, match=words):
        call()
