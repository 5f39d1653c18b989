"""NIST's reference data sets for nonlinear regression, with certified values.

https://www.itl.nist.gov/div898/strd/nls/nls_main.shtml; `nist.json` has their data, two starting
points, certified parameters, standard deviations and residual sums as NIST publishes them. The
models are written for numpy and torch alike.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

KNOWN = json.loads((Path(__file__).parent / "nist.json").read_text())


class DataSet(NamedTuple):
    """model(b, x, exp, cos, sin, atan) → y. y and x: numpy arrays; of Nelson x has two columns."""

    name: str
    model: Callable[..., Any]
    y: Any
    x: Any
    starts: list[list[float]]
    certified: list[float]
    deviations: list[float]
    rss: float

    def residuals(self, lib: Any) -> Callable[[Any], Any]:
        """Model minus data, as a function of b, in torch or numpy."""
        as_array = torch.as_tensor if lib is torch else np.asarray
        y, x = as_array(self.y), as_array(self.x)
        return lambda b: self.model(b, x, lib) - y


def exponentials(b: Any, x: Any, lib: Any) -> Any:
    return b[0] * lib.exp(-b[1] * x) + b[2] * lib.exp(-b[3] * x) + b[4] * lib.exp(-b[5] * x)


def gauss(b: Any, x: Any, lib: Any) -> Any:
    first = b[2] * lib.exp(-(((x - b[3]) / b[4]) ** 2))
    return b[0] * lib.exp(-b[1] * x) + first + b[5] * lib.exp(-(((x - b[6]) / b[7]) ** 2))


def chwirut(b: Any, x: Any, lib: Any) -> Any:
    return lib.exp(-b[0] * x) / (b[1] + b[2] * x)


def cubic(b: Any, x: Any, lib: Any) -> Any:
    above = b[0] + b[1] * x + b[2] * x**2 + b[3] * x**3
    return above / (1 + b[4] * x + b[5] * x**2 + b[6] * x**3)


def enso(b: Any, x: Any, lib: Any) -> Any:
    def wave(i: int, period: Any) -> Any:
        phase = 2 * math.pi * x / period
        return b[i] * lib.cos(phase) + b[i + 1] * lib.sin(phase)

    return b[0] + wave(1, 12) + wave(4, b[3]) + wave(7, b[6])


MODELS: dict[str, Callable[..., Any]] = {
    "Misra1a": lambda b, x, lib: b[0] * (1 - lib.exp(-b[1] * x)),
    "Chwirut2": chwirut,
    "Chwirut1": chwirut,
    "Lanczos3": exponentials,
    "Gauss1": gauss,
    "Gauss2": gauss,
    "DanWood": lambda b, x, lib: b[0] * x ** b[1],
    "Misra1b": lambda b, x, lib: b[0] * (1 - (1 + b[1] * x / 2) ** -2),
    "Kirby2": lambda b, x, lib: (b[0] + b[1] * x + b[2] * x**2) / (1 + b[3] * x + b[4] * x**2),
    "Hahn1": cubic,
    "Nelson": lambda b, x, lib: b[0] - b[1] * x[:, 0] * lib.exp(-b[2] * x[:, 1]),
    "MGH17": lambda b, x, lib: b[0] + b[1] * lib.exp(-x * b[3]) + b[2] * lib.exp(-x * b[4]),
    "Lanczos1": exponentials,
    "Lanczos2": exponentials,
    "Gauss3": gauss,
    "Misra1c": lambda b, x, lib: b[0] * (1 - (1 + 2 * b[1] * x) ** -0.5),
    "Misra1d": lambda b, x, lib: b[0] * b[1] * x / (1 + b[1] * x),
    "Roszman1": lambda b, x, lib: b[0] - b[1] * x - lib.arctan(b[2] / (x - b[3])) / math.pi,
    "ENSO": enso,
    "MGH09": lambda b, x, lib: b[0] * (x**2 + x * b[1]) / (x**2 + x * b[2] + b[3]),
    "Thurber": cubic,
    "BoxBOD": lambda b, x, lib: b[0] * (1 - lib.exp(-b[1] * x)),
    "Rat42": lambda b, x, lib: b[0] / (1 + lib.exp(b[1] - b[2] * x)),
    "MGH10": lambda b, x, lib: b[0] * lib.exp(b[1] / (x + b[2])),
    "Eckerle4": lambda b, x, lib: b[0] / b[1] * lib.exp(-0.5 * ((x - b[2]) / b[1]) ** 2),
    "Rat43": lambda b, x, lib: b[0] / (1 + lib.exp(b[1] - b[2] * x)) ** (1 / b[3]),
    "Bennett5": lambda b, x, lib: b[0] * (b[1] + x) ** (-1 / b[2]),
}


def data_set(name: str) -> DataSet:
    """A data set; of Nelson y is the logarithm that its model describes."""
    known = KNOWN[name]
    table = np.array(known["data"])
    y, x = table[:, 0], table[:, 1]
    if name == "Nelson":
        y, x = np.log(y), table[:, 1:]
    rest = [known[key] for key in ("starts", "certified", "deviations", "rss")]
    return DataSet(name, MODELS[name], y, x, *rest)
