"""Packages that stand in for hosts which do not install here."""
from collections.abc import Mapping
from pathlib import Path

import pytest


def put(files: Mapping[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write files by their paths below the folder, which Python then looks into first."""
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    monkeypatch.syspath_prepend(folder)
