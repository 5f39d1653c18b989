"""A Lightning callback for optimizers with two modes."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import Callback


class SwitchModes(Callback):
    """Calls `train()` and `eval()` of optimizers such as `ScheduleFreeAdamW` at the right times.

    It sets training mode before a batch, and evaluation mode before validation and at the end of
    training. So a checkpoint that is written after a validation, or after training, has the
    averages as its weights; one that is written in the middle of an epoch has the training weights.
    You can resume from both. Optimizers without modes are not changed.

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
