"""What Lightning's Trainer needs for optimizers with two modes."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import Callback


class SwitchModes(Callback):
    """Calls `train()` and `eval()` of optimizers such as `ScheduleFreeAdamW` at the right places.

    Before a batch they are brought into training mode, before validation and at the end of training
    into evaluation mode. A checkpoint that is written after a validation, or after training, thus
    has the averages as its weights; one that is written in the middle of an epoch has the weights
    of training. A run can be resumed from both. Optimizers without modes are left alone.

    Example::

        >>> import lightning
        >>> from functional_optim.adapters.lightning import SwitchModes
        >>> trainer = lightning.Trainer(
        ...     accelerator="cpu", logger=False, enable_progress_bar=False,
        ...     enable_checkpointing=False, callbacks=[SwitchModes()],
        ... )
    """

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        _call(trainer, "train")

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        _call(trainer, "eval")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        _call(trainer, "eval")


def _call(trainer: Any, mode: str) -> None:
    for opt in trainer.optimizers:
        switch = getattr(opt, mode, None)
        if callable(switch):
            switch()
