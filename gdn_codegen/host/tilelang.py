"""What a generated TileLang module does around its kernels beside what all modules do.

Below the line the file is copied into generated modules word for word.
"""
from __future__ import annotations

import torch

from .tables import Tables
from .tensors import _is_apart, _steps


# --- copied from here on ---
def _fits_units(t: Tables, name: str, x: torch.Tensor) -> bool:
    """Whether a tensor with dense rows lies as kernels take it: its strides are multiples of its unit, no element is in two
    places, and rows of tiles are aligned to 16 bytes. The C backend has no bfloat16."""
    if x.ndim == 4 and x.data_ptr() % 16:
        return False
    if 0 in x.stride() or not _is_apart(x) or any(far % t.units[name] for far in _steps(x.stride(), t.layout)):
        return False
    return x.dtype != torch.bfloat16 or x.is_cuda
