"""Faults in least squares, its solvers, and the transformations and objects that know residuals."""

from mutants.run import read

MUTANTS = read(r"""
= functional_optim/solvers/given.py
the derivative of a tensor in a closure is 0
~ lost=⟦is_derived(found) → False⟧
? least_squares/test_implicit.py
a solver in a function of another one loses a derivative
~ ⟦len(points) > 1 → False⟧
bounds have a derivative of 0
~ ⟦isinstance(x, Tensor) and is_derived(x) → False⟧
= functional_optim/solvers/linear.py
matrices of a batch are not padded
~ if ⟦not any(widths) → True⟧:
? least_squares/test_linear_solvers.py
the kernel form forgets D in its step
~ return gradient(W, y)⟦ / D → ⟧
damping is not scaled in QR
~ tail = torch.diag_embed(mu⟦.sqrt() → ⟧
CG takes undamped curvature
~ / D⟦ + damping * direction → ⟧
LSMR takes the square of its damping
~ damp = mu.⟦sqrt(). → ⟧unsqueeze(-1)
an unrolled factor misses a product
~ ⟦a = a - row[k] * (row[k] if i == j else L[j][k]) → pass⟧
= functional_optim/solvers/losses.py
Huber bends at another place
~ far = z > ⟦1 → 2⟧
? least_squares/test_residuals.py -k *
soft_l1 has half its curvature
- -0.5 / (t * root))
-
-
- def huber
+ -0.25 / (t * root))
+
+
+ def huber
= functional_optim/solvers/loop.py
a finished problem moves on
~ ⟦trial = torch.where(running.unsqueeze(-1), trial, s.x) → pass⟧
? least_squares/test_batched.py
= functional_optim/solvers/slots.py
finished problems stay
~ ⟦4 * (left if waiting else fewer) <= 3 * slots → False⟧
slots of a batch are not multiples
~ ROWS = ⟦16 → 1⟧
= functional_optim/solvers/loop.py
a trial leaves the bounds
~ end = ⟦data.box.inside(ahead) → ahead⟧
? least_squares/test_bounds.py
parameters at a bound count for gtol
~ free = ⟦torch.where(outward(x, g, data), 0.0, g) → g⟧.abs()
= functional_optim/solvers/implicit.py
one Newton step has no second derivative
~ ORDERS = ⟦2 → 1⟧
? least_squares/test_implicit.py
values have derivatives of 0
~ return values + ⟦ → 0 * ⟧torch.where
parameters at a bound follow the data
~ x, args, ⟦~fixed → fixed | True⟧, usable)
problems that failed have derivatives
~ return ⟦torch.where(usable.unsqueeze(-1), x + _bounded(x, args), start → x + _bounded(x, args⟧)
third derivatives are those of two steps
~ return torch.where(usable.unsqueeze(-1), x⟦ + _bounded(x, args) → ⟧, start)
= functional_optim/solvers/globalization.py
scales of few residuals have no floor
~ if ⟦residuals < D.shape[-1] → False⟧:
? least_squares/test_residual_steps.py
dogleg is not damped by the rounding of a singular matrix
~ EPS⟦ * (size if size > UNROLLED else 1) → ⟧
without a Gauss-Newton step dogleg stays
~ D * newton, ⟦ → 0 * ⟧cauchy)
damping falls without limit
~ ⟦.clamp(min=1 / 3) → ⟧
a second refused step raises damping as the first
~ torch.where(accepted, 2.0, nu⟦ * 2 → ⟧)
scales shrink
~ .sqrt()⟦.maximum(before) → ⟧
= functional_optim/solvers/steps.py
a refused step is 0.0
~ self.step, ⟦- → ⟧0.0)
the acceleration is added whole
~ return ⟦0.5 *  → ⟧a, bent
= functional_optim/core/chain.py
frozen leaves have columns
~ ⟦extra = narrowed(extra, params, filled(params), lambda x: cut(params, x)[1]) → pass⟧
? least_squares/test_residual_steps.py -k frozen
gradients of frozen leaves reach L-BFGS
~ return found⟦[0], fitting(found[1]) → ⟧
? combinators/test_combinators.py -k functions_of_all
= functional_optim/solvers/given.py
bounds are rounded to nearest
~ if ⟦inwards is not None → False⟧:
? least_squares/test_bounds.py -k digits
a tensor on the meta device is blamed on torch.vmap
~ if any(⟦x.is_meta → False⟧ for x in tensors):
? least_squares/test_bad_input.py -k meta
= functional_optim/algorithms/gauss_newton.py
JᵀJ is blamed for a singular JJᵀ
~ if at.kind == ⟦"kernel" → "qr"⟧:
? least_squares/test_residual_steps.py -k errors
= adapters/least_squares.py
a closure that raises leaves the trial's parameters
~ with restored(⟦self.params, self.before → [], []⟧):
? adapters/test_contract.py -k 'raises and (Dogleg or Gauss or Levenberg)'
= functional_optim/solvers/loop.py
a given scale is the only unit of the first damping
~ torch.where(⟦(size > 0) & (size < 1) → size < 0⟧, size, 1.0)
? least_squares/test_batched.py -k large_parameter
dogleg begins with the length of x0
~ torch.where(size > 0, size⟦.maximum(FIRST_RADIUS * unit) → ⟧, unit)
? least_squares/test_batched.py -k start_near_zero
= functional_optim/solvers/losses.py
soft_l1 of a small residual is 0
~ ⟦2 * z / (root + 1) → 2 * (root - 1)⟧
? least_squares/test_known_minima.py -k exact_fit
""")
