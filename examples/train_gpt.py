"""Train a small GPT on Python's own source code three times, with one optimizer written three ways.

(a) functional: weights and state as trees, and `fo.compile_train_step`. (b) adapter: the recipe as
a torch.optim.Optimizer. (c) torch: what torch has for this. The three start from the same weights,
see the same batches, and must find the same losses; `runs.py` holds what is compared.

    python examples/train_gpt.py

takes about three minutes on two CPU cores and leaves a picture and the numbers in `out`. Ctrl-C
leaves a checkpoint there. The program ends with 1 if the runs part or have not learnt, with 2 if
it cannot start, with 130 if it was interrupted.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

# Must stand before torch is imported. By default a thread that waits for another one spins, and
# where other programs want the cores too, that keeps the other one from running: such steps took up
# to ten times as long. On an idle machine sleeping costs a tenth.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import corpus
import flags
import report
from checkpoint import Checkpoint, Interrupts, Record
from errors import BadInput
from rich.console import Console
from runs import RUNS, Run, learning_rate
from training import FULL, QUICK, Job, train, validate


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit code."""
    try:
        with Interrupts() as interrupts:
            return work(argv, interrupts)
    except BadInput as problem:
        return say(2, str(problem))
    except KeyboardInterrupt:
        return say(130, "stopped before the training began.")


def work(argv: Sequence[str] | None, interrupts: Interrupts) -> int:
    """Train all runs, or what is left of them after a resume, and report."""
    asked = flags.parse(argv)
    saved = None if asked.resume is None else Checkpoint.load(asked.resume)
    arguments = flags.settle(asked, saved)
    size = QUICK if arguments["quick"] else FULL
    device = flags.usable(arguments["device"])
    data = arguments["data"]
    text = corpus.load(None if data is None else Path(data), size.shape.context)
    arguments["text"] = text.checksum()
    if saved is not None and saved.arguments != arguments:
        raise BadInput(f"{asked.resume} was made with another text than the one that is here now.")
    out = flags.writable(asked.out)
    job = Job(size, arguments["steps"], arguments["seed"], device, text)
    checkpoint = saved or Checkpoint(arguments, {})

    console = Console()
    console.print(job.describe(), highlight=False)
    live: tuple[str, Run] | None = None
    try:
        with report.Display(console, list(RUNS), job.steps, size.bytes_a_step) as display:
            for name, make in RUNS.items():
                record = checkpoint.records.setdefault(name, Record())
                display.begin(name, len(record.losses))
                if record.valid_average is None:
                    model = job.new_model()
                    run = make(model, learning_rate(job.steps))
                    if checkpoint.current == name and checkpoint.state is not None:
                        run.load_state_dict(checkpoint.state)
                    live = name, run
                    train(run, record, job, display, interrupts)
                    record.valid_weights = validate(model, run.weights(), job)
                    record.valid_average = validate(model, run.average(), job)
                display.end(record)
    except KeyboardInterrupt:
        interrupts.ignore()
        if live is not None:
            checkpoint.current, checkpoint.state = live[0], live[1].state_dict()
        return stop(checkpoint, out)
    interrupts.ignore()
    return conclude(checkpoint, out, console)


def stop(checkpoint: Checkpoint, out: Path) -> int:
    """Save what is done, and say how to go on."""
    path = out / "checkpoint.pt"
    checkpoint.save(path)
    name, record = list(checkpoint.records.items())[-1]
    again = [sys.executable, sys.argv[0], "--resume", str(path)]
    again += [] if out == flags.OUT else ["--out", str(out)]
    return say(
        130,
        f"stopped after {len(record.losses)} of {checkpoint.arguments['steps']} steps of the run "
        f"{name}, which are saved in {path}; continue with: {shlex.join(again)}",
    )


def conclude(checkpoint: Checkpoint, out: Path, console: Console) -> int:
    """Print the table, draw the picture, write the numbers, and judge."""
    records, arguments = checkpoint.records, checkpoint.arguments
    report.plot(records, out / "losses.png")
    results = {"arguments": arguments, "runs": {name: vars(r) for name, r in records.items()}}
    (out / "results.json").write_text(json.dumps(results, indent=1))
    console.print(report.table(records))
    print(f"The loss curves are in {out / 'losses.png'}, all numbers in {out / 'results.json'}.")
    problem = report.complaint(records, trained=not arguments["quick"])
    if problem is not None:
        return say(1, problem)
    print(report.praise(records))
    return 0


def say(code: int, sentence: str) -> int:
    """Print a sentence as an error; returns the exit code."""
    print(f"train_gpt: {sentence}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
