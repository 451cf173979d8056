"""rules: the identities of algebra that `canonical` applies.

A rule has a name, a pattern of values, a condition and a replacement. Each rule holds in exact arithmetic. No rule makes a
float32 value overflow that did not overflow before. An operand in float16 may, as its scale is outside of the product. The
result of the rules:
- A product is a flat list of factors; numbers and columns come first.
- A sum is a flat list of terms; subtracted terms come last.
- Signs and scales are outside of products of tiles.
- A factor of all terms is outside of the sum.
- Exponentials of opposite running sums are one exponential, or a `decayed_product`.
"""
from __future__ import annotations

from .columns import COLUMNS, JOINING
from .decays import DECAYS
from .masked_decays import MASKED_DECAYS
from .masks import MASKS
from .products import PRODUCTS
from .rule import Rule, Rules
from .signs import SIGNS
from .sums import SUMS

#: `canonical` applies RULES until none applies; of two that apply, the first. Then it applies JOINING, which joins columns and
#: rows that RULES separate.
RULES = Rules((*SIGNS, *COLUMNS, *DECAYS, *MASKED_DECAYS, *MASKS, *SUMS, *PRODUCTS))

__all__ = ["JOINING", "RULES", "Rule", "Rules"]
