"""Any torch optimizer as one of a group of replicas that may fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from functional_optim.adapters.base import OptimizerBase
from functional_optim.adapters.fault_tolerant.proxy import OptimizerProxy, announced
from functional_optim.adapters.fault_tolerant.rounds import Member, Round, Rounds, rounds_of
from functional_optim.adapters.stepping.loss import forget_scale, unscale
from functional_optim.core import base
from functional_optim.core.calls import check_choice, check_flags
from functional_optim.kernels import private
from functional_optim.kernels.interrupts import held
from functional_optim.replicas import Coordinator, Decision, as_coordinator


class FaultTolerantOptimizer(OptimizerProxy):
    """Any optimizer as one of a group of replicas, any of which may fail.

    ::

        opt = FaultTolerantOptimizer(coordinator, torch.optim.AdamW(model.parameters()))
        for x, y in batches:
            opt.zero_grad()                  # a step of the group begins
            loss(model(x), y).backward()
            opt.step()                       # vote; then, if it is committed, update

    A refused step changes neither parameters nor state. A committed step updates the parameters and
    state after the vote: a peer's, if the vote healed this replica.

    `zero_grad` begins a step of the group, and `step` votes on it. A second `zero_grad` does not
    begin another step, unless gradients were computed in between: then their step was skipped (as
    by a GradScaler), and is refused first. `step(closure)` begins the step itself if `zero_grad`
    has not, before the closure is called.

    Several optimizers with one coordinator share its steps: all that have called `zero_grad` before
    the vote have one vote, by the first `step` among them. So `a.zero_grad(), b.zero_grad(),
    a.step(), b.step()` is one vote, and `a.zero_grad(), a.step(), b.zero_grad(), b.step()` are two.
    After a committed vote the next step begins when each of them has taken the last step or called
    `zero_grad` again.

    Args:
        coordinator: a `replicas.Coordinator` or a torchft Manager.
        optimizer: any of torch or of this package that needs one gradient, and no loss.
        average_gradients: average the gradients over the group in `step`: clipping before that
            applies to the gradients of this replica only. A missing gradient counts as zeros, and
            stays None if all replicas lack it. By default the model averages, e.g.
            `torchft.ddp.DistributedDataParallel`.
        heal: what a replica receives from its peer. "everything" (the default): parameters, state,
            the groups' values and the schedulers' states. "schedules": only the last two, for a
            Manager whose `state_dict` contains the model and the optimizer. Neither contains a
            model's buffers: `coordinator.register("buffers", load, save)`.
        nonfinite: "commit" (the default) takes steps with infinite or NaN gradients like others;
            "refuse" votes against them.

    Schedulers: pass each LR scheduler to `follow`, and use the result. Its `step` only advances if
    a step was committed since its last advance, so a scheduler that is called after each batch does
    not advance if the batch is refused. After a heal it continues from the peer's state. Call it
    after `step` and before the next `zero_grad`: later calls warn. Pass copies and unpickled
    schedulers to `follow` again.

    Every `step` calls the hooks of this object; only committed steps call those of the inner
    optimizer and global hooks, once. A pickled or copied object has no coordinator; assign
    `opt.coordinator`. `opt.optim` is the inner optimizer, and `opt.decision` the last decision.
    With `average_gradients`, a GradScaler leaves the check for infinities to this object, as for a
    fused optimizer: a replica that skipped its `step` would make its peers wait.

    Raises:
        TypeError: if an argument is not a coordinator or optimizer; for optimizers that evaluate
            several points, such as L-BFGS, SAM and GradientFree, which move the parameters before a
            vote is possible; for a recipe that reads the loss.
        ValueError: for an unknown value of heal or nonfinite.
        RuntimeError: from `step`, if no step has begun (except the empty step by which
            `torch.distributed.checkpoint` creates an optimizer's state), or if a scheduler was
            constructed with this object or the inner optimizer and none was passed to `follow`; as
            `Coordinator.decide`.
            If the inner optimizer raises an error, its step is undone, and a peer must heal this
            replica.

    Example::

        >>> import torch, functional_optim as fo
        >>> from functional_optim.adapters import FaultTolerantOptimizer
        >>> w = torch.nn.Parameter(torch.ones(1))
        >>> group = fo.replicas.Scripted([True, False])
        >>> opt = FaultTolerantOptimizer(group, torch.optim.SGD([w], lr=0.5))
        >>> for _ in range(2):
        ...     opt.zero_grad()
        ...     w.sum().backward()
        ...     opt.step()
        ...     print(w.item(), opt.decision.committed)
        0.5 True
        0.5 False
    """

    def __init__(
        self,
        coordinator: Any,
        optimizer: torch.optim.Optimizer,
        *,
        average_gradients: bool = False,
        heal: Literal["everything", "schedules"] = "everything",
        nonfinite: Literal["commit", "refuse"] = "commit",
    ) -> None:
        group = as_coordinator(coordinator)
        _check_optimizer(optimizer)
        who = type(self).__name__
        check_choice(who, ("everything", "schedules"), heal=heal)
        check_choice(who, ("commit", "refuse"), nonfinite=nonfinite)
        check_flags({"average_gradients": "bool"}, {"average_gradients": average_gradients})
        self._make_hooks()
        self._member = Member(optimizer, average_gradients, heal, nonfinite)
        self.coordinator = group

    @property
    def optim(self) -> torch.optim.Optimizer:
        """The inner optimizer."""
        return self._member.optim

    @property
    def decision(self) -> Decision | None:
        """The decision of the group on the last `step`; None before the first."""
        return self._member.decision

    @property
    def coordinator(self) -> Coordinator | None:
        """The connection to the group. Assign one to a copy."""
        rounds = self._member.rounds
        return None if rounds is None else rounds.coordinator

    @coordinator.setter
    def coordinator(self, coordinator: Any) -> None:
        group, member = as_coordinator(coordinator), self._member
        if member.rounds is not None and member.rounds.coordinator is group:
            return
        if member.round is not None:
            raise RuntimeError(
                "this optimizer's step has begun with another coordinator; call step() first."
            )
        rounds = rounds_of(group)
        number = len(rounds.members)
        key = f"optimizer.{number}" if number else "optimizer"
        group.register(key, member.load, member.saved)
        rounds.members.append(member)
        member.rounds = rounds

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Read by GradScaler: whether to call `step` with infinite gradients, too."""
        return self._member.average_gradients

    def follow(self, scheduler: Any) -> Any:
        """Make a scheduler that only advances with committed steps, and that heals.

        Args:
            scheduler: has `step`, `state_dict` and `load_state_dict`. For nested schedulers, pass
                the outer one.

        Returns:
            The scheduler to use from now on. It has the attributes and, for `isinstance`, the class
            of the passed scheduler. Do not use the passed scheduler: it also advances with refused
            steps.

        Raises:
            TypeError: if one of these methods is missing.

        Example::

            >>> import torch
            >>> from functional_optim.adapters import SGD, FaultTolerantOptimizer
            >>> from functional_optim.replicas import Scripted
            >>> w = torch.nn.Parameter(torch.ones(2))
            >>> opt = FaultTolerantOptimizer(Scripted([True, False]), SGD([w], lr=0.1))
            >>> scheduler = opt.follow(torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5))
            >>> for _ in range(2):
            ...     opt.zero_grad()
            ...     w.sum().backward()
            ...     opt.step()
            ...     scheduler.step()
            >>> scheduler.get_last_lr()  # once, as the second step was refused
            [0.05]
        """
        return self._member.schedules.follow(scheduler)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Begin a step of the group, and reset the gradients.

        If a replica is healed at the beginning of a step (torchft with `use_async_quorum=False`),
        this changes the parameters.

        Args:
            set_to_none: set each to None (the default), or fill it with zeros.

        Raises:
            RuntimeError: as `Coordinator.start`.
        """
        member = self._member
        if member.initializes:
            member.initializes = False
        elif not member.evaluates:
            self._rounds().join(member)
        member.optim.zero_grad(set_to_none)
        member.remember_zeroed()

    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Vote on the step, and take it if the vote commits it.

        Args:
            closure: computes the gradients and returns the loss. Called once, with gradients
                enabled. It may call `zero_grad`.

        Returns:
            The closure's loss; None without a closure. `decision` is the decision on the step.

        Raises:
            RuntimeError: if no step has begun; as `Coordinator.decide`; errors of the optimizer.
        """
        member = self._member
        if closure is None and private.state_creation() is not None:
            member.optim.step(closure=None)
            member.initializes = True
            return None
        try:
            return self._voted(closure)
        except BaseException:
            forget_scale(self)
            raise
        finally:
            member.found_inf = None

    step = announced(_step)

    def _voted(self, closure: Callable[[], Any] | None) -> Any:
        member = self._member
        self._check_schedulers()
        rounds = self._rounds()
        if member.round is None and closure is not None:
            rounds.join(member)
        now = member.round
        if now is None:
            raise RuntimeError(rounds.why_none(member))
        loss = None
        if closure is not None:
            member.evaluates = True
            try:
                loss = base.recorded(closure)
            finally:
                member.evaluates = False
        self._unscale(now)
        if now.decision is None:
            rounds.vote(now)
        elif member in now.late or (member in now.empty and member.has_gradients()):
            raise RuntimeError(
                "this optimizer's gradients were made after another optimizer's step() had voted "
                "on the step that they share; call its zero_grad() after that step(), for another "
                "vote, or compute its gradients before."
            )
        held(self._settle, now)
        if rounds.waiting:
            rounds.begin()
        return loss

    def _settle(self, now: Round) -> None:
        """Execute the decision. An interrupt in between would make this replica differ from its
        peers."""
        member = self._member
        now.leave(member)
        member.decision = now.decision
        member.has_stepped = True
        if now.decision is not None and now.decision.committed:
            self._take(now)

    def _take(self, now: Round) -> None:
        member = self._member
        try:
            member.optim.step()
        except BaseException as error:
            group = self._rounds().coordinator
            reported = error if isinstance(error, Exception) else RuntimeError(type(error).__name__)
            group.report_error(reported)
            now.decision = member.decision = group.decision
            raise
        member.schedules.commits += 1

    def _unscale(self, now: Round) -> None:
        """Do a GradScaler's work, if it leaves it to `step`."""
        shared = vars(self)
        self._member.found_inf = found = shared.get("found_inf")
        scale = shared.get("grad_scale")
        if now.decision is not None and now.decision.committed and found:
            raise RuntimeError(
                "another optimizer's step() has committed the step that they share, but the "
                "GradScaler has found an infinite gradient of this one, clipped since; clip by "
                "norm, or call its zero_grad() after that step(), for another vote."
            )
        if isinstance(scale, Tensor):
            if now.decision is not None:
                raise RuntimeError(
                    "this optimizer's gradients were averaged when another one voted on the step "
                    "that they share, before they were unscaled; call scaler.unscale_(opt) for "
                    "each before the first step."
                )
            unscale([p.grad for p in self._member.parameters() if p.grad is not None], scale)

    def _check_schedulers(self) -> None:
        """Raise RuntimeError if a scheduler would step whether or not steps are committed.

        torch's schedulers mark the `step` of the optimizer with which they are made.
        """
        steps = self.step, self.optim.step
        marked = any(getattr(step, "_wrapped_by_lr_sched", False) for step in steps)
        if marked and not self._member.schedules.were_followed:
            raise RuntimeError(
                "a learning rate scheduler was made with this optimizer, but does not follow its "
                "commits; write scheduler = opt.follow(scheduler), and use the result."
            )

    def _rounds(self) -> Rounds:
        rounds = self._member.rounds
        if rounds is None:
            raise RuntimeError(
                "this optimizer was copied or unpickled, and has no coordinator; assign "
                "opt.coordinator = ... first."
            )
        return rounds

    def __getstate__(self) -> dict[str, Any]:
        names = ("optim", "average_gradients", "heal", "nonfinite")
        return {name: getattr(self._member, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._make_hooks()
        self._member = Member(**state)


def _check_optimizer(optimizer: Any) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"a torch optimizer is needed, but got a {type(optimizer).__name__}; pass the "
            "coordinator first, then the optimizer."
        )
    if isinstance(optimizer, FaultTolerantOptimizer):
        raise TypeError("this optimizer is already fault tolerant; pass its inner optimizer.")
    ours = isinstance(optimizer, OptimizerBase)
    if isinstance(optimizer, torch.optim.LBFGS) or (ours and optimizer.tries_points):
        raise TypeError(
            f"{type(optimizer).__name__} cannot be fault tolerant here: it evaluates its closure "
            "at several trial points, and has moved the parameters long before the group could "
            "vote; use fo.replicas.Replica with a transformation, or an optimizer that needs one "
            "gradient."
        )
    if ours and any(
        "value" in optimizer.checked_transform(x, in_step=True).extra
        for x in optimizer.param_groups
    ):
        raise TypeError(
            f"{type(optimizer).__name__} cannot be fault tolerant here: its recipe reads the loss, "
            "which differs between replicas, so they would drift apart; use a recipe without it, "
            "such as fo.adamw."
        )
