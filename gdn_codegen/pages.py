"""Pages from Python: show, build, call and verify an algorithm without a file of its own, as in a notebook.

    from gdn_codegen import pages
    from gdn_codegen.ir.builder import algorithm, carried, lower

    @algorithm(q="C K", k="C K", v="C V", S=carried("K V"))
    def linear_attention(q, k, v, S):
        o = q @ S + lower(q @ k.T) @ v
        S = S + k.T @ v
        return o, S

    print(pages.show(linear_attention, head_dim_k=64, head_dim_v=64))
    op = pages.compile(linear_attention, target="triton", head_dim_k=64, head_dim_v=64)
    o, S = op(q, k, v, output_final_state=True)
    pages.verify(linear_attention, target="triton", head_dim_k=64, head_dim_v=64)

Options are those of `runtime.build.Build`: target ("triton", "tilelang", "pto"), chunk (1, 16, 32, 64, 128), layout ("bthd",
"bhtd"), schedule (a name, or a `schedule.Schedule`), dtype ("float16", "bfloat16", "float32"), head_dim_k and head_dim_v (16, and
multiples of 4 from 32 to 256), heads (H, HV compiled in), arch, contract (what callers pass). ValueError names a wrong option.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .ir.page import Algorithm
from .runtime.build import Build, lowered, render

if TYPE_CHECKING:
    from .tools.cases import Case
    from .tools.verify import Recurrence

TARGET = "triton"


def _build(page: Algorithm, options: dict[str, Any]) -> Build:
    if not isinstance(page, Algorithm):
        raise ValueError(f"page: got {type(page).__name__}; accepted: a function under @algorithm")
    unknown = sorted(options.keys() - Build.__dataclass_fields__.keys() | options.keys() & {"algorithm"})
    if unknown:
        raise ValueError(f"{unknown[0]}: got it as an option; accepted: "
                         f"{', '.join(n for n in Build.__dataclass_fields__ if n != 'algorithm')}")
    return Build(**{"target": TARGET, **options, "algorithm": page})


def show(page: Algorithm, **options: Any) -> str:
    """The program that the target's emitter prints, as text: kernels, values with their types, waits."""
    from .ir.printer import program_text
    return program_text(lowered(_build(page, options)))


def source(page: Algorithm, **options: Any) -> str:
    """The text of the generated module. It needs no gdn_codegen where its target is Triton or TileLang."""
    return render(_build(page, options))


def compile(page: Algorithm, save: str = "nothing", **options: Any) -> Callable[..., Any]:
    """The op: the generated function. Its docstring gives shapes and dtypes.

    The module is written to the package's cache and imported; kernels compile in the first call. An equal page and equal options
    give the same function. torch can differentiate it by its inputs and initial states, and torch.compile takes it whole.
    save: what a call keeps for its gradient: "nothing", "states" or "rounded_states", those before chunks (docs/training.md).
    """
    from .runtime.page_op import op
    return op(_build(page, options), save)


def verify(page: Algorithm, cases: Sequence[Case] | None = None, device: str = "cpu", reference: Recurrence | None = None,
           **options: Any) -> list[dict[str, float]]:
    """RMSE over RMS of each output, one dict per case. AssertionError if one is above what the dtype allows.

    cases: sequences to run (tools.cases.Case); None for those of the command line. device: "cpu" or "cuda".
    reference: a function of your own to compare with, see `tools.verify.from_recurrence`; None for the page in float64 in
      chunks of one token.
    ValueError for a page whose output of a token depends on later tokens, and for "cuda" without a GPU.
    """
    import torch

    from .tools.cases import CASES
    from .tools.verify import accepted, compare
    b = _build(page, options)
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device: got {device!r}; accepted: cpu, since torch sees no GPU here")
    errors = [compare(b, case, device, reference) for case in (CASES if cases is None else cases)]
    for case, found in zip(CASES if cases is None else cases, errors, strict=True):
        for name, e in found.items():
            if not e <= (most := accepted(b, case, name)):
                raise AssertionError(f"{name}: RMSE over RMS is {e:.1e}, accepted for {b.dtype} is {most:.0e}; {case}")
    return errors
