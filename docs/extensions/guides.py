"""From names of the API, and from words that are looked up, to the pages that explain them.

Each function and class on a page of docs/api/ gets a line with the guide to read. Words of the
field that are headings nowhere become entries of the index, which the site's search shows first.
"""

from __future__ import annotations

from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.transforms import SphinxTransform
from sphinx.util import logging

GUIDES = {
    "checkpoints": "state_dict load_state_dict decoded encoded decode_slots",
    "choosing": (
        "schedule_free gpa eval_params variance_reduction lookahead mechanize sam asam "
        "SAM ASAM AveragingOptimizer cautious centralize scale_by_trust_ratio hyperball"
    ),
    "concepts": (
        "GradientTransformation apply_updates State EmptyState get numbers chain "
        "named_chain identity leafwise Runs Storage factory Leafwise Codec SlotSpec "
        "partition masked freeze selective_transform accumulate"
    ),
    "distributed": "sharded_over matrix_owners",
    "from_torch": (
        "Optimizer scale_by_path layerwise_decay mup clip_by_global_norm clip_by_value params_ema"
    ),
    "gotchas": (
        "apply_if_finite skip_large_updates commit_if keep_snapshots rollback zero_nans "
        "warm Warmed known main"
    ),
    "kernels_and_stacks": (
        "as_matrix matrix_views orthogonalize newton_schulz polynomials Polynomials "
        "MUON_COEFFICIENTS COEFFICIENTS"
    ),
    "logging": "monitor snapshot report Report Measure",
    "many_problems": "minimize Minimum root Root",
    "memory": "stored slot_dtypes master_weights full_weights offload summary Summary SummaryRow",
    "research": (
        "differentially_private_aggregate add_noise metropolis hutchinson "
        "gauss_newton_bartlett observe_hessian"
    ),
    "schedules": "with_schedule scale_by_schedule reduce_on_plateau",
    "training_loops": "compile compile_train_step dynamic_loss_scale find_lr LRSweep",
    "fault_tolerance": "FaultTolerantOptimizer",
    "gradient_free": "GradientFree OptimizerStub zero_loss",
}
"""The names that a guide explains, by its page in docs/."""

OTHERWISE = {
    "adapters": "from_torch",
    "core": "concepts",
    "engine": "training_loops",
    "estimators": "gradient_free",
    "replicas": "fault_tolerance",
    "schedules": "schedules",
    "search": "gradient_free",
    "solvers": "fits_and_physics",
    "tools": "concepts",
    "transforms": "concepts",
}
"""The guide to all other names of a page of docs/api/."""

WORDS = {
    "docs/api/transforms#clipping": "gradient clipping, clip gradients",
    "docs/api/transforms#momentum-and-averages": (
        "EMA, exponential moving average, weight averaging, SWA"
    ),
    "docs/api/transforms#weights": "weight decay",
    "docs/checkpoints": "resume training, save and load",
    "docs/devices": "Triton, GPU support, CUDA graphs",
    "docs/distributed": "FSDP, DDP, ZeRO, tensor parallelism, DTensor",
    "docs/fits_and_physics": "least squares, nonlinear least squares, curve fit, PINN",
    "docs/from_optax#inject-hyperparams": "inject_hyperparams",
    "docs/from_optax#mask": "mask",
    "docs/from_optax#multi-transform": "multi_transform",
    "docs/from_torch#an-ensemble-stack-module-state": "stack_module_state, ensemble",
    "docs/from_torch#parameter-groups-or-a-partition": (
        "layer-wise lr, layer-wise learning rate, param groups"
    ),
    "docs/gradient_free": "evolution strategies, zeroth order",
    "docs/kernels_and_stacks": "mixture of experts, MoE, convolution kernels",
    "docs/many_problems": "root finding, Bayesian optimization, batched minimization",
    "docs/memory": "stochastic rounding, 8-bit optimizer, master weights, bfloat16 training",
    "docs/schedules": "learning rate schedule, warmup",
    "docs/training_loops": "gradient accumulation, mixed precision, learning rate finder",
    "docs/tutorial_gpt": "fine-tuning",
}
"""Words by which a page, or a section of it, is looked up."""

logger = logging.getLogger(__name__)


def guide_to(name: str, page: str) -> str:
    """The guide to a name on a page of docs/api/."""
    own = [guide for guide, names in GUIDES.items() if name in names.split()]
    return own[0] if own and page not in ("search", "schedules") else OTHERWISE[page]


def add_guide(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Sphinx's event: a line at the end of what is said of a function, a class or a value."""
    folder, _, page = app.env.docname.rpartition("/")
    if folder == "docs/api" and what in ("function", "class", "data"):
        guide = guide_to(name.rpartition(".")[2], page)
        lines += ["", f"**Guide.** :doc:`/docs/{guide}`", ""]


class Lookups(SphinxTransform):
    """Adds the words of a page to the index."""

    default_priority = 840  # before the index is read off

    def apply(self, **_: Any) -> None:
        for place, words in WORDS.items():
            page, _, section = place.partition("#")
            if page != self.env.docname:
                continue
            ids = [x for node in self.document.findall(nodes.section) for x in node["ids"]]
            if section and section not in ids:
                logger.warning("no section %s for the index; there are %s", section, ids)
            entries = [("single", word, section, "main", None) for word in words.split(", ")]
            self.document.insert(0, addnodes.index(entries=entries))


def every_page(app: Sphinx, env: BuildEnvironment) -> list[str]:
    """Sphinx's event: what to write. The search knows index entries of pages just written only."""
    return sorted(env.found_docs)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", add_guide, priority=600)  # after napoleon
    app.connect("env-updated", every_page)
    app.add_transform(Lookups)
    return {"parallel_read_safe": True}
