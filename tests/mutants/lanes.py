"""Faults in compiled solvers: recordings, their C++, and when a library is taken again."""

from mutants.run import Mutant

TESTS = "tests/least_squares/test_compiled.py"
THREADS = "tests/least_squares/test_threads.py"


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
            "self._said(op, (op, indexed(given), indexed(named)), x)",
            "self._said(op, (indexed(given), indexed(named)), x)",
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
    *of(
        "kernels/lane_rooms",
        "'torch_does or each_kind'",
        (
            "values that are needed at once share memory",
            "for k in at if last[k] >= first[which]])",
            "for k in at if last[k] > first[which] + 9])",
        ),
    ),
    *[
        Mutant(title, f"functional_optim/{file}.py", old, new, (f"{THREADS} -k '{which}'",))
        for title, file, which, old, new in (
            (
                "a program of a GPU is not compared with torch",
                "kernels/lane_library",
                "something_else",
                "if _agrees(made,",
                "if True or _agrees(made,",
            ),
            (
                "a thread makes one step more",
                "kernels/lane_threads",
                "callback",
                "k < most && s",
                "k <= most && s",
            ),
            (
                "a number of the CPU is refused on a GPU",
                "kernels/tape",
                "may_move",
                'x.device == self.device or x.device.type == "cpu"',
                "x.device == self.device",
            ),
        )
    ],
]
