"""What is wrong with a training, in sentences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from functional_optim.tuning.history import MODEL, NORMS, History, Series, median

USUAL = 1e-3
"""The usual ratio of update to weight, by Karpathy's rule of thumb,
https://cs231n.github.io/neural-networks-3/#ratio."""
HIGH, LOW = 10 * USUAL, USUAL / 10
"""Ratios that are ten times as large, and a tenth."""
OFTEN = 0.9
"""The share of clipped steps from which on nearly all steps have the length that the clip gives."""
NAMED = 3
"""How many parameters a sentence names."""


def findings(history: History) -> list[str]:
    """Sentences on what stands out, the worst first."""
    looks = (_not_finite, _rising_loss, _dead, _ratios, _clipped, _uphill)
    return [sentence for look in looks for sentence in look(history)]


def _not_finite(history: History) -> Iterator[str]:
    """Where NaN and infinity were seen first."""
    if broken := history.broken():
        step = min(broken.values())
        names = [name for name, first in broken.items() if first == step]
        single = [name for name in names if name not in NORMS or name not in history.parts]
        yield (
            f"NaN or infinity was first recorded at step {step:g}, in {_listed(single)}. Look at "
            "the batch and at the loss of that step; a clip by norm spreads a NaN to all "
            "parameters, and fo.apply_if_finite leaves such steps out."
        )


def _rising_loss(history: History) -> Iterator[str]:
    """Whether the loss ends above its start."""
    loss = history.whole.get("loss", Series((), ())).finite().values
    last = loss[-max(1, len(loss) // 4) :]
    if len(loss) > 1 and min(last) > loss[0]:
        yield (
            "The loss rose: all of the last quarter of the records, with a median of "
            f"{median(last):.3g}, is above the first, {loss[0]:.3g}. Lower the learning rate."
        )


def _dead_in(history: History) -> list[str]:
    """The parameters whose gradients are 0 in the second half of the records."""
    each = history.each("grad_norm").items()
    return [path for path, x in each if x.later().values and not any(x.later().values)]


def _dead(history: History) -> Iterator[str]:
    """Parameters whose gradients are zero."""
    if dead := _dead_in(history):
        yield (
            "The gradient was exactly 0 in the second half of the records "
            f"{_where(dead, history.each('grad_norm'))}. Nothing arrives there: the parameter is "
            "not used, or its units are never active."
        )


def _ratios(history: History) -> Iterator[str]:
    """Parameters that move too fast or too slowly."""
    each = history.each("update_ratio")
    medians = {path: x.later().median() for path, x in each.items()}
    still = {path for path in each if medians[path] == 0} | set(_dead_in(history))
    high = [path for path in each if medians[path] > HIGH]
    low = [path for path in each if medians[path] < LOW and path not in still]
    for found, sign, bound, advice in (
        (high, -1, f"above {HIGH:.0e}", "lower the learning rate there"),
        (low, 1, f"below {LOW:.0e}", "raise the learning rate there"),
    ):
        if found:
            worst = sorted(found, key=lambda path, sign=sign: sign * medians[path])
            yield (
                f"update/weight has a median {bound} in the second half of the records "
                f"{_where(worst, each, medians, '.1e')}. About {USUAL:.0e} is usual: {advice}."
            )


def _clipped(history: History) -> Iterator[str]:
    """Whether nearly all steps are clipped."""
    share = history.clipped()
    later = share.later().finite().values if share else ()
    mean = sum(later) / len(later) if later else 0.0
    if mean > OFTEN:
        norm = history.whole.get("grad_norm")
        seen = f" (here {norm.median():.2g})" if norm else ""
        yield (
            f"{100 * mean:.0f} % of the steps were clipped: their length is what the bound says. "
            f"Bounds from half to ten times the average norm of the gradients{seen} are usual; "
            "raise the bound, or lower the learning rate if the norm grows."
        )


def _uphill(history: History) -> Iterator[str]:
    """Parameters most of whose steps lead uphill."""
    each = history.each("cosine")
    found = {path: x.later().median() for path, x in each.items()}
    if uphill := sorted([path for path, x in found.items() if x < 0], key=found.__getitem__):
        yield (
            "Most steps in the second half of the records lead uphill (the cosine of -update and "
            f"gradient is below 0) {_where(uphill, each, found, '.2f')}. The steps overshoot: "
            "lower the learning rate, or the momentum."
        )


def _where(
    found: Sequence[str],
    each: Mapping[str, Series],
    values: Mapping[str, float] | None = None,
    form: str = "",
) -> str:
    """In which parameters something was found. values: to show, in this form."""
    shown = [f"{path} ({values[path]:{form}})" if values else path for path in found]
    if list(each) == [MODEL]:
        return f"in {shown[0]}"
    return f"in {len(found)} of {len(each)} parameters: {_listed(shown)}"


def _listed(names: Sequence[str]) -> str:
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")
