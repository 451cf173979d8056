"""Which of many alike parameters run by default, and which by hand (`-m long`)."""
from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def every(n: int, *axes: Iterable[Any]) -> list[Any]:
    """Rows of the product of `axes`, for `pytest.mark.parametrize`. A row is `long` unless n divides the sum of its indices.

    So each value of an axis runs with every n-th value of another one. A tuple stands for several parameters.
    """
    rows = []
    for found in product(*map(enumerate, axes)):
        row = [y for _, x in found for y in (x if isinstance(x, tuple) else (x,))]
        rows.append(pytest.param(*row, marks=pytest.mark.long if sum(i for i, _ in found) % n else ()))
    return rows
