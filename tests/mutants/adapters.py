"""Faults in the optimizer objects, and in what divides a step over processes."""

from __future__ import annotations

from mutants.run import Mutant


def of(file: str, tests: str, *faults: tuple[str, str, str]) -> list[Mutant]:
    """Faults of one file: the title of each, a text, and what replaces it."""
    paths = tuple([f"tests/{name}.py" for name in tests.split()])
    return [Mutant(title, file, old, new, paths) for title, old, new in faults]


MUTANTS = [
    *of(
        "adapters/optimizer.py",
        "adapters/test_adapter",
        (
            "no hook that is registered for all optimizers is called",
            "            or every_optimizer._global_optimizer_pre_hooks\n",
            "",
        ),
        (
            "a closure is called with the caller's grad mode",
            "loss = base.recorded(closure)\n",
            "loss = closure()\n",
        ),
        (
            "a differentiable step is made in place",
            'if self.defaults.get("differentiable") and not compiling:',
            "if False:",
        ),
        (
            "a group is added before its hyperparameters are checked",
            "transaction(self, self._add_checked, super().add_param_group, param_group)",
            "self._add_checked(super().add_param_group, param_group)",
        ),
        ("a group may hold integers", "self.check_parameters(group)\n        tx =", "tx ="),
        (
            "a link that needs more than the loss is let through",
            'if set(missing) - {"value"}:',
            "if False:",
        ),
    ),
    *of(
        "adapters/optimizer.py",
        "adapters/test_recipes",
        (
            "torch's words for a group without names are not explained",
            'if "without names to the optimizer" not in str(error):',
            "if True:",
        ),
    ),
    *of(
        "adapters/state/recipes.py",
        "adapters/test_recipes",
        (
            "unknown keys of a group are taken",
            "unknown = unknown_keys(group, names)",
            "unknown: list[str] = []",
        ),
        (
            "a recipe that takes anything does not get what a group has more",
            "if self.more:\n            values",
            "if False:\n            values",
        ),
    ),
    *of(
        "adapters/state/names.py",
        "adapters/test_recipes adapters/test_muon_adamw",
        (
            "the words that torch.compile puts into names stay",
            'return names and [name.replace(COMPILED, "") for name in names]',
            "return names and list(names)",
        ),
    ),
    *of(
        "adapters/state/hyperparameters.py",
        "adapters/test_new_numbers",
        (
            "a number of another class counts as the same",
            "return type(x) is type(y) and bool(x == y)",
            "return bool(x == y)",
        ),
        (
            "a tensor that is written in place counts as unchanged",
            "return not isinstance(x, Tensor)  #",
            "return True  #",
        ),
    ),
    *of(
        "adapters/state/transaction.py",
        "adapters/test_transactions",
        (
            "a change that fails leaves new attributes behind",
            "        for name in own.keys() - attributes.keys():\n            del own[name]\n",
            "",
        ),
        (
            "a change that fails leaves its defaults behind",
            "        defaults.clear()\n        defaults.update(before[1])\n",
            "",
        ),
    ),
    *of(
        "adapters/drop_ins.py",
        "adapters/test_drop_ins",
        (
            "fused does not leave a scaler's work to the step",
            "self._step_supports_amp_scaling = True",
            "self._step_supports_amp_scaling = False",
        ),
        (
            "a default is not torch's",
            "amsgrad: bool = False, *, maximize: bool = False,\n        foreach",
            "amsgrad: bool = True, *, maximize: bool = False,\n        foreach",
        ),
        (
            "sparse gradients are taken with momentum as they are",
            'return g.to_dense() if group["momentum"] != 0 or group["weight_decay"] != 0 else g',
            "return g",
        ),
        ("a checkpoint without lr is refused by Rprop", 'optional = ("lr",)', "optional = ()"),
    ),
    *of(
        "adapters/state/storage.py",
        "adapters/test_stored_keyword",
        (
            "a storage of a group is that of the object",
            "return group[KEY] if KEY in group else vars(optimizer).get(KEY)",
            "return vars(optimizer).get(KEY)",
        ),
    ),
    *of(
        "adapters/optimizer.py",
        "adapters/test_stored_keyword",
        (
            "the storage is saved with the groups",
            "group.pop(KEY, None)\n            group.update",
            "group.update",
        ),
    ),
    *of(
        "adapters/muon_adamw.py",
        "adapters/test_muon_adamw",
        (
            "a user's numbers for AdamW are lost",
            '**({} if "muon" in labels else rest), **own}',
            '**({} if "muon" in labels else rest)}',
        ),
    ),
    *of(
        "adapters/one_rate.py",
        "adapters/test_ready_made",
        ("two learning rates are taken for one scale", "if len(known) > 1:", "if len(known) > 2:"),
    ),
    *of(
        "adapters/lbfgs.py",
        "adapters/test_lbfgs",
        (
            "a closure that raises leaves the parameters where they were tried",
            "for p, value in before:\n                p.copy_(value)\n            raise",
            "raise",
        ),
        (
            "what a closure has projected is forgotten",
            "if not settings.wolfe:\n                run = run._replace(x=point(flat))",
            "if False:\n                run = run._replace(x=point(flat))",
        ),
        (
            "evaluations of earlier steps are not counted",
            'old.get("func_evals", 0) + run.evals',
            "run.evals",
        ),
        (
            "a history of lists of other lengths is loaded",
            "if len({len(mine.get(key) or ()) for key in PAIRS}) > 1:",
            "if False:",
        ),
    ),
    *of(
        "adapters/averaging.py",
        "adapters/test_averaging",
        ("eval twice averages twice", "if group.get(TRAINING, True) != training]", "]"),
        (
            "a step in evaluation mode is made",
            "if not self.training:\n            raise",
            "if False:\n            raise",
        ),
        (
            "a group that joins is always in training mode",
            "self.param_groups[-1][TRAINING] = mode",
            "self.param_groups[-1][TRAINING] = True",
        ),
    ),
    *of(
        "adapters/lightning.py",
        "frameworks/test_lightning_modes",
        (
            "Lightning validates the training weights",
            "def on_validation_start(self, trainer: Any, pl_module: Any) -> None:\n",
            "def on_validation_ends(self, trainer: Any, pl_module: Any) -> None:\n",
        ),
    ),
    *of(
        "adapters/gradient_free/optimizer.py",
        "adapters/test_gradient_free",
        (
            "an interrupted search leaves its last candidate",
            "for p, value in moved:\n                p.copy_(value)\n            raise",
            "raise",
        ),
        (
            "a NaN is the best loss",
            "return worst_if_not_finite(fitness).min().to(kind)",
            "return fitness.min().to(kind)",
        ),
        (
            "groups with other hyperparameters are searched with the first's",
            "if not same(first[name], group[name]):",
            "if False:",
        ),
    ),
    *of(
        "adapters/gradient_free/methods.py",
        "adapters/test_gradient_free",
        (
            "a transformation gets no loss",
            'extra = {"value": value} if "value" in self.tx.extra else {}',
            "extra = {}",
        ),
    ),
    *of(
        "adapters/stub.py",
        "adapters/test_stub",
        (
            "a stub takes another optimizer's state",
            "if self.state:\n            raise ValueError(",
            "if False:\n            raise ValueError(",
        ),
        (
            "a loss of nothing has no dtype of its inputs",
            "dtype=real_dtype(like), device=like.device, requires_grad=True",
            "device=like.device, requires_grad=True",
        ),
    ),
    *of(
        "adapters/fault_tolerant/optimizer.py",
        "adapters/test_fault_tolerant",
        (
            "a refused step is taken",
            "if now.decision is not None and now.decision.committed:",
            "if now.decision is not None:",
        ),
        (
            "a failed step keeps the decision of its vote",
            "now.decision = member.decision = group.decision\n            raise",
            "raise",
        ),
        (
            "copies forget what is done with NaN",
            '"nonfinite": member.nonfinite,',
            '"nonfinite": "commit",',
        ),
    ),
    *of(
        "adapters/fault_tolerant/proxy.py",
        "adapters/test_fault_tolerant",
        (
            "hooks of the state dict are not called",
            "changed = after(self, state_dict)",
            "changed = None",
        ),
    ),
    *of(
        "adapters/fault_tolerant/rounds.py",
        "adapters/test_fault_tolerant",
        (
            "a gradient that only a peer has is not taken",
            "        elif share > 0:\n            p.grad = mean.detach()\n",
            "",
        ),
        (
            "zero_grad twice is a refused step",
            "            if not member.has_gradients():\n                return\n",
            "",
        ),
    ),
    *of(
        "adapters/fault_tolerant/rounds.py",
        "adapters/test_fault_tolerant_rounds",
        (
            "an optimizer that shares a step need not have taken the last",
            "if now.decision.committed and len(skipped) < len(now.owing):",
            "if False:",
        ),
        (
            "infinite gradients of a scaler are voted for",
            'if member.nonfinite == "refuse" or (scaled and member.average_gradients):',
            'if member.nonfinite == "refuse":',
        ),
    ),
    *of(
        "adapters/fault_tolerant/optimizer.py",
        "adapters/test_fault_tolerant_rounds",
        (
            "scaled gradients are averaged as they are",
            "unscale([p.grad for p in self._member",
            "lambda: unscale([p.grad for p in self._member",
        ),
    ),
    *of(
        "adapters/fault_tolerant/healing.py",
        "adapters/test_fault_tolerant_healing",
        (
            "healing rounds the state to the parameters' dtype",
            "optim.state[p].update(restore_precision(optim.state[p], state[i]))",
            "pass",
        ),
    ),
    *of(
        "adapters/fault_tolerant/schedulers.py",
        "adapters/test_fault_tolerant_healing",
        ("a peer with other schedulers is loaded", "if mine != theirs:", "if False:"),
        (
            "a scheduler that was stepped in the open step is healed too late",
            "return self._before or self._now()",
            "return self._now()",
        ),
    ),
    *of(
        "adapters/fault_tolerant/schedulers.py",
        "adapters/test_fault_tolerant_schedulers",
        (
            "a scheduler steps where the group has refused",
            "        if self._seen[scheduler] == self.commits:\n            return None\n",
            "",
        ),
    ),
    *of(
        "adapters/fault_tolerant/optimizer.py",
        "adapters/test_fault_tolerant_schedulers",
        (
            "a scheduler of its own is made with the optimizer, and nothing is said",
            "if marked and not self._member.schedules.were_followed:",
            "if False:",
        ),
    ),
    *of(
        "adapters/fault_tolerant/optimizer.py",
        "adapters/test_fault_tolerant_trainers",
        (
            "distributed checkpoint's empty step asks for a vote",
            "if closure is None and member.is_initialization():",
            "if False:",
        ),
    ),
    *of(
        "adapters/fault_tolerant/rounds.py",
        "adapters/test_fault_tolerant_trainers",
        (
            "a first step with a learning rate of 0 is taken for an empty one",
            "return bool(trained) and not any(g is None or bool(g.any()) for g in trained)",
            "return bool(trained)",
        ),
    ),
    *of(
        "functional_optim/core/sharding.py",
        "distributed/test_sharded_over",
        (
            "what processes measure is added up without a gradient",
            "return _Summed.apply(g, ctx.group), None",
            "return g, None",
        ),
        (
            "a process outside of the group takes part",
            (
                "if torch.distributed.get_rank(group) < 0:\n"
                "        raise RuntimeError(\n"
                '            "this process is not in the process group that sharded_over'
            ),
            (
                "if False:\n"
                "        raise RuntimeError(\n"
                '            "this process is not in the process group that sharded_over'
            ),
        ),
        (
            "a part that FSDP1 has flattened is taken for the model",
            "return [mark and not (undivided or _is_all(x)) for x, mark in",
            "return [False for x, mark in",
        ),
        (
            "a loss is not averaged over a mesh",
            "return total.item() / mesh.size()",
            "return total.item()",
        ),
    ),
    *of(
        "functional_optim/core/sharding.py",
        "distributed/test_sharded_over distributed/test_distributed_links",
        (
            "a slot on another mesh is taken",
            "if (mine is own or mine == own) and not (shapes and x.shape != p.shape):",
            "if not (shapes and x.shape != p.shape):",
        ),
    ),
    *of(
        "functional_optim/core/sharding.py",
        "distributed/test_distributed_links",
        (
            "sums of shards are completed one by one",
            "if all(map(_adds_up, x.placements)):",
            "if False:",
        ),
        (
            "the maximum of an empty part fails",
            "if not is_sharded(x) or all(local.shape[i] for i in dims):",
            "if True:",
        ),
    ),
    *of(
        "functional_optim/engine/shards.py",
        "distributed/test_distributed",
        (
            "shards are stepped with the numbers of a part",
            "Replicate() if where.is_replicate() else Partial() for where in placed",
            "Replicate() for where in placed",
        ),
        (
            "what is the same everywhere is counted once for each process",
            "Replicate() if where.is_replicate() else Partial() for where in placed",
            "Partial() for where in placed",
        ),
        (
            "a rule over whole tensors runs on a part",
            "if not some and not (_beside(x.rule, own, p, spec) and is_elementwise(x, p)):",
            "if not some and not _beside(x.rule, own, p, spec):",
        ),
    ),
    *of(
        "functional_optim/engine/shards.py",
        "distributed/test_distributed distributed/test_distributed_links",
        ("parts of an inner group outlive their tensors", "self._build(given)\n", "pass\n"),
    ),
    *of(
        "functional_optim/engine/shards.py",
        "distributed/test_distributed_packed",
        (
            "packed slots of a part are taken as a whole tensor's",
            "if not any(rule.codecs):\n        return tuple(map(sharding.shard, slots))\n",
            "if True:\n        return tuple(map(sharding.shard, slots))\n",
        ),
    ),
    *of(
        "functional_optim/core/ownership.py",
        "distributed/test_matrix_owners",
        (
            "every process computes every matrix",
            "return self.owner is None or self.owner[matrix] == self.rank",
            "return True",
        ),
        (
            "the first process gets all matrices",
            "owners[i] = load.index(min(load))",
            "owners[i] = 0",
        ),
        (
            "a part along a negative dimension is along the first",
            "return cls(x.shape, mesh.get_group(first), where.dim % x.dim())",
            "return cls(x.shape, mesh.get_group(first), 0)",
        ),
    ),
]
