"""Faults in compiled solvers: recordings, their C++, and when a library is taken again."""

from mutants.run import read

MUTANTS = read(r"""
= functional_optim/kernels/tape.py
what is recorded does not tell operations apart
~ self._said(op, (⟦op,  → ⟧indexed(given), indexed(named)), x)
? least_squares/test_compiled.py -k 'changed or known or other or torch_does'
values may be read
~ if ⟦op in READS → False⟧ and any(
random numbers are constants
~ ⟦raise Unsuitable(f"random numbers ({op})") → pass⟧
tensors of a closure are constants
~ if ⟦not self.inside → True⟧:
a product with 0 is its other operand
~ if number ⟦== 1 → in (0, 1)⟧ and alike:
= functional_optim/kernels/lane_program.py
an output is written while inputs are read
~ if ⟦node not in self.buffers and ops.kind(node.op) != "fill" → False⟧:
? least_squares/test_compiled.py -k 'torch_does or each_kind or exchange'
parts that are joined overlap
- start += size
-         raise NoMemory(node)
+ pass
+         raise NoMemory(node)
= functional_optim/kernels/lane_views.py
padding begins one element late
~ conditions.append(within(index[dim], before⟦ →  + 1⟧, before + x.shape[dim]))
? least_squares/test_compiled.py -k 'torch_does or each_kind'
a slice begins at 0
~ plus(times(index[dim], step), ⟦start → 0⟧), *index
= functional_optim/kernels/lanes.py
all lanes solve one problem
- load(s, at, id[l], l);
-             steps
+ load(s, at, id[0], l);
+             steps
? least_squares/test_compiled.py -k 'own or exponential or torch_does'
exponentials lose their last bits
~ p = fma_of(p, f, all_D(⟦1.0 / 24 → 0.04166⟧));
the smaller is larger
~ choice(⟦gt → lt⟧(a, b), a, b)
= functional_optim/solvers/programs.py
a library fits any function
~ if known is None⟦ or known.calls != now.calls → ⟧:
? least_squares/test_compiled.py -k 'changed or callbacks'
all steps are made at once
~ begins=False⟦, most=1 → ⟧)
= functional_optim/kernels/lane_rooms.py
values that are needed at once share memory
~ for k in at if last[k] >⟦= first[which] →  first[which] + 9⟧])
? least_squares/test_compiled.py -k 'torch_does or each_kind'
= functional_optim/kernels/lane_library.py
a program of a GPU is not compared with torch
~ if ⟦ → True or ⟧_agrees(made,
? least_squares/test_threads.py -k 'something_else'
= functional_optim/kernels/lane_threads.py
a thread makes one step more
~ k <⟦ → =⟧ most && s
? least_squares/test_threads.py -k 'callback'
= functional_optim/kernels/tape.py
a number of the CPU is refused on a GPU
~ x.device == self.device⟦ or x.device.type == "cpu" → ⟧
? least_squares/test_threads.py -k 'may_move'
""")
