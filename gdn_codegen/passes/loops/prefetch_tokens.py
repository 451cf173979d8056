"""prefetch_tokens: loads each token of a walk one iteration ahead, where a chunk has one token. For Triton.

Such a walk has no products, and the compiler leaves its loads where they stand. So each token would wait for the latency of its
loads, and the first token's loads would wait for the initial state. With this pass the first token is loaded before the initial
state. The loop loads the next token before its first store, and carries it. After the last token it loads that one again.

Example:
    before:  S_0 = load of the state; for each token, S from S_0: k = load of this token; ...
    after:   k_first = load of the first token; S_0 = load of the state
             for each token, S from S_0, k from k_first: ...; k_next = load of the next token; store of o; k = k_next
"""
from __future__ import annotations

from dataclasses import replace

from ...ir.body import Body
from ...ir.core import Carry, Kernel, Loop, Op, Program, types
from ..stage import takes


@takes("decomposed")
def prefetch_tokens(p: Program) -> Program:
    """`p` with the tokens of its walks loaded one iteration ahead, where a chunk has one token."""
    return p.map_kernels(lambda k: _kernel(p, k))


def _kernel(p: Program, k: Kernel) -> Kernel:
    """The kernel with its tokens loaded ahead. `k` itself if its chunks have several tokens."""
    loop = next((s for s in k.body if isinstance(s, Loop) and s.index == "chunk"), None)
    loads = {o.out: o for o in loop.body if isinstance(o, Op) and o.kind == "load" and o.attr("one_token")} if loop else {}
    if loop is None or not loads:
        return k
    b = Body({t.name: t for t in p.tensors})
    b.taken |= set(types(k.body))

    def copies(suffix: str) -> dict[str, str]:
        """The loads once more, one iteration ahead: for each, the name of its value."""
        return {n: b.op("load", *o.args, name=b.fresh(f"{n}_{suffix}"), line=o.line, **{**dict(o.attrs), "ahead": 1})
                for n, o in loads.items()}

    first = copies("first")
    before, b.stmts = b.stmts, []
    after = copies("next")
    carried = tuple(Carry(n, first[n], after[n], b.fresh(f"{n}_unread"), b.types[first[n]]) for n in loads)
    rest = [s for s in loop.body if not isinstance(s, Op) or s.out not in loads]
    at = next((i for i, s in enumerate(rest) if isinstance(s, Op) and s.kind == "store"), len(rest))
    walk = replace(loop, carried=(*loop.carried, *carried), body=(*rest[:at], *b.stmts, *rest[at:]))
    return replace(k, body=(*before, *(walk if s is loop else s for s in k.body)))
