"""Triton's device function for diagonal blocks of decayed products, in the interpreter."""
import importlib.util

import pytest
import torch

from gdn_codegen.emit.triton.functions import FILE
from gdn_codegen.ir.ops import OPS

tl = pytest.importorskip("triton.language")

C, K, SIZE = 32, 16, 16
KERNEL = '''

@triton.jit
def kernel(p, x, sums, before, out, LIMIT: tl.constexpr, TRANSPOSED: tl.constexpr, C: tl.constexpr, K: tl.constexpr,
           SIZE: tl.constexpr):
    square = tl.arange(0, C)[:, None] * C + tl.arange(0, C)[None, :]
    tile = tl.arange(0, C)[:, None] * K + tl.arange(0, K)[None, :]
    g = tl.load(sums + tile)
    found = decayed_blocks(tl.load(p + square), tl.load(x + tile), g, tl.load(before + tile), block_middles(g, SIZE), SIZE, LIMIT,
                           TRANSPOSED, tl.float32)
    tl.store(out + tile, found)
'''


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs the kernel in a module with the device functions, as a generated one is."""
    from gdn_codegen.host.triton import TritonLauncher
    path = tmp_path_factory.mktemp("blocks") / "blocks.py"
    path.write_text(FILE.read_text() + KERNEL)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def run(p, x, sums, before, limit, transposed):
        out = torch.full((C, K), float("nan"))
        options = {"LIMIT": limit, "TRANSPOSED": transposed, "C": C, "K": K, "SIZE": SIZE}
        TritonLauncher.interpret(module.kernel, 1, [p, x, sums, before, out], options)
        return out
    return run


@pytest.mark.parametrize("strongest", [0.0, 1.0, 5.0, 50.0])
@pytest.mark.parametrize("limit", [0.0, 40.0, None])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("exclusive", [False, True])
def test_blocks(run, exclusive, transposed, limit, strongest):
    """By one product, or by one for each level where exponents are larger than the limit. Terms are as exact as of operands that
    are not rounded. With a limit of None the caller knows that none is larger than 40."""
    if limit is None and strongest > 5:
        pytest.skip("exponents are larger")
    gen = torch.Generator().manual_seed(0)
    p, x = (torch.randn(s, generator=gen).bfloat16().float() for s in ((C, C), (C, K)))
    steps = -strongest * torch.rand(C, K, generator=gen)
    sums = steps.cumsum(0)
    before = sums - steps if exclusive else sums
    p = p.tril(-1)
    out = run(p, x, sums, before, limit, transposed)
    attrs = {"size": SIZE, "limit": 40.0, "transposed": transposed}
    want = OPS["decayed_blocks"].evaluate(attrs, p.double(), x.double(), sums.double(), *([before.double()] if exclusive else []))
    assert want.abs().max() > 0.1 and (out - want).norm() < 1e-4 * want.norm()


@pytest.mark.parametrize("limit", [0.0, 40.0])
def test_nan_of_sums_is_seen(run, limit):
    """By rows of the block that read such sums, in this channel alone. Products put it into others of the channel, too."""
    p, x, sums = torch.ones(C, C).tril(-1), torch.ones(C, K), torch.zeros(C, K)
    sums[3:, 5] = float("nan")
    out = run(p, x, sums, sums, limit, False)
    assert out[4:SIZE, 5].isnan().all() and not out[:, :5].isnan().any() and not out[:, 6:].isnan().any()
