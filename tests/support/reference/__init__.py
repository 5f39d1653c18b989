"""The papers' loops for one tensor, as plainly as they can be written, in numpy and float64."""

from reference.adam import adam as adam
from reference.adam import adamw as adamw
from reference.sgd import sgd as sgd
