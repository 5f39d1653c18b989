"""Faults in compiled solvers: recordings, their C++, and when a library is taken again."""

from mutants.run import Mutant

TESTS = "tests/least_squares/test_compiled.py"


def of(file: str, which: str, *faults: tuple[str, str, str]) -> list[Mutant]:
    """Faults of one file: the title of each, a text, and what replaces it."""
    path = f"functional_optim/{file}.py"
    return [Mutant(title, path, old, new, (f"{TESTS} -k {which}",)) for title, old, new in faults]


MUTANTS = [
    *of(
        "kernels/tape",
        "'changed or known or other or torch_does'",
        (
            "what is recorded does not tell operations apart",
            "self._said(op, (op, _plain(given), _plain(named)), x)",
            "self._said(op, (_plain(given), _plain(named)), x)",
        ),
        ("values may be read", "if op in READS and any(", "if False and any("),
        ("random numbers are constants", 'raise Unsuitable(f"random numbers ({op})")', "pass"),
        ("tensors of a closure are constants", "if not self.inside:", "if True:"),
        (
            "a product with 0 is its other operand",
            "if number == 1 and alike:",
            "if number in (0, 1) and alike:",
        ),
    ),
    *of(
        "kernels/lane_program",
        "'torch_does or each_kind or exchange'",
        (
            "an output is written while inputs are read",
            'if node not in self.buffers and ops.kind(node.op) != "fill":',
            "if False:",
        ),
        (
            "parts that are joined overlap",
            "start += size\n        raise NoMemory(node)",
            "pass\n        raise NoMemory(node)",
        ),
    ),
    *of(
        "kernels/lane_views",
        "'torch_does or each_kind'",
        (
            "padding begins one element late",
            "conditions.append(within(index[dim], before, before + x.shape[dim]))",
            "conditions.append(within(index[dim], before + 1, before + x.shape[dim]))",
        ),
        (
            "a slice begins at 0",
            "plus(times(index[dim], step), start), *index",
            "plus(times(index[dim], step), 0), *index",
        ),
    ),
    *of(
        "kernels/lanes",
        "'own or exponential or torch_does'",
        (
            "all lanes solve one problem",
            "load(s, at, id[l], l);\n            steps",
            "load(s, at, id[0], l);\n            steps",
        ),
        (
            "exponentials lose their last bits",
            "p = fma_of(p, f, all_D(1.0 / 24));",
            "p = fma_of(p, f, all_D(0.04166));",
        ),
        ("the smaller is larger", "choice(gt(a, b), a, b)", "choice(lt(a, b), a, b)"),
    ),
    *of(
        "solvers/programs",
        "'changed or callbacks'",
        (
            "a library fits any function",
            "if known is None or known.calls != now.calls:",
            "if known is None:",
        ),
        ("all steps are made at once", "begins=False, most=1)", "begins=False)"),
    ),
]
