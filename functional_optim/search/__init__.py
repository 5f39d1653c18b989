"""Training without gradients: methods with `ask` for candidates and `tell` for their losses.

Each is three pure functions, `init`, `ask` and `tell`, over any pytree; see `Search`.
"""

from functional_optim.search.annealing import annealing as annealing
from functional_optim.search.base import Search as Search
from functional_optim.search.base import best as best
from functional_optim.search.base import center as center
from functional_optim.search.base import default_population as default_population
from functional_optim.search.base import evaluate as evaluate
from functional_optim.search.cem import cem as cem
from functional_optim.search.cma import cma_es as cma_es
from functional_optim.search.differential_evolution import (
    differential_evolution as differential_evolution,
)
from functional_optim.search.evolution import openai_es as openai_es
from functional_optim.search.evolution import pgpe as pgpe
from functional_optim.search.one_plus_one import one_plus_one as one_plus_one
from functional_optim.search.random_search import random_search as random_search
from functional_optim.search.sep_cma import sep_cma_es as sep_cma_es
from functional_optim.search.shaping import centered_ranks as centered_ranks
from functional_optim.search.snes import snes as snes
