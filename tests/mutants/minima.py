"""Faults in minimizers and solvers of equations, their callbacks, and self-scaled methods."""

from mutants.run import Mutant

SOLVERS = "functional_optim/solvers"
TESTS = "tests/minimize"


def of(file: str, test: str, *faults: tuple[str, str, str]) -> list[Mutant]:
    """Faults of one file: the title of each, a text, and what replaces it."""
    path = f"{SOLVERS}/{file}.py"
    return [Mutant(title, path, old, new, (f"{TESTS}/{test}",)) for title, old, new in faults]


MUTANTS = [
    *of(
        "dense",
        "test_dense_updates.py",
        ("self-scaling also raises B", "torch.where(b > 1, 1 / b, 1.0)", "1 / b"),
        (
            "the share of DFP has no upper limit",
            "((1 - b) / b).minimum(1 / lower).maximum(",
            "((1 - b) / b).maximum(",
        ),
        ("σ has another root", "(1 / (1 - max(n, 2)))", "(-1 / max(n, 2))"),
        (
            "the first pair gives no scale to H",
            "torch.where(first, sy / _dot(y, y), 1.0)",
            "1 + 0 * sy",
        ),
        ("the inverse takes the scale of B", "1 / mix.tau, mix.phi", "mix.tau, mix.phi"),
        ("useless pairs scale B", "torch.where(known, scale, 1.0)", "scale"),
    ),
    *of(
        "box",
        "test_minimize.py -k 'hs or tree or bent'",
        (
            "a step leaves the bounds",
            "return box.inside(torch.where(blocked, x, target))",
            "return torch.where(blocked, x, target)",
        ),
        (
            "a step that the bounds bend is never cut",
            "wrong = uphill | worse(target)",
            "wrong = uphill",
        ),
    ),
    *of(
        "wolfe",
        "test_minimize.py -k 'float32 or scipy or not_finite'",
        (
            "only values decide",
            "verdict = Verdict(good | narrow",
            "good = enough & valid & flat\n    verdict = Verdict(good | narrow",
        ),
    ),
    *of(
        "descent",
        "test_side_by_side.py -k 'slots or derivatives or each_problem'",
        (
            "a finished problem moves on",
            "over = running & (verdict.over | spent)",
            "over = verdict.over | spent",
        ),
        ("pairs without curvature are learned", "useful = moved & (", "useful = moved | ("),
    ),
    *of(
        "truncated",
        "test_minimize.py -k 'newton-cg'",
        ("the gradient is not projected", "d = torch.where(blocked, 0.0, -g)", "d = -g"),
    ),
    *of(
        "truncated",
        "test_newton_cg.py",
        (
            "negative curvature ends the search at once",
            "z = torch.where(usable.unsqueeze(-1), z + t * p, z)",
            "z = torch.where((usable & ((p * Hp).sum(-1) > 0)).unsqueeze(-1), z + t * p, z)",
        ),
        ("the step leaves its free variables", "Hp = times(p) * free", "Hp = times(p)"),
        ("products are not counted", "used = used + going", "pass"),
        ("a step is exact however far", "start.sqrt().clamp(max=FORCING) * start", "1e-14 * start"),
    ),
    *of(
        "newton",
        "test_root.py",
        (
            "a singular Jacobian ends the search",
            "p = torch.where(lost.unsqueeze(-1), damped, p)",
            "pass",
        ),
        (
            "elimination does not pivot",
            "larger = rows[i][k].abs() > rows[k][k].abs()",
            "larger = rows[i][k] != rows[i][k]",
        ),
        (
            "a step that is too long is taken",
            "new <= old + DECREASE * t * slope, shorter",
            "new < torch.inf, shorter",
        ),
    ),
    *of(
        "broyden",
        "test_root.py",
        (
            "a guess of the Jacobian ends the search",
            "ends = running & short & s.exact",
            "ends = running & short",
        ),
        (
            "a stuck search keeps its guess",
            "renews = running & ~s.exact & (~accepted | short)",
            "renews = running & ~s.exact & short",
        ),
        (
            "J learns nothing",
            "return columns + unit.unsqueeze(-1) * rest.unsqueeze(-2)",
            "return columns",
        ),
    ),
    *of(
        "root",
        "test_root.py",
        ("a least sum of squares is a root", "torch.where(good, 3, -2)", "3"),
    ),
    *of(
        "watching",
        "test_callbacks.py",
        ("a callback writes into the solver", "self._tree(self.x.clone())", "self._tree(self.x)"),
        ("one problem stops all", "which = self.stops[index] &", "which = self.stops.any() &"),
        (
            "a history ends in what was never written",
            ".minimum(self.nit.unsqueeze(-1))",
            ".expand(len(x), -1)",
        ),
        ("StopIteration passes", "except StopIteration:", "except GeneratorExit:"),
    ),
    *of(
        "slots",
        "test_callbacks.py",
        (
            "problems that begin are not seen",
            "return s if see is None else see(index, s), mine, index",
            "return s, mine, index",
        ),
    ),
    *of(
        "compiled",
        "test_compiled_evaluations.py",
        ("graphs are called inside of transforms", " or modes.transformed():", ":"),
        ("a short block has a graph of its own", "more = -count % block", "more = 0"),
    ),
    Mutant(
        "a failed search keeps H",
        f"{SOLVERS}/descent.py",
        "model = model if none_of(stuck) else model.forgotten(stuck)",
        "pass",
        ("tests/adapters/test_self_scaled.py -k forgets",),
    ),
    Mutant(
        "an update ends in the middle of a line search",
        "functional_optim/algorithms/self_scaled.py",
        "spent = int(s.nfev) >= most and bool(s.nit > before)",
        "spent = int(s.nfev) >= most",
        ("tests/adapters/test_self_scaled.py -k max_eval",),
    ),
    Mutant(
        "a closure that raises leaves the trial's parameters",
        "adapters/self_scaled.py",
        "undone(moving, run)",
        "run([(p, p.detach().clone()) for p in moving])",
        ("tests/adapters/test_contract.py -k 'raises and SSB'",),
    ),
]
