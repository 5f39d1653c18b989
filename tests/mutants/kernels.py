"""Faults in how kernels are recorded, written, built, kept and called, and in compiled steps."""

from __future__ import annotations

from mutants.run import Mutant

KERNELS, ENGINE, CORE = (f"functional_optim/{x}" for x in ("kernels", "engine", "core"))
TESTS = "tests/engine"
KEYS, STORE, BUILDS, WITHOUT, BITS, WAYS, PRODUCTS, WHOLE, TRAIN = (
    f"{TESTS}/test_{x}.py"
    for x in (
        *("kernel_keys", "kernel_store", "builds", "without_kernels", "bits", "every_way"),
        *("products", "whole_steps", "train_step"),
    )
)
RULES, ENGINES, GPU, TRITON = (
    f"{TESTS}/test_{x}.py" for x in ("undeclared_rules", "engine", "gpu_steps", "triton_kernels")
)
ROWS = "tests/distributed/test_distributed_rows.py"

MUTANTS = [
    Mutant(
        "a kernel takes the last block of a tensor for a whole one",
        "functional_optim/kernels/cpp_loops.py",
        'f"    if (left >= {block}) {{"',
        'f"    if (left >= 0) {{"',
        ("tests/combinators/test_stored.py -k ways",),
    ),
    Mutant(
        "what a rule makes behind the end of a tensor counts for its last block",
        "functional_optim/core/recording.py",
        "self.codec.encode(torch.where(self.inside, x, 0.0), key)",
        "self.codec.encode(x, key)",
        ("tests/combinators/test_stored.py -k of_the_last_block",),
    ),
    # ------------------------------------------------------------ what a rule is known by
    Mutant(
        "methods of two objects are one rule",
        f"{KERNELS}/keys.py",
        "for x in (fn.__func__, fn.__self__)])",
        "for x in (fn.__func__,)])",
        (KEYS,),
    ),
    Mutant(
        "a graph serves another default dtype",
        f"{CORE}/recording.py",
        "made_as = torch.get_default_dtype()  # of",
        "made_as = None  # of",
        (KEYS,),
    ),
    # ------------------------------------------------------------ what is recorded of it
    Mutant(
        "a graph serves shapes for which the rule does something else",
        f"{CORE}/recording.py",
        "            if not graphs.fits(first, real, sizes_of(p)):\n",
        "            if False:\n",
        (f"{RULES} -k reduced_by_size",),
    ),
    Mutant(
        "rows of a transposed tensor are taken for those of a contiguous one",
        f"{CORE}/recording.py",
        "        if not p.is_contiguous() and (len(",
        "        if False and (len(",
        (f"{ENGINES} -k shape",),
    ),
    Mutant(
        "a rule that draws by Python's random is recorded once",
        f"{CORE}/recording.py",
        "if self.own or before == record.drawn():",
        "if True:",
        (f"{RULES} -k draws",),
    ),
    Mutant(
        "a rule is looked at with its first variant only",
        f"{CORE}/traits.py",
        "[placement] if count < 2 else [placement.variant(k + 1) for k in range(count)]",
        "[placement] if count < 2 else [placement.variant(1)]",
        (f"{RULES} -k variant",),
    ),
    # ------------------------------------------------------------ kernels
    Mutant(
        "products and sums are fused where the compiler likes it",
        f"{KERNELS}/toolchain.py",
        '"-fopenmp-simd", "-ffp-contract=off"',
        '"-fopenmp-simd", "-ffp-contract=fast"',
        (f"{BITS} -k 'element_wise and adamw and float32'",),
    ),
    Mutant(
        "lerp from the farther end",
        f"{KERNELS}/points.py",
        "return b.fma(w, b.sub(y, x), b.select(near, x, y))",
        "return b.fma(w, b.sub(y, x), x)",
        (f"{BITS} -k every_operation",),
    ),
    Mutant(
        "a maximum over several chunks is their sum",
        f"{KERNELS}/print_cpp.py",
        'how = {"max": "Max", ',
        "how = {",
        (f"{BITS} -k 'sums and finite and float32'",),
    ),
    Mutant(
        "the last block of a packed tensor is not written back",
        f"{KERNELS}/cpp_loops.py",
        'back = f"if (rest < {block}) memcpy(',
        'back = f"if (rest > {block}) memcpy(',
        (f"{WAYS} -k int8",),
    ),
    Mutant(
        "a slot is written before its old value was last read",
        f"{KERNELS}/cuts.py",
        "last = max([j for j, own in enumerate(needed) if target in own], default=0)",
        "last = min([j for j, own in enumerate(needed) if target in own], default=0)",
        (f"{WAYS} -k 'sides or adafactor'",),
    ),
    Mutant(
        "a slot is written before a second sum of rows reads its old value",
        f"{KERNELS}/cuts.py",
        "readers = [x.time for x in self.nests if targets & {*self.needed(x)}]",
        "readers = []",
        (f"{WAYS} -k late",),
    ),
    Mutant(
        "what follows from sums of rows is left out",
        f"{KERNELS}/cpp_loops.py",
        "self._write(nests[last:])",
        "self._write(nests[last:last])",
        (f"{WAYS} -k 'sides or adafactor'",),
    ),
    Mutant(
        "the larger one of NaN and a number is the number",
        f"{KERNELS}/cpp.py",
        'return f"({y} {sign}= {x} ? {y} : {x})"',
        "return plain",
        (f"{BITS} -k every_operation",),
    ),
    Mutant(
        "the last chunk of a tensor is left out",
        f"{KERNELS}/launches.py",
        "chunks = -(-first // max(rows, 1))",
        "chunks = first // max(rows, 1)",
        (f"{BITS} -k 'sums and finite and float32'",),
    ),
    Mutant(
        "a kernel that is tried may be far from its rule",
        f"{KERNELS}/comparison.py",
        "1e-4 * step.abs() + 1e-5 * size",
        "1e-4 * step.abs() + 1e5 * size",
        (f"{WITHOUT} -k something_else",),
    ),
    Mutant(
        "an interrupt that was held back is lost",
        f"{KERNELS}/interrupts.py",
        "            handler(*waiting.popitem())",
        "            waiting.popitem()",
        (f"{TESTS}/test_interrupts.py -k handler",),
    ),
    Mutant(
        "a count that somebody else has written is not read again",
        f"{KERNELS}/watch.cpp",
        "if (now < 0 || now != self->versions.x[i]) return 0;",
        "if (now < 0) return 0;",
        (f"{ENGINES} -k edit",),
    ),
    Mutant(
        "a parameter at another address is not noticed",
        f"{KERNELS}/watch.cpp",
        "same = place(self->read, PyTuple_GET_ITEM(self->tensors, i)) == self->places.x[i];",
        "same = 1;",
        (f"{ENGINES} -k edit",),
    ),
    # ------------------------------------------------------------ built and kept
    Mutant(
        "a strict step takes what could not be built",
        f"{KERNELS}/libraries.py",
        "let_through(partial(_made, wanted, strict))",
        "let_through(partial(_made, wanted, False))",
        (f"{WITHOUT} -k strict_step",),
    ),
    Mutant(
        "a kernel that cannot be built is passed over without a word",
        f"{KERNELS}/libraries.py",
        '        tell_failed("no kernel can be built here", found)\n',
        "",
        (f"{WITHOUT} -k told_once",),
    ),
    Mutant(
        "what was built is not kept",
        f"{KERNELS}/libraries.py",
        "    disk_cache.keep(name, path.read_bytes())\n    return native",
        "    return native",
        (f"{STORE} -k kept_once",),
    ),
    Mutant(
        "processes that start at once build the same kernel",
        f"{KERNELS}/libraries.py",
        "pending.turns = turns.pop_all()",
        "pass",
        (f"{STORE} -k start_at_once",),
    ),
    Mutant(
        "a damaged library is loaded",
        f"{KERNELS}/disk_cache.py",
        "return hashlib.sha256(content[:-DIGEST]).digest() == content[-DIGEST:]",
        "return len(content) > DIGEST",
        (f"{STORE} -k altered",),
    ),
    Mutant(
        "code that others can write is loaded",
        f"{KERNELS}/disk_cache.py",
        "return mine and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)",
        "return mine",
        (f"{STORE} -k writable",),
    ),
    Mutant(
        "off is taken for a folder",
        f"{KERNELS}/disk_cache.py",
        'return (None, "") if _is_off() else _checked(_wanted())',
        "return _checked(_wanted())",
        (f"{STORE} -k off_keeps",),
    ),
    Mutant(
        "the folder of kernels grows without end",
        f"{KERNELS}/disk_cache.py",
        "if whole > largest or file.used < since:",
        "if file.used < since:",
        (f"{STORE} -k least_recently",),
    ),
    Mutant(
        "a kernel for another processor is loaded",
        f"{KERNELS}/toolchain.py",
        "whole = repr((text, FLAGS, target(level), processor, here))",
        "whole = repr((text, FLAGS, target(level), here))",
        (f"{STORE} -k a_name",),
    ),
    Mutant(
        "builds that are interrupted leave their folders",
        f"{KERNELS}/toolchain.py",
        "    shutil.rmtree(folder, ignore_errors=True)\n",
        "",
        (f"{BUILDS} -k that_ends",),
    ),
    Mutant(
        "warm-up takes the rows of matrices for those of vectors",
        "functional_optim/warmup.py",
        "if any(x.source.axes > 1 for x in used):",
        "if False:",
        (f"{TESTS}/test_warmup.py -k every_dtype",),
    ),
    # ------------------------------------------------------------ a card
    Mutant(
        "a sum is read by the launch that makes it",
        f"{KERNELS}/print_triton.py",
        "            level[node] += 1\n",
        "",
        (f"{TRITON} -k 'in_float32 and adafactor'",),
    ),
    Mutant(
        "constants of a shape are read from the next column",
        f"{KERNELS}/print_triton.py",
        "self.constants = self.sizes + len(graph.inputs) - 1\n",
        "self.constants = self.sizes + len(graph.inputs)\n",
        (f"{TRITON} -k 'flags and places_by_size'",),
    ),
    Mutant(
        "tensors that begin anywhere are read 16 bytes at once",
        f"{KERNELS}/triton_launch.py",
        "if (bool(own.kept) or i not in among) is even:",
        "if even:",
        ("tests/gpu_check/test_gpu_check_fake_device.py -k tensors",),
    ),
    Mutant(
        "gradients at new addresses are not seen",
        f"{KERNELS}/triton_launch.py",
        "if self.there is None or addresses != self.known:",
        "if self.there is None:",
        (f"{GPU} -k 'those_of_the_cpu and Adadelta'",),
    ),
    Mutant(
        "steps beside a captured one read what has not been copied",
        f"{KERNELS}/triton_launch.py",
        "        if self.driver.capturing():\n            return self._recorded",
        "        if False:\n            return self._recorded",
        (f"{GPU} -k gradients_of_its_own",),
    ),
    Mutant(
        "new Triton kernels are not tried",
        f"{KERNELS}/triton_builds.py",
        "            check(lambda *given: self._bound(variant, found, *given)())\n",
        "",
        (f"{GPU} -k 'falls_back or tried_again'",),
    ),
    Mutant(
        "what was tried on one card is not tried on another",
        f"{KERNELS}/triton_builds.py",
        "options = [repr(OPTIONS), self.driver.name(self.device)]",
        "options = [repr(OPTIONS)]",
        (f"{GPU} -k 'falls_back or tried_again'",),
    ),
    Mutant(
        "a step that could not be replayed is captured",
        f"{ENGINE}/compile.py",
        "        if not self.capturable:\n            raise",
        "        if False:\n            raise",
        (f"{GPU} -k could_not_be_replayed",),
    ),
    # ------------------------------------------------------------ fo.compile
    Mutant(
        "without donation parameters are written",
        f"{ENGINE}/compile.py",
        "params, state = tree.map(memory.copied, params), tree.map(memory.copied, state)",
        "state = tree.map(memory.copied, state)",
        (f"{ENGINES} -k donation",),
    ),
    Mutant(
        "trees that do not fit together reach a kernel",
        f"{ENGINE}/compile.py",
        "            if self.donate:\n                check(self.tx, grads, state, params)\n",
        "",
        ("tests/core/test_errors.py -k another_tree",),
    ),
    Mutant(
        "a step of a committed transformation is made though it is refused",
        f"{ENGINE}/compile.py",
        "if as_flag(commit) else (params, state)",
        "if as_flag(commit) or True else (params, state)",
        (f"{WHOLE} -k refused",),
    ),
    Mutant(
        "a carried number that somebody has written is not read again",
        f"{ENGINE}/tree_plan.py",
        "if tensor is not x or version != version_of(x):",
        "if tensor is not x:",
        (f"{ENGINES} -k somebody",),
    ),
    Mutant(
        "the state does not show the learning rate of a schedule",
        f"{ENGINE}/tree_plan.py",
        "            writes.append(filling(state.hyper[key], now))\n",
        "            pass\n",
        (f"{ENGINES} -k all_kinds",),
    ),
    Mutant(
        "tied parameters are written twice",
        f"{ENGINE}/tree_plan.py",
        "    memory.check_apart([columns[k][i] for i, k in some], name)\n",
        "",
        ("tests/core/test_memory.py -k overlap",),
    ),
    Mutant(
        "what a chain carries is not written",
        f"{ENGINE}/tree_plan.py",
        "writes += [self.numbers.writing(k, x) for k, x in self.carried(context)]",
        "self.carried(context)",
        (f"{WAYS} -k nadam",),
    ),
    # ------------------------------------------------------------ whole steps
    Mutant(
        "a snapshot is overwritten with the parameter that it holds",
        f"{ENGINE}/graph_step.py",
        "        found = where in known\n",
        "        found = False\n",
        (f"{WHOLE} -k rollback",),
    ),
    Mutant(
        "a strict whole step falls back",
        f"{ENGINE}/graph_step.py",
        'raise kernels.refusal(kernels.cause("torch.compile failed", failure)) from failure',
        "pass",
        (f"{WHOLE} -k strict",),
    ),
    Mutant(
        "a whole step that cannot be compiled says nothing",
        f"{ENGINE}/graph_step.py",
        """        kernels.tell_failed(
            "torch.compile failed",
            failure,
            "; the steps of this transformation run eagerly",
        )
""",
        "",
        (f"{WHOLE} -k one_warning",),
    ),
    Mutant(
        "graphs that write are not tried before",
        f"{ENGINE}/graphs.py",
        "return all(map(_close, olds[0], wanted))",
        "return True",
        (f"{WHOLE} -k tried",),
    ),
    Mutant(
        "what a graph has left to be written is not",
        f"{ENGINE}/graphs.py",
        "            old.copy_(now)\n        self.ran, self.broken = True, False",
        "            pass\n        self.ran, self.broken = True, False",
        (f"{WHOLE} -k number_is_no_reason",),
    ),
    # ------------------------------------------------------------ products and shards
    Mutant(
        "tensors of one turn are not next to each other",
        f"{ENGINE}/products.py",
        "for i in sorted(range(len(params)), key=turns.__getitem__):",
        "for i in range(len(params)):",
        (f"{PRODUCTS} -k turn",),
    ),
    Mutant(
        "a shard that has moved is written where it was",
        f"{ENGINE}/shards.py",
        "            self._build(given)\n        return given",
        "            pass\n        return given",
        (f"{WAYS} -k moves",),
    ),
    Mutant(
        "sums over rows are those of one process",
        f"{ENGINE}/divided.py",
        "torch.distributed.all_reduce(x, group=self.processes)",
        "pass",
        (f"{ROWS} -k lamb",),
    ),
    Mutant(
        "means are taken over the rows of one process",
        f"{KERNELS}/divided.py",
        "return self.wholes[i]",
        "return sizes[0]",
        (f"{ROWS} -k 'own or stable_adamw'",),
    ),
    # ------------------------------------------------------------ train steps
    Mutant(
        "micro-batches take the sum of their losses",
        f"{ENGINE}/train_step.py",
        "share = 1.0 / self.parts",
        "share = 1.0",
        (f"{TRAIN} -k micro",),
    ),
    Mutant(
        "a loss that is a parameter is written with it",
        f"{ENGINE}/train_step.py",
        "return x.clone() if taken and not taken.isdisjoint(_places([x])) else x",
        "return x",
        (f"{TRAIN} -k keeps_its",),
    ),
    Mutant(
        "second gradients are scaled, and never divided",
        f"{ENGINE}/train_step.py",
        "later = scale if _scales_inside(state) else None",
        "later = scale",
        (f"{TRAIN} -k 'second_gradients and False'",),
    ),
    Mutant(
        "a refused state decides whether the loss is scaled",
        f"{ENGINE}/train_step.py",
        "        if scale is not None and self.scaled is None:\n",
        "        self.scaled = self.scaled or scale is not None\n        if scale is not None:\n",
        (f"{TRAIN} -k refused_state",),
    ),
    Mutant(
        "a loss that cannot be compiled stops the training",
        f"{ENGINE}/train_step.py",
        "            if eager or not kernels.is_compile_error(error):\n                raise",
        "            raise",
        (f"{TRAIN} -k cannot_be_compiled",),
    ),
]
