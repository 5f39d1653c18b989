"""Libraries that solve many problems: the start and a step of one, recorded and compiled."""

from __future__ import annotations

import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.kernels import lane_threads, lanes
from functional_optim.kernels.callers import warn_once
from functional_optim.kernels.cpp import STORED
from functional_optim.kernels.drivers import DRIVERS
from functional_optim.kernels.lane_program import Program
from functional_optim.kernels.lanes import VECTOR, check
from functional_optim.kernels.launches import TEAM
from functional_optim.kernels.libraries import Text, library
from functional_optim.kernels.node import Node, Unsuitable
from functional_optim.kernels.tape import Tape, recorded


class Field(NamedTuple):
    """A value of each problem: its dtype, and the elements that a problem has."""

    dtype: torch.dtype
    size: int


class Routine(NamedTuple):
    """A function to compile. inputs: the fields of its tensors. outputs: the new values of the
    state's fields, in order."""

    name: str
    inputs: Sequence[int]
    outputs: Sequence[Node]
    tape: Tape


def text_of(
    fields: Sequence[Field],
    states: int,
    status: int,
    running: int,
    routines: Sequence[Routine],
    kind: Any,
) -> str:
    """The text of a library.

    fields: those of the state, then the data. states: how many belong to the state. status: which
    one tells whether a problem is running, as it is equal to `running`. kind: `lanes` for vectors
    of a CPU, `lane_threads` for threads of a GPU.
    """
    for x in (*fields, *[y for r in routines for y in (*r.tape.captured, *r.tape.fixed)]):
        check(x.dtype)
    text = ["struct State {"]
    text += [f"{VECTOR[x.dtype]} f{k}[{x.size}];" for k, x in enumerate(fields)]
    text += ["};", *_moves("load", fields), *_moves("store", fields[:states])]
    condition = f"((const int64_t*)at[{status}])[p] == {running}"
    text.append(f"static bool running(const int64_t* at, int64_t p) {{ return {condition}; }}")
    scratch, first = 0, len(fields) + len(routines[0].tape.captured)
    for routine in routines:
        program = Program(
            [(node, f"s.f{k}") for k, node in enumerate(routine.outputs)],
            lambda i, at, own=routine.inputs: f"s.f{own[i]}[{at}]",
        )
        scratch = max(scratch, program.scratch)
        text.append(
            f"static APART void {routine.name}(State& s, const int64_t* at, Scratch scratch) {{"
        )
        text += _pointers("captured", routine.tape.captured, len(fields))
        text += _pointers("fixed", routine.tape.fixed, first)
        first += len(routine.tape.fixed)
        text += [*program.lines, "}"]
    driver = kind.DRIVER.format(scratch=scratch, status=f"f{status}", running=running)
    return kind.PRELUDE + "\n".join(text) + driver


def _moves(name: str, fields: Sequence[Field]) -> list[str]:
    """A function that moves a lane from or to torch's memory."""
    lines = [f"static void {name}(State& s, const int64_t* at, int64_t p, int l) {{"]
    for k, (dtype, size) in enumerate(fields):
        memory, lane = f"(({STORED[dtype]}*)at[{k}])[p * {size} + e]", f"LANE(s.f{k}[e], l)"
        mask = dtype is torch.bool
        move = f"{lane} = {'-' if mask else ''}{memory}"
        if name == "store":
            move = f"{memory} = {lane}{' != 0' if mask else ''}"
        lines.append(f"LOOP for (int e = 0; e < {size}; ++e) {move};")
    return [*lines, "}"]


def _pointers(kind: str, tensors: Sequence[Tensor], first: int) -> list[str]:
    return [
        f"const auto {kind}{i} = (const {STORED[x.dtype]}*)at[{first + i}];"
        for i, x in enumerate(tensors)
    ]


Call = Callable[[Sequence[int], int, int, bool], None]
"""A loaded program: called with the addresses of the states, data and constants, the number of
problems, the most steps of each, and whether it starts them instead."""


class LaneLibrary:
    """A library, and what it needs besides the problems.

    call: see `Call`. like: a state of one problem, to tell the shapes of its fields.
    """

    def __init__(self, call: Call, like: Sequence[Tensor], fixed: Sequence[Tensor]) -> None:
        self.call, self.like, self.fixed = call, like, fixed

    def states(self, count: int) -> list[Tensor]:
        """Memory for the states of so many problems."""
        return [x.new_empty((count, *x.shape[1:])) for x in self.like]

    def run(
        self, states: Sequence[Tensor], data: Sequence[Tensor], captured: Sequence[Tensor], *,
        begins: bool, most: int = 1 << 62,
    ) -> None:  # fmt: skip
        """Start all problems, or make up to so many steps of each that is running.

        states: (B, ...), written in place. data: (B, ...). captured: tensors of the functions.
        """
        device = states[0].device
        every = (*data, *captured, *self.fixed)
        given = [x.resolve_conj().resolve_neg().contiguous().to(device) for x in every]
        addresses = [x.data_ptr() for x in (*states, *given)]
        self.call(addresses, states[0].shape[0], most, begins)


def on_host(text: str) -> Call | None:
    """The library of a text, on the CPU; None if there is no compiler."""
    source: Any = Text(text)
    native = library(source)
    if native is None:
        return None

    def call(addresses: Sequence[int], count: int, most: int, begins: bool) -> None:
        head = [count, most, torch.get_num_threads(), TEAM, int(begins)]
        given = array.array("q", [*head, *addresses])
        native.call(given.buffer_info()[0])

    return call


def compiled(
    start: Callable[..., Sequence[Tensor]],
    step: Callable[..., Sequence[Tensor]],
    x: Tensor,
    data: Sequence[Tensor],
    tapes: tuple[Tape, Tape],
    status: Callable[[], int],
    running: int,
) -> LaneLibrary | None:
    """The library of a start, `start(x, *data)`, and a step, `step(*state, *data)`.

    Both return the fields of the state, of which x is the first. x, data: of one problem, with a
    leading dimension of 1. status: the index of the state's status, once a start was recorded.
    Returns None if there is no compiler for their device.

    Raises:
        Unsuitable: for operations that no library has.
    """
    values: list[list[Tensor]] = []

    def kept(function: Callable[..., Sequence[Tensor]], *given: Tensor) -> Sequence[Tensor]:
        values.append(list(function(*given)))
        return values[-1]

    first = recorded(partial(kept, start), [x, *data], tapes[0])
    state = values[0] = [y.detach().clone() for y in values[0]]
    second = recorded(partial(kept, step), [*[y.clone() for y in state], *data], tapes[1])
    if not tapes[1].repeats(tapes[0]):
        raise Unsuitable("a function that is another at each call")
    fields = [Field(y.dtype, y.numel()) for y in (*state, *data)]
    after = range(len(state), len(fields))
    routines = [
        Routine("start", [0, *after], first, tapes[0]),
        Routine("advance", [*range(len(fields))], second, tapes[1]),
    ]
    gpu = x.device.type in DRIVERS
    kind = lane_threads if gpu else lanes
    text = text_of(fields, len(state), status(), running, routines, kind)
    fixed = [*tapes[0].fixed, *tapes[1].fixed]
    try:
        call = lane_threads.on_device(text, x.device) if gpu else on_host(text)
        if call is None:
            return None
        made = LaneLibrary(call, state, fixed)
        # a problem that ends at its start makes no step; on the CPU steps are not compared, as they
        # may differ by rounding alone
        runs = gpu and int(state[status()]) == running
        if _agrees(made, x, data, tapes[0].captured, values[: 1 + runs]):
            return made
        why = "gives other values than torch"
    except RuntimeError as error:  # of the compiler, the driver or the device
        if not gpu:
            raise
        why = f"fails ({error})"
    warn_once(
        f"the program of a solver for {x.device} {why}, so it is not used; report it, with the "
        "function that it solves"
    )
    raise Unsuitable("a program that does not do what torch does")


def _agrees(
    made: LaneLibrary,
    x: Tensor,
    data: Sequence[Tensor],
    captured: Sequence[Tensor],
    values: Sequence[Sequence[Tensor]],
) -> bool:
    """Whether a program starts the recorded problem, and steps it, as torch does.

    values: of the state, after the start and, if it runs then, after a step.
    """
    states = made.states(1)
    states[0].copy_(x)
    known = [y.double() for y in (x, *data, *values[0]) if y.is_floating_point()]
    size = max([float(y[y.isfinite()].abs().max()) for y in known if y.isfinite().any()], default=0)
    rounding = 1e-3 if x.dtype is torch.float32 else 1e-6
    small = rounding * (1 + size)  # what is left where numbers cancel
    for k, expected in enumerate(values):
        made.run(states, data, captured, begins=k == 0, most=1)
        for mine, other in zip(states, expected, strict=True):
            if other.is_floating_point() and not torch.allclose(
                mine.double(), other.double(), rtol=rounding, atol=small, equal_nan=True
            ):
                return False
    return True
