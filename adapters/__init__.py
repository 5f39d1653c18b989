"""Optimizer objects: torch.optim's contract over functional recipes."""

from functional_optim.adapters.optimizer import Optimizer as Optimizer
from functional_optim.adapters.torch_optim import SGD as SGD
from functional_optim.adapters.torch_optim import Adam as Adam
from functional_optim.adapters.torch_optim import AdamW as AdamW
