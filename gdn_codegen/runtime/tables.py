"""Makes what a module's host code reads of its build: `Tables` as Python text, and the function's signature and docstring."""
from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any

from ..derived_pages import Derived
from ..devices.part_cost import of_chunks, of_short
from ..emit.base import KernelText, quoted, stride_unit
from ..host.tables import Tables
from ..input_forms import INPUT_FORMS, draws, reads
from ..ir.core import Kernel, Program
from ..ir.dataflow import ops_of
from ..ir.decays import log_decays
from ..ir.differentiate import TRANSPOSED, chunk_states
from ..ir.padding import chunk_tokens
from ..ir.types import ZEROED, Tensor
from ..schedule.contract import Contract

if TYPE_CHECKING:
    from .build import Build

WIDTH = 120
#: The name of the workspace that a launcher divides. No tensor of a page can have it.
SHARED = "(workspace)"


def named(p: Program, role: str, index: str) -> list[Tensor]:
    """The program's tensors of a kind that the host passes. A tensor that overwrites another one is left out."""
    return [t for t in p.role(role) if t.index == index and not t.over]


def tables(b: Build, p: Program, kernels: Sequence[KernelText]) -> Tables:
    """The facts of a build, whose program is `p`, that its module's host works from.

    check_chunks: more than any ring has slots, and enough that some parts of one chunk need summaries.
    """
    def rows(role: str, index: str, row: Callable[[Tensor], Any]) -> Any:
        return tuple(map(row, named(p, role, index)))
    def whole(t: Tensor) -> tuple[Any, ...]:
        return t.name, tuple(p.shape(t))
    def typed(t: Tensor) -> tuple[Any, ...]:
        return *whole(t), t.dtype
    c, traced = b.contract, b.page.trace()
    read = b.page.of.trace() if isinstance(b.page, Derived) else traced  # the log decays of a derived page are those of its page
    outputs = [t for t in p.role("output") if t.index == "token"]
    lengths = [o for k in p.kernels for o in k.ops if o.kind == "warm_up_length"]
    most = max((o.attr("most", 0) for o in lengths), default=0)
    slots = max((x.slots for k in p.kernels for x in k.buffers), default=1)
    divided = {n for k in kernels for n in k.extra.get("used", ())}  # regions of one workspace
    return Tables(
        name=b.name, function=b.function, chunk=chunk_tokens(p), layout=b.layout, dtype=b.dtype,
        inputs=rows("input", "token", lambda t: (t.name, t.heads, tuple(p.shape(t)[1:]), t.dtype)),
        outputs=tuple((t.name, tuple(p.shape(t)[1:]), t.dtype) for t in outputs),
        kernels=tuple((k.name, k.grid, k.blocks, (*(t.name for t in k.tensors), *_shared(k)), tuple(k.scalars)) for k in kernels),
        ints={k.name: tuple(k.extra["ints"]) for k in kernels}, scalars=b.page.scalar_defaults(b.sizes),
        head_inputs=rows("input", "head", lambda t: (t.name, float(t.fill) if t.fill else None, tuple(p.shape(t)), t.dtype)),
        chunk_inputs=rows("input", "slot", typed), saved=rows("output", "slot", lambda t: t.name),
        zeroed=tuple(t.name for t in p.role("output") if t.index == "slot" and t.fill == ZEROED), sums=_running_sums(read, p),
        held=tuple(t.name for t in p.role("input") if t.index == "slot" and t.fill and t.dims[0] == "C"),
        chunk_dims={t.name: _chunk_dims(p, t) for t in p.tensors if t.role != "workspace" and t.index == "slot"},
        backward=traced.walk.step < 0,
        initial=rows("input", "sequence", whole), final=rows("output", "sequence", whole),
        checkpoints=rows("output", "checkpoint", whole),
        workspaces=tuple(typed(t) for t in p.tensors if t.role != "input" and t.index == "slot" and t.name not in divided),
        end_workspaces=tuple(typed(t) for t in named(p, "workspace", "sequence") if t.name not in divided),
        shared=((SHARED,),) if divided else (),
        counters=rows("workspace", "counter", lambda t: (t.name,)),
        places=rows("workspace", "places", lambda t: (t.name,)),
        part_workspaces=tuple(typed(t) for t in p.role("workspace") if t.index == "part"),
        indices=tuple(t.name for t in p.role("input") if t.index in ("number", "numbers")),
        by_token=rows("input", "numbers", lambda t: t.name), rows=c.rows, slots=c.slots,
        positions=c.positions,
        heads=dict(zip(("H", "HV"), b.heads, strict=True)) if b.heads else {},
        heads_per_instance=max(k.batch.heads if k.batch.way == "key_head" else 1 for k in p.kernels),
        units={t.name: stride_unit(p, t) for t in p.tensors if t.strided} if b.of.stride_units else {},
        state=c.state_layout, state_dtype=c.state_dtype, pool=c.pool, in_place=c.in_place, strided=c.strided,
        declined=next((o.attr("tensor") for k in p.kernels for o in k.ops if o.kind.startswith("return_if_")), ""),
        cleared=any(t.cleared for t in outputs), **(_parts(b, p, most, bool(lengths)) if b.plan.partition else {}),
        decays=tuple(sorted(log_decays(read))), tf32=b.of.tf32 and b.dtype == "float32",
        check_chunks=max(slots, b.plan.stages, most + 1 if b.plan.partition else 1, 2) + 1)


def _chunk_dims(p: Program, t: Tensor) -> tuple[int | None, ...]:
    """The extents of the tiles of a tensor of chunks without padding, None for tokens, in the page's order."""
    dims = [None if d == "C" else n for d, n in zip(t.dims, t.tile.shape(p.memory), strict=True)]
    return tuple(dims[::-1] if t.name.endswith(TRANSPOSED) else dims)


def _running_sums(page: Program, p: Program) -> dict[str, tuple[str, bool]]:
    """The inputs of chunks of `p` that are running sums of rows of tokens in the page. Fields as in Tables."""
    sums = {chunk_states(o.out): (o.args[0], bool(o.attr("exclusive"))) for o in ops_of(page).values() if o.kind == "cumsum"}
    return {t.name: sums[t.name] for t in p.role("input") if t.name in sums and len(t.dims) == 2}


def _shared(k: KernelText) -> tuple[str, ...]:
    """The workspace that a launcher divides, if the kernel uses regions of one."""
    return (SHARED,) if k.extra.get("used") else ()


def _parts(b: Build, p: Program, most: int, warm_ups: bool) -> dict[str, Any]:
    """The fields of Tables for builds that split sequences into parts."""
    def those(kernels: Iterable[Kernel]) -> tuple[str, ...]:
        return tuple(k.name for k in kernels)
    if b.plan.partition == "pipelined":
        return {"pipelined": True, "part_chunks": b.plan.part_chunks}
    assert b.device.part_cost is not None
    page = b.page.trace()
    bound = ops_of(page).get(page.forgets)
    stored = bound.attr("tensor", "") if bound is not None else ""
    stored = stored if stored and page.tensor(stored).index == "slot" else ""
    totals = any(o.attr("tensor") for k in p.kernels for o in k.ops if o.kind == "warm_up_length")
    cost = of_short if b.plan.partition == "short" else of_chunks
    return {"part_cost": cost(b.device.part_cost, b.chunk), "part_chunks": b.plan.part_chunks, "most": most,
            "summaries": those(k for k in p.kernels if any(o.kind == "return_unless_negative" for o in k.ops)),
            "bounds": those(k for k in p.kernels if k.slices > 1), "warm_ups": warm_ups and totals, "forgets": stored}


def literal(t: Tables) -> str:
    """Python that makes the tables: fields that are not as by default, a row of a table a line."""
    lines = []
    for f in fields(t):
        x, default = getattr(t, f.name), f.default if f.default_factory is MISSING else f.default_factory()
        if x != default:
            lines.append(f"    {f.name}={_text(x)},\n")
    return f"Tables(\n{''.join(lines)})"


def _text(x: Any) -> str:
    """A field's value, with double quotes. Tuples of rows and long mappings take a line for each row."""
    if isinstance(x, tuple) and x and isinstance(x[0], tuple):
        return "(\n" + "".join(f"        {quoted(row)},\n" for row in x) + "    )"
    if isinstance(x, dict) and len(repr(x)) > WIDTH:
        return "{\n" + "".join(f"        {quoted(n)}: {quoted(row)},\n" for n, row in x.items()) + "    }"
    return quoted(x)


# --- the generated function ------------------------------------------------------------------------------------------
def signature(t: Tables, of_page: Container[str] = ()) -> str:
    """The generated function's parameters, in order. of_page: inputs of the page, so that those of heads follow the others."""
    def absent(rows: Iterable[Any]) -> list[str]:
        return [f"{n}=None" for n in rows]
    def first(rows: Sequence[tuple[Any, ...]]) -> list[str]:
        return absent(row[0] for row in rows)
    own = [row for row in t.head_inputs if row[0] in of_page]
    return ", ".join((*(row[0] for row in t.inputs), *(row[0] for row in own if row[1] is None),
                      *(row[0] for row in t.chunk_inputs),
                      *first([row for row in own if row[1] is not None]), *absent(t.scalars), *first(t.initial),
                      *absent(t.numbers), "output_final_state=False", "cu_seqlens=None", *first(t.final),
                      *(["checkpoint_chunks=1"] if _every(t) else []), *first(t.checkpoints),
                      *first([row for row in t.head_inputs if row not in own]),
                      *absent(t.outs)))


def _default(x: float | None) -> str:
    """What a generated function says of the default of a number for each head."""
    return "" if x is None else f"; {x or 'zero'} where None"


def _every(t: Tables) -> bool:
    """Whether the caller gives the number of chunks from one checkpoint to the next."""
    return bool(t.checkpoints) and not (t.rows or t.positions)


def arguments(t: Tables) -> str:
    """The arguments that the generated function passes to its `Host`."""
    def group(names: Iterable[str]) -> str:
        names = tuple(names)
        return f"({', '.join(names)}{',' if len(names) == 1 else ''})"
    def first(*tables: Sequence[tuple[Any, ...]]) -> str:
        return group(row[0] for rows in tables for row in rows)
    more = [group(t.numbers), "checkpoint_chunks"] if _every(t) else [group(t.numbers)] if t.numbers else []
    return ", ".join((first(t.inputs, t.head_inputs, t.chunk_inputs), group(t.scalars), first(t.initial), group(t.outs),
                      "cu_seqlens", first(t.final, t.checkpoints), "output_final_state", *more))


def documentation(b: Build, p: Program, t: Tables) -> list[str]:
    """Lines of the generated function's docstring after the summary."""
    shape = {"bthd": "[B, T, {h}{d}]", "bhtd": "[B, {h}, T{d}]"}[b.layout]
    shapes = ", ".join(f"{n} {shape.format(h=heads, d=''.join(f', {d}' for d in dims))} {dtype}"
                       for n, heads, dims, dtype in t.inputs)
    lines = [f"Shapes, layout {b.layout}: {shapes}.", *(INPUT_FORMS[form].doc.format(n) for n, form in b.contract.inputs)]
    lines += [f"{n}: [HV{''.join(f', {d}' for d in dims)}] {dtype}, one {'vector' if dims else 'number'} for each value head"
              f"{_default(default)}." for n, default, dims, dtype in t.head_inputs]
    lines += [line for role, index in (("input", "sequence"), ("output", "sequence"), ("output", "checkpoint"))
              for x in named(p, role, index) for line in _state_doc(b, x)]
    if b.contract.by_token or b.contract.positions:
        lines += [line for t in p.role("input") if t.index in ("number", "numbers") for line in NUMBERS[t.name, t.index]]
    elif b.contract.pool:
        lines += ["state_indices: int32 or int64 [N], a sequence's slot; -1 leaves it out: nothing of it is read, and nothing",
                  "    written. Slots may lie apart; each is dense, and aligned to 16 bytes."]
    more = ", checkpoints" if _every(t) else ""
    devices = f"CUDA tensors only: built for {b.arch}." if b.arch else "CUDA tensors run on the GPU, CPU tensors on the CPU."
    return [
        *lines,
        "cu_seqlens: int32 or int64 [N + 1], ends of sequences packed into a batch of 1; without it each row is a sequence.",
        f"{', '.join(t.outs)}: where to write what is returned; rows of no sequence stay as they are, and are zero in what is",
        "    made here. Its last dim is dense. It and a final state lie in memory that the call does not read; the package looks",
        "    at that, this module does not.",
        f"Returns (o, final state or None{more}). {devices} ValueError on bad input."]


#: What a generated function says of tensors of integers for states by token.
NUMBERS: dict[tuple[str, str], list[str]] = {
    ("state_indices", "number"): ["state_indices: int32 or int64 [N], a sequence's slot; -1 leaves it out."],
    ("state_indices", "numbers"): [
        "state_indices: int32 or int64 [N, tokens or more], a slot for each token of a sequence. The state after a token is",
        "    written there, unless it is -1 or the module freezes states. Sequences that start from slot -1 are left out."],
    ("final_indices", "number"): [],
    ("num_accepted_tokens", "number"): [
        "num_accepted_tokens: int32 or int64 [N], from 1 on; a sequence starts from the slot of its token of this number."],
    ("intermediate_state_indices", "number"): [
        "intermediate_state_indices: int32 or int64 [N], a sequence's row; -1 stores none. None: rows in order."],
    ("checkpoint_rows", "numbers"): [
        "checkpoint_rows: int32 or int64 [N, chunks or more], a row for the state after each chunk; -1 stores none."],
    ("retrieve_parent_token", "numbers"): [
        "retrieve_parent_token: int32 or int64 [N, tokens or more], the earlier token after which a token comes; negative: it",
        "    starts from the initial state, as first tokens do in any case."]}


def _state_doc(b: Build, t: Tensor) -> list[str]:
    """What a generated function says of one of its states."""
    c, dims = b.contract, ", ".join(str(b.sizes[str(d)]) for d in t.dims)
    lead = "rows" if t.index == "checkpoint" else "slots" if c.pool else "N"
    text = f"{t.name}: [{lead}, HV, {dims}] {t.dtype}"
    if t.index == "checkpoint" and c.positions:
        return [f"{text}, to be written to: the states after chunks."]
    if t.index == "checkpoint" and t.at:
        return [f"{t.name}: [rows, tokens or more, HV, {dims}] {t.dtype}, to be written to: the state after each token."]
    if t.index == "checkpoint":
        return [f"{text}, to be written to: the state after (i + 1) * checkpoint_chunks chunks of sequence n in row",
                f"    cu_seqlens[n] // (checkpoint_chunks * {b.chunk}) + i; other rows are left as they are."]
    if t.role == "output":
        return [f"{text}, another pool; without it the final state is [N, ...], undefined where a sequence is left out." if c.pool
                else f"{text}, to be written to."]
    if c.in_place:
        return [f"{text}; the final state takes its place."]
    if c.pool:
        return [f"{text}."]
    return [f"{text}, or what widens to it; zero where absent." if t.dtype == "float32" else f"{text}; zero where absent."]


def between(t: Tensor, form: str, decays: Container[str]) -> bool:
    """Whether an input with this form has rows of numbers from 0 to 1. Of one number for each token, the drawn `page` is such."""
    return len(t.dims) > 1 and t.name not in decays and not INPUT_FORMS[form].rows


def forms_text(c: Contract, page: Program, inside: bool = False) -> str:
    """The text of `_reads` and `_draws`, by the name of an input or number, for the inputs that callers pass in other forms. ""
    if there are none. inside: the module's page reads callers' forms itself, so that `_reads` is empty."""
    if not c.inputs:
        return ""
    lines = ["#: What the page reads of inputs in callers' forms, and samples of these."]
    lines += ["_reads = {", *(f'    "{n}": {reads(INPUT_FORMS[form])},' for n, form in c.inputs if not inside), "}", "_draws = {"]
    decays = log_decays(page)
    for n, form in c.inputs:
        found = draws(INPUT_FORMS[form], between(page.tensor(n), form, decays))
        lines += [f'    "{n if of == "x" else of}": {text},' for of, text in found.items()]
    return "\n".join([*lines, "}"])
