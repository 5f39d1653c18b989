"""What others compute: the papers' loops, and what optax, pycma and older versions have stored."""

import json
from pathlib import Path
from typing import Any


def write(file: Path, head: dict[str, Any], **tables: Any) -> None:
    """A file of JSON: what stands at its head, and tables with one line for each entry."""
    parts = [f"{json.dumps(name)}: {json.dumps(x)}" for name, x in head.items()]
    for name, table in tables.items():
        lines = [json.dumps(x) for x in table]
        if isinstance(table, dict):
            lines = [f"{json.dumps(key)}: {json.dumps(x)}" for key, x in table.items()]
        begin, end = "[]" if isinstance(table, list) else "{}"
        parts.append(f"{json.dumps(name)}: {begin}\n" + ",\n".join(lines) + f"\n{end}")
    file.write_text("{" + ",\n".join(parts) + "}\n")
