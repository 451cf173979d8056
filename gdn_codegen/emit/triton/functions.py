"""Selects the device functions (device.py) that a module's kernels call."""
from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ..device_functions import definitions, texts, used

FILE = Path(__file__).with_name("device.py")


def called(body: str) -> list[str]:
    """The device functions that the text of a kernel's body uses."""
    return sorted(used(f"def kernel():\n{body}") & set(definitions(FILE)))


def module_texts(names: Iterable[str]) -> list[str]:
    """The device functions of a module whose kernels use `names`."""
    return texts(definitions(FILE), names)
