// Broadcasts, reductions, transpose and selection.
#include "engine.hpp"

#include <cmath>

namespace pto_sim {

// The headers' own scratch in UB, for broadcasts that are given none.
constexpr size_t header_scratch = 184 * 1024;

static void same_rows(const Instr& in, const TileRef& a, const TileRef& b, const char* role) {
    if (a.vrow != b.vrow)
        fail("shape", "%s: %s has %d valid rows, the result %d", at(in).c_str(), role, b.vrow, a.vrow);
}

// Element r of a column, of whichever form.
static const uint8_t* column_at(const TileRef& t, Buffer& ub, int r) {
    const size_t stride = t.form == Form::ND ? size_t(t.cols) : 1;
    return bytes_of(t, ub) + size_t(r) * stride * size_t(t.size);
}

static void scrap_tile(const Instr& in, const TileRef& t, size_t bytes, const char* what) {
    const size_t has = size_t(t.rows) * size_t(t.cols) * size_t(t.size);
    if (has < bytes)
        fail("scratch", "%s: %s needs %zu bytes of scratch, the tile has %zu", at(in).c_str(), what, bytes, has);
    if (bytes) scrap(in, buffer_of(t, in), size_t(t.addr), bytes);
}

void row_expand(const TileRef& dst, const TileRef& src, bool broadcast_form, Site site) {
    const Instr in = begin("TROWEXPAND", V, site);
    check_valid(in, dst, "the result");
    check_valid(in, src, "the source");
    Buffer& ub = buffer_of(dst, in);
    buffer_of(src, in);
    if (broadcast_form) {
        // [1, N] or [N, 1] to [N, 32 bytes], one vector instruction.
        touch_valid(in, src, false);
    } else {
        same_rows(in, dst, src, "the source");
        if (core->flags[V][S][0].set || core->flags[S][V][0].set)
            fail("flag-set-twice", "%s: it uses the flags between V and S, EVENT_ID0, and one is set by %s",
                 at(in).c_str(), place((core->flags[V][S][0].set ? core->flags[V][S][0] : core->flags[S][V][0]).site).c_str());
        touch_tile(in, src, 0, 0, src.vrow, 1, false);
    }
    touch_valid(in, dst, true);
    const size_t e = size_t(dst.size);
    for (int r = 0; r < dst.vrow; ++r) {
        uint32_t bits = 0;
        memcpy(&bits, broadcast_form ? bytes_of(src, ub) + size_t(r) * e : column_at(src, ub, r), e);
        fill(dst.size, bits, bytes_of(dst, ub) + size_t(r * dst.cols) * e, size_t(dst.vcol));
    }
    trace(in, dst.vrow, dst.vcol, dst.dtype, broadcast_form ? 1 : 0);
}

void row_expand_op(Op op, const char* name, const TileRef& dst, const TileRef& a, const TileRef& b, const TileRef* tmp,
                   Site site) {
    const Instr in = begin(name, V, site);
    check_valid(in, dst, "the result");
    const int per_block = 32 / dst.size;
    auto full = [&](const TileRef& t) { return t.form == Form::ND && t.vrow == dst.vrow && t.vcol == dst.vcol; };
    const bool second = full(a) && !(full(b) && b.cols > a.cols);  // operand 1 is the column
    const TileRef& wide = second ? a : b;
    const TileRef& column = second ? b : a;
    if (!full(wide)) fail("shape", "%s: neither operand has the result's valid size", at(in).c_str());
    const bool dn = column.form == Form::DN;
    if (column.vrow != dst.vrow || column.vcol != (dn ? 1 : per_block) || (!dn && column.cols != per_block) || (tmp && !dn))
        fail("shape", "%s: the column operand is DN [%d, 1]%s, not %d x %d of %s", at(in).c_str(), dst.vrow,
             tmp ? "" : (", or ND [rows, " + std::to_string(per_block) + "] already broadcast").c_str(), column.vrow,
             column.vcol, dn ? "DN" : "ND");
    if (!second && (op == Op::sub || op == Op::div || op == Op::exp_of_difference))
        fail("shape", "%s: the column is operand 1; the A2/A3 header computes the other order for both", at(in).c_str());
    Buffer& ub = buffer_of(dst, in);
    buffer_of(a, in);
    buffer_of(b, in);
    check_overlap(in, dst, wide);
    touch_valid(in, wide, false);
    touch_valid(in, column, false);
    if (dn) {
        const size_t bytes = size_t(up(dst.vrow, 8)) * 32;
        if (tmp) scrap_tile(in, *tmp, bytes > 240 * 32 ? 240 * 32 : bytes, name);
        else scrap(in, ub, header_scratch, bytes > 240 * 32 ? 240 * 32 : bytes);
    }
    touch_valid(in, dst, true);
    const size_t e = size_t(dst.size), n = size_t(dst.vcol);
    std::vector<uint8_t> row(n * e);
    for (int r = 0; r < dst.vrow; ++r) {
        uint32_t bits = 0;
        memcpy(&bits, column_at(column, ub, r), e);
        fill(dst.size, bits, row.data(), n);
        binary_row(op, dst.dtype, bytes_of(wide, ub) + size_t(r * wide.cols) * e, row.data(),
                   bytes_of(dst, ub) + size_t(r * dst.cols) * e, n);
    }
    trace(in, dst.vrow, dst.vcol, dst.dtype, dn ? 0 : 1);
}

void col_expand(const TileRef& dst, const TileRef& src, Site site) {
    const Instr in = begin("TCOLEXPAND", V, site);
    check_valid(in, dst, "the result");
    check_valid(in, src, "the source");
    if (src.vcol != dst.vcol)
        fail("shape", "%s: the source has %d valid cols, the result %d", at(in).c_str(), src.vcol, dst.vcol);
    Buffer& ub = buffer_of(dst, in);
    buffer_of(src, in);
    touch_tile(in, src, 0, 0, 1, src.vcol, false);
    touch_valid(in, dst, true);
    const size_t e = size_t(dst.size), bytes = size_t(dst.vcol) * e, whole = (bytes + 31) / 32 * 32;
    for (int r = 0; r < dst.vrow; ++r) {
        const size_t to = size_t(r * dst.cols) * e;
        memmove(bytes_of(dst, ub) + to, bytes_of(src, ub), bytes);
        if (whole > bytes) scrap(in, ub, size_t(dst.addr) + to + bytes, whole - bytes);
    }
    trace(in, dst);
}

void col_expand_op(Op op, const char* name, const TileRef& dst, const TileRef& a, const TileRef& b, Site site) {
    const Instr in = begin(name, V, site);
    check_valid(in, dst, "the result");
    auto full = [&](const TileRef& t) { return t.vrow == dst.vrow && t.vcol == dst.vcol; };
    const bool second = full(a);
    const TileRef& wide = second ? a : b;
    const TileRef& line = second ? b : a;
    if (!full(wide)) fail("shape", "%s: neither operand has the result's valid size", at(in).c_str());
    if (line.vcol != dst.vcol)
        fail("shape", "%s: the row operand has %d valid cols, the result %d", at(in).c_str(), line.vcol, dst.vcol);
    Buffer& ub = buffer_of(dst, in);
    buffer_of(a, in);
    buffer_of(b, in);
    check_overlap(in, dst, wide);
    touch_valid(in, wide, false);
    touch_tile(in, line, 0, 0, 1, line.vcol, false);
    touch_valid(in, dst, true);
    const size_t e = size_t(dst.size);
    std::vector<uint8_t> row(bytes_of(line, ub), bytes_of(line, ub) + size_t(dst.vcol) * e);
    for (int r = 0; r < dst.vrow; ++r) {
        const uint8_t* from = bytes_of(wide, ub) + size_t(r * wide.cols) * e;
        binary_row(op, dst.dtype, second ? from : row.data(), second ? row.data() : from,
                   bytes_of(dst, ub) + size_t(r * dst.cols) * e, size_t(dst.vcol));
    }
    trace(in, dst);
}

void row_sum(const TileRef& dst, const TileRef& src, const TileRef& tmp, Site site) {
    const Instr in = begin("TROWSUM", V, site);
    check_valid(in, src, "the source");
    same_rows(in, dst, src, "the source");
    Buffer& ub = buffer_of(dst, in);
    buffer_of(src, in);
    touch_valid(in, src, false);
    // Rows of more than one repeat of 256 bytes are halved in scratch, row by row of the scratch tile.
    const int repeat = 256 / src.size;
    if (src.vcol > repeat) {
        const int half_row = src.vcol / repeat / 2 * repeat;
        const int wants = half_row > repeat ? half_row : repeat;
        const bool fast = src.dtype == Dtype::f32 && src.rows == 64 && src.vrow == 64 && src.cols == 128 && src.vcol == 128;
        if (!fast && (tmp.cols < wants || tmp.rows < src.vrow))
            fail("scratch", "%s: %d rows of %d want a scratch tile of %d x %d, not %d x %d", at(in).c_str(), src.vrow,
                 src.vcol, src.vrow, wants, tmp.rows, tmp.cols);
        scrap_tile(in, tmp, fast ? size_t(64 * 16 * 4) : size_t(src.vrow) * size_t(tmp.cols) * size_t(tmp.size), "TROWSUM");
    }
    touch_tile(in, dst, 0, 0, dst.vrow, 1, true);
    const size_t n = size_t(src.vcol), e = size_t(src.size);
    float* row = scratch(0, n);
    for (int r = 0; r < src.vrow; ++r) {
        uint8_t* to = const_cast<uint8_t*>(column_at(dst, ub, r));
        const uint8_t* from = bytes_of(src, ub) + size_t(r * src.cols) * e;
        if (src.dtype == Dtype::i32) {
            int32_t sum = 0;
            for (size_t i = 0; i < n; ++i) sum += reinterpret_cast<const int32_t*>(from)[i];
            memcpy(to, &sum, 4);
        } else {
            to_float(src.dtype, from, row, n);
            // Pairwise, as the hardware's halving is: a sum in order would err more.
            for (size_t have = n; have > 1; have = (have + 1) / 2)
                for (size_t i = 0; i < have / 2; ++i) row[i] += row[i + (have + 1) / 2];
            from_float(src.dtype, row, to, 1);
        }
    }
    trace(in, src);
}

void col_sum(const TileRef& dst, const TileRef& src, const TileRef* tmp, bool binary_tree, Site site) {
    const Instr in = begin("TCOLSUM", V, site);
    check_valid(in, src, "the source");
    if (src.vcol != dst.vcol)
        fail("shape", "%s: the source has %d valid cols, the result %d", at(in).c_str(), src.vcol, dst.vcol);
    Buffer& ub = buffer_of(dst, in);
    buffer_of(src, in);
    touch_valid(in, src, false);
    if (tmp && binary_tree && src.vrow > 1)
        scrap_tile(in, *tmp, size_t(src.vrow / 2) * size_t(tmp->cols) * size_t(tmp->size), "TCOLSUM");
    touch_tile(in, dst, 0, 0, 1, dst.vcol, true);
    const size_t n = size_t(src.vcol), e = size_t(src.size);
    std::vector<uint8_t> sum(bytes_of(src, ub), bytes_of(src, ub) + n * e);
    for (int r = 1; r < src.vrow; ++r)
        binary_row(Op::add, src.dtype, sum.data(), bytes_of(src, ub) + size_t(r * src.cols) * e, sum.data(), n);
    memcpy(bytes_of(dst, ub), sum.data(), n * e);
    trace(in, src);
}

void transpose(const TileRef& dst, const TileRef& src, const TileRef& tmp, Site site) {
    const Instr in = begin("TTRANS", V, site);
    check_valid(in, src, "the source");
    if (dst.vrow != src.vcol || dst.vcol != src.vrow)
        fail("shape", "%s: %d x %d transposed into %d x %d", at(in).c_str(), src.vrow, src.vcol, dst.vrow, dst.vcol);
    Buffer& ub = buffer_of(dst, in);
    buffer_of(src, in);
    touch_valid(in, src, false);
    const size_t e = size_t(src.size);
    const bool by_blocks = dst.cols % 16 == 0;
    if (by_blocks)
        scrap_tile(in, tmp, size_t(up(src.vcol, 32 / src.size)) * size_t(up(src.vrow, 16)) * e, "TTRANS");
    touch_valid(in, dst, true);
    std::vector<uint8_t> out(size_t(src.vrow) * size_t(src.vcol) * e);
    for (int r = 0; r < src.vrow; ++r)
        for (int c = 0; c < src.vcol; ++c)
            memcpy(out.data() + size_t(c * src.vrow + r) * e, bytes_of(src, ub) + size_t(r * src.cols + c) * e, e);
    scatter(dst, bytes_of(dst, ub), 0, 0, dst.vrow, dst.vcol, out.data());
    const size_t bytes = size_t(dst.vcol) * e, whole = (bytes + 31) / 32 * 32;
    if (by_blocks && whole > bytes)
        for (int r = 0; r < dst.vrow; ++r) scrap(in, ub, size_t(dst.addr) + size_t(r * dst.cols) * e + bytes, whole - bytes);
    trace(in, src);
}

static bool holds(pto::CmpMode mode, float a, float b) {
    switch (mode) {
        case pto::CmpMode::EQ: return a == b;
        case pto::CmpMode::NE: return a != b;
        case pto::CmpMode::LT: return a < b;
        case pto::CmpMode::LE: return a <= b;
        case pto::CmpMode::GT: return a > b;
        default: return a >= b;
    }
}

void compare(const TileRef& dst, const TileRef& a, const TileRef* b, double scalar, pto::CmpMode mode, const char* name,
             Site site) {
    const Instr in = begin(name, V, site);
    check_valid(in, a, "operand 0");
    same_rows(in, dst, a, "operand 0");
    if (b && (a.vrow != b->vrow || a.vcol != b->vcol))
        fail("shape", "%s: the operands have %d x %d and %d x %d valid elements", at(in).c_str(), a.vrow, a.vcol,
             b->vrow, b->vcol);
    // Whole repeats of 256 bytes are compared, and a bit an element written for each.
    const int repeat = 256 / a.size, bytes = up(a.vcol, repeat) / 8;
    if (bytes > dst.cols)
        fail("shape", "%s: a row of the mask takes %d bytes, the tile has %d", at(in).c_str(), bytes, dst.cols);
    Buffer& ub = buffer_of(dst, in);
    buffer_of(a, in);
    touch_valid(in, a, false);
    if (b) touch_valid(in, *b, false);
    touch_tile(in, dst, 0, 0, dst.vrow, bytes, true);
    const size_t n = size_t(a.vcol), e = size_t(a.size);
    float* fa = scratch(0, n);
    float* fb = scratch(1, n);
    for (size_t i = 0; i < n; ++i) fb[i] = float(scalar);
    for (int r = 0; r < a.vrow; ++r) {
        to_float(a.dtype, bytes_of(a, ub) + size_t(r * a.cols) * e, fa, n);
        if (b) to_float(b->dtype, bytes_of(*b, ub) + size_t(r * b->cols) * e, fb, n);
        uint8_t* to = bytes_of(dst, ub) + size_t(r * dst.cols);
        memset(to, 0, size_t(bytes));
        for (size_t i = 0; i < n; ++i)
            if (holds(mode, fa[i], fb[i])) to[i / 8] = uint8_t(to[i / 8] | 1 << i % 8);
    }
    trace(in, a);
}

void select(const TileRef& dst, const TileRef& mask, const TileRef& a, const TileRef& b, const TileRef& tmp, Site site) {
    const Instr in = begin("TSEL", V, site);
    check_valid(in, dst, "the result");
    for (const TileRef* t : {&a, &b})
        if (t->vrow != dst.vrow || t->vcol != dst.vcol)
            fail("shape", "%s: an operand has %d x %d valid elements, the result %d x %d", at(in).c_str(), t->vrow,
                 t->vcol, dst.vrow, dst.vcol);
    const int bytes = (dst.vcol + 7) / 8;
    if (bytes > mask.cols || dst.vrow > mask.rows)
        fail("shape", "%s: the mask is too small", at(in).c_str());
    Buffer& ub = buffer_of(dst, in);
    touch_valid(in, a, false);
    touch_valid(in, b, false);
    touch_tile(in, mask, 0, 0, dst.vrow, bytes, false);
    scrap_tile(in, tmp, 32, "TSEL");
    touch_valid(in, dst, true);
    const size_t e = size_t(dst.size);
    for (int r = 0; r < dst.vrow; ++r) {
        const uint8_t* bits = bytes_of(mask, ub) + size_t(r * mask.cols);
        for (int c = 0; c < dst.vcol; ++c) {
            const TileRef& from = bits[c / 8] >> c % 8 & 1 ? a : b;
            memcpy(bytes_of(dst, ub) + size_t(r * dst.cols + c) * e,
                   bytes_of(from, ub) + size_t(r * from.cols + c) * e, e);
        }
    }
    trace(in, dst);
}

}  // namespace pto_sim
