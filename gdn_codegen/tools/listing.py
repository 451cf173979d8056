"""`gdn_codegen list`: what each page needs and, for one page, which schedules serve it on each target."""
from __future__ import annotations

from collections.abc import Iterator
from inspect import Parameter

from .. import algorithms, targets
from ..ir.decays import log_decays
from ..ir.page import Algorithm
from ..ir.types import Tensor
from ..schedule import SCHEDULES

#: The names of forms that inputs of pages may have, by what an input is.
BY_KIND = {"decay": algorithms.FORMS["g"], "number": algorithms.FORMS["beta"], "row": algorithms.FORMS["q"], "other": ()}


def _decay(t: Tensor) -> str:
    """What kind of log decay an input is."""
    if t.index == "head":
        return "log decay per head and channel" if t.dims else "log decay per head"
    return "log decay per channel" if t.dims[1:] else "log decay per token"


def _input(page: Algorithm, t: Tensor, decays: set[str]) -> str:
    """An input or output with the shape of its tensor, and what it is."""
    dims = ", ".join([*(["B", "T"] if t.index == "token" else []), t.heads, *(d for d in map(str, t.dims) if d != "C")])
    about = [_decay(t)] if t.name in decays else []
    about += [f"{page.defaults[t.name]:g} where absent"] if t.name in page.defaults else []
    return f"{t.name} [{dims}]" + "".join(f" ({x})" for x in [", ".join(about)] if x)


def _forms(page: Algorithm, t: Tensor, decays: set[str]) -> str:
    """The input forms that an input may have, as --accept takes them; "" for none."""
    if t.index != "token":
        return ""
    rows = {dims[0] for dims in page.states.values()}
    kind = "decay" if t.name in decays else "number" if not t.dims[1:] else "row" if t.dims[1] in rows else "other"
    known = algorithms.FORMS.get(t.name) if page.name in algorithms.names() and t.name not in decays else None
    found = BY_KIND[kind] if known is None else known
    return f"{t.name}={'|'.join(found)}" if found else ""


def needs(page: Algorithm) -> list[str]:
    """The lines about a page: inputs and states with the shapes of their tensors, numbers, outputs, and input forms."""
    p = page.trace()
    decays, inputs = log_decays(p), [t for t in p.role("input") if not t.optional]
    numbers = [n if x is Parameter.empty else f"{n} = {x}" for n, x in page.scalars.items()]
    outputs = [_input(page, t, set()) for t in p.role("output") if t.index == "token"]
    rows = {"inputs": [_input(page, t, decays) for t in inputs],
            "states": [f"{n} [{', '.join(['N', 'HV', *map(str, dims)])}]" for n, dims in page.states.items()],
            "numbers": numbers, "outputs": outputs, "forms": [x for t in inputs if (x := _forms(page, t, decays))]}
    doc = page.doc.splitlines()[0] if page.doc else ""
    return [f"  {page.name}", *([f"    {doc}"] if doc else []),
            *(f"    {name:8} {'; '.join(each)}" for name, each in rows.items() if each)]


def served(page: Algorithm, spec: str) -> Iterator[str]:
    """The lines about the schedules that serve a page on each target, with chunks of 64 tokens, float16 and K = V = 128; and why
    the others do not. spec: how --algorithm names the page."""
    from ..runtime.build import Build
    from ..runtime.call.choose import unfit
    for name in targets.names():
        for arch in ("", *targets.find(name).archs):
            why = {s: unfit(Build(name, 64, algorithm=spec, schedule=s, arch=arch)) for s in SCHEDULES}
            yield f"    {f'{name} {arch}'.rstrip():16} {' '.join(s for s in why if not why[s]) or 'none'}"
            for s in (s for s in why if why[s]):
                yield f"      not {s}: {why[s]}"


def listed(algorithm: str | None) -> Iterator[str]:
    """The lines of `list`. algorithm: the one page to list, with the schedules that serve it; None for all, without."""
    yield "algorithms (B rows, T tokens, N sequences, H query and key heads, HV value heads)"
    for spec in algorithms.names() if algorithm is None else (algorithm,):
        page = algorithms.find(spec)
        yield from needs(page)
        if algorithm is not None:
            yield "  schedules (chunks of 64, float16, K = V = 128)"
            yield from served(page, spec)
    if algorithm is None:
        yield "schedules"
        for s in SCHEDULES.values():
            yield f"  {s.name:18} {' '.join('[' + ' '.join(g) + ']' for g in s.kernels)}, form {s.form}, inverse {s.inverse}"
        yield "targets"
        yield from (f"  {n}" for n in targets.names())
