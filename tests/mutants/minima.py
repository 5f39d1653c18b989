"""Faults in minimizers and solvers of equations, their callbacks, and self-scaled methods."""

from mutants.run import read

MUTANTS = read(r"""
= functional_optim/solvers/dense.py
self-scaling also raises B
~ ⟦torch.where(b > 1, 1 / b, 1.0) → 1 / b⟧
? minimize/test_dense_updates.py
the share of DFP has no upper limit
~ ((1 - b) / b).⟦minimum(1 / lower). → ⟧maximum(
σ has another root
~ (⟦1 / (1 - max(n, 2) → -1 / max(n, 2⟧))
the first pair gives no scale to H
~ ⟦torch.where(first, sy / _dot(y, y), 1.0) → 1 + 0 * sy⟧
the inverse takes the scale of B
~ ⟦1 /  → ⟧mix.tau, mix.phi
useless pairs scale B
~ ⟦torch.where(known, scale, 1.0) → scale⟧
= functional_optim/solvers/box.py
a step leaves the bounds
~ return ⟦box.inside(torch.where(blocked, x, target) → torch.where(blocked, x, target⟧)
? minimize/test_minimize.py -k 'hs or tree or bent'
a step that the bounds bend is never cut
~ wrong = uphill⟦ | worse(target) → ⟧
= functional_optim/solvers/wolfe.py
only values decide
- verdict = Verdict(good | narrow
+ good = enough & valid & flat
+     verdict = Verdict(good | narrow
? minimize/test_minimize.py -k 'float32 or scipy or not_finite'
= functional_optim/solvers/descent.py
a finished problem moves on
~ over = ⟦running & (verdict.over | spent) → verdict.over | spent⟧
? minimize/test_side_by_side.py -k 'slots or derivatives or each_problem'
pairs without curvature are learned
~ useful = moved ⟦& → |⟧ (
= functional_optim/solvers/truncated.py
the gradient is not projected
~ d = ⟦torch.where(blocked, 0.0, -g) → -g⟧
? minimize/test_minimize.py -k 'newton-cg'
negative curvature ends the search at once
~ z = torch.where(⟦usable → (usable & ((p * Hp).sum(-1) > 0))⟧.unsqueeze(-1), z + t * p, z)
? minimize/test_newton_cg.py
the step leaves its free variables
~ Hp = times(p)⟦ * free → ⟧
products are not counted
~ ⟦used = used + going → pass⟧
a step is exact however far
~ ⟦start.sqrt().clamp(max=FORCING) → 1e-14⟧ * start
= functional_optim/solvers/newton.py
a singular Jacobian ends the search
~ ⟦p = torch.where(lost.unsqueeze(-1), damped, p) → pass⟧
? minimize/test_root.py
elimination does not pivot
~ larger = rows[i][k]⟦.abs() > rows[k][k].abs() →  != rows[i][k]⟧
a step that is too long is taken
~ new <⟦= old + DECREASE * t * slope →  torch.inf⟧, shorter
= functional_optim/solvers/broyden.py
a guess of the Jacobian ends the search
~ ends = running & short⟦ & s.exact → ⟧
a stuck search keeps its guess
~ renews = running & ~s.exact & ⟦(~accepted | short) → short⟧
J learns nothing
~ return columns⟦ + unit.unsqueeze(-1) * rest.unsqueeze(-2) → ⟧
= functional_optim/solvers/root.py
a least sum of squares is a root
~ ⟦torch.where(good, 3, -2) → 3⟧
= functional_optim/solvers/watching.py
a callback writes into the solver
~ self._tree(self.x⟦.clone() → ⟧)
? minimize/test_callbacks.py
one problem stops all
~ which = self.stops⟦[index] → .any()⟧ &
a history ends in what was never written
~ .⟦minimum(self.nit.unsqueeze(-1) → expand(len(x), -1⟧)
StopIteration passes
~ except ⟦StopIteration → GeneratorExit⟧:
= functional_optim/solvers/slots.py
problems that begin are not seen
~ return s⟦ if see is None else see(index, s) → ⟧, mine, index
= functional_optim/solvers/compiled.py
graphs are called inside of transforms
~ ⟦ or modes.transformed() → ⟧:
? minimize/test_side_by_side.py -k 'graph or transforms'
a short block has a graph of its own
~ more = ⟦-count % block → 0⟧
= functional_optim/solvers/descent.py
a failed search keeps H
~ ⟦model = model if none_of(stuck) else model.forgotten(stuck) → pass⟧
? adapters/test_self_scaled.py -k forgets
= functional_optim/algorithms/self_scaled.py
an update ends in the middle of a line search
~ spent = int(s.nfev) >= most⟦ and bool(s.nit > before) → ⟧
? adapters/test_self_scaled.py -k max_eval
= adapters/self_scaled.py
a closure that raises leaves the trial's parameters
~ ⟦undone(moving, run → run([(p, p.detach().clone()) for p in moving]⟧)
? adapters/test_contract.py -k 'raises and SSB'
= functional_optim/solvers/underived.py
a value that is read, not derived, is no fault
~ if modes.transformed() or not bool(still.any())⟦ → or True⟧:
? minimize/test_underived.py
a corner counts as a slope
~ return ⟦1 / 3 < above / below < 3 and  → ⟧1
a saddle counts as a slope
~ and ⟦1 / 3 < near / above < 2 / 3 → True⟧
a function is called outside of its bounds
~ flat.snap(⟦box.inside(point) → point⟧[0])
""")
