"""Files are written whole or not at all: under a temporary name, then renamed."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from furcate.errors import StorageFailed

__all__ = ["write_json", "write_text"]


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Write a JSON object; raises StorageFailed and leaves an older file as it was."""
    write_text(path, json.dumps(record, indent=2, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text; raises StorageFailed and leaves an older file as it was."""
    temporary = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
        ) as file:
            temporary = file.name
            file.write(text)
        os.replace(temporary, path)
    except OSError as fault:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        full = fault.errno in (errno.ENOSPC, errno.EDQUOT)
        raise StorageFailed(
            "no space left to write the file" if full else f"cannot write: {fault.strerror}",
            field=str(path),
            hint="free some space" if full else "choose another place",
        ) from fault
