"""What pycma's CMA-ES does with given candidates, full and diagonal, for `test_search_formulas.py`.

    pip install cma==4.5.0 && python tests/support/reference/make_pycma.py

Writes `pycma.json`: the candidates of each generation and their ranks, and m, σ, C, p_c and p_σ
after some. Candidates are rounded to six digits before pycma is told of them, so they are exact in
the file. pycma takes them as they are: no clipping (check_points=False), no help for badly
conditioned matrices, and none of the mirrored candidates that it has in populations below 6. The
full C starts at exp(1e-4 i/d) on the diagonal; the file has it under step 0. With CMA_diagonal,
pycma keeps C's diagonal as a vector of deviations; the file has the squares of these as C.
"""

import sys
from pathlib import Path

import cma
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
from reference import write

FILE = Path(__file__).with_name("pycma.json")
GENERATIONS = 60
KEPT = (0, 1, 2, 10, 30, 60)
DIAGONAL = 30
"""Generations of the diagonal rows."""
OPTIONS = {"verbose": -9, "seed": 7, "conditioncov_alleviate": [np.inf, np.inf], "CMA_mirrors": 0}

FUNCTIONS = {
    "sphere": lambda x: float(np.sum(x**2)),
    "ellipsoid": lambda x: float(np.sum(1e6 ** np.linspace(0, 1, len(x)) * x**2)),
    "rosenbrock": lambda x: float(np.sum(100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2)),
    "rastrigin": lambda x: float(np.sum(10 + x**2 - 10 * np.cos(2 * np.pi * x))),
}
ROWS = {"sphere": ("sphere", 4, 8, 0.5), "ellipsoid": ("ellipsoid", 5, 8, 0.3)}
ROWS |= {"rosenbrock": ("rosenbrock", 4, 9, 0.2), "rastrigin": ("rastrigin", 3, 12, 2.0)}
ROWS |= {"one-parent": ("rosenbrock", 16, 3, 0.5), "small-start": ("sphere", 3, 12, 1e-3)}
"""name → function, dimension, population, σ.

one-parent takes C apart every second time only; small-start has h_σ = 0 until σ has grown. (Where
σ grows ten-thousandfold, pycma moves part of it into C.)
"""
DIAGONAL_ROWS = {"ellipsoid": ("ellipsoid", 5, 8, 0.3), "rastrigin": ("rastrigin", 3, 12, 2.0)}
DIAGONAL_ROWS |= {"one-parent": ("rosenbrock", 12, 3, 0.5), "small-start": ("sphere", 3, 12, 1e-3)}


def trajectory(function, d, population, sigma, diagonal=False):
    options = {**OPTIONS, "popsize": population, "CMA_diagonal": diagonal}
    es = cma.CMAEvolutionStrategy(d * [0.7], sigma, options)
    kept, told, stalls = {"0": numbers(es, np.zeros(d), diagonal)}, [], 0
    for step in range(1, (DIAGONAL if diagonal else GENERATIONS) + 1):
        X = [np.array([float(f"{x:.6g}") for x in row]) for row in es.ask()]
        fitness = [FUNCTIONS[function](x) for x in X]
        es.tell(X, fitness, check_points=False)
        told.append([[x.tolist() for x in X], np.argsort(np.argsort(fitness)).tolist()])
        stalls += not es.adapt_sigma.hsig(es)
        if step in KEPT:
            kept[str(step)] = numbers(es, es.adapt_sigma.ps, diagonal)
    found = {"d": d, "population": population, "sigma": sigma, "told": told, "kept": kept}
    return found | {"stalls": stalls}


def numbers(es, ps, diagonal):
    scales = np.broadcast_to(es.sigma_vec.scaling, es.N)
    return {
        "mean": np.asarray(es.mean).tolist(),
        "sigma": float(es.sigma),
        "C": (scales**2 if diagonal else np.asarray(es.sm.C)).tolist(),
        "pc": np.asarray(es.pc).tolist(),
        "ps": np.asarray(ps).tolist(),
    }


def main():
    tables = {
        "rows": {name: trajectory(*row) for name, row in ROWS.items()},
        "diagonal": {name: trajectory(*row, diagonal=True) for name, row in DIAGONAL_ROWS.items()},
    }
    write(FILE, {"cma": cma.__version__}, **tables)


if __name__ == "__main__":
    main()
