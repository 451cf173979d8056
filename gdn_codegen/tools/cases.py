"""The cases that `verify` runs: sequences, and how inputs of a page are drawn for them, by what the page says of each."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .. import algorithms
from ..input_forms import INPUT_FORMS, draws, reads
from ..ir.core import Program
from ..ir.decays import log_decays
from ..ir.interpret import TORCH
from ..ir.types import Tensor
from ..runtime.build import Build
from ..runtime.tables import between

F64 = torch.float64


@dataclass(frozen=True)
class Case:
    """Sequences to run: lengths packed into one row, or rows of equal lengths (batched). gate: mean log decay of a token; None
    mixes entries of 0 to -50, beside channels and heads that never forget. alike: tokens SAME of a pack have equal keys, and
    numbers of tokens are from 0 to 2."""

    lengths: tuple[int, ...]
    heads: int = 1
    value_heads: int = 2
    gate: float | None = -0.5
    initial: bool = True
    batched: bool = False
    seed: int = 0
    alike: bool = False

    @property
    def gates(self) -> str:
        """What the lines of `verify` say of the gates: their mean, that they are mixed, or that keys are alike."""
        return "alike" if self.alike else "mixed" if self.gate is None else f"{self.gate:g}"


#: Log decays of a case that mixes them, and how often each occurs: most entries keep, a few forget at once.
MIXED, OFTEN = (0.0, -0.05, -3.0, -50.0), (0.6, 0.34, 0.03, 0.03)
#: Of so many channels of such a case one never forgets. Its heads with a decay for all tokens have 0 to -50.
NEVER = 4
SAME = slice(5, 40)
#: The default cases of `verify`: tails, packed sequences, an empty sequence, no forgetting, sudden forgetting, both in one chunk,
#: and equal keys.
CASES = (Case((64,)), Case((1,)), Case((63, 0, 65)), Case((129,), gate=0.0), Case((33, 64), gate=-50.0),
         Case((70, 70), batched=True, initial=False), Case((100, 33), gate=None), Case((70,), gate=-0.01, alike=True))


def mixed(share: torch.Tensor, channels: bool) -> torch.Tensor:
    """The log decays of MIXED, as often as OFTEN says, by numbers from 0 to 1. channels: whether the last dim has them."""
    values, often = (torch.tensor(x, device=share.device) for x in (MIXED, OFTEN))
    x = values[torch.bucketize(share, often.cumsum(0)[:-1])]
    if channels:
        x[..., ::NEVER] = 0
    return x


def _functions(texts: dict[str, str]) -> dict[str, Callable[..., torch.Tensor]]:
    """The functions of these torch texts, by name."""
    return {n: eval(text, {"torch": torch}) for n, text in texts.items()}


class _Draws:
    """Draws what a page reads, one input after another."""

    def __init__(self, b: Build, p: Program, case: Case) -> None:
        self.b, self.case, self.decays, self.gen = b, case, log_decays(p), torch.Generator().manual_seed(case.seed)
        self.keys = {t.dims[:1] for t in p.role("input") if t.optional}  # of rows that multiply a state
        self.drawn: dict[str, torch.Tensor] = {}

    def share(self, shape: Sequence[int]) -> torch.Tensor:
        """Numbers from 0 to 1."""
        return torch.rand(*shape, generator=self.gen).clamp(1e-6, 1 - 1e-6)

    def of(self, t: Tensor, normal: torch.Tensor) -> torch.Tensor:
        """The input t as the page reads it. normal: normal samples of its shape."""
        how, shape, case = algorithms.DRAWN.get((self.b.page.name, t.name), ""), normal.shape, self.case
        if t.name in self.decays:
            x = self.log_decay(t, shape)
        elif how.startswith("minus"):
            x = -self.drawn[how.split()[1]] * self.share((*shape[:2], 1))
        elif how == "share":
            x = self.share(shape)
        elif len(t.dims) > 1 and (t.heads == "H" or t.dims[1:] in self.keys):
            x = torch.nn.functional.normalize(normal, dim=-1)
            x[SAME] = x[SAME][:1] if case.alike else x[SAME]
        elif t.index == "token" and len(t.dims) == 1:
            twice = case.alike and self.b.contract.input_form(t.name) in ("", "twice_sigmoid")
            x = self.share(shape) * (2 if twice else 1)
        else:
            x = normal
        self.drawn[t.name] = x
        return x

    def log_decay(self, t: Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Log decays: of tokens [T, heads] or [T, heads, dims], or of heads [heads, dims]."""
        gate = self.case.gate
        if t.index == "head":
            of_heads = torch.linspace(0, MIXED[-1], shape[0]) if gate is None else torch.full((shape[0],), gate)
            return of_heads.view(-1, *(1 for _ in shape[1:])).expand(*shape).contiguous()
        share = self.share(shape)
        return mixed(share, channels=len(shape) > 2) if gate is None else 2 * gate * share


def inputs(b: Build, p: Program, case: Case) -> dict[str, torch.Tensor]:
    """Packed inputs [tokens, heads, ...] of a traced program: unit keys and queries, log decays <= 0, other vectors in (0, 1), or
    in (0, 2) where keys are alike; in the forms and dtypes of the build's contract, with the numbers [HV] that they bring."""
    page, out = _Draws(b, p, case), dict[str, torch.Tensor]()
    gate = -0.5 if case.gate is None else case.gate
    for t in p.role("input"):
        heads = case.heads if t.heads == "H" else case.value_heads
        shape: tuple[int, ...] = (sum(case.lengths), heads, *t.tile.shape(b.sizes)[1:])
        if t.index == "head":
            shape = (heads, *t.tile.shape(b.sizes))
        if t.optional:
            shape = (len(case.lengths), case.value_heads, *t.tile.shape(b.sizes))
        normal = torch.randn(shape, generator=page.gen)
        x = page.of(t, normal)
        rate = torch.tensor(max(-gate, 1e-3)).expand(heads, *(1 for _ in t.dims[1:]))
        form = b.contract.input_form(t.name)
        samples = _functions(draws(INPUT_FORMS[form], between(t, form, page.decays))) if form else {}
        x = samples.pop("x")(x, normal, rate) if samples else x
        if t.index in ("token", "head"):
            x = x.to(TORCH[b.dtype if len(t.dims) > 1 and not t.wide else b.contract.dtype(t.name)])
        out[t.name] = x.to(TORCH[b.contract.state_dtype]) if t.optional else x
        for n, sample in samples.items():
            own = t.tile.shape(b.sizes)[1:] if n in INPUT_FORMS[form].vectors else ()
            drawn = sample(None, torch.randn(heads, *own, generator=page.gen), rate if own else rate.view(-1))
            out[n] = drawn.to(TORCH[b.contract.dtype(n)])
    return out


def read(b: Build, x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The page's inputs in float64, computed from inputs in the forms of the build's contract."""
    out = {n: t.to(F64) for n, t in x.items()}
    for n, form in b.contract.inputs:
        about = INPUT_FORMS[form]
        of_heads = {of: out[of].view(*out[of].shape, *(1 for _ in out[n].shape[out[of].ndim + 1:])) for of in about.heads}
        out[n] = _functions({n: reads(about)})[n](out[n], **of_heads)
    return out
