"""Faults in least squares, its solvers, and the transformations and objects that know residuals."""

from mutants.run import Mutant

SOLVERS = "functional_optim/solvers"
TESTS = "tests/least_squares"


def of(file: str, test: str, *faults: tuple[str, str, str]) -> list[Mutant]:
    """Faults of one file: the title of each, a text, and what replaces it."""
    path = f"{SOLVERS}/{file}.py"
    return [Mutant(title, path, old, new, (f"{TESTS}/{test}",)) for title, old, new in faults]


MUTANTS = [
    *of(
        "given",
        "test_implicit.py",
        (
            "the derivative of a tensor in a closure is 0",
            "lost=is_derived(found)",
            "lost=False",
        ),
        (
            "a solver in a function of another one loses a derivative",
            "len(points) > 1",
            "False",
        ),
        ("bounds have a derivative of 0", "isinstance(x, Tensor) and is_derived(x)", "False"),
    ),
    *of(
        "linear",
        "test_linear_solvers.py",
        ("matrices of a batch are not padded", "if not any(widths):", "if True:"),
        (
            "the kernel form forgets D in its step",
            "return gradient(W, y) / D",
            "return gradient(W, y)",
        ),
        (
            "damping is not scaled in QR",
            "tail = torch.diag_embed(mu.sqrt()",
            "tail = torch.diag_embed(mu",
        ),
        ("CG takes undamped curvature", "/ D + damping * direction", "/ D"),
        (
            "LSMR takes the square of its damping",
            "damp = mu.sqrt().unsqueeze(-1)",
            "damp = mu.unsqueeze(-1)",
        ),
        (
            "an unrolled factor misses a product",
            "a = a - row[k] * (row[k] if i == j else L[j][k])",
            "pass",
        ),
    ),
    *of(
        "losses",
        "test_residuals.py -k losses",
        ("Huber bends at another place", "far = z > 1", "far = z > 2"),
        (
            "soft_l1 has half its curvature",
            "-0.5 / (t * root))\n\n\ndef huber",
            "-0.25 / (t * root))\n\n\ndef huber",
        ),
    ),
    *of(
        "loop",
        "test_batched.py",
        (
            "a finished problem moves on",
            "trial = torch.where(running.unsqueeze(-1), trial, s.x)",
            "pass",
        ),
    ),
    *of(
        "slots",
        "test_batched.py",
        ("finished problems stay", "4 * (left if waiting else fewer) <= 3 * slots", "False"),
        ("slots of a batch are not multiples", "ROWS = 16", "ROWS = 1"),
    ),
    *of(
        "loop",
        "test_bounds.py",
        (
            "a trial leaves the bounds",
            "end = data.box.inside(ahead)",
            "end = ahead",
        ),
        (
            "parameters at a bound count for gtol",
            "free = torch.where(outward(x, g, data), 0.0, g).abs()",
            "free = g.abs()",
        ),
    ),
    *of(
        "implicit",
        "test_implicit.py",
        ("one Newton step has no second derivative", "ORDERS = 2", "ORDERS = 1"),
        (
            "values have derivatives of 0",
            "return values + torch.where",
            "return values + 0 * torch.where",
        ),
        (
            "parameters at a bound follow the data",
            "x, args, ~fixed, usable)",
            "x, args, fixed | True, usable)",
        ),
        (
            "problems that failed have derivatives",
            "return torch.where(usable.unsqueeze(-1), x + _bounded(x, args), start)",
            "return x + _bounded(x, args)",
        ),
        (
            "third derivatives are those of two steps",
            "return torch.where(usable.unsqueeze(-1), x + _bounded(x, args), start)",
            "return torch.where(usable.unsqueeze(-1), x, start)",
        ),
    ),
    *of(
        "globalization",
        "test_residual_steps.py",
        (
            "scales of few residuals have no floor",
            "if residuals < D.shape[-1]:",
            "if False:",
        ),
        (
            "dogleg is not damped by the rounding of a singular matrix",
            "EPS * (size if size > UNROLLED else 1)",
            "EPS",
        ),
        (
            "without a Gauss-Newton step dogleg stays",
            "D * newton, cauchy)",
            "D * newton, 0 * cauchy)",
        ),
        ("damping falls without limit", ".clamp(min=1 / 3)", ""),
        (
            "a second refused step raises damping as the first",
            "torch.where(accepted, 2.0, nu * 2)",
            "torch.where(accepted, 2.0, nu)",
        ),
        ("scales shrink", ".sqrt().maximum(before)", ".sqrt()"),
    ),
    *of(
        "steps",
        "test_residual_steps.py",
        ("a refused step is 0.0", "self.step, -0.0)", "self.step, 0.0)"),
        ("the acceleration is added whole", "return 0.5 * a, bent", "return a, bent"),
    ),
    Mutant(
        "frozen leaves have columns",
        "functional_optim/core/chain.py",
        "extra = narrowed(extra, filled(params), lambda x: cut(params, x)[1])",
        "pass",
        (f"{TESTS}/test_residual_steps.py -k frozen",),
    ),
    Mutant(
        "gradients of frozen leaves reach L-BFGS",
        "functional_optim/core/chain.py",
        "return found[0], cut(found[1])",
        "return found",
        ("tests/combinators/test_combinators.py -k functions_of_all",),
    ),
    Mutant(
        "bounds are rounded to nearest",
        "functional_optim/solvers/given.py",
        "if inwards is not None:",
        "if False:",
        (f"{TESTS}/test_bounds.py -k digits",),
    ),
    Mutant(
        "a closure that raises leaves the trial's parameters",
        "adapters/least_squares.py",
        "with restored(self.params, self.before):",
        "with restored([], []):",
        (f"{TESTS}/test_residual_objects.py",),
    ),
]
