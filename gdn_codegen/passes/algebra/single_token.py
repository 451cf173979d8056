"""single_token: drops the axis of tokens where tiles have one token. For TileLang and Triton.

With C = 1 the page is its own token recurrence. A tile [C, K] is a vector [K], and a vector [C] and a tile [C, C] are numbers.
Masks and inverses of such tiles are constants. Products become sums: `k @ S` is the sum over the rows of k[:, None] * S, and
`k.T @ U` is k[:, None] * U[None, :]. So a walk needs no product, and threads hold the state in registers. This serves decoding,
where a kernel mostly reads and writes states.

Example, a line of the page before and after:
    U = Tinv @ (beta[:, None] * (v - exp(G)[:, None] * (k @ S)))
    U = beta * (v - exp(G) * column_sum(k[:, None] * S))
"""
from __future__ import annotations

from ...devices import Cores, Device, Groups
from ...ir.body import Body
from ...ir.core import Kernel, Op, Program, types
from ...schedule.schedule import Schedule, ScheduleError
from ..common import rebuild_kernels
from ..stage import takes
from .token_values import TokenValue


@takes("cut")
def single_token(p: Program, s: Schedule, device: Device) -> Program:
    """`p` without the axis of tokens if a chunk has one token, else `p` itself.

    Raises ScheduleError for a schedule of several kernels, for a device whose kernels have several agents, and for a page with a
    product in which no dim is that of tokens. Also for one token in a tile of several, but on a device whose cores
    share no memory.
    """
    if p.sizes["C"] != 1:
        _check_empty_rows(p, s, device)
        return p
    if isinstance(device, (Cores, Groups)) or len(p.kernels) > 1:
        why = f"{len(p.kernels)} kernels" if len(p.kernels) > 1 else f"the device {device.name}"
        raise ScheduleError(f"schedule {s.name}: a chunk of one token with {why}; accepted: one kernel, such as 'fused' has, for "
                            "TileLang or Triton")
    done = rebuild_kernels(p, _SingleToken)
    for o in (o for k in done.kernels for o in k.ops if o.kind == "matmul"):
        raise ScheduleError(f"schedule {s.name}: a chunk of one token, and a product without tokens ({o.out}, {o.line}); "
                            "accepted: chunks of 16 tokens or more")
    return done


def _check_empty_rows(p: Program, s: Schedule, device: Device) -> None:
    """ScheduleError for a chunk of one token in a tile of several, unless the emitter of the device's kernels has it."""
    if not p.tokens:
        return
    if not isinstance(device, Cores):
        raise ScheduleError(f"chunk: got {p.sizes['C']} tokens, with states by token; accepted: 1")
    if len(p.kernels) > 1:
        raise ScheduleError(f"schedule {s.name}: states by token with {len(p.kernels)} kernels; accepted: one, as 'fused' has")
    if any(o.kind == "resume" for k in p.kernels for o in k.ops):
        raise ScheduleError(f"chunk: got {p.sizes['C']} tokens, with states by token of a tree; accepted: 1, for TileLang or "
                            "Triton")


class _SingleToken:
    """The rule for one kernel. It reads the types of tiles with an axis of tokens, and builds ops without it."""

    def __init__(self, k: Kernel) -> None:
        self.type = types(k.body)
        self.defs = {o.out: o for o in k.ops if o.out}

    def __call__(self, o: Op, b: Body) -> str | None:
        """The value of `o` without the axis of tokens. None to keep the op."""
        if o.kind in ("load", "store"):
            t = b.tensors[o.attr("tensor")]
            if t.index != "token":
                return None
            return b.op(o.kind, *o.args, name=o.out, line=o.line, **dict(o.attrs), one_token=True)
        before = [self.type[a] for a in self.defs[o.out].args] if o.out else []
        assert o.type is not None
        if not any("C" in t.dims for t in (*before, o.type)):
            return b.equal(o.kind, *o.args, **dict(o.attrs)) or None  # operands may have become the same
        new = TokenValue(o, before, b)
        return getattr(new, o.kind, new.elementwise)()
