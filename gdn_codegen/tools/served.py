"""`build --model`: the builds that a model's server calls, written and compiled before its first call.

No list says which builds these are. Dispatch is asked for each class of calls that a server makes, on a device that need not be
here.
"""
from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from .. import models
from ..ir.interpret import TORCH
from ..runtime import cache
from ..runtime.build import Build, render
from ..runtime.call import native_launcher
from ..runtime.call.device import Facts, described, facts
from ..runtime.call.launch import chosen
from ..runtime.call.positions import of_pieces, writes_slots
from ..runtime.call.request import DECODE_CHUNK, Call, Request
from ..runtime.call.size import size_of
from ..runtime.call.tables import Extent, least
from ..runtime.load import cached, write
from ..runtime.progress import under_way
from ..runtime.targets import choose
from ..schedule.contract import Contract
from .compile_ahead import check_ahead, compile_ahead, compile_one_by_one


@dataclass(frozen=True)
class Most:
    """The most tokens of all sequences, and the most sequences, of a call."""

    tokens: int = 262144
    sequences: int = 256


def prefills(H: int, HV: int, most: Most) -> Iterator[Extent]:
    """Extents of packs of prompts or parts of prompts: each number of sequences, with the least and the greatest mean length of
    each class of lengths."""
    for n in range(1, most.sequences + 1):
        exponent = 0
        while n * least(exponent) <= most.tokens:
            for mean in (least(exponent), least(exponent + 1) - 1):
                yield Extent(H, HV, n, min(n * mean, most.tokens), packed=True)
            if n > 1:  # the host may know that lengths are equal, or that one sequence has nearly all tokens
                tokens = n * least(exponent)
                yield from (Extent(H, HV, n, tokens, packed=True, longest=x) for x in (least(exponent), tokens))
            exponent += 1


def steps(H: int, HV: int, most: Most) -> Iterator[Extent]:
    """Extents of decoding steps: each number of sequences, each with the same number of new tokens."""
    return (Extent(H, HV, n, n * t, packed=True) for n in range(1, most.sequences + 1) for t in range(1, DECODE_CHUNK + 1))


@dataclass(frozen=True)
class Kind:
    """What calls of a server have in common: prefill, or decoding steps. aligned: whether states that the call stores at
    positions are after whole chunks."""

    contract: Contract
    decode: bool
    aligned: bool = False

    def __str__(self) -> str:
        """As a listing of builds has it, such as "decode in_place/slots/accepted"."""
        if self.decode:
            return f"decode {self.contract.words_by_token}".strip()
        return "prefill that stores prefixes" if self.contract.positions else "prefill"


@dataclass(frozen=True)
class Served:
    """What a server does: the engines that run a model, whether steps verify draft tokens, whether prefill stores states for a
    cache of prefixes, and the dtype of states, "" for that of the engine."""

    engines: tuple[str, ...] = models.ENGINES
    speculative: bool = False
    prefix_caching: bool = False
    state_dtype: str = ""

    def kinds(self, m: models.Model) -> list[Kind]:
        """The kinds of calls, each once."""
        return list(dict.fromkeys(x for e in self.engines if e in m.engines for x in self._of(m.engines[e])))

    def _of(self, calls: models.Calls) -> Iterator[Kind]:
        """The kinds of an engine's calls."""
        for contract in map(self._parsed, (*calls.prefill, *calls.beside_drafts * self.speculative)):
            yield Kind(contract, False)
        for contract in map(self._parsed, calls.stores if self.prefix_caching else ()):
            yield Kind(replace(contract, positions=True), False, calls.aligned)
        for contract in map(self._parsed, calls.decode):
            yield Kind(contract, True)
            for words in calls.drafts if self.speculative else ():
                flags: dict[str, Any] = {"in_place": False, **dict.fromkeys(words.split("/"), True)}
                yield Kind(replace(contract, **flags), True)

    def _parsed(self, text: str) -> Contract:
        contract = Contract.parse(text)
        return replace(contract, state_dtype=self.state_dtype) if self.state_dtype else contract


def asked(x: Kind, target: str, algorithm: str = Request.algorithm) -> Request:
    """What the calls of a kind ask for: q and k as k comes, and initial states."""
    c = x.contract
    own = algorithm == Request.algorithm  # the ops of other pages name the forms of gates in `forms`
    forms = ",".join(f"{n}={form}" for n, form in c.inputs if n not in ("beta", "q", "k") and not own)
    return Request(gate=c.input_form("g") if own else "", forms=forms, beta_form=c.input_form("beta"), algorithm=algorithm,
                   l2norm=c.input_form("k") == "l2norm", unit_keys=c.input_form("k") == "unit",
                   state_v_first=c.state_layout == "vk", state_dtype=c.state_dtype, in_place=c.in_place,
                   output_final_state=not (c.in_place or c.frozen), by_token=c.words_by_token, target=target, decode=x.decode,
                   aligned_positions=x.aligned)


def builds(m: models.Model, heads: tuple[int, int], on: Facts, target: str = "auto", most: Most | None = None,
           what: Served | None = None) -> dict[Build, list[str]]:
    """The builds that calls of a model get on a device, each with the calls: prefill or decoding, sequences x mean tokens.

    heads: H and HV of a call. Inputs may be dense or views of wider rows: a view of a single token is dense. Where a call takes
    two builds, each has an entry.
    """
    most, found = most or Most(), defaultdict(list)
    device, resolved = torch.device(on.type), choose(on.type, target)
    prompts = {size_of(x, resolved, on): x for x in prefills(*heads, most)}.values()  # calls of a size share a build
    for kind, strided in product((what or Served()).kinds(m), (False, True)):
        contract = replace(kind.contract, strided=strided)
        request = asked(kind, target, m.algorithm)
        for x in steps(*heads, most) if kind.decode else prompts:
            call = Call(request, TORCH[m.dtype], device, m.head_dims, x, contract, starts=True, wanted=not contract.frozen)
            b = chosen(call, on)
            pieces = of_pieces(b, contract) if contract.positions and not writes_slots(device, request) else None
            for one in filter(None, (b.earlier, b, pieces)):
                found[one].append(f"{kind} {x.sequences} x {x.tokens // x.sequences}")
    return dict(found)


def device_of(words: str | None) -> Facts:
    """The facts of the device that words describe; None: of the GPU that is here."""
    if words is not None:
        return described(words)
    if not torch.cuda.is_available():
        raise ValueError("device: got none, where torch sees no GPU; accepted: --device 'NVIDIA H200', or other words for the "
                         "device of the calls")
    return facts(torch.device("cuda", torch.cuda.current_device()))


def check_arch(arch: str, on: Facts) -> None:
    """ValueError unless kernels for this architecture run on the device."""
    own = on.names[-1]
    if arch.removesuffix("a") != own:
        raise ValueError(f"compile: got {arch!r} for {on.names[0]}; accepted: {on.arch or own}")


def check_has_effect(a: argparse.Namespace, m: models.Model, what: Served) -> None:
    """ValueError for an option that asks for calls that the engines do not make, or says how to compile where nothing is."""
    said = " and ".join(e for e in what.engines if e in m.engines)
    without = {"speculative": replace(what, speculative=False), "prefix_caching": replace(what, prefix_caching=False)}
    for name, less in without.items():
        if getattr(a, name) and what.kinds(m) == less.kinds(m):
            raise ValueError(f"{name}: got True for {a.model}, of which it adds no calls by {said}; accepted: without it")
    if a.jobs is not None and a.compile is None:
        raise ValueError(f"jobs: got {a.jobs} without --compile; accepted: with --compile")


def command(a: argparse.Namespace) -> int:
    """`gdn_codegen build --model`. Returns 0. ValueError for a wrong option, before anything is written."""
    m, on = models.find(a.model), device_of(a.device)
    if a.accept:
        said = (str(Contract.parse(a.accept)),)
        m = replace(m, engines={e: models.Calls(said, said, x.drafts, stores=said if x.stores else (), aligned=x.aligned)
                                for e, x in m.engines.items()})
    if a.engine not in (None, *m.engines):
        raise ValueError(f"engine: got {a.engine!r} for {a.model}; accepted: {', '.join(m.engines)}")
    what = Served((a.engine,) if a.engine else models.ENGINES, a.speculative, a.prefix_caching, a.state_dtype or "")
    check_has_effect(a, m, what)
    heads = m.share(1 if a.tensor_parallel is None else a.tensor_parallel)
    if a.compile is not None:
        check_arch(a.compile, on)
    most = Most(*(default if x is None else x for x, default in ((a.tokens, Most.tokens), (a.sequences, Most.sequences))))
    with under_way(f"asking for the builds of {a.model}"):
        found = builds(m, heads, on, "auto" if a.target == "all" else a.target, most, what)
        for b in found:
            render(b)
    if a.compile is not None:
        for b in found:
            check_ahead(b, a.compile, [heads])
    out = None if a.out is None else Path(a.out)
    cache.place(*(("GDN_CODEGEN_CACHE", cache.folder()) if out is None else ("out", out)), folder=True)
    print(f"{a.model}, {heads[0]}/{heads[1]} heads, on {on.names[0]}: {len(found)} builds", flush=True)
    start, total = time.perf_counter(), 0
    with under_way(f"making {len(found)} builds"):
        for i, (b, path, lines) in enumerate(made(list(found), out, a.compile, heads, a.jobs), 1):
            calls = found[b]
            served = f"{calls[0]} to {calls[-1]}" if calls[1:] else calls[0]
            print("\n  ".join((f"[{i}/{len(found)}] {b.target}: {b.name}", served, *lines)), flush=True)
            total += size(path)
    if a.compile is not None and on.type == "cuda":
        total += native_launcher.in_cache().stat().st_size  # Triton's calls take it from there
    print(f"{len(found)} builds: {time.perf_counter() - start:.0f} s, modules and libraries of {total} bytes", flush=True)
    return 0


#: A build, the path of its module, and lines on the module and each kernel.
Made = tuple[Build, Path, list[str]]


def made(builds: Sequence[Build], out: Path | None, arch: str | None, heads: tuple[int, int], jobs: int | None) -> Iterator[Made]:
    """Write modules, to a folder or the cache, and compile their kernels if there is an architecture. jobs: processes that do so
    at a time, by default as many as cores. Results come as builds are done."""
    jobs = min(jobs or len(os.sched_getaffinity(0)), len(builds)) if arch is not None else 1
    if jobs == 1:
        yield from (_make(b, out, arch, heads) for b in builds)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), compile_one_by_one) as pool:
        running = [pool.submit(_make, b, out, arch, heads) for b in builds]
        try:
            yield from (x.result() for x in as_completed(running))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _make(b: Build, out: Path | None, arch: str | None, heads: tuple[int, int]) -> Made:
    path = cached(b) if out is None else write(b, out)
    kernels = () if arch is None else compile_ahead(b, path, arch, [heads])
    return b, path, [f"{path}: {path.stat().st_size} bytes", *kernels]


def size(path: Path) -> int:
    """Bytes of a module and of what was compiled beside it."""
    return path.stat().st_size + sum(x.stat().st_size for x in path.with_suffix(".kernels").glob("*.so"))
