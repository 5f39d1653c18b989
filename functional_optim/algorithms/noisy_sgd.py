"""SGD with noise: added to gradients, or for differential privacy.

Neelakantan, Vilnis, Le, Sutskever, Kaiser, Kurach, Martens, "Adding Gradient Noise Improves
Learning for Very Deep Networks", https://arxiv.org/abs/1511.06807, equation 1. Abadi et al., "Deep
Learning with Differential Privacy", https://arxiv.org/abs/1607.00133, Algorithm 1.
"""

from __future__ import annotations

from torch import Tensor

from functional_optim import numeric
from functional_optim.algorithms.sgd import sgd
from functional_optim.core.base import GradientTransformation
from functional_optim.core.chain import chain
from functional_optim.core.factory import factory
from functional_optim.transforms.noise import add_noise
from functional_optim.transforms.privacy import differentially_private_aggregate


@factory
def noisy_sgd(
    lr: numeric.Hyper = 1e-3,
    eta: numeric.Hyper = 0.01,
    gamma: numeric.Hyper = 0.55,
    seed: int | Tensor = 0,
    momentum: numeric.Hyper = 0.0,
    *,
    maximize: bool = False,
) -> GradientTransformation:
    """SGD on gradients to which normal noise of variance eta / tᵞ is added.

    Args:
        lr: learning rate, ≥ 0.
        eta: variance of the noise at the first step, ≥ 0. The paper uses 0.01, 0.3 and 1.
        gamma: decay exponent, ≥ 0. Default 0.55, the paper's.
        seed: of the noise: a Python integer, or a 0-dim tensor of integers; 64 bits.
        momentum: μ, ≥ 0, of torch.optim's momentum. The Python number 0 drops the buffer.
        maximize: ascend instead of descend.

        Hyperparameters may also be 0-dim tensors or schedules. eta and gamma are optax's.

    State: `step`, and for each parameter `noise_key`, which `init` makes of the seed and the path;
    `momentum_buffer`, like the parameters, if there is momentum.

    Raises:
        ValueError: for hyperparameters out of range, and for a seed of more than 64 bits.
        TypeError: if the seed is not an integer.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.noisy_sgd(lr=0.1, eta=1.0)
        >>> w = torch.zeros(1000)
        >>> updates, state = tx.update(torch.ones(1000), tx.init(w), w)
        >>> round(float(updates.mean()), 1), round(float(updates.std()), 1)
        (-0.1, 0.1)
    """
    return chain(add_noise(eta, gamma, seed), sgd(lr, momentum, maximize=maximize))


@factory
def dpsgd(
    lr: numeric.Hyper = 1e-3,
    l2_norm_clip: numeric.Hyper = 1.0,
    noise_multiplier: numeric.Hyper = 1.0,
    seed: int | Tensor = 0,
    momentum: numeric.Hyper = 0.0,
    *,
    maximize: bool = False,
) -> GradientTransformation:
    """SGD with differential privacy: a mean of clipped gradients of single examples, with noise.

    `update` takes the gradients of all examples, (B, *shape of the parameter), see
    `differentially_private_aggregate`. Use a privacy accountant to compute the (ε, δ) of a run.

    Args:
        lr: learning rate, ≥ 0.
        l2_norm_clip: C, the largest norm of an example's gradient, > 0.
        noise_multiplier: σ, ≥ 0: noise of deviation σ C is added to the sum of the gradients.
        seed: of the noise: a Python integer, or a 0-dim tensor of integers; 64 bits. For privacy,
            use a secret seed, not the default, 0.
        momentum: μ, ≥ 0, of torch.optim's momentum. The Python number 0 drops the buffer.
        maximize: ascend instead of descend.

        Hyperparameters may also be 0-dim tensors or schedules.

    State: `step` and `seed` of the noise; `momentum_buffer`, like the parameters, if there is
    momentum.

    Raises:
        ValueError: for hyperparameters out of range, for a seed of more than 64 bits, and from
            update for gradients without a dimension of examples.
        TypeError: if the seed is not an integer.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.dpsgd(lr=1.0, noise_multiplier=0.0)
        >>> w = torch.zeros(2)
        >>> each = torch.tensor([[3.0, 4.0], [0.0, 0.5]])  # norms 5 and 0.5
        >>> tx.update(each, tx.init(w), w)[0]
        tensor([-0.3000, -0.6500])
    """
    aggregate = differentially_private_aggregate(l2_norm_clip, noise_multiplier, seed)
    return chain(aggregate, sgd(lr, momentum, maximize=maximize))
