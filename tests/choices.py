"""What a call of these shapes gets."""
from __future__ import annotations

from typing import Any

import torch

from gdn_codegen.runtime.call.choose import Choice, choice
from gdn_codegen.runtime.call.request import Call, Request
from gdn_codegen.runtime.call.tables import Extent
from gdn_codegen.schedule.contract import PLAIN, Contract


def a_call(extent: Extent, dtype: torch.dtype = torch.float16, device: str = "cpu", dims: tuple[int, int] = (128, 128),
           contract: Contract = PLAIN, **asked: Any) -> Call:
    """A call of this size. asked: fields of its Request."""
    return Call(Request(**asked), dtype, torch.device(device), dims, extent, contract)


def choice_for(q: torch.Tensor, v: torch.Tensor, target: str, chunk: int | None = None, schedule: Any = None,
               sequences: int | None = None, contract: Contract = PLAIN, layout: str = "bthd") -> Choice:
    """The choice for tensors. sequences: of packed ones."""
    tokens, heads = (1, 2) if layout == "bthd" else (2, 1)
    extent = Extent(q.shape[heads], v.shape[heads], sequences or q.shape[0], q.shape[0] * q.shape[tokens], bool(sequences))
    return choice(a_call(extent, q.dtype, str(q.device), (q.shape[3], v.shape[3]), contract, target=target, chunk_size=chunk,
                         layout=layout, schedule=schedule))
