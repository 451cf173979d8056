"""The C++ compiler of this machine."""
from __future__ import annotations

import os
import shutil


def compiler() -> str | None:
    """`$CXX`, or the first of g++ and clang++ on the path."""
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
