"""Files that a generated module compiles. One process at a time compiles a file and renames it into place.

A file whose size or digest is wrong is compiled again.

Below the line the file is copied into generated modules word for word. Modules stand alone, so this repeats what
runtime/cache.py does for the package: the same lock file, and the same digest beside a file.
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
    """True if the file exists and has the size and digest in `path`.sum."""
    try:
        return Path(f"{path}.sum").read_text() == _sum(path)
    except OSError:
        return False


def _sum(path: Path) -> str:
    return f"{path.stat().st_size} {hashlib.sha256(path.read_bytes()).hexdigest()}"


def _artefact(path: Path, make: Callable[[Path], None]) -> Path:
    """`path`. If the file is missing or damaged, make(temporary path) writes it under a lock, and it is renamed into place."""
    if _whole(path):
        return path
    with _alone(path):
        if not _whole(path):
            folder = path.with_name(f".making.{path.name}")  # only the holder of the lock uses it
            shutil.rmtree(folder, ignore_errors=True)  # left by a killed process
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
