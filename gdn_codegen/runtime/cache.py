"""Where generated modules and compiled objects lie: content-hashed, safe under several processes and kills."""
from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path


def folder() -> Path:
    """$GDN_CODEGEN_CACHE, or gdn_codegen under $XDG_CACHE_HOME or ~/.cache."""
    given = os.environ.get("GDN_CODEGEN_CACHE")
    return Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gdn_codegen"


def digest(*parts: str | bytes) -> str:
    """16 hex digits that name this content."""
    h = hashlib.sha256()
    for p in parts:
        data = p.encode() if isinstance(p, str) else p
        h.update(len(data).to_bytes(8, "little") + data)
    return h.hexdigest()[:16]


def place(name: str, path: Path, folder: bool = False) -> None:
    """ValueError for the argument `name` unless `path` can be written: a file, or a folder of files. Parents are made."""
    into = path if folder else path.parent
    try:
        into.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=into):  # modes alone do not tell: root may write anywhere, but not below /proc
            pass
        if not folder and path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    except OSError as e:
        raise ValueError(f"{name}: got {path}: {e.strerror}; accepted: a {'folder' if folder else 'file'} that can be "
                         "written") from None


def places(**files: str | None) -> None:
    """`place` for files that were asked for, by their arguments' names."""
    for name, path in files.items():
        if path is not None:
            place(name, Path(path))


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """An OSError that names no file, as a full disk's, names this one."""
    try:
        yield
    except OSError as e:
        if e.filename is None and e.errno is not None:
            e.filename = str(path)
        raise


def write(path: Path, text: str | bytes) -> Path:
    """Write a file whole or not at all: a temporary beside it, flushed, then renamed onto it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with naming(path), os.fdopen(fd, "wb") as f:
            f.write(text.encode() if isinstance(text, str) else text)
            f.flush()
            os.fsync(f.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


@contextlib.contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold `path`.lock against other processes; a killed holder frees it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(path.name + ".lock"), "w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        yield


def made(path: Path, make: Callable[[Path], object]) -> Path:
    """`path`, made by `make(temporary path)` if it is not there: once among processes, never half."""
    if path.exists():
        return path
    with lock(path):
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=path.parent, prefix=".making.") as tmp:
                temporary = Path(tmp) / path.name
                with naming(path):
                    make(temporary)
                    with open(temporary, "rb") as f:
                        os.fsync(f.fileno())
                os.replace(temporary, path)
    return path
