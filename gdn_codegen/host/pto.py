"""What a generated PTO module does around its kernels beside what all modules do.

Below the line the file is copied into generated modules word for word.
"""
from __future__ import annotations

import torch

from .tables import Tables
from .tensors import _steps


# --- copied from here on ---
def _fits_transfers(t: Tables, name: str, x: torch.Tensor) -> bool:
    """Whether transfers reach a tensor where it lies: its rows, of gates too, are dense, and less than 2^16 elements apart."""
    return x.stride(-1) == 1 and 0 < _steps(x.stride(), t.layout)[1] < 1 << 16
