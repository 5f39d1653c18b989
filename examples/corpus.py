"""The text: Python's own standard library, or a folder of yours, as bytes."""

from __future__ import annotations

import sysconfig
import zlib
from pathlib import Path
from typing import NamedTuple

import torch
from errors import BadInput
from torch import Tensor

NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
"""Folders below the standard library that hold other packages or tests."""

TEXT = {".txt", ".md", ".rst", ".py", ".c", ".h", ".cpp", ".rs", ".js", ".ts", ".html", ".tex"}
"""What counts as text in a folder of the user's."""

HELD_OUT = 10
"""Every tenth file is for validation."""


class Corpus(NamedTuple):
    """Text cut in two by file: uint8, 1-D. files: how many files each part has."""

    train: Tensor
    valid: Tensor
    files: tuple[int, int]

    def checksum(self) -> int:
        """A number that changes with the text."""
        return zlib.crc32(self.valid.numpy().tobytes(), zlib.crc32(self.train.numpy().tobytes()))


def load(folder: Path | None, context: int) -> Corpus:
    """Read every text file below `folder` (None: the standard library), sorted by path.

    Raises:
        BadInput: if there is no such folder, a file cannot be read, or the training or the
            validation files have not enough bytes for one window of `context` bytes.
    """
    paths = library() if folder is None else texts(folder)
    where = "Python's standard library" if folder is None else str(folder)
    if len(paths) < 2:
        raise BadInput(
            f"{where} holds {len(paths)} text files ({', '.join(sorted(TEXT))}), but at least two "
            "are needed: one to train on and one to validate on."
        )
    valid = paths[::HELD_OUT]
    train = [path for i, path in enumerate(paths) if i % HELD_OUT]
    corpus = Corpus(read(train), read(valid), (len(train), len(valid)))
    for part, data in (("train", corpus.train), ("validate", corpus.valid)):
        if len(data) <= context:
            raise BadInput(
                f"{where} has only {len(data)} bytes to {part} on, and one window takes "
                f"{context + 1}; name a folder with more text."
            )
    return corpus


def library() -> list[Path]:
    """The .py files of the running Python's standard library, without tests."""
    root = Path(sysconfig.get_path("stdlib"))
    found = [path.relative_to(root) for path in root.rglob("*.py")]
    return [root / path for path in sorted(found) if NOT_LIBRARY.isdisjoint(path.parts)]


def texts(folder: Path) -> list[Path]:
    """The text files below a folder."""
    if not folder.is_dir():
        raise BadInput(f"--data {folder} is not a folder; name one that holds text files.")
    found = [path for path in folder.rglob("*") if path.suffix.lower() in TEXT and path.is_file()]
    return sorted(found)


def read(paths: list[Path]) -> Tensor:
    """Files one after the other, as uint8."""
    try:
        data = b"\n".join([path.read_bytes() for path in paths])
    except OSError as error:
        raise BadInput(f"cannot read {error.filename}: {error.strerror}.") from None
    if not data:  # which frombuffer refuses
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def windows(text: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, (len(starts), context) each: the targets are one byte further on."""
    tokens = text[starts[:, None] + torch.arange(context + 1)].long()
    return tokens[:, :-1], tokens[:, 1:]


def batch(text: Tensor, seed: int, step: int, size: int, context: int) -> tuple[Tensor, Tensor]:
    """Random windows that depend on the seed and the step alone, so a resumed run sees the same."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(text) - context, (size,), generator=generator)
    return windows(text, starts, context)
