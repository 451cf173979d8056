"""The cache of generated modules and compiled objects: named by hashes of content, safe for several processes and kills."""
from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

#: How temporary names begin: of folders in which an artefact is made, and of files that are written.
MAKING, WRITING = ".making.", ".writing."
#: The pattern of names of files and folders that a killed process leaves.
LEFT = rf"(?:{re.escape(MAKING)}|{re.escape(WRITING)}).*"
#: Seconds after which an unfinished file counts as left by a killed process. Writing a file takes milliseconds.
STALE = 3600.0


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
    """Write a file atomically: write and flush a temporary file in the same folder, then rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f"{WRITING}{path.name}.")
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


def _taken(name: Path, wait: bool) -> int | None:
    """The lock file, opened and locked; None where another holds it and we do not wait."""
    while True:
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            if os.stat(name).st_ino == os.fstat(fd).st_ino:
                return fd
        except FileNotFoundError:  # `cache clear` removed it while we waited: another may have made a new one
            pass
        except BlockingIOError:
            os.close(fd)
            return None
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


@contextlib.contextmanager
def lock(path: Path, wait: bool = True) -> Iterator[bool]:
    """Hold `path`.lock against other processes and threads; a killed holder frees it. Gives whether it is held: without `wait`
    it may be another's."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = _taken(lock_of(path), wait)
    try:
        yield fd is not None
    finally:
        if fd is not None:
            os.close(fd)


def lock_of(path: Path) -> Path:
    """The lock file that goes with `path`."""
    return path.with_name(path.name + ".lock")


def sum_of(path: Path) -> Path:
    """The path of the file with the size and digest of an artefact, as in generated modules (host/artefact.py)."""
    return path.with_name(path.name + ".sum")


def _sum(path: Path) -> str:
    return f"{path.stat().st_size} {hashlib.sha256(path.read_bytes()).hexdigest()}"


def whole(path: Path) -> bool:
    """Whether an artefact is there, and as it was when it was made."""
    try:
        return sum_of(path).read_text(encoding="utf-8") == _sum(path)
    except (OSError, ValueError):
        return False


def made(path: Path, make: Callable[[Path], object]) -> Path:
    """`path`, made by `make(temporary path)` if it is not there, or damaged: once among processes, never half."""
    if whole(path):
        return path
    with lock(path):
        if not whole(path):
            sweep(path.parent)
            folder = path.with_name(MAKING + path.name)  # ours alone while we hold the lock
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            try:
                temporary = folder / path.name
                with naming(path):
                    make(temporary)
                    with open(temporary, "rb") as f:
                        os.fsync(f.fileno())
                write(sum_of(path), _sum(temporary))
                os.replace(temporary, path)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
    return path


def sweep(folder: Path) -> None:
    """Remove what killed processes left: folders of artefacts that no process is making any more, and half-written files."""
    for x in folder.glob(MAKING + "*"):
        of = folder / x.name.removeprefix(MAKING)
        with lock(of, wait=False) as held:
            if held:
                shutil.rmtree(x, ignore_errors=True)
    for x in folder.glob(WRITING + "*"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - x.stat().st_mtime > STALE:
                x.unlink()
