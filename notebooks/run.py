"""Execute notebooks and store them with their outputs: `python notebooks/run.py [01 04 …]`.

What is stored depends on the code alone: nothing of the time, the machine or the exact Python.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import matplotlib.font_manager  # noqa: F401  its cache is built here, or a notebook would say so
import nbformat
from nbclient import NotebookClient
from traitlets.config import Config

HERE = Path(__file__).parent
PATHS = sorted(HERE.glob("[0-9]*.ipynb"))
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
ENVIRONMENT = {
    "MPLBACKEND": "module://matplotlib_inline.backend_inline",
    "OMP_NUM_THREADS": "1",  # sums are the same on every machine
    "PYTHONHASHSEED": "0",
}
FOLDERS = ("/home/", "/Users/", "/root/", "/tmp/", tempfile.gettempdir(), str(HERE.parent))
"""What the name of a folder on somebody's machine begins with."""


def execute(path: Path, timeout: int = 120) -> Any:
    """A notebook with the outputs of a fresh run in its own folder; the file stays as it is.

    Args:
        path: the notebook.
        timeout: seconds that one cell may take.

    Returns:
        The notebook, ready to be written.

    Raises:
        nbclient.exceptions.CellExecutionError: where a cell fails.
        ValueError: where a cell prints a warning, a folder of this machine, or an address.
    """
    notebook = nbformat.read(path, as_version=4)
    notebook.metadata = nbformat.from_dict(METADATA)
    client = NotebookClient(
        notebook,
        timeout=timeout,
        kernel_name="python3",
        config=Config({"KernelManager": {"transport_encryption": "auto"}}),  # or it warns
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(path.parent)}},
    )
    client.execute(env={**os.environ, **ENVIRONMENT})
    notebook.metadata = nbformat.from_dict(METADATA)  # the kernel has written its own
    for i, cell in enumerate(notebook.cells):
        for fault in faults(cell):
            raise ValueError(f"{path.name}, cell {i}, {fault}")
    return notebook


def faults(cell: Any) -> list[str]:
    """What should not be stored of a cell: warnings, folders of this machine, addresses."""
    found = []
    for output in cell.get("outputs", []):
        if output.output_type == "error" or output.get("name") == "stderr":
            text = output.get("text") or "\n".join(output.get("traceback", []))
            found.append(f"writes to stderr: {text}")
    for text in texts(cell):
        found += [f"names a folder: {text}" for folder in FOLDERS if folder in text]
        found += [f"shows an address: {text}"] if " at 0x" in text else []
    return found


def texts(cell: Any) -> list[str]:
    """What a cell prints and shows, in order; a picture stands as `<png>`."""
    found = []
    for output in cell.get("outputs", []):
        if output.output_type == "stream":
            found.append(output.text)
        elif "image/png" in output.get("data", {}):
            found.append("<png>")
        else:
            found.append(output.get("data", {}).get("text/plain", ""))
    return found


def main(chosen: list[str]) -> None:
    """Execute the notebooks whose names begin so (all, if none is named), and store them."""
    paths = [path for path in PATHS if not chosen or path.name.startswith(tuple(chosen))]
    if not paths:
        sys.exit(f"no notebook's name begins with {' or '.join(chosen)}; say e.g. 01.")
    for path in paths:
        nbformat.write(execute(path), path)
        print(f"{path.name}: {path.stat().st_size // 1000} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
