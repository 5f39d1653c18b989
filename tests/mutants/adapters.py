"""Faults in the optimizer objects, and in what divides a step over processes."""

from mutants.run import read

MUTANTS = read(r"""
= adapters/base.py
global hooks are not called
~ ⟦or every_optimizer._global_optimizer_pre_hooks → ⟧
? adapters/test_adapter.py -k hook
a differentiable step is in place
~ elif ⟦self.defaults → {}⟧.get("diff
? core/test_differentiable.py -k slots
a group is there before it is checked
~ ⟦transaction → (lambda _, add, *x: add(*x))⟧(self, self._add_checked, super()
? adapters/test_adapter.py -k refused
no advice for groups without names
~ ⟦"without names to the optimizer" not in → ⟧
? adapters/test_recipes.py
= adapters/stepping/loss.py
a closure runs in the caller's mode
~ return ⟦base.recorded(closure → closure(⟧)
? adapters/test_contract.py -k closure
= adapters/state/recipes.py
unknown keys are taken
~     unknown = ⟦unknown_keys(group, names) → []⟧
a recipe does not get what a group has more
~ if ⟦self.more → not self.names⟧:
an ignored learning rate causes no warning
~ if ⟦"lr" in given and "lr" not in read → False⟧:
? adapters/test_recipes.py
an lr that only an inner function reads seems ignored
~ read = {⟦*code.co_cellvars → ""⟧}
? adapters/test_recipes.py
= adapters/state/names.py
names of compiled models stay
~ name⟦.replace(COMPILED, "") → ⟧
= adapters/state/hyperparameters.py
a number of another class is the same
~ ⟦type(x) is type(y) and  → ⟧bool(
? adapters/test_new_numbers.py -k class
a method that asks for a class is not looked at
~ ⟦    found += [(y, x) for x in read if type(x) is not FunctionType for y in _parts(x, names)] → ⟧
? adapters/test_new_numbers.py -k look_at
= adapters/state/transaction.py
new attributes outlive a failure
~             ⟦del own[name] → pass⟧
? adapters/test_contract.py
new defaults outlive a failure
~ ⟦defaults.update(before[1]) → pass⟧
= adapters/drop_ins.py
sparse gradients meet momentum
~ g⟦.to_dense() if group["momentum"] != 0 or →  if⟧
? adapters/test_drop_ins.py
Rprop needs a saved lr
~     optional = (⟦"lr", → ⟧)
= adapters/state/storage.py
a group has no storage of its own
~ ⟦group[KEY] if KEY in group else  → ⟧vars
? adapters/test_stored_keyword.py
= adapters/muon_adamw.py
a group's AdamW numbers are lost
~ else rest)⟦, **own → ⟧}
? adapters/test_muon_adamw.py
= adapters/ready_made.py
two learning rates are one
~ if len(known) > ⟦1 → 2⟧:
? adapters/test_ready_made.py
= adapters/joint.py
an interrupted search leaves its trial
~         held(⟦write → list⟧, [p
? adapters/test_contract.py -k closure
= adapters/lbfgs.py
what a closure projects is forgotten
~ if ⟦not settings.wolfe → False⟧:
? adapters/test_lbfgs.py -k closure
evaluations are not added up
~ ⟦old.get("func_evals", 0) +  → ⟧run.evals
? adapters/test_lbfgs.py -k checkpoints
histories of two lengths are loaded
~ for key in PAIRS}) > ⟦1 → 2⟧:
? adapters/test_lbfgs.py -k load
= adapters/averaging.py
eval twice averages twice
~ ⟦if group.get(TRAINING, True) != training → ⟧]
? adapters/test_averaging.py
a step in evaluation mode is made
~         if ⟦not self.training → False⟧:
= adapters/lightning.py
the training weights are validated
~ def ⟦on_validation_start → on_validation_starts⟧
? frameworks/test_lightning_checkpoints.py -k validates
= adapters/gradient_free/optimizer.py
an interrupted search leaves its candidate
~ ⟦undone → lambda every, run: run([(p, p.detach().clone()) for p in every])⟧, self._params(),
? adapters/test_contract.py -k closure
a NaN is the best loss
~ return ⟦worst_if_not_finite → ⟧(fitness)
? adapters/test_gradient_free.py
= adapters/joint.py
groups may differ
~ if ⟦not all(same(first[name], x) for x in values[1:]) → False⟧:
= adapters/stub.py
a stub takes another's state
~         if ⟦self.state → False⟧:
? adapters/test_stub.py
= adapters/fault_tolerant/optimizer.py
a refused step is taken
~ not None⟦ and now.decision.committed → ⟧:
? adapters/test_fault_tolerant.py
a failed step counts as taken
~ member.decision⟦ = group.decision → ⟧
copies forget what NaN does
~ self._member = Member(**⟦state → {**state, "nonfinite": "commit"}⟧)
= adapters/fault_tolerant/proxy.py
state dict hooks are not called
~ changed = ⟦after(self, state_dict) → None⟧
= adapters/fault_tolerant/rounds.py
a peer's gradient is not taken
~ ⟦p.grad = mean.detach() → pass⟧
zero_grad twice is a refusal
~ if ⟦not member.has_gradients() → False⟧:
nobody waits for the others
~ ⟦committed and len(skipped) < len(now.owing) → step < 0⟧:
? adapters/test_fault_tolerant_rounds.py
a scaler's infinities are taken
~ ⟦(scaled and member.average_gradients) → False⟧
healing rounds the state
~ ⟦restore_precision(optim.state[p], state[i]) → {}⟧
? adapters/test_fault_tolerant_healing.py
= adapters/fault_tolerant/schedulers.py
other schedulers are healed
~         if ⟦mine != theirs → False⟧:
a schedule is saved too late
~ return self.⟦_before or self. → ⟧_now()
refused steps are scheduled
~ if ⟦self._seen[scheduler] == self.commits → False⟧:
? adapters/test_fault_tolerant_schedulers.py
= adapters/fault_tolerant/optimizer.py
an empty step is voted on
~ if ⟦closure is None → False⟧ and private.
= functional_optim/core/sharding.py
sums have no gradient
~ return ⟦_Summed.apply(g, ctx.group) → g⟧, None
? distributed/test_sharded_over.py
FSDP1's parts are the model
~ [⟦mark and not (undivided or _is_all(x)) → False⟧
slots of another mesh are taken
~ ⟦(mine is own or mine == own) and  → ⟧not
a loss is a sum
~ return total.item()⟦ / mesh.size() → ⟧
sums are completed one by one
~ if ⟦all(map(_adds_up, x.placements)) → False⟧:
? distributed/test_distributed_links.py
= functional_optim/engine/shards.py
parts are measured for the whole
~ else ⟦Partial → Replicate⟧() for
? distributed/test_distributed.py
rules of whole tensors run on parts
~ ⟦and is_elementwise(x, p) → ⟧):
norms of parts are added up
~ if ⟦not adds_up(x, p) → False⟧:
? distributed/test_distributed_rows.py -k whole_tensors
packed parts are whole
~ ⟦packed[id(x)] if id(x) in packed else → ⟧
? distributed/test_distributed_packed.py
= functional_optim/core/ownership.py
the first owner gets all
~ owners[i] = ⟦load.index(min(load)) → 0⟧
? distributed/test_matrix_owners.py
= adapters/stepping/plan.py
another recipe is ignored while the plan is valid
~ return ⟦own.get("recipe") → None⟧, own
? adapters/test_recipes.py -k another_recipe
= adapters/stepping/shared_counts.py
a traced step has a gate for each group
~ place = ⟦given[len(self.places)] if traced → len(self.rules) if traced⟧
? adapters/test_gradients_by_turns.py -k in_a_graph
= adapters/joint.py
a closure may add both gradients
~ added = found is ⟦mark → before⟧ or
? combinators/test_sharpness.py -k does_not_clear
= adapters/stepping/leaves.py
slots may be packed in the middle
~ if others⟦ → and False⟧:
? adapters/test_stored_keyword.py -k after_the_first_step
= adapters/stepping/plan.py
groups that have become equal go on counting apart
~ return ⟦self._equal_numbers() == before → True⟧
? adapters/test_groups_as_one.py -k become_equal
= adapters/stepping/shared_counts.py
a traced step rounds scalars of parameters without a gradient
~ numeric.stored(value⟦, dtype=dtype → ⟧)
? adapters/test_groups_as_one.py -k in_phase
= adapters/base.py
the hooks of a subclass with a step of its own run twice
~ )⟦ and not _is_announced(type(self).step) → ⟧:
? adapters/test_adapter.py -k hooks_of_a_subclass
""")
