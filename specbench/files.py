"""Files that appear whole or not at all, also when the machine stops in the middle."""

import os
import tempfile
from pathlib import Path

_MARK = ".unfinished-"


def write_atomically(path: Path, content: str | bytes) -> None:
    """Writes a file that appears whole or not at all; text in UTF-8."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, part = tempfile.mkstemp(prefix=f".{path.name}{_MARK}", dir=path.parent)
    try:
        # A temporary file is its owner's alone; results are for everyone who may read the folder.
        os.chmod(part, 0o644)
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise


def remove_unfinished(*folders: Path) -> None:
    """Removes what writes that were killed left in some folders."""
    for folder in folders:
        for path in folder.glob(f".*{_MARK}*"):
            path.unlink()
