"""Self-check: compares a module's kernels with its page in float64.

Below this line the file is copied into generated modules word for word, where `Check` gets the module's tables, page and host.
"""
from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .check_call import CheckCall, tokens_of
from .check_problem import CheckProblem, Expected, _Page
from .tables import Tables

# --- copied from here on ---
#: By the name of an output: its error, as RMSE over RMS, and the error that is accepted.
_Errors = dict[str, tuple[float, float]]


class Check:
    """Compares a module's kernels with its page in float64 on a `CheckProblem`. A build with parts runs in parts too: some have a
    warm-up, and some need summaries of all parts before them."""

    #: The largest RMSE over RMS of one head in one sequence that rounding may cause, by dtype.
    ACCEPTED = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 3e-2}
    #: The same if a GPU multiplies float32 as tf32, which drops 13 bits of each operand.
    ACCEPTED_TF32 = 3e-2
    #: Of gradients: an error may be this many times the change that rounding errors of inputs make, and at most MOST. Sums of a
    #: gradient cancel, so that its entries may be small beside their terms. So may all of a head in a short sequence: an error
    #: there is compared with this many times that change, if that is more than the gradient.
    OF_ROUNDING, MOST = 16, 0.25
    #: Instances on a GPU, by copies of the problem: enough to fill it. Fewer where each token has a state, which takes memory.
    INSTANCES = 512
    INSTANCES_BY_TOKEN = 64

    def __init__(self, tables: Tables, page: _Page | None, host: Any, function: Callable[..., Any] | None,
                 reads: Mapping[str, Callable[..., torch.Tensor]] | None = None,
                 draws: Mapping[str, Callable[..., torch.Tensor]] | None = None) -> None:
        """tables, host, page: those of the module. function: the function under test, as callers see it. reads, draws: as for
        `CheckProblem`."""
        self.tables, self.host, self.function = tables, host, function
        self.problem = CheckProblem(tables, page, reads or {}, draws or {})
        self.call = CheckCall(self.problem)
        self.done: set[tuple[torch.device, tuple[int, int]]] = set()
        self.lock = threading.RLock()

    def __call__(self, device: torch.device | str | None = None, heads: tuple[int, int] | None = None) -> _Errors:
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

    def once(self, device: torch.device, heads: tuple[int, int]) -> None:
        """Do `__call__` once for these head counts on the device. GDN_CODEGEN_ADMIT=0 turns it off."""
        if os.environ.get("GDN_CODEGEN_ADMIT") == "0":
            return
        with self.lock:  # other threads wait for the result; launches within `errors` find the check done
            if (device, heads) in self.done:
                return
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(f"{self.tables.name}: call this once before a graph is captured, to check its kernels")
            self(device, heads)

    def heads(self) -> tuple[int, int]:
        """H and HV to use if the caller gives none: two value heads for each key head, or as many as one instance handles."""
        if self.tables.heads:
            h, hv = self.tables.heads.values()
            return h, hv
        both = {"H", "HV"} <= {row[1] for row in self.tables.inputs}
        return (2, 2 * max(2, self.tables.heads_per_instance)) if both else (2, 2)

    def errors(self, device: torch.device, heads: tuple[int, int] | None = None,
               calls: Sequence[tuple[bool, bool, bool]] = ((True, True, True), (False, False, True))) -> _Errors:
        """(error, accepted error) by output: the worst of `calls`. A call says whether sequences are packed, initial states are
        given, and final states are wanted."""
        heads = heads or self.heads()
        found: _Errors = {}
        hosts = [x for x in (self.host, self.host.earlier) if x is not None]
        in_parts = [x for x in hosts if x.tables.in_parts]
        parts = (1, 2) if in_parts and device.type != "cpu" else (1,)
        # the first of a pair declines the call unless all heads forget fast
        problems = [(chunks, call, (fast, rate_offset)) for chunks in parts for call in calls
                    for fast in (False, True)[:len(hosts)] for rate_offset in self.problem.rate_offsets(heads)]
        with self.lock, torch.inference_mode(False), torch.no_grad():
            self.done.add((device, heads))  # launches below call `once`
            before = [(x.poison, x.part_chunks, x.plans) for x in hosts]
            try:
                for x in hosts:
                    x.poison, x.plans = True, {}
                for chunks, call, rates in problems:
                    for x in in_parts:  # short parts, so that there are many
                        x.part_chunks = chunks
                    for n, (error, accepted) in self.compared(device, heads, *call, *rates).items():
                        known = found.get(n, (0.0, accepted))[0]
                        found[n] = (known if known > error or math.isnan(known) else error), accepted
                    self.host.plans.clear()
            except BaseException:
                self.done.discard((device, heads))
                raise
            finally:
                for x, fields in zip(hosts, before, strict=True):
                    x.poison, x.part_chunks, x.plans = fields
        return found

    def compared(self, device: torch.device, heads: tuple[int, int], packed: bool, given: bool, wanted: bool,
                 fast: bool = False, rate_offset: int = 0) -> _Errors:
        """(error, accepted error) by output of one call. fast, rate_offset: as for `CheckProblem.solved`."""
        tables, once = self.tables, self.problem.lengths(packed, heads)
        given, wanted = given or tables.pool or tables.in_place, wanted or tables.in_place
        instances = self.INSTANCES_BY_TOKEN if self.problem.by_token or tables.positions else self.INSTANCES
        lengths = once * (1 if device.type == "cpu" else 1 + instances // (len(once) * heads[1]))
        x, want = self.problem.solved(once, heads, given, fast, rate_offset)
        arguments, slots = self.call.arguments(x, lengths, heads, device, (packed, given, wanted))
        served = [n for n in range(len(lengths)) if not self.call.is_skipped(n)]
        starts = [0, *torch.tensor(lengths, device="cpu").cumsum(0).tolist()]
        written = torch.zeros(starts[-1] + packed * tables.chunk, dtype=torch.bool, device="cpu")
        for n in served:
            written[starts[n]:starts[n + 1]] = True
        writable = self.call.writable(arguments)
        assert self.function is not None
        results = self.function(**arguments)

        tf32 = tables.tf32 and device.type == "cuda"
        accepted = self.ACCEPTED_TF32 if tf32 else self.ACCEPTED[tables.dtype]
        if "retrieve_parent_token" in tables.indices:  # tokens start from states as they were stored
            accepted = max(accepted, self.ACCEPTED[tables.state_dtype])
        count = len(want.outs)
        change, change_saved = self.problem.by_rounding(x, once, heads, given, want, tf32)
        found = self.of_outputs(results[:count], want, change, (lengths, once, served), accepted)
        accepted = max(accepted, self.ACCEPTED[tables.state_dtype])
        errors = self.of_states(results[count:], arguments, want, slots, (lengths, once, served))
        saved = results[len(results) - len(want.saved):]
        found |= {n: (error, accepted) for n, error in errors.items()}
        found |= self.of_chunks(saved, want, change_saved, (lengths, once), accepted)
        own = served if slots is None else slots[served].to(device)
        return found | self.call.beside(arguments, writable, written, self.call.stored_by_token(lengths, served), own, lengths)

    def of_outputs(self, results: Sequence[torch.Tensor], want: Expected, change: Sequence[torch.Tensor],
                   rows: tuple[Sequence[int], Sequence[int], Sequence[int]], accepted: float) -> _Errors:
        """(error, accepted error) by output. change: by how much rounding of inputs changes each. rows: lengths of the call's
        sequences, of the problem's, and the numbers of those that are served."""
        (lengths, once, served), found = rows, dict[str, tuple[float, float]]()
        for (name, _, dtype), got, of_all, by_all in zip(self.tables.outputs, results, want.outs, change, strict=True):
            tokens = got if self.tables.layout == "bthd" else got.transpose(1, 2)
            each = torch.split(tokens.flatten(0, 1)[:sum(lengths)].cpu(), list(lengths))
            both = list(zip(*(torch.split(y, list(once)) for y in (of_all, by_all)), strict=True))
            error = worst([off(y + by, y, self.OF_ROUNDING * by) for y, by in both if len(y)])
            errors = [off(each[n], y, self.OF_ROUNDING * by) for n in served for y, by in [both[n % len(once)]] if len(y)]
            found[name] = worst(errors), max(accepted, self.problem.ROUNDING[dtype], min(self.MOST, self.OF_ROUNDING * error))
        return found

    def of_states(self, results: Sequence[torch.Tensor | None], arguments: Mapping[str, Any], want: Expected,
                  slots: torch.Tensor | None, rows: tuple[Sequence[int], Sequence[int], Sequence[int]]) -> dict[str, float]:
        """Errors of final states, of states by token, and of checkpoints, by name. results: those after the outputs. rows: as for
        `of_outputs`."""
        tables, (lengths, once, served), found = self.tables, rows, dict[str, float]()
        starts, kv_order = [0, *torch.tensor(lengths, device="cpu").cumsum(0).tolist()], self.problem.kv_order
        states, at_chunks = results[:len(want.finals)], results[len(want.finals):]
        names = [n for n, _ in tables.final] or [n.replace("initial", "final") for n, _ in tables.initial]
        for name, (_, dims), got, final in zip(names, tables.initial, states, want.finals, strict=True):
            if got is not None and not tables.slots:
                mine = kv_order(got.cpu() if slots is None else got.cpu()[slots], dims)
                found[name] = worst([off(mine[n][None], final[n % len(once)][None]) for n in served])
        by_token = self.call.stored_by_token(lengths, served)
        for (name, dims), after in zip(self.call.kept, want.after, strict=True) if self.call.kept else ():
            mine = kv_order(arguments[name].cpu()[by_token], dims)
            found[f"{name} by token"] = worst([off(y[None], after[n % len(once), t][None]) for y, (n, t) in
                                               zip(mine, tokens_of(lengths, served), strict=True)])
        if tables.positions:
            at_chunks = [arguments[name] for name, _ in tables.checkpoints]
        for (name, dims), got, after in zip(tables.checkpoints, at_chunks, want.after, strict=False):
            assert got is not None
            mine = kv_order(got.cpu(), dims)
            found[name] = worst([off(mine[starts[n] // tables.chunk + i][None], after[n % len(once), i][None])
                                 for n in served for i in range(lengths[n] // tables.chunk)])
        return found

    def of_chunks(self, results: Sequence[torch.Tensor], want: Expected, change: Sequence[Mapping[tuple[int, int], torch.Tensor]],
                  rows: tuple[Sequence[int], Sequence[int]], accepted: float) -> _Errors:
        """(error, accepted error) by output of chunks. change: by how much rounding of inputs changes each. rows: lengths of the
        call's sequences, and of the problem's."""
        (lengths, once), found = rows, _Errors()
        for m, (name, got, of_chunk, by_rounding) in enumerate(zip(self.tables.saved, results, want.saved, change, strict=True)):
            mine, (_, *columns) = self.problem.of_chunk(name, got), self.tables.chunk_dims[name]
            tiles: dict[tuple[int, int], list[tuple[torch.Tensor, ...]]] = {}
            for slot, n, i in self.call.chunk_slots(lengths):  # states one by one, rows of tokens and sums by sequence
                y, by = of_chunk[n % len(once), i], by_rounding[n % len(once), i]
                x = mine[slot][:, :y.shape[1]].cpu()
                if None in columns:  # a last chunk has fewer columns
                    fill = (0, self.tables.chunk - y.shape[2])
                    x, y, by = (torch.nn.functional.pad(z[..., :y.shape[2]], fill) for z in (x, y, by))
                own = m < len(self.tables.initial) and not self.tables.backward
                tiles.setdefault((n, i if own else 0), []).append((x, y, by))
            each = [[torch.cat(z, 1).transpose(0, 1) for z in zip(*x, strict=True)] for x in tiles.values()]
            error = worst([off(y + by, y, self.OF_ROUNDING * by) for _, y, by in each])
            found[name] = (worst([off(x, y, self.OF_ROUNDING * by) for x, y, by in each]),
                           max(accepted, min(self.MOST, self.OF_ROUNDING * error)))
            if name in self.tables.zeroed:  # callers add up the slots without a chunk, too
                unused = sorted({*range(len(mine))} - {slot for slot, *_ in self.call.chunk_slots(lengths)})
                found[f"memory beside chunks of {name}"] = float(mine[unused].abs().max()) if unused else 0.0, 0.0
        return found


def off(got: torch.Tensor, want: torch.Tensor, least: torch.Tensor | None = None) -> torch.Tensor:
    """RMSE over RMS of the worst head. got, want, least: [tokens, heads, ...]. An RMS is at least that of `least`."""
    got, least = got.double(), torch.zeros_like(want) if least is None else least
    error, size, other = ((y * y).transpose(0, 1).flatten(1).mean(1) for y in (got - want, want, least))
    return (error / size.maximum(other).clamp_min(1e-30)).sqrt().max()


def worst(errors: Sequence[torch.Tensor]) -> float:
    """The largest error; NaN if any is NaN."""
    return float(torch.stack(list(errors)).max()) if errors else 0.0
