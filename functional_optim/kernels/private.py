"""The private names of torch that this package uses, all of them, and what is done without each.

`NAMES` lists them, except those of `state_creation`, `without_memory`, `differentiated` and
`restore`. A torch that lacks one is served by the Python below it, which is slower, or leaves
something out, but steps no parameter wrongly. `tests/core/test_private.py` deletes each.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])

NAMES = (
    "torch._C._len_torch_dispatch_stack",
    "torch._ops._len_torch_dispatch_stack_pre_dispatch",
    "torch._C._functorch.peek_interpreter_stack",
    "torch._C._set_grad_enabled",
    "torch._C._dynamo.guards.TensorGuards",
    "torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr",
    "torch.autograd._profiler_enabled",
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch._dynamo.symbolic_convert",
    "_dynamo_marked_constant",
)
"""The last one is an attribute of functions; the one before it is imported while torch traces."""


def _found(name: str) -> Any:
    """What torch has under a name; None if it has nothing."""
    found: Any = torch
    for part in name.split(".")[1:]:
        found = getattr(found, part, None)
    return found


def _called_dispatch() -> int:
    """Whether a dispatch mode is active, as an operation calls Python then. The mode sees it."""
    names: list[str] = []
    before = sys.getprofile()
    try:
        sys.setprofile(lambda frame, event, arg: names.append(frame.f_code.co_name))
        torch.empty(0, device="cpu")
    finally:
        sys.setprofile(before)
    return int("__torch_dispatch__" in names)


def _transforming_frame() -> Any:
    """The frame of a transform of torch.func, or of torch.vmap, that has called us; None if there
    is none."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("torch._functorch."):
            return frame
        frame = frame.f_back
    return None


dispatch_modes: Callable[[], int] = _found(NAMES[0]) or _called_dispatch
"""How many dispatch modes, such as make_fx's, see operations."""

early_dispatch_modes: Callable[[], int] = _found(NAMES[1]) or _called_dispatch
"""How many see them before autograd does."""

transform: Callable[[], Any] = _found(NAMES[2]) or _transforming_frame
"""Something for the innermost transform of torch.func that is active; None if none is."""

set_grad_enabled: Callable[[bool], Any] = _found(NAMES[3]) or torch.set_grad_enabled
"""`torch.set_grad_enabled`, in a third of its time."""

TensorGuards: Any = _found(NAMES[4])
"""With which torch.compile guards its inputs, 10 ns a tensor; None: compare attributes."""

data_reader: int = _found(NAMES[5]) or 0
"""The address of torch's function from a tensor object to its data; 0: ask each tensor."""

profiling: Callable[[], bool] = _found(NAMES[6]) or (lambda: True)
"""Whether torch's profiler may be running."""

DispatchMode: Any = _found(NAMES[7])
"""What sees operations as it overrides `__torch_dispatch__`; None: rules are not recorded, and run
eagerly. Assign that method after the class statement: torch wraps one that is defined there, so
that the first operation imports torch._dynamo, in a second."""

ModeBase: Any = DispatchMode or object


def state_creation() -> Any:
    """The frame of torch.distributed.checkpoint that steps an optimizer only to create its state;
    None if that is not what calls us.

    Without the name `_init_optim_state`, such a step is a step like others.
    """
    if torch.compiler.is_compiling():
        return None
    module = sys.modules.get("torch.distributed.checkpoint.state_dict")
    code = getattr(getattr(module, "_init_optim_state", None), "__code__", None)
    frame: Any = None if code is None else sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame


def _without_memory(kind: type, like: torch.Tensor) -> Any:
    found = _wrapper(kind, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device)
    _refuse_reading(found)
    return found


_wrapper: Any = _found("torch.Tensor._make_wrapper_subclass")
_refuse_reading: Any = _found("torch._C._set_throw_on_mutable_data_ptr")
without_memory: Any = _without_memory if _wrapper and _refuse_reading else None
"""Makes a tensor of a subclass that is like another, but has no memory: reading it is an error.
None: perturbed parameters are computed before the loss reads them."""


def _nothing(*_: Any) -> int:
    return 0


_in_transform = _found("torch._C._functorch.is_functorch_wrapped_tensor") or _nothing
_inside = _found("torch._C._functorch.get_unwrapped")
_at_gradient = _found("torch._C._functorch.is_gradtrackingtensor") or _nothing


def differentiated(x: torch.Tensor, *, forward: bool = False) -> bool:
    """Whether a torch.func.grad records x, possibly inside of a torch.vmap.

    forward: whether also torch.func.jvp counts, a gradient of other tensors, and autograd.
    """
    while _in_transform(x):
        if _at_gradient(x) and (forward or x.requires_grad):
            return True
        x = _inside(x)
    return forward and torch.is_grad_enabled() and x.requires_grad


_transforms = _found("torch._C._functorch.get_dynamic_layer_stack_depth") or _nothing
_leave_to = _found("torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth") or _nothing
_function_modes = _found("torch._C._len_torch_function_stack") or _nothing
_leave_function_mode = _found("torch._C._pop_torch_function_stack") or _nothing
_dispatch_mode = _found("torch.utils._python_dispatch._get_current_dispatch_mode")


def torch_state() -> tuple[bool, int, int, int]:
    """Whether autograd records, and how many transforms and modes are active."""
    return torch.is_grad_enabled(), _transforms(), _function_modes(), dispatch_modes()


def restore(state: tuple[bool, int, int, int]) -> None:
    """Leave transforms and modes that were entered since `torch_state`: Ctrl-C may have kept torch
    from leaving them."""
    recording, transforms, function_modes, modes = state
    if _transforms() > transforms:
        with suppress(RuntimeError):  # torch 2.11 raises one after it has left the outermost
            _leave_to(transforms)
    for _ in range(_function_modes() - function_modes):
        _leave_function_mode()
    for _ in range(dispatch_modes() - modes if _dispatch_mode else 0):
        _dispatch_mode().__exit__(None, None, None)
    set_grad_enabled(recording)


def constant_while_traced(fn: F) -> F:
    """A function of constants that is called while others are traced, and not traced itself.

    As torch.compiler.assume_constant_result, without its import of the compiler.
    """
    vars(fn)[NAMES[9]] = True
    return fn


@constant_while_traced
def keep_numbers_open() -> None:
    """While a function is traced: say that its 0-dim float64 inputs on the CPU stay tensors.

    torch gives such an input a symbol for its value, as it does with a Python float. After the
    whole trace it finds that nobody has used the symbol, remembers its name, and traces everything
    again (`torch/fx/passes/_tensorify_python_scalars.py`). Numbers of a state or a learning rate
    may be such inputs. If their symbols' names are remembered before, the first trace is kept.
    Nothing else changes: no value is guarded, and Python floats are left to torch.

    As of torch 2.13. If something of this is missing, torch traces twice.
    """
    if torch.compiler.is_dynamo_compiling():  # a torch that traces this function, too
        return
    try:
        from torch._dynamo import symbolic_convert

        context = symbolic_convert.TracingContext.try_get()  # pyright: ignore[reportPrivateImportUsage]
        specialize = symbolic_convert.TensorifyState.specialize
    except (ImportError, AttributeError):
        return
    numbers: Any = getattr(getattr(context, "fake_mode", None), "shape_env", None)
    for symbol, sources in getattr(numbers, "var_to_sources", {}).items():
        of_tensor = any(type(source).__name__ == "CallMethodItemSource" for source in sources)
        if of_tensor and str(symbol).startswith("zf"):  # the symbol of a float
            specialize(str(symbol))


def of_compiler(error: BaseException) -> bool:
    """Whether an error is one of torch's compiler, by the module that defines its class."""
    homes = [made.__module__ for made in type(error).__mro__]
    return any(home.startswith(("torch._dynamo.", "torch._inductor.")) for home in homes)
