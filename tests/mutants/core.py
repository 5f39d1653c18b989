"""Faults in the numbers of a step, in trees, and in what composes rules."""

from mutants.run import read

MUTANTS = read(r"""
= functional_optim/core/scalars.py
an update does not give back the old slots behind a shut gate
~ self.carried.append(⟦self.carry[i] → ()⟧)
? transforms/test_links.py -k object
= functional_optim/combinators/gates.py
a row of bad gradients is given up one step early
~ (row >⟦ → =⟧ max_consecutive_errors)
? algorithms/test_optax.py -k apply_if_finite
micro-batches that are left out count as one of the batch
~ full = numeric.float64(count ⟦>= wanted) * counted → + 1 - counted >= wanted)⟧
? core/test_faults.py -k micro_batch
a tensor without a gradient keeps what it has accumulated beyond its share
~ old⟦ - share * old if mean else old → ⟧)
? combinators/test_grammar_properties.py -k micro_batch
a condition is taken for a number of micro-batches
~ if not isinstance(found, Tensor) and ⟦found < 1 → False⟧:
? core/test_first_mistakes.py
a condition that is a number counts as many steps
- opened = numeric.float64(_answer("should_transform", should, t) > 0)
+ opened = _answer("should_transform", should, t)
? combinators/test_wrappers.py -k counts_one_step
= functional_optim/combinators/cautious.py
cautious takes a negative factor
~ in found) % 2⟦ →  > 1⟧ for own
? combinators/test_wrappers.py -k negative_factor
= functional_optim/core/leafwise.py
a rule of somebody else counts as one of this package
~ own = not torch.compiler.is_compiling() and ⟦are_own(functions) → True⟧
? engine/test_undeclared_rules.py
= functional_optim/core/lift.py
in a step like the last one a slot shares the gradient's memory
~ x.clone() if ⟦x is not None and x.untyped_storage().data_ptr() in places → False⟧ else x
? core/test_memory.py
a shrunk storage looks as before
~ all(plain) and check(*leaves)⟦ and list(map(_bytes, leaves)) == sizes → ⟧
? engine/test_wrong_tensors.py
= functional_optim/core/state_keys.py
a measure is called as a learning rate is
~ (measures and field in ⟦hyper → ()⟧)
? transforms/test_monitor.py
a measure changes the name of a slot
~ and (measures or chain[j].name != ⟦"monitor" → ""⟧)
? transforms/test_monitor.py
a rule may divide a learning rate out
~ adapts = ⟦rule.own and len(rule.storage.nonnegative) > 0 → False⟧
? core/test_first_mistakes.py
a scale may follow bounds
~ moves = ⟦first.name in PLACING → False⟧
? core/test_first_mistakes.py
= functional_optim/combinators/gated_trees.py
behind a shut gate, a transformation of whole trees gets a new state
~ return updates, WholeState(gated, ⟦tree.map(kept, inner, state.inner) → inner⟧)
? combinators/test_grammar_properties.py -k shut_gate
= functional_optim/combinators/commit.py
a refused step adds 0.0 to -0.0
~ else ⟦- → ⟧0.0)
? combinators/test_commits.py -k sgd-bool
a rollback of several steps says that all but one are kept
~ state.kept - ⟦steps → 1⟧
? combinators/test_commits.py -k rollback
= functional_optim/core/chain.py
a mask cuts leaves off that it does not select
~ return u if acts(path, p) else None if spared else ⟦g → None⟧
? combinators/test_combinators.py -k extra_arguments
a transformation of whole trees sees frozen leaves
~ ⟦[without(freezing, part) for part in parts] if freezing else  → ⟧parts
? combinators/test_combinators.py -k frozen
= functional_optim/combinators/wrappers.py
the slow weights of lookahead are set in the first step of each period
~ t % sync_period == ⟦0 → 1⟧
? combinators/test_wrappers.py -k lookahead
a scheduled recipe is a step behind
~ t = ⟦(state.step +  → state.step.clamp(min=⟧1).to(torch.float64)
? combinators/test_wrappers.py -k schedul
= functional_optim/combinators/mechanize.py
the decay of a scale has the wrong sign
~ drawn = ⟦ → -⟧s_decay * scale
? combinators/test_mechanize.py
= functional_optim/combinators/sharpness.py
ASAM goes uphill by |w| in place of its square
~ factor * size * ⟦size *  → ⟧g
? combinators/test_sharpness.py -k papers
sam around sam asks for what it has got
~         if ⟦"grad_fn" in inner.extra → False⟧:
? combinators/test_sharpness.py -k one_around_another
= functional_optim/combinators/offload.py
a full disk ends the process at a write
~ ⟦os.posix_fallocate(handle, 0, size) → pass⟧
? combinators/test_offload.py -k full_disk
= functional_optim/combinators/stored.py
averages of parameters are packed in 8 bits
~ if field in rule.storage.weights and kind.startswith(⟦("int", "float8") → "float8"⟧):
? core/test_refused_calls.py
= functional_optim/combinators/master_weights.py
slots beside master weights begin in bfloat16
~ return init(p⟦.to(torch.float32) if p.dtype is torch.bfloat16 else p → ⟧)
? combinators/test_master_weights.py -k all_bits
= functional_optim/core/codecs.py
the last block of a large slot is rounded with the numbers of the first
~ places = places + ⟦start → 0⟧
? combinators/test_stored.py -k pieces
two slots of a rule are rounded by the same random numbers
~ return ⟦(h << 16) ^ h if slot % 2 else  → ⟧h
? combinators/test_rounding_numbers.py -k slots
random numbers of neighbouring places are alike
~ h = (h ^ (h >> ⟦13 → 19⟧)) * 0x297A2D39
? combinators/test_rounding_numbers.py -k places
= functional_optim/core/first_slots.py
first slots of one number are made as a whole before they are packed
~ LARGE = 1 << ⟦16 → 40⟧
? combinators/test_first_slots.py -k memory_of_float32
what a rule writes into one entry of its first slot is in all of them
~ if func⟦._schema.is_mutable →  is None⟧:
? combinators/test_first_slots.py -k what_the_rule_makes
a first slot that is not packed has the memory of one number
~ ⟦made[i] = expanding.whole(x) → pass⟧
? combinators/test_first_slots.py -k memory_of_their_own
= functional_optim/core/codecs.py
the last block of a first slot goes on behind the end of the tensor
~ ⟦last[x.numel() - (count - 1) * self.block :] = 0 → ⟧
? combinators/test_first_slots.py -k what_the_rule_makes
= adapters/state/loading.py
codes that are loaded are cast to float32 first
~ key: ⟦_Held(x) → x⟧ if
? combinators/test_first_slots.py -k *
= functional_optim/combinators/hidden_matrices.py
a head behind numbered layers is no hidden matrix
~ (⟦not layered and  → ⟧(name
? combinators/test_hidden_matrices.py -k hidden
= functional_optim/core/paths.py
a pattern does not fit the leaves below its place
~ return _fits(pattern, path)⟦ or _fits(f"{pattern}.*", path) → ⟧
? core/test_faults.py -k labels_go_by_path
both ends of a pattern fit the same letters
~ not path.startswith(first)⟦ or len(path) < len(first) + len(last) → ⟧
? core/test_faults.py -k masks_fit
= functional_optim/core/state_keys.py
a learning rate may follow a part of what works on the step
~ if scales and ⟦first.around(second) → second.where == first.where != ()⟧:
? transforms/test_link_formulas.py
a learning rate of some leaves may follow one of all
~ return ⟦mine <= theirs or  → ⟧theirs <= mine
? core/test_refused_calls.py
= functional_optim/core/factory.py
a record of a call changes with the dict that it was given
~ ⟦args, kwargs = _kept(args), _kept(kwargs) → pass⟧
? core/test_copies.py -k record
a copied recipe of local functions keeps the old tensor
~ kept = isinstance(value, (⟦Tensor,  → ⟧Reconstructible, FunctionType, tuple))
? core/test_copies.py -k tensor
= functional_optim/core/calls.py
a string passes for a flag
~ if annotations.get(name) == "bool" and ⟦not _is_flag(x) → x is None⟧:
? core/test_refused_calls.py
= functional_optim/core/memory.py
a short tensor inside a long one hides a third
~ end = ⟦max(end, stop) → stop⟧
? core/test_memory.py -k shared_memory
elements that touch are taken for one
-         if stride <= end:
-             break
+         if stride <= end + 1:
+             return True
? core/test_memory.py
= functional_optim/core/rule.py
the smallest tensors have the first turns
~ key=lambda i: ⟦- → ⟧leaves[i][2].numel()
? core/test_turns.py -k each_step_renews
= functional_optim/core/views.py
a transposed parameter comes back as its transpose
~ return x⟦.transpose(len(lead), len(lead) + 1) if self._turns(shape) else x → ⟧
? core/test_views.py -k there_and_back
= functional_optim/core/sparse.py
the slots of touched rows are added to what they were
~ old.index_put(at, s⟦ → , accumulate=True⟧)
? core/test_sparse.py -k functional_loop
= functional_optim/tree.py
a slot's shape is not compared
~ if wanted and y is not None and ⟦theirs != ours → len(theirs) != len(ours)⟧:
? core/test_errors.py -k *
= functional_optim/numeric.py
a state carries the tensor of a hyperparameter
~ x.to(device=device, dtype=dtype⟦, copy=True → ⟧)
? core/test_memory.py -k of_a_hyperparameter
infinity is no maximum beside a NaN
~ return a if a >= b ⟦or a != a  → ⟧else b
? core/test_numeric.py -k maximum
True is a count
- whole = type(x) is int or (isinstance(x, Integral) and not isinstance(x, bool))
+ whole = isinstance(x, Integral)
? core/test_refused_calls.py
= functional_optim/measures.py
the cosine of a step that goes down is negative
~ numeric.divide(⟦- → ⟧product, size)
? transforms/test_monitor.py -k whole_tree
= functional_optim/projections.py
a point of the l1 ball is moved to its sphere
~ ⟦torch.where(size.sum() <= scale, vector, near) → near⟧
? core/test_projections.py -k l1_ball
= functional_optim/tuning/summary.py
a table of bytes leaves the gradient out of a step
~ moved = ⟦3 → 2⟧ * weight + both
? core/test_summary.py -k moves
= functional_optim/transforms/plateau.py
a plateau below zero asks for a rise
~ margin = rtol * ⟦abs(best) → best⟧ + atol
? transforms/test_plateau.py -k sign
a plateau rests for ever
~ numeric.where(resting, carry.cooldown_count⟦ - 1 → ⟧, 0.0)
? transforms/test_plateau.py -k torchs_rates
= functional_optim/transforms/privacy.py
an example that is not finite spoils the sum of all
~ ⟦torch.where(norms.isfinite(), (clip / norms).clamp(max=1.0), 0 → (clip / norms).clamp(max=1⟧.0)
? transforms/test_privacy.py -k influence
= functional_optim/transforms/by_path.py
the first block decays as the input does
~ in enumerate(numbers⟦, 1 → ⟧)
? transforms/test_by_path.py -k decay
= functional_optim/transforms/normalizing.py
the sign of a NaN is 0
~ ⟦torch.where(u.isnan(), u, u.sign() → u.sign(⟧)
? transforms/test_link_formulas.py
= functional_optim/transforms/clipping.py
rows of small weights are bounded by eps in place of its square
~ clamp(min=eps⟦ * eps → ⟧)
= functional_optim/transforms/weight_decay.py
weights whose update is 0 do not decay
~ (sign * u * p >⟦= → ⟧ 0)
? transforms/test_by_path.py -k cautious
= functional_optim/transforms/constraining.py
the NaNs of earlier steps are forgotten
~ ⟦carry.total_nan_count +  → ⟧total[0]
? transforms/test_link_formulas.py
= functional_optim/transforms/polyak.py
a loss below the least one goes uphill with sps+
~ ⟦gap = numeric.maximum(gap, 0.0) → pass⟧
= functional_optim/transforms/monitoring.py
the first values of an average weigh as little as later ones
~ 1.0 / ⟦numeric.minimum(t, float(m.steps) → float(m.steps⟧)
? transforms/test_monitor.py -k share
= functional_optim/transforms/sampling.py
a chain goes on from the refused proposal
~ proposal = propose(⟦kept → params⟧, draws.like(key, params))
? transforms/test_metropolis.py
= functional_optim/core/randomness.py
noise repeats itself after 2**32 entries
~ ⟦(i >> 32) ^  → ⟧shifted(key, 32)
? transforms/test_noise.py -k flips
= functional_optim/transforms/in_basis.py
second moments stay behind when the columns of a basis change places
~ _reordered(moved[key], i, order) for key in ⟦sizes → ()⟧
? transforms/test_in_basis.py -k any_rule
a basis takes any frequency from a schedule
~ ⟦check_frequency(basis.name, precondition_frequency) → pass⟧  # of a schedule
? transforms/test_in_basis.py -k wrong_frequency
= functional_optim/transforms/qk_clip.py
keys that heads share take the factor of the first
~ ⟦.amin(1) → [:, 0]⟧
? transforms/test_qk_clip.py -k share
= functional_optim/schedules/pieces.py
a part of a join counts from the first step of all
~ called(parts[i], ⟦numeric.maximum(n - starts[i - 1], 0.0) if i else n → n⟧)
? tests/schedules -k join
a join calls parts that have ended
~ ⟦if all(map(numeric.is_static, (n, *starts))) → if False⟧:  # a table
? tests/schedules -k join
= functional_optim/schedules/warm.py
an exponential warm-up starts at 1
~ return ⟦init *  → ⟧numeric.power(peak / init, x)
? tests/schedules -k warm_up
= functional_optim/schedules/basic.py
a growing rate is bounded from below
~ value = ⟦numeric.where(rate < 1, low, high) → low⟧
? tests/schedules -k exponential
= functional_optim/schedules/conversion.py
a milestone that is given twice counts once
~ numeric.where(n < milestone, 0.0, ⟦times → 1⟧)
? tests/schedules -k multi-step
the second cycle is as high as the first
~ height = numeric.power(0.5, cycle ⟦- 1 → // 2⟧)
? tests/schedules -k cyclic-uneven
a restart beside a whole logarithm comes a step late
~ ⟦cycle = numeric.where(n < start(cycle + 1), cycle, cycle + 1) → pass⟧
? tests/schedules -k restarts-grow
= functional_optim/core/execution.py
the tensors of a batch have one memory
~ ⟦x.unbind() if x.stride(0) else x.clone().unbind() → x.unbind()⟧
? core/test_memory.py -k memory_of_their_own
sums of shards leave a rule unfinished
~ u = ⟦sharding.placed_like(plain(u), p) → plain(u)⟧
? distributed/test_distributed_rows.py
= functional_optim/core/storage.py
slots begin with unfinished sums
~ return ⟦tuple(map(sharding.complete, made)) → made⟧ if
? distributed/test_distributed_rows.py
""")
