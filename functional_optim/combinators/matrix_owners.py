"""Assignment of matrices to processes that share them."""

from __future__ import annotations

from typing import Any, Literal

from functional_optim.core import base, sharding
from functional_optim.core.calls import check_choice
from functional_optim.core.chain import each_placement
from functional_optim.core.factory import factory
from functional_optim.core.ownership import OwnerGroup


@factory
def matrix_owners(
    tx: base.GradientTransformation, owners: Literal["each", "spread"] = "spread", group: Any = None
) -> base.GradientTransformation:
    """Assign the matrices of the matrix rules in a transformation to processes.

    Newton–Schulz and decompositions need whole matrices, and are expensive. If several processes
    have the same model, each would compute all matrices; with "spread", each computes about 1/n of
    them.

    Args:
        tx: a transformation with rules that take batches of matrices, such as `muon()`.
        owners: "each": every process computes all matrices, as without `matrix_owners`; DTensors
            are gathered in all of them. "spread": each matrix has one owner, the same in every step
            with the same gradients; the most expensive matrices are assigned first, each to the
            process with the least work. The shards of a DTensor are sent to the owner, and the
            shards of its result back, in one all_to_all each; results for plain tensors are sent to
            all, in one all_gather.
        group: a `torch.distributed` process group whose processes have the same plain tensors
            (DDP);
            None: the default group. DTensors (fully_shard, tensor parallelism) have their groups.

    Elements that each of n processes sends per step of a rule: for a DTensor of m elements that is
    sharded over all processes, m/n · (n − 1)/n on average to owners, and as many back; for a plain
    tensor, m to all. Slots are sent, too: slots like the parameter together with it; all other
    slots, and with plain tensors every slot, from the owner to all, so that each process has the
    whole state, and a checkpoint is that of a single process.

    Every process must take the same number of steps, with gradients for the same parameters; if one
    raises an error, the others wait until their group's timeout. A step that is traced by
    torch.compile, vmapped or differentiated computes all matrices in every process, as does a step
    of a DTensor that is sharded along two dimensions.

    Raises:
        ValueError: for unknown `owners`, or without a rule that takes batches.
        TypeError: if tx is not a transformation, or group neither a process group nor None.
        RuntimeError: from a step, without torch.distributed's process groups, or outside this
            group.

    Example::

        >>> import functional_optim as fo
        >>> tx = fo.matrix_owners(fo.muon(0.02), "spread")
        >>> tx
        chain(scale_by_muon, orthogonalize, add_decayed_weights, scale_by_lr)
    """
    base.check_transformation("matrix_owners", tx, "matrix_owners(muon())")
    check_choice("matrix_owners", ("each", "spread"), owners=owners)
    if not any(x.rule.runs.batched for x in tx.placements):
        raise ValueError(
            "matrix_owners got a transformation without a rule that takes batches of "
            "matrices; pass one such as muon(), or leave matrix_owners out."
        )
    sharding.check_group("matrix_owners", group)
    shared = OwnerGroup(group) if owners == "spread" else None
    return each_placement(tx, lambda x: [x.spread_over(shared)])
