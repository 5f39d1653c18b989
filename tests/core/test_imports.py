"""What is imported on demand: nothing of it at first, and then as if it had always been there."""

import ast
import importlib
import inspect
import pickle
import shutil
from pathlib import Path

import pytest
from forks import forks

import functional_optim as fo
from functional_optim import adapters

ON_DEMAND = (
    *("functional_optim.adapters.fault_tolerant", "functional_optim.adapters.gradient_free"),
    *("functional_optim.adapters.lbfgs", "functional_optim.adapters.stub"),
    *("functional_optim.algorithms.lbfgs", "functional_optim.cache"),
    *("functional_optim.estimators", "functional_optim.replicas", "functional_optim.schedules"),
    *("functional_optim.search", "functional_optim.tuning", "functional_optim.warmup"),
)
"""What no program has to load that does not use it."""

FIRST = {
    "from functional_optim import mezo as x": "mezo",
    "from functional_optim import search as x, schedules": "functional_optim.search",
    "import functional_optim.search as s; x = s.cma_es": "cma_es",
    "import functional_optim as fo; x = fo.replicas.Local": "Local",
    "from functional_optim.adapters import LBFGS as x, Adam": "LBFGS",
    "import functional_optim.algorithms.lbfgs, functional_optim as fo; x = fo.lbfgs": "lbfgs",
    "import pickle; x = pickle.loads(b'cfunctional_optim\\nspsa\\n.')": "spsa",
}
"""Programs that name something at once, and its name."""

both = pytest.mark.parametrize("package", [fo, adapters], ids=lambda x: x.__name__)


def declared(package):
    """The names that type checkers see: each with the module it comes from."""
    stub = Path(package.__file__).with_suffix(".pyi")
    return {
        alias.name: statement.module
        for statement in ast.parse(stub.read_text()).body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """What each program prints that starts where nothing but torch has been imported."""
    with forks() as run:
        yield lambda *programs: [run(x, tmp_path_factory.mktemp("program")) for x in programs]


def test_an_import_loads_none_of_it(printed):
    """Neither torch's compiler; nor does it change whether garbage is collected."""
    load = "import gc, sys, functional_optim, functional_optim.adapters"
    last = f"{load}\nprint(gc.isenabled())"
    modules, on, off = printed(
        f"{load}\nprint(*sys.modules)", last, f"import gc; gc.disable()\n{last}"
    )
    late = (*ON_DEMAND, "torch._dynamo", "torch._inductor")
    assert [name for name in modules.split() if name.startswith(late)] == []
    assert {"functional_optim.adapters", "functional_optim.algorithms.adam"} <= {*modules.split()}
    assert (on, off) == ("True", "False")


def test_any_of_it_may_be_the_first_thing_that_a_program_names(printed):
    assert printed(*(f"{code}\nprint(x.__name__)" for code in FIRST)) == list(FIRST.values())


@both
def test_it_is_what_type_checkers_see_and_a_star_imports_all(package, printed):
    name = package.__name__
    late, starred = printed(
        f"import {name} as package\nprint(*(set(package.__all__) - set(vars(package))))",
        f"from {name} import *\nprint(*dir())",
    )
    assert set(late.split()) <= declared(package).keys()
    assert declared(package).keys() <= set(package.__all__) <= set(starred.split())
    assert set(package.__all__) <= set(dir(package))


@both
def test_every_name_is_the_one_of_its_module(package):
    for name, home in declared(package).items():
        found = getattr(package, name)
        if inspect.ismodule(found):
            assert found is importlib.import_module(f"{home}.{name}")
        else:
            assert found is getattr(importlib.import_module(home), name)
            assert pickle.loads(pickle.dumps(found)) is found


@both
def test_an_unknown_name_is_an_attribute_error(package):
    with pytest.raises(AttributeError, match=f"'{package.__name__}' has no attribute 'mezzo'"):
        _ = package.mezzo
    assert not hasattr(package, "mezzo")


def test_a_compiled_function_may_be_the_first_to_read_it(tmp_path, printed):
    path = tmp_path / "program.py"
    path.write_text(
        "import torch, functional_optim as fo, functional_optim.adapters as adapters\n"
        "@torch.compile(backend='eager', fullgraph=True)\n"
        "def f(x):\n"
        "    rate = fo.schedules.linear(1.0, 0.0, 10)(x.sum())\n"
        "    return x * rate + len(adapters.LBFGS.__name__) + len(fo.mezo.__name__)\n"
        "print([f(torch.full((2,), 2.5)).tolist() for _ in range(2)])"
    )
    program = f"import runpy; runpy.run_path({str(path)!r})"
    assert printed(program) == ["[[10.25, 10.25], [10.25, 10.25]]"]


STEPS = """
import os, sys, torch, functional_optim as fo, functional_optim.adapters as adapters
os.environ["FUNCTIONAL_OPTIM_CACHE"] = {folder!r}
params = {{"w": torch.ones(4, 3), "b": torch.ones(3)}}
recipes = {{
    "AdamW": fo.adamw,
    "Adafactor": fo.adafactor,
    "LAMB": fo.lamb,
    "Lion": fo.lion,
    "int8 AdamW": lambda lr: fo.stored(fo.adamw(lr), "int8", min_size=0),
    "SOAP": lambda lr: fo.soap(lr),
    "MuonAdamW": lambda lr: fo.muon_adamw(lr, lr),
}}
for name, recipe in recipes.items():
    tx, p = recipe(0.1), {{key: x.clone() for key, x in params.items()}}
    fo.compile(tx, strict=True)(params, tx.init(p), p)
    p = {{key: torch.nn.Parameter(x.clone()) for key, x in params.items()}}
    for key, x in p.items():
        x.grad = params[key]
    made = getattr(adapters, name, None) or (lambda ps, lr: adapters.Optimizer(ps, recipe, lr=lr))
    made(p.items(), lr=0.1, **({{"muon": "w"}} if name == "MuonAdamW" else {{}})).step()
    late = [x for x in ("torch._dynamo", "torch._inductor", "sympy") if x in sys.modules]
    if late:
        break
print(name, late, len(os.listdir({folder!r})) > len(recipes))
"""


def test_the_first_step_of_a_process_imports_no_compiler(tmp_path, printed):
    """Nor does it find a kernel that was compiled before."""
    assert printed(STEPS.format(folder=str(tmp_path))) == ["MuonAdamW [] True"]


CLONE = """
import sys
if {alone}:
    sys.meta_path[:] = [x for x in sys.meta_path if "editable" not in repr(x).lower()]
sys.path.insert(0, {folder!r})
import pickle, torch
import functional_optim.adapters.stepping.plan
import functional_optim as fo
from functional_optim import adapters
model = torch.nn.Linear(2, 2)
opt = adapters.SOAP(model.parameters())
model(torch.ones(1, 2)).sum().backward()
opt.step()
pickle.loads(pickle.dumps(opt)).step()
assert fo.adapters is adapters
assert adapters.__file__.startswith({folder!r}), adapters.__file__
"""


def test_a_clone_on_the_path_is_as_an_installed_package(tmp_path, printed):
    """Also where another clone is installed, editable."""
    root = Path(fo.__file__).parents[1]
    for name in ("functional_optim", "adapters"):
        shutil.copytree(root / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for alone in (True, False):  # beside an editable install of another clone
        printed(CLONE.format(folder=str(tmp_path), alone=alone))
