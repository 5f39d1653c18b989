"""Faults in the optimizer objects, and in what divides a step over processes."""

from mutants.run import Mutant


def of(file: str, tests: str, *faults: tuple[str, str, str]) -> list[Mutant]:
    """Faults of one file: the title of each, a text, and what replaces it."""
    return [Mutant(title, file, old, new, (f"tests/{tests}",)) for title, old, new in faults]


PASS = "pass"
PUT_BACK = "p.copy_(value)\n            raise"

MUTANTS = [
    *of(
        "adapters/base.py",
        "adapters/test_adapter.py -k hook",
        ("global hooks are not called", "or every_optimizer._global_optimizer_pre_hooks", ""),
    ),
    *of(
        "adapters/base.py",
        "adapters/test_contract.py -k closure",
        (
            "a closure runs in the caller's mode",
            "loss = base.recorded(closure)",
            "loss = closure()",
        ),
    ),
    *of(
        "adapters/base.py",
        "core/test_differentiable.py -k slots",
        ("a differentiable step is in place", 'elif self.defaults.get("diff', 'elif {}.get("diff'),
    ),
    *of(
        "adapters/base.py",
        "adapters/test_adapter.py -k refused",
        (
            "a group is there before it is checked",
            "transaction(self, self._add_checked, super()",
            "(lambda _, add, *x: add(*x))(self, self._add_checked, super()",
        ),
    ),
    *of(
        "adapters/base.py",
        "adapters/test_recipes.py",
        ("no advice for groups without names", '"without names to the optimizer" not in', ""),
    ),
    *of(
        "adapters/state/recipes.py",
        "adapters/test_recipes.py",
        ("unknown keys are taken", "    unknown = unknown_keys(group, names)", "    unknown = []"),
        ("a recipe does not get what a group has more", "if self.more:\n", "if not self.names:\n"),
    ),
    *of(
        "adapters/state/names.py",
        "adapters/test_recipes.py",
        ("names of compiled models stay", 'name.replace(COMPILED, "")', "name"),
    ),
    *of(
        "adapters/state/hyperparameters.py",
        "adapters/test_new_numbers.py -k class",
        ("a number of another class is the same", "type(x) is type(y) and bool(", "bool("),
    ),
    *of(
        "adapters/state/transaction.py",
        "adapters/test_contract.py",
        ("new attributes outlive a failure", "            del own[name]", "            pass"),
        ("new defaults outlive a failure", "defaults.update(before[1])", PASS),
    ),
    *of(
        "adapters/drop_ins.py",
        "adapters/test_drop_ins.py",
        ("sparse gradients meet momentum", 'g.to_dense() if group["momentum"] != 0 or', "g if"),
        ("Rprop needs a saved lr", '    optional = ("lr",)', "    optional = ()"),
    ),
    *of(
        "adapters/state/storage.py",
        "adapters/test_stored_keyword.py",
        ("a group has no storage of its own", "group[KEY] if KEY in group else vars", "vars"),
    ),
    *of(
        "adapters/muon_adamw.py",
        "adapters/test_muon_adamw.py",
        ("a group's AdamW numbers are lost", "else rest), **own}", "else rest)}"),
    ),
    *of(
        "adapters/ready_made.py",
        "adapters/test_ready_made.py",
        ("two learning rates are one", "if len(known) > 1:", "if len(known) > 2:"),
    ),
    *of(
        "adapters/lbfgs.py",
        "adapters/test_contract.py -k closure",
        ("an interrupted search leaves its trial", PUT_BACK, "pass\n            raise"),
    ),
    *of(
        "adapters/lbfgs.py",
        "adapters/test_lbfgs.py -k closure",
        ("what a closure projects is forgotten", "if not settings.wolfe:", "if False:"),
    ),
    *of(
        "adapters/lbfgs.py",
        "adapters/test_lbfgs.py -k checkpoints",
        ("evaluations are not added up", 'old.get("func_evals", 0) + run.evals', "run.evals"),
    ),
    *of(
        "adapters/lbfgs.py",
        "adapters/test_lbfgs.py -k load",
        (
            "histories of two lengths are loaded",
            "for key in PAIRS}) > 1:",
            "for key in PAIRS}) > 2:",
        ),
    ),
    *of(
        "adapters/averaging.py",
        "adapters/test_averaging.py",
        ("eval twice averages twice", "if group.get(TRAINING, True) != training]", "]"),
        ("a step in evaluation mode is made", "        if not self.training:", "        if False:"),
    ),
    *of(
        "adapters/lightning.py",
        "frameworks/test_lightning_checkpoints.py -k validates",
        (
            "the training weights are validated",
            "def on_validation_start",
            "def on_validation_starts",
        ),
    ),
    *of(
        "adapters/gradient_free/optimizer.py",
        "adapters/test_contract.py -k closure",
        ("an interrupted search leaves its candidate", PUT_BACK, "pass\n            raise"),
    ),
    *of(
        "adapters/gradient_free/optimizer.py",
        "adapters/test_gradient_free.py",
        ("a NaN is the best loss", "return worst_if_not_finite(fitness)", "return (fitness)"),
        ("groups may differ", "if not same(first[name], group[name]):", "if False:"),
    ),
    *of(
        "adapters/stub.py",
        "adapters/test_stub.py",
        ("a stub takes another's state", "        if self.state:", "        if False:"),
    ),
    *of(
        "adapters/fault_tolerant/optimizer.py",
        "adapters/test_fault_tolerant.py",
        ("a refused step is taken", "not None and now.decision.committed:", "not None:"),
        (
            "a failed step counts as taken",
            "member.decision = group.decision\n",
            "member.decision\n",
        ),
        (
            "copies forget what NaN does",
            "self._member = Member(**state)",
            'self._member = Member(**{**state, "nonfinite": "commit"})',
        ),
    ),
    *of(
        "adapters/fault_tolerant/proxy.py",
        "adapters/test_fault_tolerant.py",
        ("state dict hooks are not called", "changed = after(self, state_dict)", "changed = None"),
    ),
    *of(
        "adapters/fault_tolerant/rounds.py",
        "adapters/test_fault_tolerant.py",
        ("a peer's gradient is not taken", "p.grad = mean.detach()", PASS),
        ("zero_grad twice is a refusal", "if not member.has_gradients():\n", "if False:\n"),
    ),
    *of(
        "adapters/fault_tolerant/rounds.py",
        "adapters/test_fault_tolerant_rounds.py",
        (
            "nobody waits for the others",
            "committed and len(skipped) < len(now.owing):",
            "step < 0:",
        ),
        ("a scaler's infinities are taken", "(scaled and member.average_gradients)", "False"),
    ),
    *of(
        "adapters/fault_tolerant/rounds.py",
        "adapters/test_fault_tolerant_healing.py",
        ("healing rounds the state", "restore_precision(optim.state[p], state[i])", "{}"),
    ),
    *of(
        "adapters/fault_tolerant/schedulers.py",
        "adapters/test_fault_tolerant_healing.py",
        ("other schedulers are healed", "        if mine != theirs:", "        if False:"),
        (
            "a schedule is saved too late",
            "return self._before or self._now()",
            "return self._now()",
        ),
    ),
    *of(
        "adapters/fault_tolerant/schedulers.py",
        "adapters/test_fault_tolerant_schedulers.py",
        ("refused steps are scheduled", "if self._seen[scheduler] == self.commits:", "if False:"),
    ),
    *of(
        "adapters/fault_tolerant/optimizer.py",
        "adapters/test_fault_tolerant_schedulers.py",
        (
            "an empty step is voted on",
            "if closure is None and member.is_init",
            "if False and m.is_i",
        ),
    ),
    *of(
        "functional_optim/core/sharding.py",
        "distributed/test_sharded_over.py",
        ("sums have no gradient", "return _Summed.apply(g, ctx.group), None", "return g, None"),
        ("FSDP1's parts are the model", "[mark and not (undivided or _is_all(x))", "[False"),
        ("slots of another mesh are taken", "(mine is own or mine == own) and not", "not"),
        ("a loss is a sum", "return total.item() / mesh.size()", "return total.item()"),
    ),
    *of(
        "functional_optim/core/sharding.py",
        "distributed/test_distributed_links.py",
        ("sums are completed one by one", "if all(map(_adds_up, x.placements)):", "if False:"),
    ),
    *of(
        "functional_optim/engine/shards.py",
        "distributed/test_distributed.py",
        (
            "parts are measured for the whole",
            "else Partial() for",
            "else Replicate() for",
        ),
        ("rules of whole tensors run on parts", "and is_elementwise(x, p)):", "):"),
    ),
    *of(
        "functional_optim/engine/shards.py",
        "distributed/test_distributed_packed.py",
        ("packed parts are whole", "packed[id(x)] if id(x) in packed else", ""),
    ),
    *of(
        "functional_optim/core/ownership.py",
        "distributed/test_matrix_owners.py",
        ("the first owner gets all", "owners[i] = load.index(min(load))", "owners[i] = 0"),
    ),
]
