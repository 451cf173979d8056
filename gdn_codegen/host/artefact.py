"""Files that a generated module compiles. One process at a time makes a file and renames it into place.

A file whose size or digest is wrong is made again. What killed processes left is removed.

Below the line the file is copied into generated modules word for word. runtime/cache.py gives the same functions to the package.
"""
from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

# --- copied from here on ---
#: How temporary names begin: of folders in which an artefact is made, and of files that the package's cache writes.
_MAKING, _WRITING = ".making.", ".writing."
#: Seconds after which a file that is written, which takes milliseconds, is a killed process's.
_STALE = 3600.0


def _lock_of(path: Path) -> Path:
    """The lock file that goes with `path`."""
    return path.with_name(path.name + ".lock")


def _sum_of(path: Path) -> Path:
    """The path of the file with the size and digest of an artefact."""
    return path.with_name(path.name + ".sum")


def _taken(name: Path, wait: bool) -> int | None:
    """The lock file, opened and locked. None if another process holds it and this one does not wait."""
    while True:
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            if os.stat(name).st_ino == os.fstat(fd).st_ino:
                return fd
        except FileNotFoundError:  # `cache clear` removed it while we waited: another process may have made a new one
            pass
        except BlockingIOError:
            os.close(fd)
            return None
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


@contextlib.contextmanager
def _lock(path: Path, wait: bool = True) -> Iterator[bool]:
    """Hold `path`.lock against other processes and threads. A killed holder frees it. Gives whether it is held: without `wait`
    it may be another's."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = _taken(_lock_of(path), wait)
    try:
        yield fd is not None
    finally:
        if fd is not None:
            os.close(fd)


def _sum(path: Path) -> str:
    return f"{path.stat().st_size} {hashlib.sha256(path.read_bytes()).hexdigest()}"


def _whole(path: Path) -> bool:
    """True if the file exists and has the size and digest in `path`.sum."""
    try:
        return _sum_of(path).read_text(encoding="utf-8") == _sum(path)
    except (OSError, ValueError):
        return False


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """An OSError that names no file, as a full disk's, names this one."""
    try:
        yield
    except OSError as e:
        if e.filename is None and e.errno is not None:
            e.filename = str(path)
        raise


def _flush(path: Path) -> None:
    """Wait until a file is on the disk."""
    with open(path, "rb") as f:
        os.fsync(f.fileno())


def _artefact(path: Path, make: Callable[[Path], object]) -> Path:
    """`path`. If the file is missing or damaged, make(temporary path) writes it under a lock, and it is renamed into place."""
    if _whole(path):
        return path
    with _lock(path):
        if not _whole(path):
            _sweep(path.parent)
            folder = path.with_name(_MAKING + path.name)  # only the holder of the lock uses it
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            try:
                built, sums = folder / path.name, folder / "sum"
                with _naming(path):
                    make(built)
                    _flush(built)
                    sums.write_text(_sum(built), encoding="utf-8")
                    _flush(sums)
                os.replace(sums, _sum_of(path))
                os.replace(built, path)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
    return path


def _sweep(folder: Path) -> None:
    """Remove what killed processes left: folders of artefacts that no process is making any more, and half-written files."""
    for x in folder.glob(_MAKING + "*"):
        with _lock(folder / x.name.removeprefix(_MAKING), wait=False) as held:
            if held:
                shutil.rmtree(x, ignore_errors=True)
    for x in folder.glob(_WRITING + "*"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - x.stat().st_mtime > _STALE:
                x.unlink()
