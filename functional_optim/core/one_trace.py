"""How torch.compile is kept from tracing a step twice."""

from __future__ import annotations

from typing import Any


def keep_numbers_open() -> None:
    """While a function is traced: say that its 0-dim float64 inputs on the CPU stay tensors.

    torch gives such an input a symbol for its value, as it does with a Python float. After the
    whole trace it finds that nobody has used the symbol, remembers its name, and traces everything
    again (`torch/fx/passes/_tensorify_python_scalars.py`). Numbers of a state or a learning rate
    may be such inputs. If their symbols' names are remembered before, the first trace is kept.
    Nothing else changes: no value is guarded, and Python floats are left to torch.

    The names are torch's internals, seen with 2.13. Where they are missing it traces twice.
    """
    from torch._guards import TracingContext
    from torch.utils._sympy.symbol import SymT, symbol_is_type

    try:
        from torch._dynamo.source import CallMethodItemSource
        from torch._dynamo.symbolic_convert import TensorifyState
    except ImportError:
        return
    context = TracingContext.try_get()
    numbers: Any = getattr(getattr(context, "fake_mode", None), "shape_env", None)
    for symbol, sources in getattr(numbers, "var_to_sources", {}).items():
        of_tensor = any(isinstance(source, CallMethodItemSource) for source in sources)
        if of_tensor and symbol_is_type(symbol, SymT.FLOAT):
            TensorifyState.specialize(str(symbol))


# what torch.compiler.assume_constant_result does, without its import of the compiler: the function
# is called while others are traced, and is not traced itself
vars(keep_numbers_open)["_dynamo_marked_constant"] = True
