"""The cache of generated modules and compiled objects: named by hashes of content, safe for several processes and kills."""
from __future__ import annotations

import errno
import hashlib
import os
import re
import tempfile
from pathlib import Path

from ..host import artefact

# An artefact is a file that is made once among processes, by the functions that generated modules have, too.
lock, lock_of, whole, sum_of, made = artefact._lock, artefact._lock_of, artefact._whole, artefact._sum_of, artefact._artefact
naming = artefact._naming
#: How temporary names begin: of folders in which an artefact is made, and of files that are written.
MAKING, WRITING = artefact._MAKING, artefact._WRITING
#: The pattern of names of files and folders that a killed process leaves.
LEFT = rf"(?:{re.escape(MAKING)}|{re.escape(WRITING)}).*"


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
