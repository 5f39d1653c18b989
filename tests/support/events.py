"""Reading back what was written for TensorBoard."""

from __future__ import annotations

from pathlib import Path


def read_events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """The steps and values of every scalar, by tag."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    tags = events.Tags()["scalars"]
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}
