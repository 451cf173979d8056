"""The page causal_conv1d on every target, beside a recurrence over tokens written by hand in float64."""
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from reference import TOLERANCE, rms_error

from gdn_codegen.algorithms import find, names, of_layers
from gdn_codegen.ir.interpret import TORCH
from gdn_codegen.runtime.build import Build, lowered
from gdn_codegen.runtime.load import function
from gdn_codegen.runtime.targets import runs
from gdn_codegen.schedule import ScheduleError
from gdn_codegen.targets import OWN

HERE = [t for t in OWN if runs(t, "cpu")]
STATES = ("s1", "s2", "s3", "s4")


@dataclass(frozen=True)
class Case:
    """Sequences of inputs. width: taps. linear: 1 for no activation. options: of the build."""

    lengths: tuple[int, ...]
    options: tuple[tuple[str, object], ...] = ()
    width: int = 4
    heads: int = 2
    dim: int = 64
    dtype: str = "float16"
    initial: bool = True
    bias: bool = True
    linear: float = 0.0
    batched: bool = False


CASES = {
    "ladder": Case((1, 2, 3, 4, 0, 15, 16, 17, 63, 64, 65, 130, 0)),
    "chunk16": Case((15, 0, 16, 17, 1, 2, 33), (("chunk", 16),), width=3, dtype="bfloat16"),
    "rows": Case((70, 70, 70), (("layout", "bhtd"),), heads=3, dim=128, dtype="float32", batched=True),
    "plain": Case((5, 0, 66), width=2, initial=False, bias=False, linear=1.0, dtype="float32"),
    "tokens": Case((1, 0, 2, 5), (("chunk", 1),)),
    "narrow": Case((65, 3), dim=36, heads=1, dtype="bfloat16"),
}


def drawn(c):
    """x [T, heads, dim], weights and bias [heads, dim], the states [N, heads, dim]: the last inputs first."""
    gen = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, c.heads, c.dim, generator=gen)
    taps = [draw() if n < c.width else torch.zeros(c.heads, c.dim) for n in range(4)]
    states = [draw(len(c.lengths)) if c.initial else torch.zeros(len(c.lengths), c.heads, c.dim) for _ in STATES]
    return draw(sum(c.lengths)).to(TORCH[c.dtype]), taps, draw() if c.bias else torch.zeros(c.heads, c.dim), states


def by_hand(c, x, taps, bias, states):
    """y [T, heads, dim] and the final states, token by token."""
    y, final, start = torch.empty(x.shape, dtype=torch.float64), [s.double().clone() for s in states], 0
    for n, length in enumerate(c.lengths):
        last = [s[n].double() for s in states]
        for t in range(start, start + length):
            last = [x[t].double(), *last[:3]]
            z = bias.double() + sum(w.double() * v for w, v in zip(taps, last, strict=True))
            y[t] = z if c.linear else z / (1 + torch.exp(-z))
        for s, v in zip(final, last, strict=True):
            s[n] = v
        start += length
    return y, final


def computed(b, c, x, taps, bias, states):
    """What the module gives. A pack has rows of NaN past its end, of which y must have zeros."""
    rows, rest = (len(c.lengths), 0) if c.batched else (1, 3)
    x = torch.cat([x, x.new_full((rest, *x.shape[1:]), float("nan"))]).reshape(rows, -1, *x.shape[1:])
    x = x if b.layout == "bthd" else x.transpose(1, 2).contiguous()
    ends = None if c.batched else torch.tensor([0, *c.lengths]).cumsum(0).to(torch.int32)
    given = {f"initial_{n}": s for n, s in zip(STATES, states, strict=True)} if c.initial else {}
    more = {f"w{n}": taps[n] for n in (2, 3) if n < c.width} | ({"bias": bias} if c.bias else {})
    y, *final = function(b)(x, *taps[:2], **more, **given, linear=c.linear, cu_seqlens=ends, output_final_state=True)
    y = (y if b.layout == "bthd" else y.transpose(1, 2)).flatten(0, 1)
    assert (y[sum(c.lengths):] == 0).all(), "rows of no sequence are not zero"
    return y[:sum(c.lengths)], final


def test_a_page_of_layers_is_short_and_no_member():
    assert of_layers() == ("causal_conv1d",) and not set(of_layers()) & set(names())
    assert len(Path(find("causal_conv1d").fn.__code__.co_filename).read_text().splitlines()) <= 30


@pytest.mark.parametrize("target, why", [("tilelang", "one token with tiles of no state"), ("pto", "one token with the device")])
def test_single_tokens_are_refused_where_no_kernel_takes_them(target, why):
    """Triton takes them; chunks of 16 tokens serve few tokens elsewhere."""
    with pytest.raises(ScheduleError, match=why):
        lowered(Build(target, algorithm="causal_conv1d", head_dim_k=64, head_dim_v=64, schedule="fused", chunk=1))


@pytest.mark.slow
@pytest.mark.parametrize("case, target", [(c, t) for c in CASES for t in HERE if c != "tokens" or t == "triton"])
def test_it_agrees_with_the_recurrence(case, target):
    c = CASES[case]
    b = Build(target, algorithm="causal_conv1d", head_dim_k=c.dim, head_dim_v=c.dim, dtype=c.dtype, schedule="fused",
              **dict(c.options))
    x, taps, bias, states = drawn(c)
    y, final = computed(b, c, x, taps, bias, states)
    want, wants = by_hand(c, x, taps, bias, states)
    assert rms_error(y, want) < TOLERANCE[c.dtype]
    for got, s in zip(final, wants, strict=True):
        assert torch.equal(got.double(), s)  # inputs are copied, not computed


@pytest.mark.parametrize("wrong", ["off by one", "over a start"])
def test_the_comparison_tells_wrong_taps_and_leaks(wrong):
    """Taps in the wrong order, or rows of the sequence before, are off by far more than what is accepted."""
    c = CASES["ladder"]
    x, taps, bias, states = drawn(c)
    want, _ = by_hand(c, x, taps, bias, states)
    if wrong == "off by one":
        other, _ = by_hand(c, x, taps[1:] + taps[:1], bias, states)
    else:
        whole = Case((sum(c.lengths),))
        other, _ = by_hand(whole, x, taps, bias, states)
    assert rms_error(other, want) > 0.1
