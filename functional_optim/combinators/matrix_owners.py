"""Which process computes what of the matrices that several processes share."""

from __future__ import annotations

from typing import Any, Literal

from functional_optim.combinators.as_matrix import each_placement
from functional_optim.core import base
from functional_optim.core.factory import factory
from functional_optim.core.ownership import Owners


@factory
def matrix_owners(
    tx: base.GradientTransformation, owners: Literal["each", "spread"] = "spread", group: Any = None
) -> base.GradientTransformation:
    """Say which process computes what of the matrix rules in a transformation.

    Newton–Schulz and decompositions need whole matrices, and take long. Where several processes
    have the same model, each of them would compute the same; spread, each computes about 1/n.

    Args:
        tx: a transformation with rules that take batches of matrices, such as `muon()`.
        owners: "each": every process computes all matrices, as without `matrix_owners`; DTensors
            are gathered in all of them. "spread": each matrix has one owner, the same in every step
            with the same gradients; the most expensive go first, each to the process that has least
            to do. The parts of a DTensor are sent to the owner, and the parts of its result back,
            in one all_to_all each; of plain tensors all get the owner's result, in one all_gather.
        group: a `torch.distributed` process group of those that have the same plain tensors (DDP);
            None: the default group. DTensors (fully_shard, tensor parallelism) know theirs.

    Sent in a step of a rule with n processes, entries of each: of a DTensor of m entries, divided
    between all, m/n · (n − 1)/n on average there, and as many back; of a plain tensor m to all.
    Slots of such a rule travel likewise: those like the parameter with it; all others, and with
    plain tensors every slot, go from the owner to all, so that each process has the whole state,
    and a checkpoint is that of a single process.

    Every process must step equally often, with gradients for the same parameters; if one raises,
    the others wait until their group's timeout. A step that torch.compile traces, vmap, and a step
    that is differentiated compute all matrices everywhere, as does a DTensor that is divided along
    two dimensions.

    Raises:
        ValueError: for another word, or without a rule that takes batches.
        TypeError: if tx is no transformation.
        RuntimeError: from a step, without torch.distributed's process groups, or outside of this
            one.

    Example::

        >>> import functional_optim as fo
        >>> tx = fo.matrix_owners(fo.muon(0.02), "spread")
        >>> tx
        chain(scale_by_muon, orthogonalize, add_decayed_weights, scale_by_lr)
    """
    base.check_transformation("matrix_owners", tx, "matrix_owners(muon())")
    if owners not in ("each", "spread"):
        raise ValueError(f"matrix_owners needs owners 'each' or 'spread', but got {owners!r}.")
    if not any(x.rule.runs.batched for x in tx.placements):
        raise ValueError(
            "matrix_owners was given a transformation without a rule that takes batches of "
            "matrices; pass one such as muon(), or leave matrix_owners out."
        )
    shared = Owners(group) if owners == "spread" else None
    return each_placement(tx, lambda x: [x.spread_over(shared)])
