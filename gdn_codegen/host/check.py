"""Self-check: compares a module's kernels with its page in float64.

Below this line the file is copied into generated modules word for word, where `Check` gets the module's tables, page and host.
"""
from __future__ import annotations

import math
import os
import threading
from typing import Any

import torch

from .tables import Tables


# --- copied from here on ---
def _unit_lower_inverse(x: Any) -> Any:
    eye = torch.eye(x.shape[-1], dtype=x.dtype, device="cpu")
    return torch.linalg.solve_triangular(eye + x, eye.expand_as(x), upper=False, unitriangular=True)


def _decayed_product(a: Any, b: Any, x: Any, before: Any = None) -> Any:
    decay = ((x if before is None else before)[..., :, None, :] - x[..., None, :, :]).exp()  # of positive numbers, too, above
    kept = torch.ones(x.shape[-2], x.shape[-2], dtype=x.dtype, device="cpu").tril(0 if before is None else -1) > 0
    return torch.where(kept[..., None], a[..., :, None, :] * b[..., None, :, :] * decay, 0.0).sum(-1)


def _decayed_matmul(p: Any, b: Any, x: Any, before: Any = None, transposed: bool = False) -> Any:
    decay = ((x if before is None else before)[..., :, None, :] - x[..., None, :, :]).exp()  # of positive numbers, too, above
    kept = torch.ones(x.shape[-2], x.shape[-2], dtype=x.dtype, device="cpu").tril(-1) > 0
    each = p[..., None] * torch.where(kept[..., None], decay, 0.0)
    return (each * b[..., :, None, :]).sum(-3) if transposed else (each * b[..., None, :, :]).sum(-2)


class Check:
    """Compares a module's kernels with its page in float64 on a small problem.

    The problem has sequences of one token, of one chunk, of no token, and one longer than the pipeline depth, with a ragged
    tail. One token is repeated. Heads forget nothing, little and much. There are initial states. A build with parts runs in
    parts too: some have a warm-up, and some need summaries of all parts before them. Rows are as large as they may be without
    results that grow beyond what every dtype holds.
    """

    DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
    #: The largest RMSE over RMS of one head in one sequence that rounding may cause, by dtype.
    ACCEPTED = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 3e-2}
    #: The same if a GPU multiplies float32 as tf32, which drops 13 bits of each operand.
    ACCEPTED_TF32 = 3e-2
    #: Of gradients: an error may be this many times the change that rounding errors of inputs make, and at most MOST. Sums of a
    #: gradient cancel, so that its entries may be small beside their terms. So may all of a head in a short sequence: an error
    #: there is compared with this many times that change, if that is more than the gradient.
    OF_ROUNDING, MOST = 16, 0.25
    #: Half of the distance from 1 to the next number of a dtype.
    ROUNDING = {"float32": 2 ** -24, "float16": 2 ** -11, "bfloat16": 2 ** -8}
    #: The value of memory that no call may write.
    MARK = 7.0
    #: Tokens of a chunk of the page here: a divisor of all chunks. A page that reads or gives something of each chunk has the
    #: module's chunk.
    STEP = 16
    #: The mean log decay of a token, by value head, without its sign: strong, none, weak, medium.
    RATES = (2.0, 0.0, 0.02, 0.3)
    #: The value of inputs between 0 and 1, such as beta, for the repeated token. The larger it is, the harder is the inverse.
    ALIKE = 1 - 2 ** -8
    #: Factors of the rows that tokens have, in the order in which they are tried, until no result is above LARGEST. A page may
    #: multiply the state by more than 1 for some rows; a repeated token does that once for each token of a chunk.
    FACTORS = (1.0, 0.5, 0.25, 0.125)
    LARGEST = 256.0
    #: The least input between 0 and 1, and the least mean log decay of a head for forms.
    LEAST = 1e-6
    #: Guard elements before and after each tensor of the kernels.
    GUARD = 1 << 16
    #: Instances on a GPU, by copies of the problem: enough to fill it. Fewer where each token has a state, which takes memory.
    INSTANCES = 512
    INSTANCES_BY_TOKEN = 64

    def __init__(self, tables: Tables, page: Any, host: Any, function: Any, reads: Any = None, draws: Any = None) -> None:
        """tables, host, page: those of the module. function: the function under test, as callers see it.

        reads, draws: for inputs in callers' forms, functions by name (runtime/tables.py): what the page reads, and samples."""
        self.tables, self.page, self.host, self.function = tables, page, host, function
        self.reads, self.draws = reads or {}, draws or {}
        self.done: Any = set()
        self.lock = threading.RLock()

    def __call__(self, device: Any = None, heads: Any = None) -> Any:
        """Run the kernels and compare. Returns (error, accepted error) by output, as RMSE over RMS. Raises RuntimeError if an
        error is too large. heads: H and HV, if kernels are compiled for them."""
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        with self.lock:
            found = self.errors(device, heads)
            wrong = [f"{n} off by {error:.1e} ({accepted:.0e} is accepted)" for n, (error, accepted) in found.items()
                     if not error <= accepted]
            if wrong:
                self.done.discard((device, heads or self.heads()))
                raise RuntimeError(f"{self.tables.name} gives wrong results on {device}: {', '.join(wrong)}")
        return found

    def once(self, device: Any, heads: Any) -> None:
        """Do `__call__` once for these head counts on the device. GDN_CODEGEN_ADMIT=0 turns it off."""
        if os.environ.get("GDN_CODEGEN_ADMIT") == "0":
            return
        with self.lock:  # other threads wait for the result; launches within `errors` find the check done
            if (device, heads) in self.done:
                return
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(f"{self.tables.name}: call this once before a graph is captured, to check its kernels")
            self(device, heads)

    def heads(self) -> Any:
        """H and HV to use if the caller gives none: two value heads for each key head, or as many as one instance handles."""
        if self.tables.heads:
            return tuple(self.tables.heads.values())
        both = {"H", "HV"} <= {row[1] for row in self.tables.inputs}
        return (2, 2 * max(2, self.tables.heads_per_instance)) if both else (2, 2)

    def errors(self, device: Any, heads: Any = None, calls: Any = ((True, True, True), (False, False, True))) -> Any:
        """(error, accepted error) by output: the worst of `calls`. A call says whether sequences are packed, initial states are
        given, and final states are wanted."""
        heads = heads or self.heads()
        found: Any = {}
        host, in_parts = self.host, self.tables.part_cost is not None
        parts = (1, 2) if in_parts and device.type != "cpu" else (1,)
        with self.lock, torch.inference_mode(False), torch.no_grad():
            self.done.add((device, heads))  # launches below call `once`
            before = host.poison, host.part_chunks, host.plans
            try:
                host.poison, host.plans = True, {}
                for chunks in parts:
                    for call in calls:
                        if in_parts:  # short parts, so that there are many
                            host.part_chunks = chunks
                        for n, (error, accepted) in self.compared(device, heads, *call).items():
                            known = found.get(n, (0.0, accepted))[0]
                            found[n] = (known if known > error or math.isnan(known) else error), accepted
                        host.plans.clear()
            except BaseException:
                self.done.discard((device, heads))
                raise
            finally:
                host.poison, host.part_chunks, host.plans = before
        return found

    # --- the problem --------------------------------------------------------------------------------------------------
    def lengths(self, packed: bool) -> Any:
        """Tokens of each sequence. If packed, a pool skips the third."""
        chunk = max(self.tables.chunk, self.STEP)
        if not packed:
            return [chunk + 3] * 2
        if self.by_token:
            return [1, chunk, chunk // 2 - 1, 0, chunk + 3]
        return [1, chunk, chunk // 2 - 1, 0, self.tables.check_chunks * chunk + chunk // 2 + 3]

    def problem(self, lengths: Any, heads: Any, given: bool) -> Any:
        """`drawn` with the first of FACTORS for which `expected` is at most LARGEST everywhere, or the last; and `expected`."""
        for factor in self.FACTORS:
            x = self.drawn(lengths, heads, factor)
            outs, finals, after, saved = found = self.expected(x, lengths, heads, given)
            by_chunk = (s for by in (*after, *saved) for s in by.values())
            if all(float(y.abs().max()) <= self.LARGEST for y in (*outs, *finals, *by_chunk)):
                break
        return x, found

    def by_rounding(self, x: Any, lengths: Any, heads: Any, given: bool, outs: Any, tf32: bool) -> Any:
        """For each output of a gradient, by how much rounding errors of inputs change it; 0 for other outputs."""
        if not self.tables.backward:
            return [torch.zeros_like(y) for y in outs]
        gen = torch.Generator(device="cpu").manual_seed(1)
        size = 2 ** -11 if tf32 else self.ROUNDING[self.tables.dtype]
        rows = [*(row[0] for row in self.tables.inputs if row[2]), *(row[0] for row in self.tables.chunk_inputs)]
        near = {n: y.double() * (1 + size * torch.randn(y.shape, generator=gen, dtype=torch.float64, device="cpu"))
                if n in rows else y for n, y in x.items()}
        return [y - want for y, want in zip(self.expected(near, lengths, heads, given)[0], outs, strict=True)]

    def drawn(self, lengths: Any, heads: Any, factor: float = 1.0) -> Any:
        """Random inputs [T, heads, ...], numbers [HV], states [N, HV, ...] and inputs of chunks [N, chunks, HV, ...] in the
        caller's forms, by name, on the CPU.

        factor: of rows that are not log decays."""
        tables, gen, total, out = self.tables, torch.Generator(device="cpu").manual_seed(0), sum(lengths), {}
        on_cpu: Any = {"dtype": torch.float32, "device": "cpu"}
        count = dict(zip(("H", "HV"), heads, strict=True))
        rate = torch.tensor([self.RATES[j % len(self.RATES)] for j in range(heads[1])], **on_cpu)
        forgets = rate.clamp_min(self.LEAST)  # forms may take its log
        repeated = total - lengths[-1] + max(tables.chunk, self.STEP) - self.STEP // 2  # a token near the first chunk's end
        keys = {dims[:1] for _, dims in tables.initial}  # of rows that multiply a state
        for name, of, dims, dtype in tables.inputs:
            normal = torch.randn(total, count[of], *dims, generator=gen, **on_cpu)
            page = normal / normal.norm(dim=-1, keepdim=True) if dims and (of == "H" or dims in keys) else normal
            if not dims or name in tables.decays:
                page = torch.rand(total, count[of], *dims, generator=gen, **on_cpu).clamp(self.LEAST, 1 - self.LEAST)
                if name in tables.decays:
                    page = -2 * page * rate[:count[of]].view(-1, *(1 for _ in dims))
                else:
                    page[repeated] = self.ALIKE
            else:
                page = page * factor
            x = self.draws[name](page, normal, forgets[:count[of]]) if name in self.draws else page
            x[repeated:repeated + max(tables.chunk, self.STEP)] = x[repeated:repeated + 1].clone()
            out[name] = x.to(self.DTYPES[dtype])
        for name, _, dims, dtype in tables.head_inputs:
            normal = torch.randn(heads[1], *dims, generator=gen, **on_cpu)
            page = -rate.view(-1, *(1 for _ in dims)).expand_as(normal) if name in tables.decays else normal
            x = self.draws[name](None, normal, forgets) if name in self.draws else page
            out[name] = x.to(self.DTYPES[dtype])
        for name, dims in tables.initial:
            x = torch.randn(len(lengths), heads[1], *dims, generator=gen, **on_cpu) / 2
            out[name] = x.to(self.DTYPES[tables.state_dtype])
        for n, (name, dims, dtype) in enumerate(tables.chunk_inputs):
            x = torch.zeros(len(lengths), -(-max(lengths) // tables.chunk), heads[1], *dims, **on_cpu)
            tile = self.of_chunk(n, name, x)
            tile.copy_(torch.randn(tile.shape, generator=gen, **on_cpu) / 2)
            out[name] = x.to(self.DTYPES[dtype])
        return out

    def of_chunk(self, n: int, name: str, tiles: Any, rows: Any = None) -> Any:
        """A view of the states before chunks in the page's order of dims, without padding. n: the number of the state. After the
        states come tiles of a chunk's tokens with the columns of the first one. rows: of these tiles, None for all."""
        states = self.tables.initial
        _, dims = states[n if n < len(states) else 0]
        dims = dims[::-1] if self.tables.state == "vk" else dims
        dims = dims if n < len(states) else (rows, *dims[1:])
        tiles = tiles.mT if name.endswith("_vk") else tiles
        places = (..., *map(slice, dims))
        return tiles[places]

    def read(self, name: str, x: Any) -> Any:
        """An input in the form in which the page reads it, in float64."""
        y = x[name].double()
        if name not in self.reads:
            return y
        of_heads = {n: x[n].double() for n, *_ in self.tables.head_inputs}
        return self.reads[name](y, **{n: z.view(*z.shape, *(1 for _ in y.shape[z.ndim + 1:])) for n, z in of_heads.items()})

    def kv_order(self, state: Any, dims: Any) -> Any:
        """A caller's states in the page's order of dims."""
        return state.mT if self.tables.state == "vk" and len(dims) == 2 else state

    def expected(self, x: Any, lengths: Any, heads: Any, given: bool) -> Any:
        """The page's results in float64: a list of outputs [T, HV, ...], one of final states [N, HV, ...], one of dicts of
        states after chunks [HV, ...], by (sequence, chunk), and one of dicts of outputs of chunks [HV, ...]."""
        tables = self.tables
        share = {"H": heads[1] // heads[0], "HV": 1}
        inputs = [self.read(n, x).repeat_interleave(share[of], 1).transpose(0, 1) for n, of, *_ in tables.inputs]
        of_heads = [x[n].double() for n, *_ in tables.head_inputs if n not in self.draws or not self.reads]
        numbers = [torch.tensor(1.0 if n is None else n, dtype=torch.float64, device="cpu") for n in tables.scalars.values()]
        initial = [self.kv_order(x[n].double(), dims) * given for n, dims in tables.initial]
        count, start, by_page = len(tables.outputs), 0, bool(tables.chunk_inputs or tables.saved)
        shapes = [(heads[1], sum(lengths), *dims) for _, dims, _ in tables.outputs]
        outs: Any = [torch.zeros(shape, dtype=torch.float64, device="cpu") for shape in shapes]
        finals: Any = [[] for _ in initial]
        after: Any = [{} for _ in initial]
        saved: Any = [{} for _ in tables.saved]
        for n, length in enumerate(lengths):
            states = [s[n] for s in initial]
            step = tables.chunk if by_page else min(self.STEP, tables.chunk)  # so that there is a state after each chunk
            for t in range(0, length, step)[::-1 if tables.backward else 1]:
                if "retrieve_parent_token" in tables.indices and t:
                    parent = self.parent(n, t)
                    states = [s[n] for s in initial] if parent < 0 else [s[n, parent] for s in after]
                rows = slice(start + t, start + min(t + step, length))
                of_chunk = [self.of_chunk(i, name, x[name][n, t // step], rows.stop - rows.start).double()
                            for i, (name, *_) in enumerate(tables.chunk_inputs)]
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
            for kept, s, first in zip(finals, states, initial, strict=True):
                kept.append(s.expand_as(first[n]))
            start += length
        return [y.transpose(0, 1) for y in outs], [torch.stack(s) for s in finals], after, saved

    # --- the call -----------------------------------------------------------------------------------------------------
    def guarded(self, x: Any, shape: Any, fill: float) -> Any:
        """A tensor of this shape, like `x`, between guard elements that kernels must not touch."""
        size = math.prod(shape)
        return x.new_full((size + 2 * self.GUARD,), fill)[self.GUARD:self.GUARD + size].view(shape)

    def placed(self, x: Any, rows: int, fill: float = math.nan) -> Any:
        """[T, heads, ...] in the module's layout. If kernels take strides, there are gaps between heads."""
        x = x.unflatten(0, (rows, -1))
        x = x if self.tables.layout == "bthd" else x.transpose(1, 2)
        shape = (*x.shape[:2], x.shape[2] + self.tables.strided, *x.shape[3:])
        return self.guarded(x, shape, fill)[:, :, :x.shape[2]].copy_(x)

    def pool(self, x: Any, slots: Any, count: int) -> Any:
        """A pool with gaps between slots, `count` in all, of which some are no sequence's."""
        size = x[0].numel()
        pool = x.new_full((count, size + 32), self.MARK)[:, :size].unflatten(1, x.shape[1:])
        pool[slots] = x
        return pool

    @staticmethod
    def parent(n: int, t: int) -> int:
        """The parent of a token of a sequence: an earlier token, or -1 for the initial state."""
        return (7 * t + n) % (t + 1) - 1

    def places(self, lengths: Any) -> Any:
        """Where states lie: the slot of each sequence's initial state, slots of tokens [N, W], and rows of sequences."""
        count, width = len(lengths), max(lengths) + 1
        rows = torch.arange(count, 0, -1, device="cpu")
        if "state_indices" not in self.tables.by_token:
            return rows, None, rows
        slots = torch.arange(count * width, 0, -1, device="cpu").view(count, width)
        accepted = "num_accepted_tokens" in self.tables.indices
        return slots[torch.arange(count, device="cpu"), [n % 3 * accepted for n in range(count)]], slots, rows

    def integers(self, lengths: Any, once: int, device: Any) -> Any:
        """The tensors of integers, by name. once: how many sequences differ."""
        names, (first, slots, rows), width = self.tables.numbers, self.places(lengths), max(lengths) + 1
        left_out = torch.tensor([self.is_skipped(n) for n in range(len(lengths))], device="cpu")
        made = {"state_indices": first.where(~left_out, -1) if slots is None else slots.where(~left_out[:, None], -1),
                "num_accepted_tokens": torch.tensor([n % 3 + 1 for n in range(len(lengths))], device="cpu"),
                "intermediate_state_indices": rows,
                "retrieve_parent_token": torch.tensor([[self.parent(n % once, t) for t in range(width)]
                                                       for n in range(len(lengths))], device="cpu"),
                "checkpoint_rows": self.rows(lengths)}
        return {name: made[name].to(torch.int32).to(device) for name in names}

    def rows(self, lengths: Any) -> Any:
        """The rows of checkpoints, by sequence and chunk: one after each whole chunk, in those of calls with one for every
        chunk."""
        chunk, start = self.tables.chunk, 0
        rows = torch.full((len(lengths), max(lengths) // chunk + 1), -1, device="cpu")
        for n, length in enumerate(lengths):
            rows[n, :length // chunk] = start // chunk + torch.arange(length // chunk, device="cpu")
            start += length
        return rows

    def arguments(self, x: Any, lengths: Any, heads: Any, device: Any, call: Any) -> Any:
        """The call's arguments, and the slots of the sequences. Rows past the last sequence are NaN."""
        tables, (packed, given, wanted) = self.tables, call
        rows, spare = (1, tables.chunk) if packed else (len(lengths), 0)
        slots: Any = None
        copies = sum(lengths) // x[tables.inputs[0][0]].shape[0]
        arguments: Any = {"output_final_state": wanted} if tables.final or tables.in_place else {}
        arguments.update({n: 1.0 for n, default in tables.scalars.items() if default is None})
        for name, *_ in tables.inputs:
            y = x[name].to(device)
            spare_rows = y.new_full((spare, *y.shape[1:]), math.nan)
            arguments[name] = self.placed(torch.cat([y] * copies + [spare_rows]), rows)
        for name, *_ in tables.head_inputs:
            arguments[name] = x[name].to(device)
        for name, dims, _ in tables.chunk_inputs:
            y = x[name].to(device)
            tiles = y.new_full(((sum(lengths) + spare) // tables.chunk + len(lengths), heads[1], *dims), math.nan)
            for slot, n, i in self.chunk_slots(lengths):
                tiles[slot] = y[n % len(y), i]
            arguments[name] = tiles
        for name, (_, dims, dtype) in zip(tables.outs, tables.outputs, strict=True):
            shape = (sum(lengths) + spare, heads[1], *dims)
            arguments[name] = self.placed(torch.full(shape, self.MARK, dtype=self.DTYPES[dtype], device=device), rows, self.MARK)
        if packed:
            arguments["cu_seqlens"] = torch.tensor([0, *lengths], device="cpu").cumsum(0).to(torch.int32).to(device)
        for name, _ in tables.initial if given else ():
            y = torch.cat([x[name].to(device)] * copies)
            arguments[name] = self.guarded(y, y.shape, self.MARK).copy_(y)
        if tables.pool:
            slots, all_slots, _ = self.places(lengths)
            count = (slots if all_slots is None else all_slots).numel() + 2
            arguments.update({name: self.pool(arguments[name], slots, count) for name, _ in tables.initial})
        arguments.update(self.integers(lengths, len(lengths) // copies, device) if tables.numbers else {})
        for (name, dims), (initial, _) in zip(tables.checkpoints, tables.initial, strict=True) if tables.rows else ():
            shape = (len(lengths) + 2, max(lengths) + 1, heads[1], *dims)
            arguments[name] = self.guarded(x[initial].to(device), shape, self.MARK).fill_(self.MARK)
        for (name, dims), (initial, _) in zip(tables.checkpoints, tables.initial, strict=True) if tables.positions else ():
            shape = ((sum(lengths) + spare) // tables.chunk + 1, heads[1], *dims)
            arguments[name] = self.guarded(x[initial].to(device), shape, self.MARK).fill_(self.MARK)
        for (name, dims), (initial, _) in zip(tables.final, tables.initial, strict=True) if wanted and tables.final else ():
            y = x[initial].to(device)
            arguments[name] = (torch.full_like(arguments[initial], self.MARK) if tables.pool else
                          self.guarded(y, (len(lengths), heads[1], *dims), self.MARK))
        return arguments, slots

    def chunk_slots(self, lengths: Any) -> Any:
        """The chunk slots of the sequences, as (slot, sequence, chunk)."""
        chunk, starts = self.tables.chunk, [0, *torch.tensor(lengths, device="cpu").cumsum(0).tolist()]
        return [(starts[n] // chunk + n + i, n, i) for n, length in enumerate(lengths) for i in range(-(-length // chunk))]

    def is_skipped(self, n: int) -> bool:
        """True if the pool's slot of this sequence is -1."""
        return self.tables.pool and n % 5 == 2

    def compared(self, device: Any, heads: Any, packed: bool, given: bool, wanted: bool) -> Any:
        """(error, accepted error) by output of one call."""
        tables, once = self.tables, self.lengths(packed)
        given, wanted = given or tables.pool or tables.in_place, wanted or tables.in_place
        instances = self.INSTANCES_BY_TOKEN if self.by_token or tables.positions else self.INSTANCES
        copies = 1 if device.type == "cpu" else 1 + instances // (len(once) * heads[1])
        x, (outs, finals, after, saved) = self.problem(once, heads, given)
        lengths = once * copies
        arguments, slots = self.arguments(x, lengths, heads, device, (packed, given, wanted))
        served = [n for n in range(len(lengths)) if not self.is_skipped(n)]
        starts = [0, *torch.tensor(lengths, device="cpu").cumsum(0).tolist()]
        written = torch.zeros(starts[-1] + packed * tables.chunk, dtype=torch.bool, device="cpu")
        for n in served:
            written[starts[n]:starts[n + 1]] = True
        writable = {n: (whole(arguments[n]), whole(arguments[n]).clone()) for n in self.writable(arguments)}
        results = self.function(**arguments)

        found, accepted, tf32 = {}, self.ACCEPTED[tables.dtype], tables.tf32 and device.type == "cuda"
        if tf32:
            accepted = self.ACCEPTED_TF32
        if "retrieve_parent_token" in tables.indices:  # tokens start from states as they were stored
            accepted = max(accepted, self.ACCEPTED[tables.state_dtype])
        rounding = self.by_rounding(x, once, heads, given, outs, tf32)
        for (name, *_), got, want, change in zip(tables.outputs, results[:len(outs)], outs, rounding, strict=True):
            rows = got if tables.layout == "bthd" else got.transpose(1, 2)
            each = rows.flatten(0, 1)[:starts[-1]].cpu().split(lengths)
            both = list(zip(want.split(once), change.split(once), strict=True))
            error = worst([off(y + by, y, self.OF_ROUNDING * by) for y, by in both if len(y)])
            errors = [off(each[n], y, self.OF_ROUNDING * by) for n in served for y, by in [both[n % len(once)]] if len(y)]
            found[name] = worst(errors), max(accepted, min(self.MOST, self.OF_ROUNDING * error))
        accepted = max(accepted, self.ACCEPTED[tables.state_dtype])
        states, at_chunks = results[len(outs):][:len(finals)], results[len(outs):][len(finals):]
        names = [n for n, _ in tables.final] or [n.replace("initial", "final") for n, _ in tables.initial]
        for name, (_, dims), got, want in zip(names, tables.initial, states, finals, strict=True):
            if got is not None and not tables.slots:
                got = self.kv_order(got.cpu() if slots is None else got.cpu()[slots], dims)
                each = [off(got[n][None], want[n % len(once)][None]) for n in served]
                found[name] = worst(each), accepted
        by_token = self.stored_by_token(lengths, served)
        for (name, dims), want in zip(self.kept, after, strict=True) if self.kept else ():
            got = self.kv_order(arguments[name].cpu()[by_token], dims)
            found[f"{name} by token"] = worst([off(y[None], want[n % len(once), t][None]) for y, (n, t) in
                                               zip(got, tokens_of(lengths, served), strict=True)]), accepted
        if tables.positions:
            at_chunks = [arguments[name] for name, _ in tables.checkpoints]
        for (name, dims), got, want in zip(tables.checkpoints, at_chunks, after, strict=False):
            got = self.kv_order(got.cpu(), dims)
            found[name] = worst([off(got[starts[n] // tables.chunk + i][None], want[n % len(once), i][None])
                                 for n in served for i in range(lengths[n] // tables.chunk)]), accepted
        for m, (name, want) in enumerate(zip(tables.saved, saved, strict=True)):
            got, tiles = self.of_chunk(m, name, results[len(results) - len(saved) + m]), dict[Any, Any]()
            for slot, n, i in self.chunk_slots(lengths):  # states one by one, and rows of tokens by sequence
                y = want[n % len(once), i]
                tiles.setdefault((n, i if m < len(tables.initial) else 0), []).append((got[slot][:, :y.shape[1]].cpu(), y))
            pairs = [[torch.cat(z, 1).transpose(0, 1) for z in zip(*x, strict=True)] for x in tiles.values()]
            found[name] = worst([off(*x) for x in pairs]), accepted
        own = served if slots is None else slots[served].to(device)
        return found | self.beside(arguments, writable, written, by_token, own, lengths)

    def beside(self, arguments: Any, writable: Any, written: Any, by_token: Any, slots: Any, lengths: Any) -> Any:
        """(inf, 0) by name of memory in which something changed that the call may not write, else (0, 0).

        writable: for each, all memory of its storage now and before the call. written: tokens of sequences. by_token, slots: the
        tiles of states that the call writes."""
        tables, found = self.tables, {}
        for name, (now, before) in writable.items():
            own = torch.zeros(now.shape, dtype=torch.bool, device=now.device).as_strided(
                arguments[name].shape, arguments[name].stride(), arguments[name].storage_offset())
            if name in tables.outs:
                own = own if tables.layout == "bthd" else own.transpose(1, 2)
                own[written.view(own.shape[:2]).to(now.device)] = True
            elif name in dict(self.kept):
                own[tuple(at.to(now.device) for at in by_token)] = True
            elif name in dict(tables.checkpoints):
                own[[row for row in self.rows(lengths).flatten().tolist() if row >= 0]] = True
            else:
                own[slots] = True
            found[f"memory beside {name}"] = math.inf if ((now != before) & ~whole(own)).any() else 0.0, 0.0
        return found

    @property
    def by_token(self) -> bool:
        """Whether a call keeps or reads a state for each token."""
        return self.tables.rows or any(n != "checkpoint_rows" for n in self.tables.by_token)

    @property
    def kept(self) -> Any:
        """Rows of the tensors that hold a state for each token."""
        return self.tables.checkpoints if self.tables.rows else self.tables.initial if self.tables.slots else ()

    def stored_by_token(self, lengths: Any, served: Any) -> Any:
        """The indices of the tiles in which the states after all tokens of the served sequences are."""
        _, slots, rows = self.places(lengths)
        n, t = torch.tensor(tokens_of(lengths, served), dtype=torch.int64, device="cpu").view(-1, 2).unbind(1)
        return (slots[n, t],) if self.tables.slots else (rows[n], t) if self.tables.rows else ()

    def writable(self, arguments: Any) -> Any:
        """Names of the arguments that kernels write to. Their memory has guards and gaps, too."""
        states = [n for n, _ in (self.tables.initial if self.tables.in_place else self.tables.final)]
        rows = [n for n, _ in self.tables.checkpoints] if self.tables.rows or self.tables.positions else []
        return [n for n in (*self.tables.outs, *states, *rows) if n in arguments]


def tokens_of(lengths: Any, served: Any) -> Any:
    """The tokens of these sequences, as pairs (sequence, token)."""
    return [(n, t) for n in served for t in range(lengths[n])]


def whole(x: Any) -> Any:
    """All memory of the storage of a tensor."""
    return x.new_empty(0).set_(x.untyped_storage())


def off(got: Any, want: Any, least: Any = None) -> Any:
    """RMSE over RMS of the worst head. got, want, least: [tokens, heads, ...]. An RMS is at least that of `least`."""
    got, least = got.double(), torch.zeros_like(want) if least is None else least
    error, size, other = ((y * y).transpose(0, 1).flatten(1).mean(1) for y in (got - want, want, least))
    return (error / size.maximum(other).clamp_min(1e-30)).sqrt().max()


def worst(errors: Any) -> float:
    """The largest error; NaN if any is NaN."""
    return float(torch.stack(errors).max()) if errors else 0.0
