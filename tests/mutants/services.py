"""Faults in checkpoints, replicas, searches, estimators, tuning, and what their pages show."""

from mutants.run import Mutant

CHECKPOINTS = [
    Mutant(
        "a state shares its memory with what was saved",
        "functional_optim/checkpoint/state_dict.py",
        "return torch.empty_like(like, device=device).copy_(found)",
        "return found.to(like.dtype)",
        ("tests/checkpoint/test_state_dicts.py -k shares_no_memory",),
    ),
    Mutant(
        "two values are kept under one key",
        "functional_optim/checkpoint/state_dict.py",
        "            if key in seen:\n",
        "            if key in ():\n",
        ("tests/checkpoint/test_state_dicts.py -k refused",),
    ),
    Mutant(
        "carried numbers are always rounded to float32",
        "functional_optim/checkpoint/state_dict.py",
        "return kept if torch.equal(kept.to(value.dtype), value) else value.to(torch.float64)",
        "return kept",
        ("tests/checkpoint/test_state_dicts.py -k exactly",),
    ),
    Mutant(
        "a shape that differs is loaded",
        "functional_optim/checkpoint/errors.py",
        "if shape != tuple(like.shape):",
        "if len(shape) != like.dim():",
        ("tests/checkpoint/test_state_dicts.py -k fit",),
    ),
    Mutant(
        "an integer is loaded for a float",
        "functional_optim/checkpoint/errors.py",
        "    if kind(found) != kind(like):\n",
        "    if False:\n",
        ("tests/checkpoint/test_state_dicts.py -k fit",),
    ),
    Mutant(
        "a negative count of steps is loaded",
        "functional_optim/checkpoint/errors.py",
        "not (value >= 0 and value == value // 1)",
        "not (value == value // 1)",
        ("tests/checkpoint/test_bad_checkpoints.py -k negative",),
    ),
    Mutant(
        "parameters at different steps are loaded",
        "functional_optim/checkpoint/state_dict.py",
        "if len(set(values.values())) < 2:",
        "if True:",
        ("tests/checkpoint/test_state_dicts.py -k fit",),
    ),
    Mutant(
        "missing entries are not told",
        "functional_optim/checkpoint/state_dict.py",
        "    if strict and missing:\n",
        "    if strict and missing and unexpected:\n",
        ("tests/checkpoint/test_state_dicts.py -k refused",),
    ),
    Mutant(
        "a value that a hook has changed is taken back",
        "functional_optim/checkpoint/conversion.py",
        "return saved.to(loaded.device, copy=True) if _is_cast(saved, loaded) else loaded",
        "return saved.to(loaded.device, copy=True)",
        ("tests/checkpoint/test_checkpoints.py -k cast",),
    ),
    Mutant(
        "a packed slot is read with scales that do not fit",
        "functional_optim/checkpoint/conversion.py",
        "if scales and (codes.dim() < 2 or scales[0].shape != codes.shape[:-1]):",
        "if scales and codes.dim() < 2:",
        ("tests/checkpoint/test_packed_states.py -k refused",),
    ),
    Mutant(
        "a slot of another size is decoded into a parameter's",
        "functional_optim/checkpoint/conversion.py",
        "return codes.shape[-2] == form.blocks.blocks(math.prod(each))",
        "return True",
        ("tests/checkpoint/test_packed_states.py -k refused",),
    ),
]

REPLICAS = [
    Mutant(
        "two parts are registered under one key",
        "functional_optim/replicas/coordinator.py",
        "if key in self._loads:",
        "if key in ():",
        (
            "tests/replicas/test_replicas.py",
            "tests/replicas/test_torchft_manager.py",
        ),
    ),
    Mutant(
        "a peer gets the tensors that are written to",
        "functional_optim/replicas/coordinator.py",
        "return x.detach().clone() if isinstance(x, Tensor) else copy.deepcopy(x)",
        "return x.detach() if isinstance(x, Tensor) else copy.deepcopy(x)",
        (
            "tests/replicas/test_replicas.py",
            "tests/replicas/test_torchft_manager.py",
        ),
    ),
    Mutant(
        "refused steps are counted from the start",
        "functional_optim/replicas/coordinator.py",
        "self._refused = 0 if decision.committed else self._refused + 1",
        "self._refused += not decision.committed",
        (
            "tests/replicas/test_replicas.py",
            "tests/replicas/test_torchft_manager.py",
        ),
    ),
    Mutant(
        "an update that fails is not reported",
        "functional_optim/replicas/loop.py",
        "                self.coordinator.report_error(error)\n",
        "                pass\n",
        (
            "tests/replicas/test_replicas.py",
            "tests/replicas/test_torchft_manager.py",
        ),
    ),
    Mutant(
        "a step with infinite gradients is not refused",
        "functional_optim/replicas/loop.py",
        "        self._check_finite(mean)\n        self._give(now)",
        "        self._give(now)",
        (
            "tests/replicas/test_replicas.py",
            "tests/replicas/test_torchft_manager.py",
        ),
    ),
    Mutant(
        "a replica goes on with its own tree after it was healed",
        "functional_optim/replicas/loop.py",
        "        if not self._came:\n            self._tree = now",
        "        self._tree = now",
        (
            "tests/replicas/test_replicas.py",
            "tests/replicas/test_torchft_manager.py",
        ),
    ),
    Mutant(
        "a tensor that spans two buckets loses an element",
        "functional_optim/replicas/coordinator.py",
        "pieces = joined.split(max(1, bucket_bytes // dtype.itemsize))",
        "pieces = joined.split(max(1, bucket_bytes))",
        ("tests/replicas/test_buckets.py",),
    ),
    Mutant(
        "the mean of a conjugated tensor is that of its memory",
        "functional_optim/replicas/coordinator.py",
        "return torch.view_as_real(x.resolve_conj())",
        "return torch.view_as_real(x.conj().resolve_conj())",
        ("tests/replicas/test_buckets.py",),
    ),
    Mutant(
        "a refused round of local SGD keeps the inner state",
        "functional_optim/replicas/sync/local_sgd.py",
        "LocalSGDState(no_steps(), copied(past), anchor, past)",
        "LocalSGDState(no_steps(), state.inner, anchor, past)",
        ("tests/replicas/test_synced.py -k local_sgd",),
    ),
    Mutant(
        "DiLoCo's outer gradient points uphill",
        "functional_optim/replicas/sync/diloco.py",
        "way = tree.map(torch.sub, state.anchor, params)",
        "way = tree.map(torch.sub, params, state.anchor)",
        ("tests/replicas/test_synced.py -k plain_loop",),
    ),
    Mutant(
        "DiLoCo mixes local and global parameters the wrong way round",
        "functional_optim/replicas/sync/diloco.py",
        "torch.lerp(new, p, alpha)",
        "torch.lerp(p, new, alpha)",
        ("tests/replicas/test_synced.py -k plain_loop",),
    ),
    Mutant(
        "a refused fragment of DiLoCo keeps its inner slots",
        "functional_optim/replicas/sync/diloco.py",
        "def slot_back(owner: int | None, x: Tensor, old: Any) -> Tensor:\n"
        "            return old.clone() if owner == k else x",
        "def slot_back(owner: int | None, x: Tensor, old: Any) -> Tensor:\n            return x",
        ("tests/replicas/test_synced.py -k refused_fragment",),
    ),
    Mutant(
        "fragments are cut by leaves, not by bytes",
        "functional_optim/replicas/sync/diloco.py",
        "accumulate([x.numel() * x.element_size() for x in leaves])",
        "accumulate([1 for x in leaves])",
        ("tests/replicas/test_synced_contract.py -k bytes",),
    ),
    Mutant(
        "a simulated group averages those that heal, too",
        "functional_optim/replicas/simulation/group_server.py",
        "mean = _mean([given[m] for m in r.participants], given[m])",
        "mean = _mean([given[m] for m in r.members], given[m])",
        (
            "tests/replicas/test_simulation.py",
            "tests/replicas/test_simulation_schedules.py -k fault_costs",
        ),
    ),
    Mutant(
        "a simulated group commits a step that nobody took part in",
        "functional_optim/replicas/simulation/group_server.py",
        "        if not r.participants:\n",
        "        if r.participants is None:\n",
        (
            "tests/replicas/test_simulation.py",
            "tests/replicas/test_simulation_schedules.py -k after_the_end",
        ),
    ),
    Mutant(
        "a simulated group does not notice that it has lost its last step",
        "functional_optim/replicas/simulation/group_server.py",
        "if self.step and not self.holders():",
        "if self.step < 0 and not self.holders():",
        (
            "tests/replicas/test_simulation.py",
            "tests/replicas/test_simulation_schedules.py -k lost",
        ),
    ),
    Mutant(
        "a torchft step that is taken back stays counted",
        "functional_optim/replicas/torchft.py",
        '"step": known["step"] - 1',
        '"step": known["step"]',
        (
            "tests/replicas/test_replicas.py",
            "tests/replicas/test_torchft_manager.py",
        ),
    ),
]

SEARCHES = [
    Mutant(
        "equal losses get different ranks",
        "functional_optim/search/shaping.py",
        "return wide / 2 / max(n - 1, 1)",
        "return place.first.to(wide.dtype) / max(n - 1, 1)",
        ("tests/search/test_search_formulas.py -k places",),
    ),
    Mutant(
        "CMA-ES learns nothing from its path",
        "functional_optim/search/cma.py",
        "C = C + rates.c1 * torch.outer(pc, pc)",
        "C = C + rates.c1 * torch.outer(pc, pc) * 0",
        ("tests/search/test_search_formulas.py -k pycmas",),
    ),
    Mutant(
        "CMA-ES decomposes a generation late",
        "functional_optim/search/cma.py",
        "due = step >= state.decomposed + gap",
        "due = step > state.decomposed + gap + 1",
        ("tests/search/test_search_formulas.py -k pycmas",),
    ),
    Mutant(
        "the step size of CMA-ES is damped once more",
        "functional_optim/search/covariance.py",
        "damps=1 + 2 * max(",
        "damps=2 + 2 * max(",
        ("tests/search/test_search_formulas.py -k pycmas",),
    ),
    Mutant(
        "SNES widens where it should narrow",
        "functional_optim/search/snes.py",
        "(u @ (z.square() - 1))",
        "(u @ (1 - z.square()))",
        ("tests/search/test_search_formulas.py -k snes",),
    ),
    Mutant(
        "the elites of CEM may have lost",
        "functional_optim/search/cem.py",
        "w = torch.where(losses.isfinite(), weigh(losses, places.to(torch.float64)), 0.0)",
        "w = weigh(losses, places.to(torch.float64))",
        ("tests/search/test_search_formulas.py -k elites",),
    ),
    Mutant(
        "a trial of differential evolution may change nothing",
        "functional_optim/search/differential_evolution.py",
        "(chance < numeric.at(CR, t)) | chosen",
        "(chance < numeric.at(CR, t))",
        ("tests/search/test_search_formulas.py -k differential",),
    ),
]

ESTIMATORS = [
    Mutant(
        "directions without a finite loss count in the mean",
        "functional_optim/estimators/protocol.py",
        "return finite(x) / x.isfinite().sum().clamp(min=1)",
        "return finite(x) / x.numel()",
        ("tests/estimators/test_estimators.py -k bad_loss",),
    ),
    Mutant(
        "a loss is measured along another direction than the estimate takes",
        "functional_optim/estimators/protocol.py",
        "return draws.stream(state.seed, step), step.to(torch.float64)",
        "return draws.stream(state.seed, step * 0), step.to(torch.float64)",
        ("tests/estimators/test_estimators.py -k projections",),
    ),
    Mutant(
        "a central difference is divided by one width",
        "functional_optim/estimators/pairs.py",
        "finite(weigh(losses[:n], losses[n:]) / (2 * c))",
        "finite(weigh(losses[:n], losses[n:]) / c)",
        ("tests/estimators/test_estimators.py -k central",),
    ),
    Mutant(
        "MeZO moves all leaves before the loss reads them",
        "functional_optim/estimators/pairs.py",
        "return Lazy(p, make) if plain and can_be_lazy(p) else make()",
        "return make()",
        ("tests/estimators/test_mezo.py -k leaf",),
    ),
    Mutant(
        "a forward gradient sums its slopes",
        "functional_optim/estimators/forward.py",
        "weights = shared(slopes.to(state.weights))",
        "weights = slopes.to(state.weights)",
        ("tests/estimators/test_estimators.py -k projections",),
    ),
]

TUNING = [
    Mutant(
        "the suggestion is the best value",
        "functional_optim/tuning/lr_sweep.py",
        "while place > 0 and ordered[place - 1][1] <= most:",
        "while place < 0 and ordered[place - 1][1] <= most:",
        ("tests/tuning/test_lr_sweep.py",),
    ),
    Mutant(
        "a run that has diverged is the best",
        "functional_optim/tuning/lr_sweep.py",
        "return torch.where(end.isfinite().all(1), end.quantile(0.5, dim=1), torch.inf)",
        "return end.nan_to_num(0.0, 0.0, 0.0).quantile(0.5, dim=1)",
        ("tests/tuning/test_lr_sweep.py", "tests/tuning/test_find_lr.py"),
    ),
    Mutant(
        "runs of a sweep do not draw the same numbers",
        "functional_optim/tuning/find_lr.py",
        "        for i, value in enumerate(values):\n            self.random.restore()\n",
        "        for i, value in enumerate(values):\n",
        ("tests/tuning/test_find_lr.py -k random_numbers",),
    ),
    Mutant(
        "an error of memory is tried in another way",
        "functional_optim/tuning/find_lr.py",
        "        raise error\n",
        "        return\n",
        ("tests/tuning/test_find_lr.py -k too_large",),
    ),
    Mutant(
        "a falling loss is told to rise",
        "functional_optim/tuning/history.py",
        "if len(loss) > 1 and min(last) > loss[0]:",
        "if len(loss) > 1 and max(last) < loss[0]:",
        ("tests/tuning/test_report.py",),
    ),
    Mutant(
        "dead parameters are told to move too slowly",
        "functional_optim/tuning/history.py",
        "if medians[path] == 0} | set(_dead_in(history))",
        "if medians[path] == 0}",
        ("tests/tuning/test_report.py",),
    ),
    Mutant(
        "the norm of all parameters is the sum of theirs",
        "functional_optim/tuning/history.py",
        "squares[step] = squares.get(step, 0.0) + x * x",
        "squares[step] = (squares.get(step, 0.0) ** 0.5 + x) ** 2",
        ("tests/tuning/test_report.py",),
    ),
]

PAGES = [
    Mutant(
        "the page of an algorithm names a slot that there is not",
        "docs/algorithms/lion.md",
        "| `exp_avg` |",
        "| `exp_avg_sq` |",
        ("tests/docs/test_algorithm_pages.py -k lion",),
    ),
    Mutant(
        "the table to choose from has another memory",
        "docs/choosing.md",
        "large batches, little memory: transformers | 1 |",
        "large batches, little memory: transformers | 2 |",
        ("tests/docs/test_algorithm_pages.py",),
    ),
    Mutant(
        "holm's levels stay as they are",
        "benchmarks/comparison/measures.py",
        "LEVEL / (len(chances) - i)",
        "LEVEL / len(chances)",
        ("tests/docs/test_compare.py -k holms",),
    ),
    Mutant(
        "a page's output may stand within a statement",
        "tests/support/snippets.py",
        "    assert compared == promised,",
        "    assert compared <= promised,",
        ("tests/docs/test_docs.py -k wrong",),
    ),
]

MUTANTS = [*CHECKPOINTS, *REPLICAS, *SEARCHES, *ESTIMATORS, *TUNING, *PAGES]
