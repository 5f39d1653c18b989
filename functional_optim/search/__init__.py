"""Training without gradients: methods that ask for candidates and are told their losses."""

from functional_optim.search.shaping import centered_ranks as centered_ranks
