"""Products with exponentials of differences between rows, 16 rows by each warp."""
import tilelang
import tilelang.language as T

from .headers import HELPERS


def sums_of_groups(x, groups):
    """The layout of a product of 64 rows, of which each warp group has a part of the columns (PTX ISA, wgmma, fragment D)."""
    columns = x.shape[1] // groups
    return tilelang.layout.Fragment(x.shape, lambda i, j: (
        j // columns * 128 + i // 16 * 32 + i % 8 * 4 + j % 8 // 2, j % columns // 8 * 4 + i % 16 // 8 * 2 + j % 2))


def sums_of(sums, before):
    """The sums before each row, or `sums` if there are none."""
    return sums if before is None else before


@T.macro
def decayed_blocks_cuda(p, x, g, out, before=None, limit=0.0, transposed=False, bounded=False):
    """Row i of `out`, a fragment: the sum over j < i of p[i, j] x[j] exp(before[i] - g[j]). transposed: row j is the sum over
    i > j of p[i, j] x[i] exp(before[i] - g[j]). before: None for g. limit: of exponents of either sign, relative to the middle
    row of 16. bounded: none is larger. p [64, 64] and x [64, k] in 16 bits and sums [64, k] in float32 lie in shared memory. The
    threads are whole warp groups."""
    T.import_source(HELPERS)
    groups = T.get_thread_extent() // 128
    T.annotate_layout({out: sums_of_groups(out, groups)})
    options = [p.dtype == "bfloat16", transposed, bounded, x.shape[1], g.shape[1], out.shape[1] // groups]
    name = f"decayed_blocks<{', '.join(str(n).lower() for n in options)}>"
    T.call_extern("handle", name, out.access_ptr("w"), *(y.access_ptr("r") for y in (p, x, g, sums_of(g, before))),
                  T.float32(limit), T.get_thread_binding())


@T.macro
def decayed_pairs_cuda(tiles, x, g, results, channels, before=None, limit=0.0, bounded=False):
    """Entries i, j below the diagonal of `results`, fragments: the sum over c of a[i, c] x[j, c] exp(before[i, c] - g[j, c]), for
    one or two tiles a; other entries are 0. before: None for g. limit: of exponents of either sign, relative to the middle row of
    16. bounded: none is larger. Tiles [64, channels] in 16 bits and sums in float32 lie in shared memory. The threads are whole
    warp groups."""
    T.import_source(HELPERS)
    groups = T.get_thread_extent() // 128
    for y in results:
        T.annotate_layout({y: sums_of_groups(y, groups)})
    options = [x.dtype == "bfloat16", len(tiles), bounded, channels, tiles[0].shape[1], x.shape[1], g.shape[1], 4 // groups]
    name = f"decayed_pairs<{', '.join(str(n).lower() for n in options)}>"
    T.call_extern("handle", name, results[0].access_ptr("w"), results[-1].access_ptr("w"), tiles[0].access_ptr("r"),
                  tiles[-1].access_ptr("r"), x.access_ptr("r"), g.access_ptr("r"), sums_of(g, before).access_ptr("r"),
                  T.float32(limit), T.get_thread_binding())
