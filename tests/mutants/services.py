"""Faults in checkpoints, replicas, searches, estimators, tuning, and what their pages show."""

from mutants.run import read

MUTANTS = read(r"""
= functional_optim/checkpoint/state_dict.py
a state shares its memory with what was saved
~ return ⟦torch.empty_like(like, device=device).copy_(found → found.to(like.dtype⟧)
? checkpoint/test_state_dicts.py -k shares_no_memory
two values are kept under one key
~             if key in ⟦seen → ()⟧:
? checkpoint/test_state_dicts.py -k refused
the state of a vector without slots is not saved
~     own = [name for name, x in state.slots.items() if ⟦x is None or  → ⟧isinstance(x, Tensor)]
? checkpoint/test_state_dicts.py -k several_parts
carried numbers are always rounded to float32
~ return kept⟦ if torch.equal(kept.to(value.dtype), value) else value.to(torch.float64) → ⟧
? checkpoint/test_state_dicts.py -k exactly
= functional_optim/checkpoint/errors.py
a shape that differs is loaded
~ if ⟦shape != tuple(like.shape → len(shape) != like.dim(⟧):
? checkpoint/test_state_dicts.py -k fit
an integer is loaded for a float
~     if ⟦kind(found) != kind(like) → False⟧:
a negative count of steps is loaded
~ not (value ⟦>= 0 and value  → ⟧== value // 1)
? checkpoint/test_bad_checkpoints.py -k negative
= functional_optim/checkpoint/state_dict.py
parameters at different steps are loaded
~ if ⟦len(set(values.values())) < 2 → True⟧:
? checkpoint/test_state_dicts.py -k fit
missing entries are not told
~     if strict and missing⟦ →  and unexpected⟧:
? checkpoint/test_state_dicts.py -k refused
= functional_optim/checkpoint/conversion.py
a value that a hook has changed is taken back
~ return saved.to(loaded.device, copy=True)⟦ if _is_cast(saved, loaded) else loaded → ⟧
? checkpoint/test_checkpoints.py -k cast
a packed slot is read with scales that do not fit
~ if scales and ⟦(codes.dim() < 2 or scales[0].shape != codes.shape[:-1]) → codes.dim() < 2⟧:
? checkpoint/test_packed_states.py -k refused
a slot of another size is decoded into a parameter's
~ return ⟦codes.shape[-2] == form.blocks.blocks(math.prod(each)) → True⟧
= functional_optim/replicas/coordinator.py
two parts are registered under one key
~ if key in ⟦self._loads → ()⟧:
? replicas/test_{replicas,torchft_manager}.py
a peer gets the tensors that are written to
~ return x.detach()⟦.clone() → ⟧ if isinstance(x, Tensor) else copy.deepcopy(x)
refused steps are counted from the start
~ self._refused ⟦= 0 if decision.committed else self._refused + 1 → += not decision.committed⟧
= functional_optim/replicas/loop.py
an update that fails is not reported
~                 ⟦self.coordinator.report_error(error) → pass⟧
a step with infinite gradients is not refused
-         self._check_finite(mean)
-         self._give(now)
+         self._give(now)
a replica goes on with its own tree after it was healed
-         if not self._came:
-             self._tree = now
+         self._tree = now
= functional_optim/replicas/coordinator.py
a tensor that spans two buckets loses an element
~ pieces = joined.split(max(1, bucket_bytes⟦ // dtype.itemsize → ⟧))
? replicas/test_buckets.py
the mean of a conjugated tensor is that of its memory
~ return torch.view_as_real(x.⟦ → conj().⟧resolve_conj())
= functional_optim/replicas/sync/local_sgd.py
a refused round of local SGD keeps the inner state
~ LocalSGDState(no_steps(), ⟦copied(past) → state.inner⟧, anchor, past)
? replicas/test_synced.py -k *
= functional_optim/replicas/sync/diloco.py
DiLoCo's outer gradient points uphill
~ way = tree.map(torch.sub, ⟦state.anchor, params → params, state.anchor⟧)
? replicas/test_synced.py -k plain_loop
DiLoCo mixes local and global parameters the wrong way round
~ torch.lerp(⟦new, p → p, new⟧, alpha)
a refused fragment of DiLoCo keeps its inner slots
- def slot_back(owner: int | None, x: Tensor, old: Any) -> Tensor:
-             return old.clone() if owner == k else x
+ def slot_back(owner: int | None, x: Tensor, old: Any) -> Tensor:
+             return x
? replicas/test_synced.py -k refused_fragment
fragments are cut by leaves, not by bytes
~ accumulate([⟦x.numel() * x.element_size() → 1⟧ for x in leaves])
? replicas/test_synced_contract.py -k bytes
= functional_optim/replicas/simulation/group_server.py
a simulated group averages those that heal, too
~ mean = _mean([given[m] for m in r.⟦participants → members⟧], given[m])
? replicas/test_{simulation,simulation_schedules}.py -k fault_costs
a simulated group commits a step that nobody took part in
~         if ⟦not r.participants → r.participants is None⟧:
? replicas/test_{simulation,simulation_schedules}.py -k after_the_end
a simulated group does not notice that it has lost its last step
~ if self.step ⟦ → < 0 ⟧and not self.holders():
? replicas/test_{simulation,simulation_schedules}.py -k lost
= functional_optim/replicas/torchft.py
a torchft step that is taken back stays counted
~ "step": known["step"]⟦ - 1 → ⟧
? replicas/test_{replicas,torchft_manager}.py
= functional_optim/search/shaping.py
equal losses get different ranks
~ return ⟦wide / 2 → place.first.to(wide.dtype)⟧ / max(n - 1, 1)
? search/test_search_formulas.py -k places
= functional_optim/search/cma.py
CMA-ES learns nothing from its path
~ C = C + rates.c1 * torch.outer(pc, pc)⟦ →  * 0⟧
? search/test_search_formulas.py -k pycmas
CMA-ES decomposes a generation late
~ due = step >⟦= state.decomposed + gap →  state.decomposed + gap + 1⟧
= functional_optim/search/covariance.py
the step size of CMA-ES is damped once more
~ damps=⟦1 → 2⟧ + 2 * max(
= functional_optim/search/snes.py
SNES widens where it should narrow
~ (u @ (⟦z.square() - 1 → 1 - z.square()⟧))
? search/test_search_formulas.py -k *
= functional_optim/search/cem.py
the elites of CEM may have lost
- w = torch.where(losses.isfinite(), weigh(losses, places.to(torch.float64)), 0.0)
+ w = weigh(losses, places.to(torch.float64))
? search/test_search_formulas.py -k elites
= functional_optim/search/differential_evolution.py
a trial of differential evolution may change nothing
~ (chance < base.now(CR, state, chance))⟦ | chosen → ⟧
? search/test_search_formulas.py -k differential
= functional_optim/estimators/protocol.py
directions without a finite loss count in the mean
~ return finite(x) / x.⟦isfinite().sum().clamp(min=1 → numel(⟧)
? estimators/test_estimators.py -k bad_loss
a loss is measured along another direction than the estimate takes
~ return draws.stream(state.seed, step⟦ →  * 0⟧), step.to(torch.float64)
? estimators/test_estimators.py -k projections
= functional_optim/estimators/pairs.py
a central difference is divided by one width
~ finite(weigh(losses[:n], losses[n:]) / ⟦(2 * c) → c⟧)
? estimators/test_estimators.py -k central
MeZO moves all leaves before the loss reads them
~ return ⟦Lazy(p, make) if plain and can_be_lazy(p) else  → ⟧make()
? estimators/test_mezo.py -k leaf
= functional_optim/estimators/forward.py
a forward gradient sums its slopes
~ weights = ⟦shared(slopes.to(state.weights) → slopes.to(state.weights⟧)
? estimators/test_estimators.py -k projections
= functional_optim/tuning/lr_sweep.py
the suggestion is the best value
~ while place ⟦> → <⟧ 0 and ordered[place - 1][1] <= most:
? tuning/test_lr_sweep.py
a run that has diverged is the best
- return torch.where(end.isfinite().all(1), end.quantile(0.5, dim=1), torch.inf)
+ return end.nan_to_num(0.0, 0.0, 0.0).quantile(0.5, dim=1)
? tuning/test_{lr_sweep,find_lr}.py
= functional_optim/tuning/find_lr.py
runs of a sweep do not draw the same numbers
-         for value in values:
-             self.restore()
+         for value in values:
? tuning/test_find_lr.py -k random_numbers
an error of memory is tried in another way
~         ⟦raise error → return⟧
? tuning/test_find_lr.py -k too_large
= functional_optim/tuning/history.py
a falling loss is told to rise
~ if len(loss) > 1 and ⟦min(last) > → max(last) <⟧ loss[0]:
? tuning/test_report.py
dead parameters are told to move too slowly
~ if medians[path] == 0}⟦ | set(_dead_in(history)) → ⟧
the norm of all parameters is the sum of theirs
~ squares[at] = ⟦squares.get(at, 0.0) + x * x → (squares.get(at, 0.0) ** 0.5 + x) ** 2⟧
= docs/algorithms/lion.md
the page of an algorithm names a slot that there is not
~ | `⟦exp_avg → exp_avg_sq⟧` |
? docs/test_algorithm_pages.py -k *
= docs/choosing.md
the table to choose from has another memory
~ large batches, little memory: transformers | ⟦1 → 2⟧ |
? docs/test_algorithm_pages.py
= benchmarks/comparison/measures.py
holm's levels stay as they are
~ LEVEL / ⟦(len(chances) - i → len(chances⟧)
? docs/test_compare.py -k holms
= tests/support/snippets.py
a page's output may stand within a statement
~     assert compared ⟦= → <⟧= promised,
? docs/test_docs.py -k wrong
""")
