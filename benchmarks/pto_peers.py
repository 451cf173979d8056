"""Hand-written Ascend kernels by our ruler: python benchmarks/pto_peers.py CHECKOUT [--kda]

CHECKOUT is a checkout of huawei-csl/megagdn-pto. Its kernels for chunks of Gated DeltaNet, or of Kimi Delta Attention, are
compiled as they are for the bundled simulator, which here reports no missing wait. Prints the cycles of block 0 of 24 in each, by
the flat model and by the fitted one, and what bounds them, as `gdn_codegen bench --target pto` does for ours: T = 2048, 16 heads,
chunks of 128, K = V = 128, float16. Not in it: what its callers transpose before.
"""
from __future__ import annotations

import argparse
import re
import tempfile
from pathlib import Path

import torch

from gdn_codegen import pto_sim
from gdn_codegen.tools.bench_pto import bound
from gdn_codegen.tools.pto_time import replay

T, H, C, D, BLOCKS = 2048, 16, 128, 128, 24
SIZES_OF_CHUNKS = f"#define GDN_C {C}\n#define GDN_D {D}\n"
#: What the sources use and the bundled simulator does not have: shapes of tiles in rows, signals of A5, which A2 and A3 do not
#: run, and a pair of flags in one call.
PRELUDE = """
using std::min;
template <typename T, int rows, int cols, pto::Layout>
using TileShape2D = pto::Shape<1, 1, 1, rows, cols>;
template <typename T, int rows, int cols, pto::Layout>
using BaseShape2D = pto::Stride<rows * cols, rows * cols, rows * cols, cols, 1>;
template <typename... X> inline void set_intra_block(X...) {}
template <typename... X> inline void wait_intra_block(X...) {}
template <pipe_t from, pipe_t to> inline void PtoSetWaitFlag(event_t set, event_t wait) {
  set_flag(from, to, set); wait_flag(from, to, wait);
}
"""
IN, OUT, WORK = pto_sim.INPUT, pto_sim.OUTPUT, pto_sim.WORKSPACE
half, single = torch.float16, torch.float32
TOKENS, STATES, SCORES = (1, T, H, D), (T // C * H, D, D), (1, T, H, C)
ONE_SEQUENCE, LENGTHS = (1, T, T), None
INVERSE = ([(OUT, single, SCORES), (IN, half, SCORES), (IN, half, (C, C)), LENGTHS], (C, T // C * H, H | 1 << 16))
Kernels = dict[str, tuple[list[tuple[int, torch.dtype, tuple[int, ...]] | None], tuple[int, ...]]]
#: Source -> tensors as (kind, dtype, shape), None for an absent one, and integers.
GDN: Kernels = {
    "chunk_cumsum": ([(IN, single, (1, T, H)), (OUT, single, (1, T, H)), LENGTHS], (1, T, H)),
    "scaled_dot_kkt": ([(IN, half, TOKENS), (IN, half, (H, T)), (IN, single, (H, T)), (IN, single, (C, C)),
                        (WORK, half, (2 * BLOCKS, C, C)), (OUT, half, SCORES), LENGTHS], (*ONE_SEQUENCE, H, H)),
    "tri_inverse_impl": INVERSE,
    "wy_fast": ([(IN, half, TOKENS), (IN, half, TOKENS), (IN, half, (H, T)), (IN, single, (H, T)), (IN, half, SCORES),
                 (WORK, half, (BLOCKS, C, C)), (WORK, half, (BLOCKS, C, C)), (OUT, half, TOKENS), (OUT, half, TOKENS), LENGTHS],
                (*ONE_SEQUENCE, H, H)),
    "chunk_h": ([(IN, half, TOKENS), (IN, half, TOKENS), (IN, half, TOKENS), (IN, single, (H, T)), (OUT, half, STATES),
                 (OUT, half, TOKENS), (OUT, half, (H, D, D)), None, (WORK, half, (4 * BLOCKS, D, D)), LENGTHS],
                (0, 1, *ONE_SEQUENCE, H, H)),
    "chunk_o": ([(IN, half, TOKENS), (IN, half, TOKENS), (IN, half, TOKENS), (IN, half, STATES), (IN, single, (H, T)),
                 (IN, single, (C, C)), (WORK, half, (BLOCKS, C, C)), (WORK, half, (BLOCKS, C, D)), (WORK, half, (BLOCKS, C, C)),
                 (OUT, half, TOKENS), LENGTHS], (*ONE_SEQUENCE, H, H))}
KDA: Kernels = {
    "gate_cumsum_kda": ([(IN, half, TOKENS), (OUT, single, TOKENS), LENGTHS], (1, T, H)),
    "kkt_kda": ([(IN, half, TOKENS), (IN, single, TOKENS), (IN, half, (H, T)), (IN, single, (C, C)),
                 (WORK, single, (2 * BLOCKS, 2 * C, D)), (WORK, single, (2 * BLOCKS, C, C)), (OUT, half, SCORES), LENGTHS],
                (*ONE_SEQUENCE, H)),
    "tri_inverse_impl": INVERSE,
    "wy_kda": ([(IN, half, TOKENS), (IN, half, TOKENS), (IN, half, (H, T)), (IN, single, TOKENS), (IN, half, SCORES),
                (WORK, half, (BLOCKS, C, C)), (WORK, half, (BLOCKS, C, D)), (OUT, half, TOKENS), (OUT, half, TOKENS), LENGTHS],
               (*ONE_SEQUENCE, H)),
    "chunk_h_kda": ([(IN, half, TOKENS), (IN, half, TOKENS), (IN, half, TOKENS), (IN, single, TOKENS), (OUT, half, STATES),
                     (OUT, half, TOKENS), (WORK, half, (5 * BLOCKS, D, D)), LENGTHS], (*ONE_SEQUENCE, H)),
    "chunk_o_kda": ([(IN, half, TOKENS), (IN, half, TOKENS), (IN, half, TOKENS), (IN, half, STATES), (IN, single, TOKENS),
                     (IN, single, (C, C)), (WORK, single, (7 * BLOCKS, D, D)), (OUT, half, TOKENS), LENGTHS], (*ONE_SEQUENCE, H))}


def source(folder: Path, name: str) -> str:
    """The text of a kernel for the simulator's driver, which includes it once for each kind of core."""
    utilities = (folder / "include" / "kernel_utils.h").read_text().replace("#pragma once", "")
    text = (folder / f"{name}.cpp").read_text().replace('#include "kernel_utils.h"', PRELUDE + utilities)
    text = text.replace('extern "C" __global__ AICORE void', "PTO_ENTRY void")
    return SIZES_OF_CHUNKS + text.partition('extern "C" void call_kernel')[0]


def main() -> None:
    """Print a line for each kernel, and the sum."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--kda", action="store_true", help="Kimi Delta Attention")
    a = parser.parse_args()
    folder, sums = a.checkout / "kernels" / "pto", [0, 0]
    for name, (tensors, ints) in (KDA if a.kda else GDN).items():
        text = source(folder, name)
        (entry,) = re.findall(r"^PTO_ENTRY void (\w+)", text, re.M)
        with tempfile.TemporaryDirectory() as place:
            path = Path(place, f"{name}.cpp")
            path.write_text(text)
            lib = pto_sim.load(pto_sim.build(path, [entry], path.with_suffix(".so")))
        given = [torch.empty(0) if t is None else torch.zeros(t[2], dtype=t[1]) for t in tensors]
        with pto_sim.record(BLOCKS) as seen:
            pto_sim.launch(lib, entry, BLOCKS, given, [IN if t is None else t[0] for t in tensors], ints, order=0)
        times = [replay(seen.launches[0][1], model) for model in ("flat", "fitted")]
        print(f"{name:16} {times[0].cycles:9,} {times[1].cycles:9,}  {bound(times[0])}  |  {bound(times[1])}", flush=True)
        sums = [n + t.cycles for n, t in zip(sums, times, strict=True)]
    print(f"{'sum':16} {sums[0]:9,} {sums[1]:9,}")


if __name__ == "__main__":
    main()
