"""The C++ compiler of tests: g++, for which TileLang's header is compiled once. A small kernel takes half of the time then."""
from __future__ import annotations

import hashlib
import os
import shutil
from importlib.util import find_spec
from pathlib import Path

from gdn_codegen.host import tilelang

HEADER = Path("tl_templates", "cpp", "common.h")
#: The compiler looks for a header's `.gch` in each folder first. If that was made with other flags, it reads the header.
SCRIPT = """#!/bin/sh
case "$*" in *tilelang*) ;; *) exec {cxx} "$@";; esac
if [ ! -e "{made}" ]; then
    {cxx} -std=c++17 -fPIC {flags} -w -x c++-header "{header}" -o "{made}.$$" && mv "{made}.$$" "{made}"
fi
exec {cxx} "-I{folder}" "$@"
"""


def with_header(cache: Path) -> Path | None:
    """The compiler, a script in `cache`. None without g++ or TileLang, or if the environment names a compiler."""
    cxx, found = shutil.which("g++"), find_spec("tilelang")
    if cxx is None or found is None or found.origin is None or "CXX" in os.environ or "CC" in os.environ:
        return None
    header = Path(found.origin).parent / "src" / HEADER
    if not header.exists():
        return None
    flags = " ".join(tilelang._cpu_flags())
    folder = cache / "cxx" / hashlib.sha256(f"{cxx} {header} {header.stat().st_mtime} {flags}".encode()).hexdigest()[:16]
    made, script = folder / f"{HEADER}.gch", folder / "g++"
    made.parent.mkdir(parents=True, exist_ok=True)
    if not script.exists():
        new = folder / f"{os.getpid()}.new"
        new.write_text(SCRIPT.format(cxx=cxx, made=made, flags=flags, header=header, folder=folder))
        new.chmod(0o755)
        new.replace(script)
    return script
