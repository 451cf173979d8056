"""What dispatch asks of a page, with the input forms of a call."""
from __future__ import annotations

from typing import Any

from ...input_forms import INPUT_FORMS
from ...ir.core import Op
from ...ir.decays import by_channel, log_decays
from ..build import Build


def page_facts(b: Build) -> dict[str, Any]:
    """The fields of `targets.candidates.Asked` that the page of `b` and its input forms decide."""
    page = b.page.trace()
    channels = by_channel(page)
    forms = [INPUT_FORMS[form] for _, form in b.contract.inputs if form != "unit"]
    return {"computed": any(x.heads or x.rows for x in forms),
            "channels": channels, "inverts": any(isinstance(o, Op) and o.kind == "unit_lower_inverse" for o in page.walk.body),
            "bounded": bool(page.forgets and log_decays(page)), "block_rows": _block_rows(b) if channels else 1}


def _block_rows(b: Build) -> int:
    """The rows of a decayed product's diagonal blocks that one product computes, the fewest of the page's."""
    from ...passes.abi.caller_inputs import caller_inputs  # here, so that importing the ops does not import passes
    from ...passes.algebra.decayed_products import DECAYED, LIMITS, block_rows
    p = caller_inputs(b.page.trace(), b.contract)
    ops = [o for o in p.walk.body if isinstance(o, Op) and o.kind in DECAYED]
    return min((block_rows([o], p, b.chunk, LIMITS[b.dtype]) for o in ops), default=1)
