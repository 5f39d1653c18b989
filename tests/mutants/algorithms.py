"""Faults in algorithms, checkpoints, replicas, searches, estimators and tuning."""

from mutants.run import Mutant

ALGORITHMS = "functional_optim/algorithms"
TRANSFORMS = "functional_optim/transforms"
SCHULZ = "functional_optim/kernels/newton_schulz.cpp"


def followed(title: str, file: str, old: str, new: str, word: str) -> Mutant:
    """A fault in the mathematics of an algorithm, of whose rows the word is part."""
    tests = [f"tests/algorithms/test_{x}.py" for x in ("trajectories", "optax", "authors")]
    return Mutant(title, f"{ALGORITHMS}/{file}.py", old, new, (*tests[:2], f"{tests[2]} -k {word}"))


FORMULAS = [
    followed(
        "AdaBelief adds no eps to its second average",
        "adabelief",
        "v = slots.exp_avg_var.lerp(r * r, a2) + eps",
        "v = slots.exp_avg_var.lerp(r * r, a2)",
        "adabelief",
    ),
    followed(
        "ACProp divides by the average with the newest gradient in it",
        "adabelief",
        "r, v = g - m, slots.exp_avg_var + eps",
        "r, v = g - m, slots.exp_avg_var.lerp((g - m) ** 2, a2) + eps",
        "acprop",
    ),
    followed(
        "Adan takes a difference from zero in its first step",
        "adan",
        "numeric.where(t == 1, 0.0, 1.0)",
        "1.0",
        "adan",
    ),
    followed(
        "the slow average of AdEMAMix warms up from another rate",
        "ademamix",
        "b3 = _warmed(t, b1, b3, beta3_warmup)",
        "b3 = _warmed(t, b2, b3, beta3_warmup)",
        "ademamix",
    ),
    followed(
        "AdEMAMix raises alpha from its second step on",
        "ademamix",
        "return numeric.minimum(1.0, t / numeric.maximum(warmup, 1.0))",
        "return numeric.minimum(1.0, (t - 1) / numeric.maximum(warmup, 1.0))",
        "ademamix",
    ),
    followed(
        "CAME averages the residuals at the rate of the squares",
        "came",
        "S = S.lerp(mean(distance, -1), a3)",
        "S = S.lerp(mean(distance, -1), a2)",
        "came",
    ),
    Mutant(
        "COCOB forgets the least bound of a gradient",
        f"{ALGORITHMS}/cocob.py",
        ".clamp(min=eps)",
        "",
        ("tests/algorithms/test_properties.py -k no_nan",),
    ),
    followed(
        "DoG measures from the start without the first distance",
        "dog",
        "least = 0.0 if given else first * (1 + _root(total[2]))",
        "least = 0.0 if given else first * _root(total[2])",
        "dog",
    ),
    followed(
        "GaLore does not correct the bias of its averages",
        "galore",
        "correction = numeric.sqrt(1 - b2**t) / (1 - b1**t)",
        "correction = 1.0",
        "galore",
    ),
    followed(
        "APOLLO scales by the gradient instead of its projection",
        "apollo",
        "U = X * (norm(N, across) / (norm(R, across) + 1e-8))",
        "U = X * (norm(N, across) / (norm(X, across) + 1e-8))",
        "apollo",
    ),
    followed(
        "LAMB's relative LARS leaves the decay out of its ratio",
        "lamb",
        "ratio = trust_ratio(P, G, k, decay, eps)",
        "ratio = trust_ratio(P, G, k, 0.0, eps)",
        "lars",
    ),
    followed(
        "LaProp averages with the newest rate alone",
        "laprop",
        "average = b1 * carry.lr_average + (1 - b1) * lr",
        "average = (1 - b1**t) * lr * b1",
        "laprop",
    ),
    followed(
        "MADGRAD's roots are square ones",
        "madgrad",
        ".pow(1 / 3) + eps",
        ".sqrt() + eps",
        "madgrad",
    ),
    followed(
        "Prodigy keeps its distance where the guess is larger",
        "prodigy",
        "new_top = numeric.maximum(top, guess)",
        "new_top = top",
        "prodigy",
    ),
    followed(
        "Prodigy lets its distance grow without a bound",
        "prodigy",
        "ProdigyCarry(grown(start, new_top, growth_rate), new_top, numerator)",
        "ProdigyCarry(new_top, new_top, numerator)",
        "prodigy",
    ),
    followed(
        "D-Adapted Adam's distance can shrink",
        "dadapt_adam",
        "new = numeric.maximum(d, grown(d, guess, growth_rate))",
        "new = grown(d, guess, growth_rate)",
        "dadapt",
    ),
    followed(
        "schedule-free AdamW does not correct its second moment",
        "schedule_free",
        "root = numeric.sqrt(1 - beta2**t)",
        "root = 1.0",
        "schedule_free",
    ),
    followed(
        "schedule-free warm-ups start at zero",
        "schedule_free",
        "numeric.minimum((count + 1) / steps, 1.0)",
        "numeric.minimum(count / steps, 1.0)",
        "schedule_free",
    ),
    followed(
        "SM3 takes the bound of one dimension only",
        "sm3",
        "bound = torch.minimum(bound, x)",
        "bound = bound + 0 * x",
        "sm3",
    ),
    followed(
        "StableAdamW's bound leaves its decay alone",
        "stable_adamw",
        "u = m / (v.sqrt() + eps) + decay * p\n        return u * excess.rsqrt(), ",
        "u = m / (v.sqrt() + eps) * excess.rsqrt()\n        return u + decay * p, ",
        "stable_adamw",
    ),
    followed(
        "Yogi's second moment goes the wrong way",
        "yogi",
        "v = v - a2 * (v - g * g)",
        "v = v + a2 * (v - g * g)",
        "yogi",
    ),
    followed(
        "NovoGrad's second moment starts anew in each step",
        "novograd",
        "v = torch.where(v == 0, square, v.lerp(square, weight))",
        "v = torch.where(v == v, square, v.lerp(square, weight))",
        "novograd",
    ),
    followed(
        "optimistic steps take a first difference from zero",
        "optimistic",
        "numeric.where(t == 1, 0.0, beta)",
        "beta",
        "optimistic",
    ),
    followed(
        "NorMuon does not give its update the old norm",
        "normuon",
        "U = U * (frobenius(O) / (frobenius(U) + eps))",
        "U = U / (frobenius(U) + eps)",
        "normuon",
    ),
    followed(
        "Dion2 damps all that is gathered",
        "dion2",
        "rows = rows.scatter(-2, at, decay * taken)",
        "rows = decay * rows",
        "dion2",
    ),
    followed(
        "Scion's kernels are scaled without their window",
        "scion",
        "/ max(math.prod(window), 1)",
        "",
        "scion",
    ),
    followed(
        "PSGD learns from noise of another size",
        "psgd",
        "A, B = mu + DAMPING * size * V, V",
        "A, B = mu + DAMPING * V, V",
        "psgd",
    ),
    followed(
        "Shampoo grafts after taking the root of one side twice",
        "shampoo",
        "W = turned(W, i, R)",
        "W = turned(turned(W, i, R), i, R)",
        "shampoo",
    ),
    Mutant(
        "the eigenvalues of KL-SOAP and KL-Shampoo have no bound",
        "functional_optim/transforms/bases.py",
        "return values.clamp(min=most**-2.0)",
        "return values",
        (
            "tests/algorithms/test_matrices.py",
            "tests/algorithms/test_psgd.py -k loop",
        ),
    ),
]

PARTS = [
    Mutant(
        "MoMo's estimate of the least loss starts at zero",
        f"{ALGORITHMS}/momo.py",
        "low = numeric.where(t == 1, lb, carry.lb)",
        "low = carry.lb",
        ("tests/algorithms/test_momo.py", "tests/algorithms/test_authors.py -k momo"),
    ),
    Mutant(
        "Sophia divides by negative estimates",
        f"{ALGORITHMS}/sophia.py",
        "slots.hessian.clamp(min=0.0)",
        "slots.hessian",
        ("tests/algorithms/test_sophia.py",),
    ),
    Mutant(
        "an estimate of the Hessian is summed, not averaged",
        "functional_optim/estimators/diagonals.py",
        "return (old + share * (new - old)).to(average.dtype)",
        "return (old + share * new).to(average.dtype)",
        ("tests/algorithms/test_sophia.py",),
    ),
    Mutant(
        "Mars treats vectors as matrices",
        f"{ALGORITHMS}/mars.py",
        'return "matrix" if p.dim() == 2 else "other"',
        'return "matrix" if p.dim() <= 2 else "other"',
        ("tests/algorithms/test_moments.py", "tests/algorithms/test_trajectories.py -k mars"),
    ),
    Mutant(
        "a projector of GaLore may change its sign",
        f"{ALGORITHMS}/galore.py",
        "first = torch.where(turned, -first, first)",
        "first = 1 * first",
        (
            "tests/algorithms/test_matrices.py",
            "tests/algorithms/test_psgd.py -k signs",
        ),
    ),
    Mutant(
        "PSGD learns from a gradient of zeros",
        f"{ALGORITHMS}/psgd.py",
        "good = size > 0",
        "good = size >= 0",
        (
            "tests/algorithms/test_matrices.py",
            "tests/algorithms/test_psgd.py -k says_nothing",
        ),
    ),
    Mutant(
        "a broken factor of Shampoo spoils its root",
        f"{ALGORITHMS}/shampoo.py",
        "return torch.where(finite[..., None, None], root, old)",
        "return root",
        (
            "tests/algorithms/test_matrices.py",
            "tests/algorithms/test_psgd.py -k broken",
        ),
    ),
    Mutant(
        "L-BFGS keeps one pair more than its history",
        f"{ALGORITHMS}/lbfgs/quasi_newton.py",
        "return [*places, x][-size:]",
        "return [*places, x][-size - 1 :]",
        ("tests/algorithms/test_lbfgs_transform.py",),
    ),
    Mutant(
        "L-BFGS takes pairs of negative curvature",
        f"{ALGORITHMS}/lbfgs/quasi_newton.py",
        "curved = decide(going & (ys > CURVED))",
        "curved = decide(going & (abs(ys) > CURVED))",
        ("tests/algorithms/test_lbfgs_transform.py",),
    ),
    Mutant(
        "the line search asks for the wrong slope",
        f"{ALGORITHMS}/lbfgs/line_search.py",
        "flat = decide(abs(new.slope) <= -C2 * origin.slope)",
        "flat = decide(abs(new.slope) <= -C1 * origin.slope)",
        ("tests/algorithms/test_lbfgs_transform.py",),
    ),
    Mutant(
        "backtracking wears its step length down to zero",
        f"{ALGORITHMS}/lbfgs/backtracking.py",
        "kept = t.clamp(min=torch.finfo(t.dtype).tiny)",
        "kept = t",
        ("tests/algorithms/test_lbfgs_transform.py -k step_length",),
    ),
    Mutant(
        "a symmetric product repeats its corner as it is",
        "functional_optim/linalg.py",
        "torch.cat([corner.T, lower], 1)",
        "torch.cat([corner.T.flip(0), lower], 1)",
        ("tests/transforms/test_linalg.py",),
    ),
    Mutant(
        "the last matrices of a batch are not orthogonalized",
        SCHULZ,
        "    if (rest) Crew<K>{c, memory, spaces, whole, rest, -1}.iterate();\n",
        "",
        ("tests/transforms/test_newton_schulz.py -k bits",),
    ),
    Mutant(
        "a symmetric product has nothing below its diagonal",
        SCHULZ,
        "for (int64_t i = 0; symmetric && i < column; i += LANES)",
        "for (int64_t i = 0; symmetric && i < 0; i += LANES)",
        ("tests/transforms/test_newton_schulz.py -k doubles",),
    ),
    Mutant(
        "a long sum forgets its beginning",
        SCHULZ,
        "for (int r = 0; first && r < ROWS; ++r)",
        "for (int r = 0; first && r < 0; ++r)",
        ("tests/transforms/test_newton_schulz.py -k doubles",),
    ),
    Mutant(
        "autograd sees constants in place of orthogonal matrices",
        "functional_optim/linalg.py",
        "        and not (G.requires_grad and torch.is_grad_enabled())\n",
        "",
        ("tests/transforms/test_newton_schulz.py -k must_see",),
    ),
    Mutant(
        "forward-mode derivatives pass an orthogonal matrix by",
        "functional_optim/linalg.py",
        "        and unpack_dual(G).tangent is None\n",
        "",
        ("tests/transforms/test_newton_schulz.py -k must_see",),
    ),
    Mutant(
        "large triangles are multiplied without their corners",
        "functional_optim/linalg.py",
        "return torch.cat([top + corner @ low, bottom], -2)",
        "return torch.cat([top, bottom], -2)",
        (
            "tests/algorithms/test_matrices.py",
            "tests/algorithms/test_psgd.py -k triangles",
        ),
    ),
]

STACKS = "tests/algorithms/test_kernels_and_stacks.py"
VIEWS = [
    Mutant(
        "a stack of matrices is one matrix",
        "functional_optim/core/views.py",
        "return shape[-2:] if self.stack else shape",
        "return shape",
        (f"{STACKS} -k each_matrix",),
    ),
    Mutant(
        "three dimensions are taken for a kernel",
        "functional_optim/core/views.py",
        "len(shape) in (0, 1, 2, 4, 5)",
        "len(shape) in (0, 1, 2, 3, 4, 5)",
        ("tests/combinators/test_matrix_views.py -k refused",),
    ),
    Mutant(
        "a transposed convolution has its outputs first",
        "functional_optim/combinators/as_matrix.py",
        'found[path]["orientation"] = "in_out"',
        'found[path]["orientation"] = "out_in"',
        ("tests/combinators/test_matrix_views.py -k tells",),
    ),
    Mutant(
        "the first view counts for all leaves",
        "functional_optim/combinators/as_matrix.py",
        "pattern: ways.index(view) for",
        "pattern: 0 for",
        (f"{STACKS} -k own_way",),
    ),
    Mutant(
        "updates come back from two of their bases only",
        f"{TRANSFORMS}/in_basis.py",
        "        for i, Q in known:\n            u = turned(u, i, Q, back=True)",
        "        for i, Q in known[:2]:\n            u = turned(u, i, Q, back=True)",
        (f"{STACKS} -k soap_has",),
    ),
    Mutant(
        "a KL factor is whitened by the dimensions before it only",
        f"{TRANSFORMS}/bases.py",
        "                if j != i:",
        "                if j < i:",
        (f"{STACKS} -k kl_factors",),
    ),
    Mutant(
        "the factor of a middle dimension is that of the last",
        f"{TRANSFORMS}/sides.py",
        "G.movedim(at, lead)",
        "G.movedim(-1, lead)",
        (f"{STACKS} -k has_a",),
    ),
    Mutant(
        "dimensions are merged beyond the limit",
        "functional_optim/core/views.py",
        "if length * n <= self.limit:",
        "if length <= self.limit:",
        (f"{STACKS} -k merged",),
    ),
    Mutant(
        "PSGD clips a stack as one",
        f"{ALGORITHMS}/psgd.py",
        "square = (mu * mu).mean((-2, -1), keepdim=True)",
        "square = (mu * mu).mean()",
        (f"{STACKS} -k each_matrix",),
    ),
    Mutant(
        "the blocks that are left over come first",
        "functional_optim/core/views.py",
        "start = 0 if length == block else x.shape[dim] - length",
        "start = 0",
        ("tests/algorithms/test_trajectories.py -k shampoo",),
    ),
    Mutant(
        "the matrices of a stack lose their slots between steps",
        "functional_optim/engine/products.py",
        "self.turns += [turn] * matrices",
        "self.turns += [0] * matrices",
        ("tests/core/test_turns.py", f"{STACKS} -k spread"),
    ),
]

MUTANTS = [*FORMULAS, *PARTS, *VIEWS]
