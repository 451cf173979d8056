"""`gdn_codegen cache export` and `import`: what the cache has, as one file that serves other machines of the same kind.

An archive is a tar.gz file. Its first member, manifest.json, has the versions and the device for which the files were made, and
the digest of each file. An archive for other versions or another device is refused. Triton's compiled kernels lie in Triton's
own cache, and are exported from there: those of modules in ours.
"""
from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import platform
import re
import sys
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path, PurePosixPath
from typing import Any

from .. import __version__
from ..runtime import cache
from ..targets import machine
from .cache_command import KEPT, entries, known, told

MANIFEST, FORMAT = "manifest.json", 1
#: The kind of Triton's compiled kernels, and the pattern of their files.
TRITON, OF_TRITON = "triton", re.compile(r"[0-9A-Z]{52}/[\w.-]+")
#: What the files of a kind depend on; other kinds depend on `machine` alone. gdn_codegen, python and packages are versions.
NEEDS = {"modules": ("gdn_codegen", "machine", "device", "triton", "tilelang"), TRITON: ("device", "triton"),
         "native_launcher": ("machine", "python", "torch"), KEPT: ("gdn_codegen", "device")}


def kinds() -> list[str]:
    """The kinds that can be exported."""
    return [*known(), TRITON]


def facts(device: str) -> dict[str, str]:
    """What files of this machine depend on. device: a name that replaces that of the GPU here; "" for none."""
    packages = {n: machine.version(n) for n in ("torch", "triton", "tilelang")}
    return {"gdn_codegen": __version__, "python": f"{sys.version_info.major}.{sys.version_info.minor}", **packages,
            "machine": platform.machine(), "device": device or machine.gpu() or "cpu"}


def triton_folder() -> Path:
    """Triton's cache: $TRITON_CACHE_DIR, or .triton/cache under $TRITON_HOME or the home folder, as Triton says."""
    given = os.environ.get("TRITON_CACHE_DIR")
    return Path(given) if given else Path(os.environ.get("TRITON_HOME") or Path.home()) / ".triton" / "cache"


def _of_triton(modules: set[str]) -> Iterator[Path]:
    """Files of Triton's cache that were compiled from these modules of ours. A kernel's text names the file of its source."""
    for text in sorted(triton_folder().glob("*/*.ttir")):
        found = re.search(rb'loc\("[^"]*/modules/triton/(\w+)\.py"', text.read_bytes())
        if found and found[1].decode() in modules:
            yield from (x for x in sorted(text.parent.iterdir()) if x.is_file() and x.name != "lock")


def _files(wanted: Iterable[str]) -> Iterator[tuple[str, str, Path]]:
    """(kind, name in the archive, path) of the files of these kinds, without locks and what killed processes left."""
    ours = [k for k in wanted if k != TRITON]
    for e in entries(ours):
        for x in [e.path] if e.path.is_file() else sorted(e.path.rglob("*")):
            name = x.relative_to(cache.folder()).as_posix()
            left = re.search(rf"(?:^|/)(?:{cache.LEFT}|__pycache__)|\.lock$", name)
            if x.is_file() and not x.is_symlink() and not left:
                yield e.kind, name, x
    if TRITON in wanted:
        modules = {e.path.stem for e in entries(["modules"]) if e.path.parent.name == "triton"}
        for x in _of_triton(modules):
            yield TRITON, f"{TRITON}/{x.parent.name}/{x.name}", x


def exported(to: Path, wanted: Iterable[str], device: str) -> Iterator[str]:
    """Write the archive; lines that say what is in it. wanted: kinds. device: as for `facts`. ValueError if there is nothing."""
    files = list(_files(list(wanted)))
    if not files:
        raise ValueError(f"kinds: got {' '.join(wanted)}, of which {cache.folder()} has no file; accepted: kinds that it has")
    here, packed = facts(device), io.BytesIO()
    contents = {name: path.read_bytes() for _, name, path in files}
    made_for = {k: {n: here[n] for n in NEEDS.get(k, ("machine",))} for k in dict.fromkeys(k for k, *_ in files)}
    manifest = {"format": FORMAT, "made_for": made_for,
                "files": {name: [kind, hashlib.sha256(contents[name]).hexdigest()] for kind, name, _ in files}}
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, data in {MANIFEST: json.dumps(manifest, indent=1).encode(), **contents}.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    cache.write(to, packed.getvalue())
    for kind, needs in made_for.items():
        yield f"{kind}: {sum(k == kind for k, *_ in files)} files, for {', '.join(f'{n} {v}' for n, v in needs.items() if v)}"
    yield f"{told(to.stat().st_size)} in {to}"


def _broken(path: Path, why: str) -> ValueError:
    return ValueError(f"file: got {path}, {why}; accepted: a file that gdn_codegen cache export wrote")


def _read(path: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The manifest and the files of an archive. ValueError if it is none, or is damaged."""
    try:
        with tarfile.open(path, "r:gz") as tar:
            data = {m.name: f.read() for m in tar if (f := tar.extractfile(m)) is not None}
        manifest = json.loads(data.pop(MANIFEST))
        wanted: dict[str, list[str]] = manifest["files"]
        if manifest["format"] != FORMAT:
            raise _broken(path, f"an archive of format {manifest['format']}")
    except (tarfile.TarError, zlib.error, gzip.BadGzipFile, EOFError, KeyError, TypeError, json.JSONDecodeError,
            UnicodeDecodeError) as e:
        raise _broken(path, "which is no such archive, or a part of one") from e
    except OSError as e:
        raise _broken(path, f"which cannot be read ({e.strerror})") from e
    if wanted.keys() != data.keys() or any(hashlib.sha256(data[n]).hexdigest() != x for n, (_, x) in wanted.items()):
        raise _broken(path, "which is damaged")
    return manifest, data


def _place(kind: str, name: str) -> Path | None:
    """Where a file of an archive belongs; None for a name that no export gives."""
    parts = PurePosixPath(name).parts
    if ".." in parts or name != "/".join(parts) or kind not in kinds():
        return None
    if kind == TRITON:
        inside = name.removeprefix(f"{TRITON}/")
        return triton_folder() / inside if inside != name and OF_TRITON.fullmatch(inside) else None
    folders, pattern = known()[kind]
    depth = folders.count("/") + 1
    fits = PurePosixPath(*parts[:depth]).match(folders) and len(parts) > depth and re.fullmatch(pattern, parts[depth])
    return cache.folder() / name if fits else None


def imported(path: Path, device: str) -> Iterator[str]:
    """Put the files of an archive into the caches; lines that say how many. Files that are there already stay as they are.

    device: as for `facts`. ValueError if the archive is damaged, or is for other versions or another device; then nothing is
    written.
    """
    manifest, data = _read(path)
    here = facts(device)
    for kind, needs in manifest["made_for"].items():
        for n, wanted in needs.items():
            if here.get(n) != wanted:
                raise ValueError(f"{n}: got an archive whose {kind} are for {wanted or 'none'}; accepted: one for "
                                 f"{here.get(n) or 'none'}, which is here (cache export FILE KIND ... leaves kinds out)")
    places = {name: _place(kind, name) for name, (kind, _) in manifest["files"].items()}
    if None in places.values():
        raise _broken(path, f"with a file {next(n for n, p in places.items() if p is None)}")
    counts: dict[str, list[int]] = {}
    # of a kernel, Triton looks up the file __grp__ first
    for name in sorted(data, key=lambda n: "/__grp__" in n):
        to = places[name]
        assert to is not None
        contents = _at_home(to, data[name]) if to.name.startswith("__grp__") else data[name]
        new = _put(to, contents, f"{name}.sum" in data or name.endswith(".sum"))
        counts.setdefault(manifest["files"][name][0], [0, 0])[not new] += 1
    for kind, (written, there) in counts.items():
        yield f"{kind}: {written} files, {there} were there"


def _at_home(to: Path, group: bytes) -> bytes:
    """Triton's file of a kernel's files, with their paths here: it has absolute ones."""
    paths = json.loads(group)["child_paths"]
    return json.dumps({"child_paths": {n: str(to.parent / PurePosixPath(x).name) for n, x in paths.items()}}).encode()


def _put(to: Path, data: bytes, locked: bool) -> bool:
    """Write a file unless it is there; whether it was written. locked: under the lock of its artefact, which has a sum."""
    of = to.with_name(to.name.removesuffix(".sum"))
    with ExitStack() as held:
        if locked:
            held.enter_context(cache.lock(of))
        if to.exists() and (not locked or cache.whole(of)):
            return False
        cache.write(to, data)
    return True
