"""Device code of `decayed_blocks` and `decayed_pairs` on the CPU, beside what the ops mean: lanes of a warp are threads.

PTX is replaced by what PTX ISA says (warp_lanes.cpp). So addresses of ldmatrix are not tested here, but on a GPU (tests/device).
"""
from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch

from gdn_codegen.emit.tilelang.functions import FOLDER
from gdn_codegen.ir.ops import OPS

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")]
K, PAD = 64, 8
#: Functions with PTX, in the place of which the test has its own.
OWN = ("two_elements", "two_rounded", "second_operand", "square_block")
#: Builds of pairs: tiles, threads, rows of a and b (64: swizzled), bounded. Of blocks: transposed, threads, rows of x, bounded.
PAIRS = [(2, 256, 64, 64, 0), (1, 128, 64, 72, 0), (2, 512, 72, 64, 0), (1, 256, 72, 72, 1)]
BLOCKS = [(t, threads, row, bounded) for t in (0, 1) for threads, row, bounded in ((256, 72, 0), (128, 64, 0), (256, 64, 1))]
GATES = ("slow", "strong", "mixed", "first", "last", "zero")
#: Gates whose exponents are too large for one product in some blocks.
LARGE = ("strong", "mixed", "first", "last")
#: Gates, whether each row has a sum of its own for what comes before it, and dtypes. By default all gates with such sums in
#: bfloat16, and two of them without, and in float16.
FEW = [("mixed", False, torch.bfloat16), ("zero", False, torch.bfloat16), ("mixed", True, torch.float16),
       ("zero", True, torch.float16), *((x, True, torch.bfloat16) for x in GATES)]
CASES = [x if x in FEW else pytest.param(*x, marks=pytest.mark.long)
         for x in product(GATES, (False, True), (torch.bfloat16, torch.float16))]


def device_code() -> str:
    """The headers without functions that have PTX."""
    text = "".join((FOLDER / x).read_text() for x in ("decayed_rows.cuh", "block_products.cuh", "pair_products.cuh"))
    for name in OWN:
        text, n = re.subn(rf"template <[^>]*> static __device__ __forceinline__ \w+ {name}\(.*?\n}}\n", "", text, flags=re.S)
        assert n == 1, name
    assert "asm" not in text
    return text


def function(bf16: bool, n: int, kind: str) -> str:
    """The function of build n, for all threads of a block."""
    true = ("false", "true")
    if kind == "pairs":
        tiles, threads, a, b, bounded = PAIRS[n]
        pointers, of = "a other b", f"{tiles}, {true[bounded]}, {K}, {a}, {b}, {K + PAD}, {512 // threads}"
    else:
        transposed, threads, x, bounded = BLOCKS[n]
        pointers, of = "p x", f"{true[transposed]}, {true[bounded]}, {x}, {K + PAD}, {K * 128 // threads}"
    results = ["out + t * each", *(["out + 4096 + t * each"] if kind == "pairs" else [])]
    given = ", ".join(f"const void *{x}" for x in (*pointers.split(), "g", "before"))
    passed = ", ".join([*results, *pointers.split(), "g", "before", "limit", "t"])
    return (f'extern "C" void {"" if bf16 else "f16_"}{kind}_{n}(float *out, {given}, float limit) {{\n'
            f"  const int each = {4096 // threads};\n"
            f"  block({threads}, [=](int t) {{ decayed_{kind}<{true[bf16]}, {of}>({passed}); }});\n}}\n")


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The compiled builds: pairs_N and blocks_N, in bfloat16, and f16_pairs_0 in float16."""
    folder = tmp_path_factory.mktemp("lanes")
    functions = [function(bf16, n, kind) for bf16 in (True, False) for kind, builds in (("pairs", PAIRS), ("blocks", BLOCKS))
                 for n in range(len(builds))]
    text = Path(__file__).with_name("warp_lanes.cpp").read_text().replace("// DEVICE CODE", device_code())
    (folder / "code.cpp").write_text(text + "\n".join(functions))
    subprocess.run([*"g++ -O1 -std=c++20 -shared -fPIC -pthread -o code.so code.cpp".split()], cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "code.so"))


def laid(x: torch.Tensor, row: int) -> torch.Tensor:
    """A tile [64, 64] in rows of `row` elements, with NaN after each, or swizzled for 64."""
    if row == 64:
        i, j = torch.meshgrid(torch.arange(64), torch.arange(64), indexing="ij")
        out = torch.empty_like(x)
        out[i, (j // 8 ^ i % 8) * 8 + j % 8] = x
        return out.contiguous()
    return torch.nn.functional.pad(x, (0, row - 64), value=float("nan")).contiguous()


def read(out: torch.Tensor, threads: int) -> torch.Tensor:
    """A result [64, 64] from the registers of all threads (`sums_of_groups`)."""
    columns = 64 * 128 // threads
    i, j = torch.meshgrid(torch.arange(64), torch.arange(64), indexing="ij")
    thread = j // columns * 128 + i // 16 * 32 + i % 8 * 4 + j % 8 // 2
    register = j % columns // 8 * 4 + i % 16 // 8 * 2 + j % 2
    return out.reshape(threads, -1)[thread, register]


def sums(gates: str, gen: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Running sums, and those before each row. "mixed": some warps compute by levels, others at once. "first", "last": the first
    or last token of a block forgets all."""
    g = -torch.rand(64, K, generator=gen) * {"strong": 50.0, "zero": 0.0}.get(gates, 0.3)
    if gates in ("mixed", "first", "last"):
        g[{"mixed": slice(20, 24), "first": slice(16, 64, 16), "last": slice(31, 64, 32)}[gates]] = -100.0
    G = g.cumsum(0)
    return G, G - g


def run(f: Callable[..., None], out: torch.Tensor, *args: torch.Tensor, limit: float) -> None:
    """A call with pointers."""
    f(*(ctypes.c_void_p(x.data_ptr()) for x in (out, *args)), ctypes.c_float(limit))


def near(got: torch.Tensor, want: torch.Tensor, most: float) -> None:
    """RMSE over RMS."""
    assert want.square().mean() > 0 and (got.double() - want).square().mean().sqrt() < most * want.square().mean().sqrt()


@pytest.mark.parametrize("gates, exclusive, dtype", CASES)
@pytest.mark.parametrize("n", range(len(PAIRS)))
def test_pairs(code: ctypes.CDLL, n: int, gates: str, exclusive: bool, dtype: torch.dtype) -> None:
    """Both branches in bfloat16, by gates; levels alone in float16."""
    tiles, threads, a_row, b_row, bounded = PAIRS[n]
    if bounded and (gates in LARGE or dtype == torch.float16):
        pytest.skip("exponents are larger")
    gen = torch.Generator().manual_seed(n)
    a, other, b = (torch.randn(64, K, generator=gen).to(dtype) for _ in range(3))
    G, before = sums(gates, gen)
    held, shown = (torch.nn.functional.pad(x, (0, PAD), value=float("nan")).contiguous() for x in (G, before if exclusive else G))
    out = torch.full((2 * 4096,), float("nan"))
    name = f"{'' if dtype == torch.bfloat16 else 'f16_'}pairs_{n}"
    run(getattr(code, name), out, laid(a, a_row), laid(other, a_row), laid(b, b_row), held, shown,
        limit=40.0 if dtype == torch.bfloat16 else 0.0)
    means, given = OPS["decayed_pairs"].evaluate, (G.double(), *((before.double(),) if exclusive else ()))
    assert means is not None
    most = 5e-3 if dtype == torch.bfloat16 else 7e-4
    for x, registers in zip((a, other)[:tiles], out.split(4096), strict=False):
        near(read(registers, threads), means({"limit": 0.0}, x.double(), b.double(), *given), most)
        assert not read(registers, threads).triu().any()


@pytest.mark.parametrize("gates, exclusive, dtype", CASES)
@pytest.mark.parametrize("n", range(len(BLOCKS)))
def test_blocks(code: ctypes.CDLL, n: int, gates: str, exclusive: bool, dtype: torch.dtype) -> None:
    """As above, and operands have two parts: in bfloat16 they are nearly exact."""
    transposed, threads, x_row, bounded = BLOCKS[n]
    if bounded and (gates in LARGE or dtype == torch.float16):
        pytest.skip("exponents are larger")
    gen = torch.Generator().manual_seed(n)
    p, x = (torch.randn(64, 64, generator=gen).to(dtype) for _ in range(2))
    p = p.tril(-1)
    G, before = sums(gates, gen)
    held, shown = (torch.nn.functional.pad(y, (0, PAD), value=float("nan")).contiguous() for y in (G, before if exclusive else G))
    out = torch.full((64 * K,), float("nan"))
    name = f"{'' if dtype == torch.bfloat16 else 'f16_'}blocks_{n}"
    run(getattr(code, name), out, laid(p, 64), laid(x, x_row), held, shown, limit=40.0 if dtype == torch.bfloat16 else 0.0)
    means, given = OPS["decayed_matmul"].evaluate, (G.double(), *((before.double(),) if exclusive else ()))
    assert means is not None
    near(read(out, threads), means({"transposed": bool(transposed)}, p.double(), x.double(), *given), 5e-5)
