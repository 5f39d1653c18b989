"""Faults in the optimizer objects, and in what divides a step over processes."""

from __future__ import annotations

from mutants.run import Mutant

CONTRACT = ("tests/adapters/test_adapter.py",)
RULES = ("tests/adapters/test_adapter_grammar.py", "tests/adapters/test_group_keys.py")
DROP_INS = ("tests/adapters/test_drop_ins.py",)
LBFGS = ("tests/adapters/test_lbfgs.py", "tests/adapters/test_lbfgs_contract.py")
AVERAGING = ("tests/adapters/test_averaging.py",)
MODES = ("tests/frameworks/test_averaging_modes.py",)
FREE = ("tests/adapters/test_gradient_free.py",)
MUON = ("tests/adapters/test_muon_adamw.py",)
NEW = ("tests/adapters/test_new_numbers.py",)
STUB = ("tests/adapters/test_stub.py",)
STORED = ("tests/adapters/test_stored_keyword.py",)
TRANSACTIONS = ("tests/adapters/test_transactions.py",)
STEPS = ("tests/adapters/test_fault_tolerant.py",)
OBJECT = ("tests/adapters/test_fault_tolerant_object.py",)
ROUNDS = ("tests/adapters/test_fault_tolerant_rounds.py",)
HEALING = ("tests/adapters/test_fault_tolerant_healing.py",)
SCHEDULERS = ("tests/adapters/test_fault_tolerant_schedulers.py",)
TRAINERS = ("tests/adapters/test_fault_tolerant_trainers.py",)
PARTS = ("tests/distributed/test_sharded_over.py",)
SHARDS = ("tests/distributed/test_distributed.py",)
LINKS = ("tests/distributed/test_distributed_links.py",)
OWNERS = ("tests/distributed/test_matrix_owners.py",)

MUTANTS = [
    # ---------------------------------------------------------------- the contract of torch
    Mutant(
        "no hook that is registered for all optimizers is called",
        "adapters/optimizer.py",
        "            or every_optimizer._global_optimizer_pre_hooks\n",
        "",
        CONTRACT,
    ),
    Mutant(
        "a closure is called with the caller's grad mode",
        "adapters/optimizer.py",
        "            loss = base.recorded(closure)\n",
        "            loss = closure()\n",
        CONTRACT,
    ),
    Mutant(
        "a differentiable step is made in place",
        "adapters/optimizer.py",
        'if self.defaults.get("differentiable") and not compiling:',
        "if False:",
        CONTRACT,
    ),
    Mutant(
        "a group is added before its hyperparameters are checked",
        "adapters/optimizer.py",
        "        transaction(self, self._add_checked, super().add_param_group, param_group)",
        "        self._add_checked(super().add_param_group, param_group)",
        CONTRACT,
    ),
    Mutant(
        "a group may hold integers",
        "adapters/optimizer.py",
        "        self.check_parameters(group)\n        tx =",
        "        tx =",
        CONTRACT,
    ),
    Mutant(
        "a link that needs more than the loss is let through",
        "adapters/optimizer.py",
        'if set(missing) - {"value"}:',
        "if False:",
        CONTRACT,
    ),
    Mutant(
        "torch's words for a group without names are not explained",
        "adapters/optimizer.py",
        'if "without names to the optimizer" not in str(error):',
        "if True:",
        RULES,
    ),
    Mutant(
        "unknown keys of a group are taken",
        "adapters/state/recipes.py",
        "    unknown = unknown_keys(group, names)",
        "    unknown: list[str] = []",
        RULES,
    ),
    Mutant(
        "a recipe that takes anything does not get what a group has more",
        "adapters/state/recipes.py",
        "        if self.more:\n            values",
        "        if False:\n            values",
        RULES,
    ),
    Mutant(
        "the words that torch.compile puts into names stay",
        "adapters/state/names.py",
        'return names and [name.replace(COMPILED, "") for name in names]',
        "return names and list(names)",
        (*RULES, *MUON),
    ),
    Mutant(
        "a number of another class counts as the same",
        "adapters/state/hyperparameters.py",
        "return type(x) is type(y) and bool(x == y)",
        "return bool(x == y)",
        NEW,
    ),
    Mutant(
        "a tensor that is written in place counts as unchanged",
        "adapters/state/hyperparameters.py",
        "return not isinstance(x, Tensor)  #",
        "return True  #",
        NEW,
    ),
    Mutant(
        "a change that fails leaves new attributes behind",
        "adapters/state/transaction.py",
        "        for name in own.keys() - attributes.keys():\n            del own[name]\n",
        "",
        TRANSACTIONS,
    ),
    Mutant(
        "a change that fails leaves its defaults behind",
        "adapters/state/transaction.py",
        "        defaults.clear()\n        defaults.update(before[1])\n",
        "",
        TRANSACTIONS,
    ),
    # ---------------------------------------------------------------- drop-ins and ready-made
    Mutant(
        "fused does not leave a scaler's work to the step",
        "adapters/drop_ins.py",
        "            self._step_supports_amp_scaling = True",
        "            self._step_supports_amp_scaling = False",
        DROP_INS,
    ),
    Mutant(
        "a default is not torch's",
        "adapters/drop_ins.py",
        "amsgrad: bool = False, *, maximize: bool = False,\n        foreach",
        "amsgrad: bool = True, *, maximize: bool = False,\n        foreach",
        DROP_INS,
    ),
    Mutant(
        "sparse gradients are taken with momentum as they are",
        "adapters/drop_ins.py",
        'return g.to_dense() if group["momentum"] != 0 or group["weight_decay"] != 0 else g',
        "return g",
        DROP_INS,
    ),
    Mutant(
        "a checkpoint without lr is refused by Rprop",
        "adapters/drop_ins.py",
        '    optional = ("lr",)',
        "    optional = ()",
        DROP_INS,
    ),
    Mutant(
        "a storage of a group is that of the object",
        "adapters/state/storage.py",
        "return group[KEY] if KEY in group else vars(optimizer).get(KEY)",
        "return vars(optimizer).get(KEY)",
        STORED,
    ),
    Mutant(
        "the storage is saved with the groups",
        "adapters/optimizer.py",
        "            group.pop(KEY, None)\n            group.update",
        "            group.update",
        STORED,
    ),
    Mutant(
        "a user's numbers for AdamW are lost",
        "adapters/muon_adamw.py",
        '**({} if "muon" in labels else rest), **own}',
        '**({} if "muon" in labels else rest)}',
        MUON,
    ),
    Mutant(
        "two learning rates are taken for one scale",
        "adapters/one_rate.py",
        "if len(known) > 1:",
        "if len(known) > 2:",
        ("tests/adapters/test_one_rate.py",),
    ),
    # ---------------------------------------------------------------- L-BFGS
    Mutant(
        "a closure that raises leaves the parameters where they were tried",
        "adapters/lbfgs.py",
        "            for p, value in before:\n                p.copy_(value)\n            raise",
        "            raise",
        LBFGS,
    ),
    Mutant(
        "what a closure has projected is forgotten",
        "adapters/lbfgs.py",
        "            if not settings.wolfe:\n                run = run._replace(x=point(flat))",
        "            if False:\n                run = run._replace(x=point(flat))",
        LBFGS,
    ),
    Mutant(
        "evaluations of earlier steps are not counted",
        "adapters/lbfgs.py",
        'old.get("func_evals", 0) + run.evals',
        "run.evals",
        LBFGS,
    ),
    Mutant(
        "a history of lists of other lengths is loaded",
        "adapters/lbfgs.py",
        "if len({len(mine.get(key) or ()) for key in PAIRS}) > 1:",
        "if False:",
        LBFGS,
    ),
    # ---------------------------------------------------------------- two modes
    Mutant(
        "eval twice averages twice",
        "adapters/averaging.py",
        "if group.get(TRAINING, True) != training]",
        "]",
        AVERAGING,
    ),
    Mutant(
        "a step in evaluation mode is made",
        "adapters/averaging.py",
        "        if not self.training:\n            raise",
        "        if False:\n            raise",
        AVERAGING,
    ),
    Mutant(
        "a group that joins is always in training mode",
        "adapters/averaging.py",
        "        self.param_groups[-1][TRAINING] = mode",
        "        self.param_groups[-1][TRAINING] = True",
        AVERAGING,
    ),
    Mutant(
        "Lightning validates the training weights",
        "adapters/lightning.py",
        "    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:\n",
        "    def on_validation_ends(self, trainer: Any, pl_module: Any) -> None:\n",
        MODES,
    ),
    # ---------------------------------------------------------------- without gradients, and none
    Mutant(
        "an interrupted search leaves its last candidate",
        "adapters/gradient_free/optimizer.py",
        "            for p, value in moved:\n                p.copy_(value)\n            raise",
        "            raise",
        FREE,
    ),
    Mutant(
        "a NaN is the best loss",
        "adapters/gradient_free/optimizer.py",
        "return worst_if_not_finite(fitness).min().to(kind)",
        "return fitness.min().to(kind)",
        FREE,
    ),
    Mutant(
        "a transformation gets no loss",
        "adapters/gradient_free/methods.py",
        'extra = {"value": value} if "value" in self.tx.extra else {}',
        "extra = {}",
        FREE,
    ),
    Mutant(
        "groups with other hyperparameters are searched with the first's",
        "adapters/gradient_free/optimizer.py",
        "if not same(first[name], group[name]):",
        "if False:",
        FREE,
    ),
    Mutant(
        "a stub takes another optimizer's state",
        "adapters/stub.py",
        "        if self.state:\n            raise ValueError(",
        "        if False:\n            raise ValueError(",
        STUB,
    ),
    Mutant(
        "a loss of nothing has no dtype of its inputs",
        "adapters/stub.py",
        "dtype=real_dtype(like), device=like.device, requires_grad=True",
        "device=like.device, requires_grad=True",
        STUB,
    ),
    # ---------------------------------------------------------------- fault tolerance
    Mutant(
        "a refused step is taken",
        "adapters/fault_tolerant/optimizer.py",
        "if now.decision is not None and now.decision.committed:",
        "if now.decision is not None:",
        STEPS,
    ),
    Mutant(
        "a failed step keeps the decision of its vote",
        "adapters/fault_tolerant/optimizer.py",
        "            now.decision = member.decision = group.decision\n            raise",
        "            raise",
        STEPS,
    ),
    Mutant(
        "hooks of the state dict are not called",
        "adapters/fault_tolerant/proxy.py",
        "            changed = after(self, state_dict)",
        "            changed = None",
        OBJECT,
    ),
    Mutant(
        "copies forget what is done with NaN",
        "adapters/fault_tolerant/optimizer.py",
        '            "nonfinite": member.nonfinite,',
        '            "nonfinite": "commit",',
        OBJECT,
    ),
    Mutant(
        "a gradient that only a peer has is not taken",
        "adapters/fault_tolerant/rounds.py",
        "        elif share > 0:\n            p.grad = mean.detach()\n",
        "",
        STEPS,
    ),
    Mutant(
        "zero_grad twice is a refused step",
        "adapters/fault_tolerant/rounds.py",
        "            if not member.has_gradients():\n                return\n",
        "",
        STEPS,
    ),
    Mutant(
        "an optimizer that shares a step need not have taken the last",
        "adapters/fault_tolerant/rounds.py",
        "if now.decision.committed and len(skipped) < len(now.owing):",
        "if False:",
        ROUNDS,
    ),
    Mutant(
        "infinite gradients of a scaler are voted for",
        "adapters/fault_tolerant/rounds.py",
        'if member.nonfinite == "refuse" or (scaled and member.average_gradients):',
        'if member.nonfinite == "refuse":',
        ROUNDS,
    ),
    Mutant(
        "scaled gradients are averaged as they are",
        "adapters/fault_tolerant/optimizer.py",
        "            unscale([p.grad for p in self._member",
        "            lambda: unscale([p.grad for p in self._member",
        ROUNDS,
    ),
    Mutant(
        "healing rounds the state to the parameters' dtype",
        "adapters/fault_tolerant/healing.py",
        "            optim.state[p].update(restore_precision(optim.state[p], state[i]))",
        "            pass",
        HEALING,
    ),
    Mutant(
        "a peer with other schedulers is loaded",
        "adapters/fault_tolerant/schedulers.py",
        "        if mine != theirs:",
        "        if False:",
        HEALING,
    ),
    Mutant(
        "a scheduler that was stepped in the open step is healed too late",
        "adapters/fault_tolerant/schedulers.py",
        "            return self._before or self._now()",
        "            return self._now()",
        HEALING,
    ),
    Mutant(
        "a scheduler steps where the group has refused",
        "adapters/fault_tolerant/schedulers.py",
        "        if self._seen[scheduler] == self.commits:\n            return None\n",
        "",
        SCHEDULERS,
    ),
    Mutant(
        "a scheduler of its own is made with the optimizer, and nothing is said",
        "adapters/fault_tolerant/optimizer.py",
        "if marked and not self._member.schedules.were_followed:",
        "if False:",
        SCHEDULERS,
    ),
    Mutant(
        "distributed checkpoint's empty step asks for a vote",
        "adapters/fault_tolerant/optimizer.py",
        "if closure is None and member.is_initialization():",
        "if False:",
        TRAINERS,
    ),
    Mutant(
        "a first step with a learning rate of 0 is taken for an empty one",
        "adapters/fault_tolerant/rounds.py",
        "return bool(trained) and not any(g is None or bool(g.any()) for g in trained)",
        "return bool(trained)",
        TRAINERS,
    ),
    # ---------------------------------------------------------------- several processes
    Mutant(
        "what processes measure is added up without a gradient",
        "functional_optim/core/sharding.py",
        "return _Summed.apply(g, ctx.group), None",
        "return g, None",
        PARTS,
    ),
    Mutant(
        "a process outside of the group takes part",
        "functional_optim/core/sharding.py",
        "    if torch.distributed.get_rank(group) < 0:\n        raise RuntimeError(\n"
        '            "this process is not in the process group that sharded_over',
        "    if False:\n        raise RuntimeError(\n"
        '            "this process is not in the process group that sharded_over',
        PARTS,
    ),
    Mutant(
        "a part that FSDP1 has flattened is taken for the model",
        "functional_optim/core/sharding.py",
        "    return [mark and not (undivided or _is_all(x)) for x, mark in",
        "    return [False for x, mark in",
        PARTS,
    ),
    Mutant(
        "a slot on another mesh is taken",
        "functional_optim/core/sharding.py",
        "    if (mine is own or mine == own) and not (shapes and x.shape != p.shape):",
        "    if not (shapes and x.shape != p.shape):",
        (*PARTS, *LINKS),
    ),
    Mutant(
        "sums of shards are completed one by one",
        "functional_optim/core/sharding.py",
        "            if all(map(_adds_up, x.placements)):",
        "            if False:",
        LINKS,
    ),
    Mutant(
        "the maximum of an empty part fails",
        "functional_optim/core/sharding.py",
        "    if not is_sharded(x) or all(local.shape[i] for i in dims):",
        "    if True:",
        LINKS,
    ),
    Mutant(
        "a loss is not averaged over a mesh",
        "functional_optim/core/sharding.py",
        "    return total.item() / mesh.size()",
        "    return total.item()",
        PARTS,
    ),
    Mutant(
        "shards are stepped with the numbers of a part",
        "functional_optim/engine/shards.py",
        "Replicate() if where.is_replicate() else Partial() for where in placed",
        "Replicate() for where in placed",
        SHARDS,
    ),
    Mutant(
        "what is the same everywhere is counted once for each process",
        "functional_optim/engine/shards.py",
        "Replicate() if where.is_replicate() else Partial() for where in placed",
        "Partial() for where in placed",
        SHARDS,
    ),
    Mutant(
        "a rule over whole tensors runs on a part",
        "functional_optim/engine/shards.py",
        "if not some and not (_beside(x.rule, own, p, spec) and is_elementwise(x, p)):",
        "if not some and not _beside(x.rule, own, p, spec):",
        SHARDS,
    ),
    Mutant(
        "parts of an inner group outlive their tensors",
        "functional_optim/engine/shards.py",
        "            self._build(given)\n",
        "            pass\n",
        (*SHARDS, *LINKS),
    ),
    Mutant(
        "packed slots of a part are taken as a whole tensor's",
        "functional_optim/engine/shards.py",
        "    if not any(rule.codecs):\n        return tuple(map(sharding.shard, slots))\n",
        "    if True:\n        return tuple(map(sharding.shard, slots))\n",
        ("tests/distributed/test_distributed_packed.py",),
    ),
    Mutant(
        "every process computes every matrix",
        "functional_optim/core/ownership.py",
        "return self.owner is None or self.owner[matrix] == self.rank",
        "return True",
        OWNERS,
    ),
    Mutant(
        "the first process gets all matrices",
        "functional_optim/core/ownership.py",
        "        owners[i] = load.index(min(load))",
        "        owners[i] = 0",
        OWNERS,
    ),
    Mutant(
        "a part along a negative dimension is along the first",
        "functional_optim/core/ownership.py",
        "return cls(x.shape, mesh.get_group(first), where.dim % x.dim())",
        "return cls(x.shape, mesh.get_group(first), 0)",
        OWNERS,
    ),
]
