"""Faults in the noise of rules."""

from mutants.run import read

MUTANTS = read(r"""
= functional_optim/kernels/cpp_loops.py
each piece of a block gets the noise of the first one
~ f"noise({name}, {name}k, start⟦ →  / 4096 * 4096⟧, length);"
? transforms/test_noise.py -k every_way
= functional_optim/kernels/noise.h
a kernel gives both numbers of a pair the same place
~ return ⟦place & LANES ? b :  → ⟧a;
? transforms/test_noise.py -k several_axes
the step of a kernel has 24 bits
~ (⟦(uint64_t)low + ((uint64_t)high << WORD)) → uint64_t)low⟧
? transforms/test_noise.py -k repeats
= functional_optim/core/noise.py
the step of an eager rule has 24 bits
~ low.to(torch.int64)⟦ + (high.to(torch.int64) << WORD) → ⟧
= functional_optim/core/randomness.py
the second key does not change the step of the counter
~ z = first + i⟦ * (second | 1) → ⟧
? transforms/test_noise.py -k splitmix
= functional_optim/kernels/noise.h
an angle is cut off to a quarter of its bits
~ deviates(a, b, x, (int32_t)(y ⟦<< 3 → & 0xff000000u⟧),
? transforms/test_noise.py -k 'library or tails'
= functional_optim/core/sparse.py
a sparse gradient gets noise in its own rows
~ return g⟦.to_dense() if sparse and any(x.rule.draws for x in placements) else g → ⟧
? transforms/test_noise.py -k sparse
= adapters/stepping/leaves.py
parameters of one name, or of one index, get the same noise
~ found[p] = ⟦f"{k}." if alone else f"{again}:" if again else "" → ""⟧
? adapters/test_groups_as_one.py -k independent_noise
= functional_optim/core/storage.py
all leaves get the same noise
~ init(p⟦, path → ⟧) if rule.draws
? transforms/test_noise.py -k independent
= functional_optim/core/noise.py
members of an ensemble get the same noise
~ if ⟦all(dim is None for dim in dims[:3]) → True⟧:
? transforms/test_noise.py -k ensemble
""")
