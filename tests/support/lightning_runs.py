"""Small runs of Lightning's Trainer, to compare: always on the CPU, quiet, from the same start."""

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import lightning
import torch
from helpers import assert_close, assert_same
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

for _name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero", "lightning.fabric"):
    logging.getLogger(_name).setLevel(logging.ERROR)

BATCHES = 6
ROWS = 6


class Net(lightning.LightningModule):
    """Two layers with the same weights each time, and a loss that is another one for each batch.

    configure: from this module to what `configure_optimizers` returns.
    bias: False leaves matrices only. dtype: of the weights, and of the loss.
    losses: of all batches.
    """

    def __init__(
        self, configure: Callable[[Any], Any], bias: bool = True, dtype: torch.dtype = torch.float64
    ) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            layers = [torch.nn.Linear(4, 5, bias), torch.nn.Tanh(), torch.nn.Linear(5, 3, bias)]
        self.layers = torch.nn.Sequential(*layers).to(dtype)
        self.configure = configure
        self.losses: list[float] = []

    def loss(self, x: Tensor) -> Tensor:
        return (self.layers(x) - x.sum(1, keepdim=True)).square().mean()

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = self.loss(batch[0])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return self.configure(self)


class ByHand(Net):
    """The same with manual optimization."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False


def data(batches: int = BATCHES, dtype: torch.dtype = torch.float64) -> Tensor:
    """What the batches are made of."""
    return torch.randn(batches * ROWS, 4, dtype=dtype, generator=torch.Generator().manual_seed(1))


def loader(batches: int = BATCHES, dtype: torch.dtype = torch.float64) -> DataLoader:
    return DataLoader(TensorDataset(data(batches, dtype)), batch_size=ROWS)


class Resumable(DataLoader):
    """A loader that goes on where it was when it was saved, as `torchdata`'s does.

    at: how many batches of this epoch it has given.
    """

    def __init__(self, batches: int = BATCHES) -> None:
        super().__init__(TensorDataset(data(batches)), batch_size=ROWS)
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        self.at %= len(self)  # Lightning asks for as many as there are, and so ends no iterator
        for i, batch in enumerate(super().__iter__()):
            if i == self.at:
                self.at += 1
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.at = state_dict["at"]


def trainer(max_epochs: int = 1, **kwargs: Any) -> lightning.Trainer:
    """One that writes nothing, unless it is told to."""
    silent = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    silent |= {"enable_progress_bar": False, "enable_model_summary": False}
    return lightning.Trainer(max_epochs=max_epochs, **{**silent, **kwargs})


def fit(
    module: Any, data: Any = None, max_epochs: int = 1, ckpt_path: Any = None, **kwargs: Any
) -> lightning.Trainer:
    """Train a module, and return the trainer."""
    made = trainer(max_epochs, **kwargs)
    made.fit(module, loader() if data is None else data, ckpt_path=ckpt_path)
    return made


def values(module: torch.nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in module.parameters()]


def found(module: Net, made: lightning.Trainer) -> Any:
    """Weights, losses, and what the optimizers keep, copied, to compare."""
    saved = [opt.state_dict() for opt in made.optimizers]
    groups = [group for each in saved for group in each["param_groups"]]
    kept = values(module), module.losses, [each["state"] for each in saved]
    return copy.deepcopy((kept, groups))


def run(configure: Callable[[Any], Any], kind: type[Net] = Net, **kwargs: Any) -> Any:
    """Train a new module, and return what was found."""
    own = {key: kwargs.pop(key) for key in ("bias", "dtype") if key in kwargs}
    module = kind(configure, **own)
    return found(module, fit(module, **kwargs))


def assert_agree(ours: Any, theirs: Any, tolerance: float = 1e-10) -> None:
    """Two runs ended with the same weights, losses and states, and with the very same groups."""
    assert_close(ours[0], theirs[0], tolerance)
    assert ours[1] == theirs[1]


def assert_ended_alike(some: Any, others: Any) -> None:
    """Two runs, of which one began later, ended alike; their last losses are the same, too."""
    assert_same(some[0][::2], others[0][::2])
    assert some[1] == others[1]
    late = min(len(some[0][1]), len(others[0][1]))
    assert late > 1
    assert_same(some[0][1][-late:], others[0][1][-late:])


def assert_moved(run: Any) -> None:
    """It is a run in which something happened."""
    start = values(Net(None, bias=len(run[0][0]) == 4))
    assert not torch.equal(run[0][0][0], start[0].to(run[0][0][0]))
    assert len(set(run[0][1])) > 1
