"""What is imported on demand: nothing of it at first, and then as if it had always been there."""

import ast
import importlib
import inspect
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import functional_optim as fo
from functional_optim import adapters

ON_DEMAND = (
    "functional_optim.adapters.fault_tolerant",
    "functional_optim.adapters.gradient_free",
    "functional_optim.adapters.lbfgs",
    "functional_optim.adapters.stub",
    "functional_optim.algorithms.lbfgs",
    "functional_optim.cache",
    "functional_optim.estimators",
    "functional_optim.replicas",
    "functional_optim.schedules",
    "functional_optim.search",
    "functional_optim.tuning",
    "functional_optim.warmup",
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


LOAD = "import gc, sys, functional_optim, functional_optim.adapters"
PROGRAMS = {
    "modules": f"{LOAD}\nprint(*sys.modules)",
    "on": f"{LOAD}\nprint(gc.isenabled())",
    "off": f"import gc; gc.disable()\n{LOAD}\nprint(gc.isenabled())",
    **{code: f"{code}\nprint(x.__name__)" for code in FIRST},
}
"""What is asked of processes in which nothing but torch has been imported; more follow below."""

for name in ("functional_optim", "functional_optim.adapters"):
    late = f"import {name} as package\nprint(*(set(package.__all__) - set(vars(package))))"
    PROGRAMS |= {f"late in {name}": late, f"* of {name}": f"from {name} import *\nprint(*dir())"}

FORKS = """
import os, sys, torch
for i, program in enumerate(sys.argv[2:]):
    if not os.fork():
        os.mkdir(folder := os.path.join(sys.argv[1], str(i)))
        exec(program, {"folder": folder})
        sys.stdout.flush()
        os._exit(0)
    os.wait()
    print(end="\\0", flush=True)
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """What each of the programs prints. The name `folder` in them is one of their own."""
    command = [sys.executable, "-c", FORKS, str(tmp_path_factory.mktemp("programs"))]
    done = subprocess.run(
        [*command, *PROGRAMS.values()], capture_output=True, text=True, check=False
    )
    sys.stderr.write(done.stderr)  # shown when a test fails
    said = [text.strip() for text in done.stdout.split("\0")[:-1]]
    return dict(zip(PROGRAMS, said, strict=True))


def test_an_import_loads_none_of_it(printed):
    """Neither torch's compiler; nor does it change whether garbage is collected."""
    modules = printed["modules"].split()
    late = (*ON_DEMAND, "torch._dynamo", "torch._inductor")
    assert [name for name in modules if name.startswith(late)] == []
    assert {"functional_optim.adapters", "functional_optim.algorithms.adam"} <= {*modules}
    assert (printed["on"], printed["off"]) == ("True", "False")


def test_any_of_it_may_be_the_first_thing_that_a_program_names(printed):
    assert {code: printed[code] for code in FIRST} == FIRST


@both
def test_it_is_what_type_checkers_see_and_a_star_imports_all(package, printed):
    name = package.__name__
    assert set(printed[f"late in {name}"].split()) <= declared(package).keys()
    starred = set(printed[f"* of {name}"].split())
    assert declared(package).keys() <= set(package.__all__) <= starred
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


PROGRAMS["compiled"] = """
import pathlib, runpy
path = pathlib.Path(folder, "program.py")
path.write_text(
    "import torch, functional_optim as fo, functional_optim.adapters as adapters\\n"
    "@torch.compile(backend='eager', fullgraph=True)\\n"
    "def f(x):\\n"
    "    rate = fo.schedules.linear(1.0, 0.0, 10)(x.sum())\\n"
    "    return x * rate + len(adapters.LBFGS.__name__) + len(fo.mezo.__name__)\\n"
    "print([f(torch.full((2,), 2.5)).tolist() for _ in range(2)])"
)
runpy.run_path(str(path))
"""


def test_a_compiled_function_may_be_the_first_to_read_it(printed):
    assert printed["compiled"] == "[[10.25, 10.25], [10.25, 10.25]]"


PROGRAMS["steps"] = """
import os, sys, torch, functional_optim as fo, functional_optim.adapters as adapters
os.environ["FUNCTIONAL_OPTIM_CACHE"] = folder
params = {"w": torch.ones(4, 3), "b": torch.ones(3)}
recipes = {
    "AdamW": fo.adamw,
    "Adafactor": fo.adafactor,
    "LAMB": fo.lamb,
    "Lion": fo.lion,
    "int8 AdamW": lambda lr: fo.stored(fo.adamw(lr), "int8", min_size=0),
    "SOAP": lambda lr: fo.soap(lr),
    "MuonAdamW": lambda lr: fo.muon_adamw(lr, lr),
}
for name, recipe in recipes.items():
    tx, p = recipe(0.1), {key: x.clone() for key, x in params.items()}
    fo.compile(tx, strict=True)(params, tx.init(p), p)
    p = {key: torch.nn.Parameter(x.clone()) for key, x in params.items()}
    for key, x in p.items():
        x.grad = params[key]
    made = getattr(adapters, name, None) or (lambda ps, lr: adapters.Optimizer(ps, recipe, lr=lr))
    made(p.items(), lr=0.1, **({"muon": "w"} if name == "MuonAdamW" else {})).step()
    late = [x for x in ("torch._dynamo", "torch._inductor", "sympy") if x in sys.modules]
    if late:
        break
print(name, late, len(os.listdir(folder)) > len(recipes))
"""


def test_the_first_step_of_a_process_imports_no_compiler(printed):
    """Nor does it find a kernel that was compiled before."""
    assert printed["steps"] == "MuonAdamW [] True"


CLONE = """
import os, shutil, sys
folder = os.path.join(os.path.dirname(folder), "clone")
for name in ("functional_optim", "adapters"):
    if not os.path.exists(os.path.join(folder, name)):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(os.path.join({root!r}, name), os.path.join(folder, name), ignore=ignored)
if {alone}:
    sys.meta_path[:] = [x for x in sys.meta_path if "editable" not in repr(x).lower()]
sys.path[0] = folder
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
assert adapters.__file__.startswith(folder), adapters.__file__
print("stepped")
"""
for alone in (True, False):  # beside an editable install of another clone
    PROGRAMS[f"clone, {alone=}"] = CLONE.format(alone=alone, root=str(Path(fo.__file__).parents[1]))


@pytest.mark.parametrize("alone", [True, False])
def test_a_clone_on_the_path_is_as_an_installed_package(printed, alone):
    """Also where another clone is installed, editable."""
    assert printed[f"clone, {alone=}"] == "stepped"
