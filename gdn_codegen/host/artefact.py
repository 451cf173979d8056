"""Files that a generated module compiles: made once among processes, never half, and made again where they are damaged.

Below the line the file is copied into generated modules word for word. Modules stand alone, so that this repeats what
runtime/cache.py does for the package: the same lock file, the same digest beside a file.
"""
from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path


# --- copied from here on ---
@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold path.lock against other processes and threads; a killed holder frees it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with open(f"{path}.lock", "a") as f:
            fcntl.flock(f, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):  # removed while we waited
                if os.stat(f.name).st_ino == os.fstat(f.fileno()).st_ino:
                    yield
                    return


def _whole(path: Path) -> bool:
    """Whether a file is there, and as it was when it was made: its size and digest stand beside it."""
    try:
        return Path(f"{path}.sum").read_text() == _sum(path)
    except OSError:
        return False


def _sum(path: Path) -> str:
    return f"{path.stat().st_size} {hashlib.sha256(path.read_bytes()).hexdigest()}"


def _artefact(path: Path, make: Callable[[Path], None]) -> Path:
    """`path`, made by make(temporary path) if it is not there, or damaged: once among processes, never half."""
    if _whole(path):
        return path
    with _alone(path):
        if not _whole(path):
            folder = path.with_name(f".making.{path.name}")  # ours alone while we hold the lock
            shutil.rmtree(folder, ignore_errors=True)  # a killed process's
            folder.mkdir()
            try:
                built, sums = folder / path.name, folder / "sum"
                make(built)
                sums.write_text(_sum(built))
                sums.replace(f"{path}.sum")
                built.replace(path)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
    return path
