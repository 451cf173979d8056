"""`gdn_codegen cache`: lists, removes, exports and imports the files of the package's cache. It never removes other files."""
from __future__ import annotations

import argparse
import contextlib
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .. import targets
from ..runtime import cache

#: By kind: its folder of the cache, and how what the package puts there is called. 16 or 24 hex digits name content. Targets have
#: further kinds (Toolchain.cached). Any folder may also have what a killed process left.
KINDS: dict[str, tuple[str, str]] = {
    "modules": ("modules/*", r"\w+_[0-9a-f]{16}\..*|__pycache__"),
    "native_launcher": ("native_launcher", r"native_launcher_[0-9a-f]{16}\.so.*"),
    "choices": ("choices/*", r"\w+_gdn_codegen-.*\.jsonl?(?:\.lock)?")}
#: Measurements of this machine, which `clear` takes by name alone.
KEPT = "choices"


@dataclass(frozen=True)
class Entry:
    """A file or folder of the cache."""

    kind: str
    path: Path

    @property
    def size(self) -> int:
        """Bytes on disk; of a folder, those of its files."""
        files = [self.path] if not self.path.is_dir() else [x for x in self.path.rglob("*") if x.is_file()]
        found = 0
        for x in files:
            with contextlib.suppress(FileNotFoundError):  # another process has finished it, or taken it away
                found += x.lstat().st_size
        return found


def known() -> dict[str, tuple[str, str]]:
    """The names of all kinds."""
    return KINDS | {n: files for n in targets.names() if (files := targets.find(n).toolchain.cached)}


def entries(kinds: Iterable[str] | None = None) -> Iterator[Entry]:
    """What the package put into its cache, of all kinds or these: links are nothing of its own."""
    for kind, (folders, name) in known().items():
        if kinds is not None and kind not in kinds:
            continue
        for folder in sorted(cache.folder().glob(folders)):
            if folder.is_dir() and not folder.is_symlink():
                yield from (Entry(kind, x) for x in sorted(folder.iterdir())
                            if re.fullmatch(f"{name}|{cache.LEFT}", x.name) and not x.is_symlink())


def told(size: float) -> str:
    """A number of bytes as text for people, such as 1.5 MiB."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def others() -> list[Path]:
    """Files in the cache's folders that are not the package's."""
    mine = {e.path for e in entries()}
    folders = {f for pattern, _ in known().values() for f in cache.folder().glob(pattern) if f.is_dir()}
    return sorted(x for f in folders for x in f.iterdir() if x not in mine)


def listed() -> Iterator[str]:
    """Lines of `cache list`."""
    yield str(cache.folder())
    total = 0
    for e in entries():
        total += e.size
        yield f"  {told(e.size):>10}  {e.path.relative_to(cache.folder())}"
    yield f"  {told(total):>10}  in all"


def cleared(kinds: Iterable[str]) -> Iterator[str]:
    """Remove entries of these kinds; a line for each."""
    total, used = 0, set[Path]()
    for e in list(entries(kinds)):
        if not e.path.exists():  # a lock, which went with what it was of
            continue
        of = e.path.with_name(e.path.name.removeprefix(cache.MAKING).removesuffix(".lock").removesuffix(".sum"))
        with cache.lock(of, wait=False) as held:
            if not held:
                used.add(of)
                continue
            size = e.size
            if e.path.is_dir():
                shutil.rmtree(e.path)
            else:
                e.path.unlink()
            cache.lock_of(of).unlink(missing_ok=True)
        total += size
        yield f"removed {told(size):>10}  {e.path.relative_to(cache.folder())}"
    for of in sorted(used):
        yield f"left, since a process makes it: {of.relative_to(cache.folder())}"
    for x in others():
        yield f"left, since it is not gdn_codegen's: {x.relative_to(cache.folder())}"
    yield f"{told(total)} removed from {cache.folder()}"


def facts() -> tuple[bool, str]:
    """For `doctor`: whether the cache can be written, its path, and its size."""
    said = f"{cache.folder()}, {told(sum(e.size for e in entries()))}"
    try:
        cache.place("GDN_CODEGEN_CACHE", cache.folder(), folder=True)
    except ValueError as e:
        return False, str(e)
    return True, said


def command(a: argparse.Namespace) -> int:
    """`gdn_codegen cache`, of parsed words. Returns 0; ValueError for a kind that there is not."""
    from . import cache_archive
    if a.action == "list":
        lines = listed()
    elif a.action == "import":
        lines = cache_archive.imported(Path(a.file), a.device)
    else:
        accepted = [*known()] if a.action == "clear" else cache_archive.kinds()
        for kind in a.kinds:
            if kind not in accepted:
                raise ValueError(f"kinds: got {kind!r}; accepted: {', '.join(accepted)}")
        kinds = a.kinds or [k for k in accepted if k != KEPT]
        lines = cleared(kinds) if a.action == "clear" else cache_archive.exported(Path(a.file), kinds, a.device)
    for line in lines:
        print(line, flush=True)
    return 0


def options(p: argparse.ArgumentParser) -> None:
    """Give the parser the actions of `cache`, and their options."""
    of = p.add_subparsers(dest="action", required=True)
    of.add_parser("list", help="list the files with sizes")
    names = ", ".join(known())
    clear = of.add_parser("clear", help="remove files")
    clear.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {names} (default: all but {KEPT}, which tune measured)")
    for name, text in (("export", "write files to an archive, for machines of the same kind"),
                       ("import", "put the files of an archive into the cache, if it is for this device and these versions")):
        x = of.add_parser(name, help=text)
        x.add_argument("file", metavar="FILE", help="the archive, a tar.gz file")
        if name == "export":
            x.add_argument("kinds", nargs="*", metavar="KIND",
                           help=f"of {names}, triton (Triton's compiled kernels of our modules); default: all but {KEPT}")
        x.add_argument("--device", default="", metavar="NAME",
                       help="the device that the files are for, as 'NVIDIA H200' (default: the GPU here, or cpu)")
