"""Faults in how kernels are recorded, written, built, kept and called, and in compiled steps."""

from mutants.run import read

MUTANTS = read(r"""
= functional_optim/kernels/cpp_loops.py
a kernel takes the last block of a tensor for a whole one
~ f"    if (left >= ⟦{block} → 0⟧) {{"
? combinators/test_stored.py -k ways
= functional_optim/core/recording.py
what a rule makes behind the end of a tensor counts for its last block
~ codec.encode(⟦torch.where(inside, x, 0.0) → x⟧, key)
? combinators/test_stored.py -k of_the_last_block
a rule is recorded at the default device
-     @with_cpu_as_default
-     def find(self, g
+     def find(self, g
? core/test_default_device.py
= functional_optim/numeric.py
a count of steps is at the default device
~ return torch.full((), x, dtype=dtype, device=device⟦ or "cpu" → ⟧)
= functional_optim/kernels/keys.py
methods of two objects are one rule
~ for x in (fn.__func__,⟦ fn.__self__ → ⟧)])
? engine/test_kernel_keys.py
= functional_optim/core/recording.py
a graph serves another default dtype
~ made_as = ⟦torch.get_default_dtype() → None⟧  # of
? engine/test_kernel_keys.py -k dtype_that_new
a graph serves shapes for which the rule does something else
~             if ⟦not graphs.fits(first, real, sizes_of(p)) → False⟧:
? engine/test_undeclared_rules.py -k reduced_by_size
rows of a transposed tensor are taken for those of a contiguous one
~         if ⟦not p.is_contiguous() → False⟧ and (len(
? engine/test_engine.py -k shape
a rule that draws by Python's random is recorded once
~ if ⟦self.own or before == record.drawn() → True⟧:
? engine/test_undeclared_rules.py -k draws
= functional_optim/core/traits.py
a rule is looked at with its first variant only
~ [placement] if count < 2 else [placement.variant(⟦k + 1) for k in range(count → 1⟧)]
? engine/test_undeclared_rules.py -k variant
a rule that DTensors compute wrongly runs on them
~ _whole[key] = ⟦not all(_is_shardable(x, p) for x in variants(placement)) → False⟧
? distributed/test_distributed_rows.py -k whole_tensors
= functional_optim/kernels/toolchain.py
products and sums are fused where the compiler likes it
~ "-fopenmp-simd", "-ffp-contract=⟦off → fast⟧"
? engine/test_bits.py -k 'element_wise and adamw and float32'
= functional_optim/kernels/points.py
lerp from the farther end
~ return b.fma(w, b.sub(y, x), ⟦b.select(near, x, y) → x⟧)
? engine/test_bits.py -k every_operation
= functional_optim/kernels/print_cpp.py
a maximum over several chunks is their sum
~ how = ⟦kept.combined.title() → "Sum"⟧
? engine/test_bits.py -k 'sums and finite and float32'
= functional_optim/kernels/cpp_loops.py
the last block of a packed tensor is not written back
~ back = f"if (rest ⟦< → >⟧ {block}) memcpy(
? engine/test_every_way.py -k int8
= functional_optim/kernels/cuts.py
a slot is written before its old value was last read
~ last = ⟦max → min⟧([j for j, own in enumerate(needed) if target in own], default=0)
? engine/test_every_way.py -k 'sides or adafactor'
= functional_optim/kernels/launches.py
the last chunk of a tensor is left out
~ chunks = ⟦-(-first // max(rows, 1) → first // max(rows, 1⟧)
? engine/test_bits.py -k 'sums and finite and float32'
= functional_optim/kernels/comparison.py
a kernel that is tried may be far from its rule
~ 1e-4 * step.abs() + ⟦1e-5 → 1e5⟧ * size
? engine/test_without_kernels.py -k something_else
= functional_optim/kernels/interrupts.py
an interrupt that was held back is lost
~             ⟦handler(*waiting.popitem() → waiting.popitem(⟧)
? engine/test_interrupts.py -k handler
= functional_optim/kernels/watch.cpp
a count that somebody else has written is not read again
~ if (size ? now < FIRST⟦ || memcmp(next, (void*)now, size) → ⟧
? engine/test_engine.py -k edit
a parameter at another address is not noticed
~ same = ⟦place(self->read, PyTuple_GET_ITEM(self->tensors, i)) == self->places.x[i] → 1⟧;
= functional_optim/kernels/libraries.py
a strict step takes what could not be built
~ let_through(partial(_made, wanted, ⟦strict → False⟧))
? engine/test_without_kernels.py -k strict_step
a kernel that cannot be built is passed over without a word
-         warn_failed("no kernel can be built here", found)
-
+
? engine/test_without_kernels.py -k told_once
what was built is not kept
-     disk_cache.keep(name, path.read_bytes())
-     return native
+     return native
? engine/test_kernel_store.py -k kept_once
processes that start at once build the same kernel
-         _build(missing)
+     _build(missing)
? engine/test_kernel_store.py -k start_at_once
= functional_optim/kernels/disk_cache.py
a damaged library is loaded
~ return ⟦hashlib.sha256(content[:-DIGEST]).digest() == content[-DIGEST:] → len(content) > DIGEST⟧
? engine/test_kernel_store.py -k altered
code that others can write is loaded
~ return mine⟦ and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) → ⟧
? engine/test_kernel_store.py -k writable
off is taken for a folder
~ return ⟦(None, "") if _is_off() else  → ⟧_checked(_wanted())
? engine/test_kernel_store.py -k off_keeps
the folder of kernels grows without end
~ if ⟦whole > largest or  → ⟧file.used < since:
? engine/test_kernel_store.py -k least_recently
= functional_optim/kernels/toolchain.py
a kernel for another processor is loaded
~ *target(level), ⟦*processor,  → ⟧suffix
? engine/test_kernel_store.py -k a_name
builds that are interrupted leave their folders
-     shutil.rmtree(folder, ignore_errors=True)
-
+
? engine/test_builds.py -k ends_at_once
= functional_optim/warmup.py
warm-up takes the rows of matrices for those of vectors
~ if ⟦any(x.source.axes > 1 for x in used) → False⟧:
? engine/test_warmup.py -k every_dtype
= functional_optim/kernels/print_triton.py
a sum is read by the launch that makes it
-             level[node] += 1
-
+
? engine/test_triton_kernels.py -k 'in_float32 and adafactor'
constants of a shape are read from the next column
~ self.constants = self.sizes + len(graph.inputs)⟦ - 1 → ⟧
? engine/test_triton_kernels.py -k 'flags and by_size'
= functional_optim/kernels/triton_launch.py
tensors that begin anywhere are read 16 bytes at once
~ if ⟦(bool(own.kept) or i not in among) is  → ⟧even:
? gpu_check/test_gpu_check_fake_device.py -k tensors
gradients at new addresses are not seen
~ if self.there is None⟦ or addresses != self.known → ⟧:
? engine/test_gpu_steps.py -k 'those_of_the_cpu and Adadelta'
steps beside a captured one read what has not been copied
-         if self.driver.capturing():
-             return self._recorded
+         if False:
+             return self._recorded
? engine/test_gpu_steps.py -k gradients_of_its_own
= functional_optim/kernels/triton_builds.py
new Triton kernels are not tried
-             check(lambda *given: self._bound(variant, found, *given)())
-
+
? engine/test_gpu_steps.py -k 'falls_back or tried_again'
what was tried on one card is not tried on another
~ options = [repr(OPTIONS)⟦, self.driver.name(self.device) → ⟧]
= functional_optim/engine/compile.py
a step that could not be replayed is captured
-         if not self.capturable:
-             raise
+         if False:
+             raise
? engine/test_gpu_steps.py -k could_not_be_replayed
without donation parameters are written
~ ⟦params, state = tree.map(memory.copied, params), → state =⟧ tree.map(memory.copied, state)
? engine/test_engine.py -k donation
trees that do not fit together reach a kernel
-             if self.donate:
-                 check(self.tx, grads, state, params)
-
+
? core/test_errors.py -k another_tree
a step of a committed transformation is made though it is refused
-         if not as_flag(commit):
-             return params, state
-         if self.nested
+         if self.nested
? engine/test_whole_steps.py -k refused
= functional_optim/engine/tree_plan.py
a carried number that somebody has written is not read again
~ if tensor is not x⟦ or version != version_of(x) → ⟧:
? engine/test_engine.py -k somebody
the state does not show the learning rate of a schedule
~             ⟦writes.append(filling(state.hyper[key], now)) → pass⟧
? engine/test_engine.py -k all_kinds
tied parameters are written twice
-     memory.check_apart([columns[k][i] for i, k in some], name)
-
+
? core/test_memory.py -k overlap
what a chain carries is not written
~ ⟦writes += [self.numbers.writing(k, x) for k, x in self.carried(context)] → self.carried(context)⟧
? engine/test_every_way.py -k nadam
= functional_optim/engine/graph_step.py
a snapshot is overwritten with the parameter that it holds
~         found = ⟦where in known → False⟧
? engine/test_whole_steps.py -k rollback
a strict whole step falls back
~ ⟦raise kernels.refusal(kernels.cause("torch.compile failed", failure)) from failure → pass⟧
? engine/test_whole_steps.py -k strict
a whole step that cannot be compiled says nothing
-         kernels.warn_failed(
-             "torch.compile failed",
-             failure,
-             "; the steps of this transformation run eagerly",
-         )
-
+
? engine/test_whole_steps.py -k one_warning
= functional_optim/engine/graphs.py
graphs that write are not tried before
~ return ⟦all(map(_close, olds[0], wanted)) → True⟧
? engine/test_whole_steps.py -k tried
what a graph has left to be written is not
-             old.copy_(now)
-         self.ran, self.broken = True, False
+             pass
+         self.ran, self.broken = True, False
? engine/test_whole_steps.py -k number_is_no_reason
= functional_optim/engine/products.py
tensors of one turn are not next to each other
~ for i in ⟦sorted(range(len(params)), key=turns.__getitem__ → range(len(params)⟧):
? engine/test_products.py -k turn
= functional_optim/engine/shards.py
a gradient of a shard is read in the layout of the last one
-             self._build(given)
+             pass
? engine/test_every_way.py -k another_layout
= functional_optim/engine/divided.py
sums over rows are those of one process
~ dist.all_reduce(⟦x → x.clone()⟧, group=self.processes, async_op=True)
? distributed/test_distributed_rows.py -k lamb
processes choose by their own rows alone
~ for x in ⟦(*every, *map(sharding.shard, every)) → map(sharding.shard, every)⟧):
? distributed/test_distributed_rows.py -k columns
two lanes of passes write into one memory
~ launch.use(⟦memory → self.__dict__.setdefault("one", torch.empty(1 << 20, dtype=torch.uint8))⟧)
? distributed/test_distributed_rows.py -k buckets
= functional_optim/kernels/launches.py
means are taken over the rows of one process
~ rows, chunks, ⟦self.wholes[i → sizes[0⟧], *offsets]
? distributed/test_distributed_rows.py -k 'own or stable_adamw'
= functional_optim/engine/train_step.py
micro-batches take the sum of their losses
~ share = 1.0⟦ / self.parts → ⟧
? engine/test_train_step.py -k micro
a loss that is a parameter is written with it
~ return x⟦.clone() if taken and not taken.isdisjoint(_places([x])) else x → ⟧
? engine/test_train_step.py -k keeps_its
second gradients are scaled, and never divided
~ later = scale⟦ if _scales_inside(state) else None → ⟧
? engine/test_train_step.py -k 'second_gradients and False'
a refused state decides whether the loss is scaled
-         if scale is not None and self.scaled is None:
+         self.scaled = self.scaled or scale is not None
+         if scale is not None:
? engine/test_train_step.py -k refused_state
a loss that cannot be compiled stops the training
-             if eager or not kernels.is_compile_error(error):
-                 raise
+             raise
? engine/test_train_step.py -k cannot_be_compiled
= functional_optim/warmup.py
warmed recipes lack the libraries of larger matrices
~     if ⟦any(x.rule.runs.batched for x in step.tx.placements) → False⟧:
? engine/test_warmup.py -k large
= functional_optim/kernels/cuts.py
a slot is written before a second sum of rows reads its old value
~ readers = [⟦x.time for x in self.nests if targets & {*self.needed(x)} → ⟧]
? engine/test_every_way.py -k late
= functional_optim/kernels/cpp_loops.py
what follows from sums of rows is left out
~ self._write(nests[last:⟦ → last⟧])
? engine/test_every_way.py -k 'sides or adafactor'
= functional_optim/kernels/head.h
parts of integers are put together as doubles
~ total[j] = ⟦How::of(total[j],  → (T)How::of((double)total[j], (double)⟧parts[k * length + j]);
? engine/test_bits.py -k put_together
= functional_optim/kernels/cpp.py
the larger one of NaN and a number is the number
~ return ⟦f"({y} {sign}= {x} ? {y} : {x})" → plain⟧
? engine/test_bits.py -k every_operation
""")
