"""Gradients without a backward pass: estimators for any transformation."""

from functional_optim.estimators.diagonals import gauss_newton_bartlett as gauss_newton_bartlett
from functional_optim.estimators.diagonals import hutchinson as hutchinson
from functional_optim.estimators.diagonals import observe_hessian as observe_hessian
from functional_optim.estimators.evolution import es_gradient as es_gradient
from functional_optim.estimators.forward import forward_gradient as forward_gradient
from functional_optim.estimators.mezo import mezo as mezo
from functional_optim.estimators.mezo import mezo_step_ as mezo_step_
from functional_optim.estimators.protocol import Estimator as Estimator
from functional_optim.estimators.protocol import EstimatorState as EstimatorState
from functional_optim.estimators.protocol import replay as replay
from functional_optim.estimators.spsa import spsa as spsa
from functional_optim.estimators.spsa import spsa_gain as spsa_gain
