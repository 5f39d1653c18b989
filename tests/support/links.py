"""The table of links that no row of `cases` has, and of recipes that are not leafwise, or read the
loss: one row sends each through every way of running it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import combined
import pytest
import torch
from torch import Tensor

import functional_optim as fo
from functional_optim import projections

SHAPES = {"cube": (2, 3, 2), "kernel": (2, 3, 2, 2), "matrix": (3, 4), "scalar": (), "vector": (5,)}


class LinkCase(NamedTuple):
    """A row.

    make: the link. last: does it stand after the learning rate? whole: is it a recipe, from the
    learning rate? dim: the only number of dimensions of a parameter that it takes. real: does it
    refuse complex ones? extra: an argument of its update. batched: can vmap go over its state?
    rounding: how far equal float64 results may part. shapes: of parameters. bad: is there a NaN in
    some gradients? steps: in which it does all that it does.
    """

    name: str
    make: Callable[..., fo.GradientTransformation]
    last: bool = False
    whole: bool = False
    dim: int | None = None
    real: bool = False
    extra: str = ""
    batched: bool = True
    rounding: float = 1e-12
    shapes: dict[str, tuple[int, ...]] = SHAPES
    bad: bool = False
    steps: int = 4

    def recipe(self, lr: Any = 0.1) -> fo.GradientTransformation:
        """A descent with this link in its place."""
        if self.whole:
            return self.make(lr)
        parts = [self.make(), fo.scale_by_lr(lr)]
        return fo.chain(*(reversed(parts) if self.last else parts))

    def params(self, dtype: torch.dtype = torch.float64, seed: int = 0) -> dict[str, Tensor]:
        """A tree of all shapes that it takes, positive entries for sets that ask for them."""
        random = torch.Generator().manual_seed(seed)
        found = {}
        for name, shape in self.shapes.items():
            x = torch.randn(shape, dtype=torch.complex128, generator=random)
            if self.dim in (None, len(shape)):
                found[name] = (x if dtype.is_complex else x.real).to(dtype).contiguous()
        return found

    def grads(self, params: dict[str, Tensor], steps: int) -> list[dict[str, Tensor]]:
        found = [
            {name: x.to(params[name].dtype) for name, x in self.params(p.dtype, seed).items()}
            for seed in range(10, 10 + steps)
            for p in [next(iter(params.values()))]
        ]
        for g in found[1::5] if self.bad else ():
            g["body.b"][2] = torch.nan
        return found

    def given(self, step: int) -> dict[str, Any]:
        """The extra arguments of a step."""
        value = torch.tensor(3.0 / (1 + step), dtype=torch.float64)
        return {self.extra: value} if self.extra else {}

    def run(self, tx: Any, params: Any, grads: list[Any], state: Any = None, at: int = 0) -> Any:
        """The functional loop."""
        state = tx.init(params) if state is None else state
        for i, g in enumerate(grads):
            updates, state = tx.update(g, state, params, **self.given(at + i))
            params = fo.apply_updates(params, updates)
        return params, state


def row(name: str, make: Callable[[], Any], **said: Any) -> LinkCase:
    return LinkCase(name, make, **said)


def reading(name: str, make: Callable[[Any], Any]) -> LinkCase:
    """A recipe that reads the loss."""
    return LinkCase(name, make, whole=True, extra="value")


def inside(projection: Any, **numbers: float) -> Callable[[], Any]:
    return lambda: fo.keep_params_in(projection, **numbers)


def all_but_vectors(path: str, p: Tensor) -> bool:
    return p.ndim != 1


LINKS = (
    row("sign", fo.sign),
    row("ema", lambda: fo.ema(0.9)),
    row("ema-biased", lambda: fo.ema(0.9, debias=False)),
    row("decay-masked", lambda: fo.add_decayed_weights(0.1, mask=all_but_vectors)),
    row("decay-independent", lambda: fo.add_decayed_weights(0.1, independent=True), last=True),
    row("cautious_weight_decay", lambda: fo.cautious_weight_decay(0.1)),
    row("scale_by_path", lambda: fo.scale_by_path({"*r": 0.5, "*matrix": 2.0}), batched=False),
    row("centralize", fo.centralize, real=True),
    row("normalize", lambda: fo.normalize(0.5)),
    row("clip_by_block_rms", lambda: fo.clip_by_block_rms(0.5)),
    row("adaptive_grad_clip", lambda: fo.adaptive_grad_clip(0.1), real=True),
    row("zero_nans", fo.zero_nans),
    row("keep_params_nonnegative", fo.keep_params_nonnegative, last=True, real=True),
    row("box", inside(projections.box, lower=-0.5, upper=0.6), last=True, real=True),
    row("hypercube", inside(projections.hypercube, scale=0.7), last=True, real=True),
    row("linf_ball", inside(projections.linf_ball, scale=0.4), last=True, real=True),
    row("simplex", inside(projections.simplex, scale=2.0), last=True, real=True),
    row("l1_ball", inside(projections.l1_ball, scale=1.5), last=True, real=True),
    row("l1_sphere", inside(projections.l1_sphere, scale=1.5), last=True, real=True),
    row("l2_ball", inside(projections.l2_ball, scale=1.1), last=True, real=True),
    row("l2_sphere", inside(projections.l2_sphere, scale=1.1), last=True, real=True),
    row("scale_by_trust_ratio", lambda: fo.scale_by_trust_ratio(eps=1e-3)),
    row("clip_by_trust_ratio", lambda: fo.clip_by_trust_ratio(0.3)),
    row("keep_norms_within", lambda: fo.keep_norms_within(1.02), last=True),
    row("hyperball", lambda: fo.hyperball(0.3), last=True),
    row("cautious", lambda: fo.cautious(fo.scale_by_adam())),
    row("cautious-masked", lambda: fo.cautious(fo.masked(fo.trace(0.9), "*matrix")), batched=False),
    row("orthogonalize", fo.orthogonalize, dim=2, real=True, rounding=2e-2),  # in bfloat16
    row("add_noise", lambda: fo.add_noise(0.3, 0.55, seed=7)),
    row("monitor", lambda: fo.monitor(EVERY_MEASURE)),
    row(
        "monitor-each",
        lambda: fo.monitor(fo.measures.diagnostics, around=fo.trace(0.9), per_tensor=True),
    ),
    row("monitor-around", lambda: fo.monitor(fo.measures.diagnostics, around=fo.trace(0.9))),
    row("snapshot", lambda: fo.snapshot("size", fo.measures.global_norm, of="params")),
    row("apply_delta", lambda: fo.apply_delta(0.3)),
    row("set_to_zero", lambda: fo.set_to_zero()),
    row("decay_after_step", lambda: fo.decay_after_step(0.1), last=True),
    row("proximal_step", lambda: fo.proximal_step(0.1, 0.1), last=True),
    row("variance_reduction", lambda: fo.variance_reduction()),
    row("scale_by_polyak", lambda: fo.scale_by_polyak(0.1, eps=1e-3), extra="value"),
)

READING = (
    row("plateau", lambda: fo.reduce_on_plateau(0.5, patience=1, rtol=1.0), extra="value"),
    reading("momo", lambda lr: fo.momo(lr, weight_decay=0.1, beta=0.8, lb=0.2)),
    reading("momo-corrected", lambda lr: fo.momo(lr, beta=0.8, bias_correction=True)),
    reading("momo-fstar", lambda lr: fo.momo(lr, weight_decay=0.1, use_fstar=True)),
    reading("momo_adam", lambda lr: fo.momo_adam(lr, (0.8, 0.95), 1e-3, 0.1, lb=0.2)),
    reading("momo_adam-fstar", lambda lr: fo.momo_adam(lr, eps=1e-3, use_fstar=True)),
)

TAKING_NAN = (combined.finite, combined.growing, combined.guarded)
COMBINED = tuple(
    LinkCase(
        recipe.__name__,
        recipe,
        **{"whole": True, "batched": False, "shapes": combined.SHAPES, "steps": 9},
        rounding=5e-2 if recipe is combined.deep else 1e-12,  # Muon's iteration is in bfloat16
        bad=recipe in TAKING_NAN,
    )
    for recipe in (*combined.LEAFWISE, *combined.WHOLE, *combined.WRAPPED)
)

EVERY_MEASURE = {"grad_norm": fo.measures.global_norm, "average": fo.measures.mean}
EVERY_MEASURE |= {"size": fo.measures.rms, "nans": fo.measures.nan_count}
EVERY_MEASURE |= {"l1": lambda x: x.abs().sum()}


def rows(*which: LinkCase) -> list[Any]:
    return [pytest.param(case, id=case.name) for case in which]
