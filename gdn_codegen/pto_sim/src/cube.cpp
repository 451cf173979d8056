// L1 to L0, matmul, and L0C back to L1. Bytes really lie in each buffer's layout.
#include "engine.hpp"

namespace pto_sim {

void extract(const TileRef& to, const TileRef& src, int row, int col, const char* name, Site site) {
    const Instr in = begin(name, MTE1, site);
    const std::string at = place(in.site) + " (" + core->label() + ")";
    check_valid(in, to, "the result");
    if (row + to.rows > src.rows || col + to.cols > src.cols)
        fail("bounds", "%s: [%d, %d) x [%d, %d) of a tile of %d x %d", at.c_str(), row, row + to.rows, col,
             col + to.cols, src.rows, src.cols);
    const bool left = to.loc == pto::TileType::Left;
    const bool transposed = (src.form == Form::ZN) == left;
    const int row_step = transposed ? 16 : (left ? 16 : to.block), col_step = transposed ? 16 : (left ? to.block : 16);
    if (row % row_step || col % col_step)
        fail("alignment", "%s: row %d and col %d are not multiples of %d and %d", at.c_str(), row, col, row_step,
             col_step);
    const TileRef dst = physical(to);
    Buffer& l1 = buffer_of(src, in);
    Buffer& l0 = buffer_of(dst, in);
    touch_tile(in, src, row, col, dst.rows, dst.cols, false);
    touch_tile(in, dst, 0, 0, dst.rows, dst.cols, true);
    const size_t bytes = size_t(dst.rows) * size_t(dst.cols) * size_t(dst.size);
    uint8_t* flat = reinterpret_cast<uint8_t*>(scratch(0, bytes / 4 + 1));
    gather(src, bytes_of(src, l1), row, col, dst.rows, dst.cols, flat);
    scatter(dst, bytes_of(dst, l0), 0, 0, dst.rows, dst.cols, flat);
    trace(in, dst.rows, dst.cols, dst.dtype, left ? 0 : 1);
}

void acc_to_mat(const TileRef& dst, const TileRef& src, Site site) {
    const Instr in = begin("TMOV", FIX, site);
    check_valid(in, src, "the source");
    Buffer& l0c = buffer_of(src, in);
    Buffer& l1 = buffer_of(dst, in);
    // All rows move, valid or not; columns up to the last block.
    const int cols = up(src.vcol, dst.block);
    touch_tile(in, src, 0, 0, src.rows, cols, false);
    touch_tile(in, dst, 0, 0, src.rows, cols, true);
    const size_t n = size_t(src.rows) * size_t(cols);
    float* wide = scratch(0, n);
    uint8_t* narrow = reinterpret_cast<uint8_t*>(scratch(1, n / 2 + 1));
    gather(src, bytes_of(src, l0c), 0, 0, src.rows, cols, reinterpret_cast<uint8_t*>(wide));
    from_float(dst.dtype, wide, narrow, n);
    scatter(dst, bytes_of(dst, l1), 0, 0, src.rows, cols, narrow);
    trace(in, dst);
}

void same_accumulator(const TileRef& out, const TileRef& input, Site site) {
    if (out.addr != input.addr)
        fail("address", "%s: accumulates in place, but its two accumulators are at %lld and %lld",
             where("TMATMUL_ACC", site).c_str(), static_cast<long long>(out.addr), static_cast<long long>(input.addr));
}

// The unit packs its operands by the valid sizes; a tile that is wider lies differently.
static void check_packed(const Instr& in, const char* tile, const char* dim, int valid, int packed, int has, int lines) {
    if (packed == has || lines <= 1) return;
    fail("layout", "%s (%s): the matmul packs the %s tile by its valid %s, %d, but the tile is laid out for %d; use the "
         "Compact alias, or fill the tile with zeros and make it all valid", place(in.site).c_str(),
         core->label().c_str(), tile, dim, valid, has);
}

void matmul(const TileRef& ct, const TileRef& at, const TileRef& bt, bool accumulate, Site site) {
    const Instr in = begin(accumulate ? "TMATMUL_ACC" : "TMATMUL", M, site);
    const std::string here = place(in.site) + " (" + core->label() + ")";
    const TileRef a = physical(at), b = physical(bt), c = physical(ct);
    const int m = a.vrow, k = a.vcol, n = b.vcol;
    check_valid(in, a, "the left tile");
    check_valid(in, b, "the right tile");
    check_valid(in, c, "the accumulator");
    if (b.vrow != k || c.vrow != m || c.vcol != n)
        fail("shape", "%s: (%d x %d) @ (%d x %d) into %d x %d", here.c_str(), m, k, b.vrow, n, c.vrow, c.vcol);
    if (m > 4095 || k > 4095 || n > 4095) fail("shape", "%s: a side is over 4095", here.c_str());
    const int mr = up(m, 16), nr = up(n, 16), kr = up(k, a.block);
    check_packed(in, "left", "cols", k, kr, a.cols, mr / 16);
    check_packed(in, "right", "cols", n, nr, b.cols, kr / b.block);
    check_packed(in, "accumulator", "rows", m, mr, c.rows, nr / 16);
    Buffer& la = buffer_of(a, in);
    Buffer& lb = buffer_of(b, in);
    Buffer& lc = buffer_of(c, in);
    // Whole fractals are read, so padding rows and cols of the last ones must hold something too.
    touch_tile(in, a, 0, 0, mr, kr, false);
    touch_tile(in, b, 0, 0, kr, nr, false);
    if (accumulate) touch_tile(in, c, 0, 0, mr, nr, false);
    touch_tile(in, c, 0, 0, mr, nr, true);

    const size_t an = size_t(mr) * size_t(k), bn = size_t(k) * size_t(nr), cn = size_t(mr) * size_t(nr);
    float* raw = scratch(0, an > bn ? an : bn);
    float* fa = scratch(1, an);
    float* fb = scratch(2, bn);
    float* fc = scratch(3, cn);
    gather(a, bytes_of(a, la), 0, 0, mr, k, reinterpret_cast<uint8_t*>(raw));
    to_float(a.dtype, raw, fa, an);
    gather(b, bytes_of(b, lb), 0, 0, k, nr, reinterpret_cast<uint8_t*>(raw));
    to_float(b.dtype, raw, fb, bn);
    if (accumulate) gather(c, bytes_of(c, lc), 0, 0, mr, nr, reinterpret_cast<uint8_t*>(fc));
    else memset(fc, 0, cn * 4);
    multiply(fa, fb, fc, mr, k, nr);
    scatter(c, bytes_of(c, lc), 0, 0, mr, nr, reinterpret_cast<const uint8_t*>(fc));
    trace(in, m, n, a.dtype, k);
}

}  // namespace pto_sim
