"""The problem of a self-check: random inputs in callers' forms, and the results of the page in float64.

Below this line the file is copied into generated modules word for word.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .tables import Tables


# --- copied from here on ---
def _unit_lower_inverse(x: torch.Tensor) -> torch.Tensor:
    eye = torch.eye(x.shape[-1], dtype=x.dtype, device="cpu")
    inverse: torch.Tensor = torch.linalg.solve_triangular(eye + x, eye.expand_as(x), upper=False, unitriangular=True)
    return inverse


def _decayed_product(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor, before: torch.Tensor | None = None) -> torch.Tensor:
    decay = ((x if before is None else before)[..., :, None, :] - x[..., None, :, :]).exp()  # of positive numbers, too, above
    kept = torch.ones(x.shape[-2], x.shape[-2], dtype=x.dtype, device="cpu").tril(0 if before is None else -1) > 0
    return torch.where(kept[..., None], a[..., :, None, :] * b[..., None, :, :] * decay, 0.0).sum(-1)


def _decayed_matmul(p: torch.Tensor, b: torch.Tensor, x: torch.Tensor, before: torch.Tensor | None = None,
                    transposed: bool = False) -> torch.Tensor:
    decay = ((x if before is None else before)[..., :, None, :] - x[..., None, :, :]).exp()  # of positive numbers, too, above
    kept = torch.ones(x.shape[-2], x.shape[-2], dtype=x.dtype, device="cpu").tril(-1) > 0
    each = p[..., None] * torch.where(kept[..., None], decay, 0.0)
    return (each * b[..., :, None, :]).sum(-3) if transposed else (each * b[..., None, :, :]).sum(-2)


#: A function of the module: the page on float64 tiles, (inputs, states, numbers) -> outputs, outputs of the chunk, next states.
_Page = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor], Sequence[torch.Tensor]], list[torch.Tensor]]


@dataclass(frozen=True)
class Expected:
    """The page's results in float64. outs: [T, HV, ...]. finals: [N, HV, ...]. after: for each state, by (sequence, chunk), the
    state after a chunk [HV, ...]. saved: for each output of chunks, the same."""

    outs: list[torch.Tensor]
    finals: list[torch.Tensor]
    after: list[dict[tuple[int, int], torch.Tensor]]
    saved: list[dict[tuple[int, int], torch.Tensor]]


def parent_of(n: int, t: int) -> int:
    """The parent of token t of sequence n in a tree of draft tokens: an earlier token, or -1 for the initial state."""
    return (7 * t + n) % (t + 1) - 1


class CheckProblem:
    """The problem of a self-check.

    It has sequences of one token, of one chunk, of no token, and one longer than the pipeline depth, with a ragged tail. One
    token is repeated. Heads forget nothing, little and much; where there are fewer heads than RATES, sequences come in groups
    with rates of their own. There are initial states. Rows are as large as they may be without results that grow beyond what
    every dtype holds.
    """

    DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
    #: Half of the distance from 1 to the next number of a dtype.
    ROUNDING = {"float32": 2 ** -24, "float16": 2 ** -11, "bfloat16": 2 ** -8}
    #: Tokens of a chunk of the page here: a divisor of all chunks. A page that reads or gives something of each chunk has the
    #: module's chunk.
    STEP = 16
    #: The mean log decay of a token, by value head, without its sign: strong, none, weak, medium.
    RATES = (2.0, 0.0, 0.02, 0.3)
    #: The largest log decay of a token where all heads forget fast, by value head, without its sign. The least is half of it. So
    #: warm-ups have one chunk of 16 tokens, and several.
    FAST = (4.0, 0.25)
    #: The value of inputs between 0 and 1, such as beta, for the repeated token. The larger it is, the harder is the inverse.
    ALIKE = 1 - 2 ** -8
    #: Factors of the rows that tokens have, in the order in which they are tried, until no result is above LARGEST. A page may
    #: multiply the state by more than 1 for some rows; a repeated token does that once for each token of a chunk.
    FACTORS = (1.0, 0.5, 0.25, 0.125)
    LARGEST = 256.0
    #: The least input between 0 and 1, and the least mean log decay of a head for forms.
    LEAST = 1e-6

    def __init__(self, tables: Tables, page: _Page | None, reads: Mapping[str, Callable[..., torch.Tensor]],
                 draws: Mapping[str, Callable[..., torch.Tensor]]) -> None:
        """tables, page: those of the module. reads, draws: for inputs in callers' forms, functions by name (runtime/tables.py):
        what the page reads, and samples."""
        self.tables, self.page, self.reads, self.draws = tables, page, reads, draws

    @property
    def by_token(self) -> bool:
        """Whether a call keeps or reads a state for each token."""
        return self.tables.rows or any(n != "checkpoint_rows" for n in self.tables.by_token)

    @property
    def without_gates(self) -> bool:
        """Whether log decays are drawn as 0: walks come in parts, whose warm-ups follow from them, and a gradient reads their
        sums and operands of chunks, which are drawn apart. No bound on forgetting but 0 would be true of these."""
        return self.tables.part_cost is not None and any(len(self.tables.chunk_dims[n]) > 1 for n in self.tables.held)

    def groups(self, heads: tuple[int, int]) -> int:
        """Groups of sequences, so that all RATES are there."""
        return -(-len(self.RATES) // heads[1])

    def rate_offsets(self, heads: tuple[int, int]) -> tuple[int, ...]:
        """For each problem the index in RATES of its first head. What heads have, as A_log, is the same in all sequences. So few
        heads have two problems: a strong decay shows sums that overflow, and hides errors of what comes from states."""
        return (0, 2) if self.tables.head_inputs and self.groups(heads) > 1 else (0,)

    def lengths(self, packed: bool, heads: tuple[int, int]) -> list[int]:
        """Tokens of each sequence. If packed, a pool skips the third of each group."""
        chunk = max(self.tables.chunk, self.STEP)
        last = chunk + 3 if self.by_token else self.tables.check_chunks * chunk + chunk // 2 + 3
        return ([1, chunk, chunk // 2 - 1, 0, last] if packed else [chunk + 3] * 2) * self.groups(heads)

    def solved(self, lengths: Sequence[int], heads: tuple[int, int], given: bool, fast: bool = False,
               rate_offset: int = 0) -> tuple[dict[str, torch.Tensor], Expected]:
        """`drawn` with the first of FACTORS for which `expected` is at most LARGEST everywhere, or the last; and `expected`.

        fast: whether all heads forget fast. rate_offset: as for `drawn`."""
        for factor in self.FACTORS:
            x = self.drawn(lengths, heads, factor, fast, rate_offset)
            found = self.expected(x, lengths, heads, given)
            by_chunk = (s for by in (*found.after, *found.saved) for s in by.values())
            if all(float(y.abs().max()) <= self.LARGEST for y in (*found.outs, *found.finals, *by_chunk)):
                break
        return x, found

    def by_rounding(self, x: Mapping[str, torch.Tensor], lengths: Sequence[int], heads: tuple[int, int], given: bool,
                    want: Expected, tf32: bool) -> tuple[list[torch.Tensor], list[dict[tuple[int, int], torch.Tensor]]]:
        """By how much rounding errors of inputs change each output of a gradient, and each of its sums of chunks; 0 for other
        modules."""
        if not self.tables.backward:
            return ([torch.zeros_like(y) for y in want.outs],
                    [{at: torch.zeros_like(y) for at, y in by_chunk.items()} for by_chunk in want.saved])
        gen = torch.Generator(device="cpu").manual_seed(1)
        size = 2 ** -11 if tf32 else self.ROUNDING[self.tables.dtype]
        rows = [*(row[0] for row in self.tables.inputs if row[2]), *(n for n, *_ in self.tables.chunk_inputs if self.rounded(n))]
        near = {n: y.double() * (1 + size * torch.randn(y.shape, generator=gen, dtype=torch.float64, device="cpu"))
                if n in rows else y for n, y in x.items()}
        found = self.expected(near, lengths, heads, given)
        return ([y - of for y, of in zip(found.outs, want.outs, strict=True)],
                [{at: y - of[at] for at, y in by_chunk.items()} for by_chunk, of in zip(found.saved, want.saved, strict=True)])

    def rounded(self, name: str) -> bool:
        """Whether operands of products may be rounded tiles of this input of chunks: no vectors, and no exponents."""
        return name not in self.tables.held and len(self.tables.chunk_dims[name]) > 1

    def drawn(self, lengths: Sequence[int], heads: tuple[int, int], factor: float = 1.0, fast: bool = False,
              rate_offset: int = 0) -> dict[str, torch.Tensor]:
        """Random inputs [T, heads, ...], numbers [HV], states [N, HV, ...] and inputs of chunks [N, chunks, HV, ...] in the
        caller's forms, by name, on the CPU.

        factor: of rows that are not log decays, and of tiles of chunks that are no sums of them. fast: as for `solved`.
        rate_offset: the index in RATES of the first head."""
        tables, gen, total = self.tables, torch.Generator(device="cpu").manual_seed(0), sum(lengths)
        out: dict[str, torch.Tensor] = {}
        on_cpu: Any = {"dtype": torch.float32, "device": "cpu"}
        count = dict(zip(("H", "HV"), heads, strict=True))
        rates = self.FAST if fast else (0.0,) if self.without_gates else self.RATES
        each = max(1, len(lengths) // self.groups(heads))  # sequences of a group
        by_group = torch.tensor([[rates[(rate_offset + n // each * heads[1] + j) % len(rates)] for j in range(heads[1])]
                                 for n in range(len(lengths))], **on_cpu)  # the mean log decays of each sequence's heads
        rate, of_tokens = by_group[0], by_group.repeat_interleave(torch.tensor(lengths, device="cpu"), 0)
        forgets = rate.clamp_min(self.LEAST)  # forms may take its log
        # in the last sequence of each group a token near the first chunk's end, for as long as a chunk
        size = max(tables.chunk, self.STEP)
        repeated = [slice(t, min(t + size, sum(lengths[:n + 1]))) for n in range(each - 1, len(lengths), each)
                    for t in [sum(lengths[:n]) + size - self.STEP // 2]]
        keys = {dims[:1] for _, dims in tables.initial}  # of rows that multiply a state
        for name, of, dims, dtype in tables.inputs:
            normal = torch.randn(total, count[of], *dims, generator=gen, **on_cpu)
            page = normal / normal.norm(dim=-1, keepdim=True) if dims and (of == "H" or dims in keys) else normal
            if not dims or name in tables.decays:
                page = torch.rand(total, count[of], *dims, generator=gen, **on_cpu).clamp(self.LEAST, 1 - self.LEAST)
                if name in tables.decays:
                    means = of_tokens[:, :count[of]].view(total, count[of], *(1 for _ in dims))
                    page = -(0.5 + page / 2 if fast else 2 * page) * means
                else:
                    page[[s.start for s in repeated]] = self.ALIKE
            else:
                page = page * factor
            raw = normal.abs() if fast and name in tables.decays else normal  # raw gates, of which more forget more
            x = self.draws[name](page, raw, forgets[:count[of]]) if name in self.draws else page
            for s in repeated:
                x[s] = x[s.start:s.start + 1].clone()
            out[name] = x.to(self.DTYPES[dtype])
        for name, _, dims, dtype in tables.head_inputs:
            normal = torch.randn(heads[1], *dims, generator=gen, **on_cpu)
            page = -rate.view(-1, *(1 for _ in dims)).expand_as(normal) if name in tables.decays else normal
            x = self.draws[name](None, normal.abs() if fast else normal, forgets) if name in self.draws else page
            out[name] = x.to(self.DTYPES[dtype])
        for name, dims in tables.initial:
            x = torch.randn(len(lengths), heads[1], *dims, generator=gen, **on_cpu) / 2
            out[name] = x.to(self.DTYPES[tables.state_dtype])
        summed = sorted({of for of, _ in tables.sums.values()})
        for name, dims, dtype in tables.chunk_inputs:
            x = torch.zeros(len(lengths), -(-max(lengths) // tables.chunk), heads[1], *dims, **on_cpu)
            of, _ = tables.sums.get(name, ("", False))
            for n, (tiles, length) in enumerate(zip(x, lengths, strict=True)):
                own = torch.Generator("cpu").manual_seed(1000 * (1 + summed.index(of)) + n) if of else gen
                self.fill(name, tiles, length, own, factor, by_group[n])
            out[name] = x.to(self.DTYPES[dtype])
        return out

    def fill(self, name: str, tiles: torch.Tensor, length: int, gen: torch.Generator, factor: float, rates: torch.Tensor
             ) -> None:
        """Random tiles of the chunks of a sequence, with zeros past its end, as modules store them. Those of `held` repeat
        their last row there, and tiles of rows are running sums of log decays. Those of the same decays get generators in the
        same state: of independent sums exp of a difference could grow. What bounds how much tokens forget is not below 0: they
        forget nothing, so that each part starts from what the parts before it give. factor: of other tiles. rates: of heads."""
        for i, of_all in enumerate(tiles[:-(-length // self.tables.chunk)]):
            rows = min(length - i * self.tables.chunk, self.tables.chunk)
            tile = self.of_chunk(name, of_all, rows)
            tile.copy_(torch.randn(tile.shape, generator=gen, dtype=tile.dtype, device="cpu") / 2)
            if name == self.tables.forgets:
                tile.abs_()
            if name not in self.tables.held:
                tile.mul_(factor)
                continue
            if tile.ndim > 2:
                decays = -2 * rates.view(-1, 1, 1) * tile.abs()
                before = name in self.tables.sums and self.tables.sums[name][1]
                tile.copy_(decays.cumsum(1) - (decays if before else 0.0))
            of_all[:, rows:] = of_all[:, rows - 1:rows]

    def of_chunk(self, name: str, tiles: torch.Tensor, rows: int | None = None) -> torch.Tensor:
        """A view of tiles of chunks in the page's order of dims, without padding. rows: tokens of the chunk, None for all."""
        dims = self.tables.chunk_dims[name]
        tiles = tiles.mT if name.endswith("_vk") else tiles
        for axis, extent in zip(range(-len(dims), 0), dims, strict=True):
            most = rows if extent is None else extent
            tiles = tiles if most is None else tiles.narrow(axis, 0, most)
        return tiles

    def read(self, name: str, x: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """An input in the form in which the page reads it, in float64."""
        y = x[name].double()
        if name not in self.reads:
            return y
        of_heads = {n: x[n].double() for n, *_ in self.tables.head_inputs}
        return self.reads[name](y, **{n: z.view(*z.shape, *(1 for _ in y.shape[z.ndim + 1:])) for n, z in of_heads.items()})

    def kv_order(self, state: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
        """A caller's states in the page's order of dims."""
        return state.mT if self.tables.state == "vk" and len(dims) == 2 else state

    def expected(self, x: Mapping[str, torch.Tensor], lengths: Sequence[int], heads: tuple[int, int], given: bool) -> Expected:
        """The page's results in float64. given: whether initial states count."""
        tables = self.tables
        assert self.page is not None
        share = {"H": heads[1] // heads[0], "HV": 1}
        inputs = [self.read(n, x).repeat_interleave(share[of], 1).transpose(0, 1) for n, of, *_ in tables.inputs]
        of_heads = [x[n].double() for n, *_ in tables.head_inputs if n not in self.draws or not self.reads]
        numbers = [torch.tensor(1.0 if n is None else n, dtype=torch.float64, device="cpu") for n in tables.scalars.values()]
        initial = [self.kv_order(x[n].double(), dims) * given for n, dims in tables.initial]
        count, start, by_page = len(tables.outputs), 0, bool(tables.chunk_inputs or tables.saved)
        shapes = [(heads[1], sum(lengths), *dims) for _, dims, _ in tables.outputs]
        outs = [torch.zeros(shape, dtype=torch.float64, device="cpu") for shape in shapes]
        finals: list[list[torch.Tensor]] = [[] for _ in initial]
        after: list[dict[tuple[int, int], torch.Tensor]] = [{} for _ in initial]
        saved: list[dict[tuple[int, int], torch.Tensor]] = [{} for _ in tables.saved]
        for n, length in enumerate(lengths):
            states = [s[n] for s in initial]
            step = tables.chunk if by_page else min(self.STEP, tables.chunk)  # so that there is a state after each chunk
            for t in range(0, length, step)[::-1 if tables.backward else 1]:
                if "retrieve_parent_token" in tables.indices and t:
                    parent = parent_of(n, t)
                    states = [s[n] for s in initial] if parent < 0 else [s[n, parent] for s in after]
                rows = slice(start + t, start + min(t + step, length))
                of_chunk = [self.of_chunk(name, x[name][n, t // step], rows.stop - rows.start).double()
                            for name, *_ in tables.chunk_inputs]
                results = self.page([*(y[:, rows] for y in inputs), *of_heads, *of_chunk], states, numbers)
                states = results[count + len(saved):]
                for kept, y in zip(outs, results, strict=False):
                    kept[:, rows] = y
                for by_chunk, y in zip(saved, results[count:], strict=False):
                    by_chunk[n, t // step] = y
                whole = (t + step) // tables.chunk
                if t + step <= length and (t + step) % tables.chunk == 0:
                    for by_chunk, s in zip(after, states, strict=True):
                        by_chunk[n, whole - 1] = s
            for of_state, s, first in zip(finals, states, initial, strict=True):
                of_state.append(s.expand_as(first[n]))
            start += length
        return Expected([y.transpose(0, 1) for y in outs], [torch.stack(s) for s in finals], after, saved)
