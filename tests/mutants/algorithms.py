"""Faults in algorithms, checkpoints, replicas, searches, estimators and tuning."""

from mutants.run import read

MUTANTS = read(r"""
= functional_optim/algorithms/adabelief.py
AdaBelief adds no eps to its second average
~ v = slots.exp_avg_var.lerp(r * r, a2)⟦ + eps → ⟧
? algorithms/test_{trajectories,optax,authors}.py -k *
ACProp divides by the average with the newest gradient in it
~ r, v = g - m, slots.exp_avg_var⟦ → .lerp((g - m) ** 2, a2)⟧ + eps
? algorithms/test_{trajectories,optax,authors}.py -k acprop
= functional_optim/algorithms/adan.py
Adan takes a difference from zero in its first step
~ ⟦numeric.where(t == 1, 0.0, 1.0) → 1.0⟧
? algorithms/test_{trajectories,optax,authors}.py -k *
= functional_optim/algorithms/ademamix.py
the slow average of AdEMAMix warms up from another rate
~ b3 = _warmed(t, ⟦b1 → b2⟧, b3, beta3_warmup)
AdEMAMix raises alpha from its second step on
~ return numeric.minimum(1.0, ⟦t → (t - 1)⟧ / numeric.maximum(warmup, 1.0))
= functional_optim/algorithms/came.py
CAME averages the residuals at the rate of the squares
~ S = S.lerp(mean(distance, -1), ⟦a3 → a2⟧)
= functional_optim/algorithms/cocob.py
COCOB forgets the least bound of a gradient
~ ⟦.clamp(min=eps) → ⟧
? algorithms/test_properties.py -k no_nan
= functional_optim/algorithms/dog.py
DoG measures from the start without the first distance
~ least = 0.0 if given else first * ⟦(1 + numeric.sqrt(total[2]) → numeric.sqrt(total[2]⟧)
? algorithms/test_{trajectories,optax,authors}.py -k *
= functional_optim/algorithms/galore.py
GaLore does not correct the bias of its averages
~ correction = ⟦numeric.sqrt(1 - b2**t) / (1 - b1**t) → 1.0⟧
= functional_optim/algorithms/apollo.py
APOLLO scales by the gradient instead of its projection
~ U = X * (norm(N, across) / (norm(⟦R → X⟧, across) + 1e-8))
= functional_optim/algorithms/lamb.py
LAMB's relative LARS leaves the decay out of its ratio
~ ratio = trust_ratio(P, G, k, ⟦decay → 0.0⟧, eps)
? algorithms/test_{trajectories,optax,authors}.py -k lars
= functional_optim/algorithms/laprop.py
LaProp averages with the newest rate alone
~ average = ⟦b1 * carry.lr_average + (1 - b1) * lr → (1 - b1**t) * lr * b1⟧
? algorithms/test_{trajectories,optax,authors}.py -k *
= functional_optim/algorithms/madgrad.py
MADGRAD's roots are square ones
~ .⟦pow(1 / 3 → sqrt(⟧) + eps
= functional_optim/algorithms/prodigy.py
Prodigy keeps its distance where the guess is larger
~ new_top = ⟦numeric.maximum(top, guess) → top⟧
Prodigy lets its distance grow without a bound
~ ProdigyCarry(⟦grown(start, new_top, growth_rate) → new_top⟧, new_top, numerator)
= functional_optim/algorithms/dadapt_adam.py
D-Adapted Adam's distance can shrink
~ new = ⟦numeric.maximum(d, grown(d, guess, growth_rate) → grown(d, guess, growth_rate⟧)
? algorithms/test_{trajectories,optax,authors}.py -k dadapt
= functional_optim/algorithms/schedule_free.py
schedule-free AdamW does not correct its second moment
~ root = ⟦numeric.sqrt(1 - beta2**t) → 1.0⟧
? algorithms/test_{trajectories,optax,authors}.py -k *
schedule-free warm-ups start at zero
~ numeric.minimum(⟦(count + 1) → count⟧ / steps, 1.0)
= functional_optim/algorithms/sm3.py
SM3 takes the bound of one dimension only
~ bound = ⟦torch.minimum(bound, x) → bound + 0 * x⟧
= functional_optim/algorithms/stable_adamw.py
StableAdamW's bound leaves its decay alone
- u = m / (root(v) + eps) + decay * p
-         return u * excess.rsqrt(),
+ u = m / (root(v) + eps) * excess.rsqrt()
+         return u + decay * p,
= functional_optim/algorithms/yogi.py
Yogi's second moment goes the wrong way
~ v = v ⟦- → +⟧ a2 * (v - g * g)
= functional_optim/algorithms/novograd.py
NovoGrad's second moment starts anew in each step
~ v = torch.where(v == ⟦0 → v⟧, square, v.lerp(square, weight))
= functional_optim/algorithms/optimistic.py
optimistic steps take a first difference from zero
~ ⟦numeric.where(t == 1, 0.0, beta) → beta⟧
= functional_optim/algorithms/normuon.py
NorMuon does not give its update the old norm
~ U = U ⟦* (frobenius(O) / (frobenius(U) + eps) → / (frobenius(U) + eps⟧)
= functional_optim/algorithms/dion2.py
Dion2 damps all that is gathered
~ rows = ⟦rows.scatter(-2, at, decay * taken) → decay * rows⟧
= functional_optim/algorithms/scion.py
Scion's kernels are scaled without their window
~ ⟦/ max(math.prod(window), 1) → ⟧
= functional_optim/algorithms/psgd.py
PSGD learns from noise of another size
~ A, B = mu + DAMPING * ⟦size *  → ⟧V, V
= functional_optim/algorithms/shampoo.py
Shampoo grafts after taking the root of one side twice
~ W = turned(⟦W → turned(W, i, R)⟧, i, R)
= functional_optim/transforms/bases.py
the eigenvalues of KL-SOAP and KL-Shampoo have no bound
~ return values⟦.clamp(min=most**-2.0) → ⟧
? algorithms/test_{matrices,psgd}.py -k loop
= functional_optim/algorithms/momo.py
MoMo's estimate of the least loss starts at zero
~ low = ⟦numeric.where(t == 1, lb, carry.lb) → carry.lb⟧
? algorithms/test_moments.py algorithms/test_authors.py -k momo
= functional_optim/algorithms/sophia.py
Sophia divides by negative estimates
~ slots.hessian⟦.clamp(min=0.0) → ⟧
? algorithms/test_sophia.py
= functional_optim/estimators/diagonals.py
an estimate of the Hessian is summed, not averaged
~ return (old + share * ⟦(new - old) → new⟧).to(average.dtype)
= functional_optim/algorithms/mars.py
Mars treats vectors as matrices
~ return "matrix" if p.dim() ⟦= → <⟧= 2 else "other"
? algorithms/test_{moments,trajectories}.py -k *
= functional_optim/algorithms/galore.py
a projector of GaLore may change its sign
~ first = ⟦torch.where(turned, -first, first) → 1 * first⟧
? algorithms/test_{matrices,psgd}.py -k signs
= functional_optim/algorithms/psgd.py
PSGD learns from a gradient of zeros
~ good = size >⟦ → =⟧ 0
? algorithms/test_{matrices,psgd}.py -k says_nothing
= functional_optim/algorithms/shampoo.py
a broken factor of Shampoo spoils its root
~ return ⟦torch.where(finite[..., None, None], root, old) → root⟧
? algorithms/test_{matrices,psgd}.py -k broken
= functional_optim/algorithms/lbfgs/quasi_newton.py
L-BFGS keeps one pair more than its history
~ return [*places, x][-size⟦ →  - 1 ⟧:]
? algorithms/test_lbfgs_transform.py
L-BFGS takes pairs of negative curvature
~ curved = decide(going & (⟦ys → abs(ys)⟧ > CURVED))
= functional_optim/algorithms/lbfgs/line_search.py
the line search asks for the wrong slope
~ flat = decide(abs(new.slope) <= -⟦C2 → C1⟧ * origin.slope)
= functional_optim/algorithms/lbfgs/backtracking.py
backtracking wears its step length down to zero
~ kept = t⟦.clamp(min=torch.finfo(t.dtype).tiny) → ⟧
? algorithms/test_lbfgs_transform.py -k step_length
= functional_optim/linalg.py
a symmetric product repeats its corner as it is
~ torch.cat([corner.T⟦ → .flip(0)⟧, lower], 1)
? transforms/test_linalg.py
= functional_optim/kernels/newton_schulz.cpp
the last matrices of a batch are not orthogonalized
-     if (rest) Crew<K>{c, memory, spaces, whole, rest, -1}.iterate();
-
+
? transforms/test_newton_schulz.py -k bits
a symmetric product has nothing below its diagonal
~ for (int64_t i = 0; symmetric && i < ⟦column → 0⟧; i += LANES)
? transforms/test_newton_schulz.py -k doubles
a long sum forgets its beginning
~ for (int r = 0; first && r < ⟦ROWS → 0⟧; ++r)
= functional_optim/linalg.py
autograd sees constants in place of orthogonal matrices
-         and not (G.requires_grad and torch.is_grad_enabled())
-
+
? transforms/test_newton_schulz.py -k must_see
forward-mode derivatives pass an orthogonal matrix by
-         and unpack_dual(G).tangent is None
-
+
eigenvectors of float32 may be NaN
~     if ⟦A.is_cpu and not bool(values.isfinite().all() & vectors.isfinite().all()) → False⟧:
? transforms/test_linalg.py -k zero
large triangles are multiplied without their corners
~ return torch.cat([top⟦ + corner @ low → ⟧, bottom], -2)
? algorithms/test_{matrices,psgd}.py -k triangles
= functional_optim/core/views.py
a stack of matrices is one matrix
~ return shape⟦[-2:] if self.stack else shape → ⟧
? algorithms/test_kernels_and_stacks.py -k each_matrix
three dimensions are taken for a kernel
~ len(shape) in (0, 1, 2, ⟦ → 3, ⟧4, 5)
? combinators/test_matrix_views.py -k refused
= functional_optim/combinators/as_matrix.py
a transposed convolution has its outputs first
~ turned = {"orientation": "⟦in_out → out_in⟧"} if
? combinators/test_matrix_views.py -k tells
the first view counts for all leaves
~ pattern: ⟦ways.index(view) → 0⟧ for
? algorithms/test_kernels_and_stacks.py -k own_way
= functional_optim/transforms/in_basis.py
updates come back from two of their bases only
-         for i, Q in known:
-             u = turned(u, i, Q, back=True)
+         for i, Q in known[:2]:
+             u = turned(u, i, Q, back=True)
? algorithms/test_kernels_and_stacks.py -k soap_has
= functional_optim/transforms/bases.py
a KL factor is whitened by the dimensions before it only
~                 if j ⟦!= → <⟧ i:
? algorithms/test_kernels_and_stacks.py -k kl_factors
= functional_optim/transforms/sides.py
the factor of a middle dimension is that of the last
~ G.movedim(⟦at → -1⟧, lead)
? algorithms/test_kernels_and_stacks.py -k has_a
= functional_optim/core/views.py
dimensions are merged beyond the limit
~ if length ⟦* n  → ⟧<= self.limit:
? algorithms/test_kernels_and_stacks.py -k merged
= functional_optim/algorithms/psgd.py
PSGD clips a stack as one
~ square = (mu * mu).mean(⟦(-2, -1), keepdim=True → ⟧)
? algorithms/test_kernels_and_stacks.py -k each_matrix
= functional_optim/core/views.py
the blocks that are left over come first
~ start = 0⟦ if length == block else x.shape[dim] - length → ⟧
? algorithms/test_trajectories.py -k shampoo
= functional_optim/engine/products.py
the matrices of a stack lose their slots between steps
~ self.turns += [⟦turn → 0⟧] * matrices
? core/test_turns.py algorithms/test_kernels_and_stacks.py -k spread
""")
