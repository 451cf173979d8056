// Elementwise vector instructions.
#include "engine.hpp"

#include <cmath>

namespace pto_sim {

static void same_valid(const Instr& in, const TileRef& a, const TileRef& b, const char* role) {
    if (a.vrow != b.vrow || a.vcol != b.vcol)
        fail("shape", "%s: %s has %d x %d valid elements, the result %d x %d", at(in).c_str(), role, b.vrow, b.vcol,
             a.vrow, a.vcol);
}

static size_t span(const TileRef& t) {
    const bool nd = t.form == Form::ND;
    const int lines = nd ? t.vrow : t.vcol, across = nd ? t.vcol : t.vrow, pitch = nd ? t.cols : t.rows;
    return (size_t(lines - 1) * size_t(pitch) + size_t(across)) * size_t(t.size);
}

// Whether two tiles are other columns of the same wide rows.
static bool other_columns(const TileRef& a, const TileRef& b) {
    if (a.form != Form::ND || b.form != Form::ND || a.size != b.size || a.cols != b.cols) return false;
    const int64_t pitch = int64_t(a.cols) * a.size, shift = ((b.addr - a.addr) % pitch + pitch) % pitch;
    return shift >= int64_t(a.vcol) * a.size && pitch - shift >= int64_t(b.vcol) * b.size;
}

// In place is fine; a shifted overlap would read what the instruction has already written.
void check_overlap(const Instr& in, const TileRef& dst, const TileRef& src) {
    const bool apart = dst.addr + int64_t(span(dst)) <= src.addr || src.addr + int64_t(span(src)) <= dst.addr ||
                       other_columns(dst, src);
    const bool in_place = dst.addr == src.addr && dst.size == src.size &&
                          (dst.cols == src.cols || dst.vrow == 1) && dst.form == src.form;
    if (!apart && !in_place)
        fail("overlap", "%s: the result at UB [%lld, %lld) overlaps the source at [%lld, %lld), and is not in place",
             at(in).c_str(), static_cast<long long>(dst.addr), static_cast<long long>(dst.addr + int64_t(span(dst))),
             static_cast<long long>(src.addr), static_cast<long long>(src.addr + int64_t(span(src))));
}

template <typename T>
static T apply(Op op, T a, T b) {
    switch (op) {
        case Op::add: return T(a + b);
        case Op::sub: return T(a - b);
        case Op::mul: return T(a * b);
        case Op::div: return std::is_integral<T>::value && b == 0 ? T(0) : T(a / b);
        case Op::max: return a > b ? a : b;
        case Op::min: return a < b ? a : b;
        default: return a;
    }
}

template <typename T>
static void apply_row(Op op, const T* a, const T* b, T* out, size_t n) {
    switch (op) {  // one loop an op, so that the compiler can vectorise each
        case Op::add: for (size_t i = 0; i < n; ++i) out[i] = T(a[i] + b[i]); break;
        case Op::sub: for (size_t i = 0; i < n; ++i) out[i] = T(a[i] - b[i]); break;
        case Op::mul: for (size_t i = 0; i < n; ++i) out[i] = T(a[i] * b[i]); break;
        case Op::exp_of_difference:
            for (size_t i = 0; i < n; ++i) out[i] = T(std::exp(float(a[i] - b[i])));
            break;
        default: for (size_t i = 0; i < n; ++i) out[i] = apply(op, a[i], b[i]);
    }
}

// b holds n elements in the dtype of the row.
void binary_row(Op op, Dtype t, const void* a, const void* b, void* out, size_t n) {
    switch (t) {
        case Dtype::f32:
            apply_row(op, static_cast<const float*>(a), static_cast<const float*>(b), static_cast<float*>(out), n);
            break;
        case Dtype::i32:
            apply_row(op, static_cast<const int32_t*>(a), static_cast<const int32_t*>(b), static_cast<int32_t*>(out), n);
            break;
        case Dtype::i16:
            apply_row(op, static_cast<const int16_t*>(a), static_cast<const int16_t*>(b), static_cast<int16_t*>(out), n);
            break;
        default: {
            float* fa = scratch(0, n);
            float* fb = scratch(1, n);
            to_float(t, a, fa, n);
            to_float(t, b, fb, n);
            if (op == Op::exp_of_difference) {
                // Two instructions on hardware: the difference is rounded before the exponential.
                apply_row(Op::sub, fa, fb, fa, n);
                from_float(t, fa, out, n);
                to_float(t, out, fa, n);
                for (size_t i = 0; i < n; ++i) fa[i] = std::exp(fa[i]);
            } else {
                apply_row(op, fa, fb, fa, n);
            }
            from_float(t, fa, out, n);
        }
    }
}

void binary(Op op, const char* name, const TileRef& dst, const TileRef& a, const TileRef& b, Site site) {
    const Instr in = begin(name, V, site);
    check_valid(in, dst, "the result");
    same_valid(in, dst, a, "operand 0");
    same_valid(in, dst, b, "operand 1");
    Buffer& ub = buffer_of(dst, in);
    buffer_of(a, in);
    buffer_of(b, in);
    check_overlap(in, dst, a);
    check_overlap(in, dst, b);
    touch_valid(in, a, false);
    touch_valid(in, b, false);
    touch_valid(in, dst, true);
    const size_t e = size_t(dst.size);
    for (int r = 0; r < dst.vrow; ++r)
        binary_row(op, dst.dtype, bytes_of(a, ub) + size_t(r * a.cols) * e, bytes_of(b, ub) + size_t(r * b.cols) * e,
                   bytes_of(dst, ub) + size_t(r * dst.cols) * e, size_t(dst.vcol));
    trace(in, dst);
}

// Writes the scalar's bits in a dtype; a row of it serves as the second operand.
static void scalar_bits(Dtype t, double value, void* out) {
    if (t == Dtype::i32) {
        const int32_t v = int32_t(value);
        memcpy(out, &v, 4);
    } else {
        const float v = float(value);
        from_float(t, &v, out, 1);
    }
}

void with_scalar(Op op, const char* name, const TileRef& dst, const TileRef& a, double value, Site site) {
    const Instr in = begin(name, V, site);
    check_valid(in, dst, "the result");
    same_valid(in, dst, a, "the operand");
    Buffer& ub = buffer_of(dst, in);
    buffer_of(a, in);
    check_overlap(in, dst, a);
    touch_valid(in, a, false);
    touch_valid(in, dst, true);
    const size_t e = size_t(dst.size);
    uint32_t bits = 0;
    scalar_bits(dst.dtype, value, &bits);
    std::vector<uint8_t> row(size_t(dst.vcol) * e);
    fill(dst.size, bits, row.data(), size_t(dst.vcol));
    for (int r = 0; r < dst.vrow; ++r)
        binary_row(op, dst.dtype, bytes_of(a, ub) + size_t(r * a.cols) * e, row.data(),
                   bytes_of(dst, ub) + size_t(r * dst.cols) * e, size_t(dst.vcol));
    trace(in, dst);
}

void unary(Op op, const char* name, const TileRef& dst, const TileRef& a, Site site) {
    const Instr in = begin(name, V, site);
    check_valid(in, dst, "the result");
    same_valid(in, dst, a, "the operand");
    Buffer& ub = buffer_of(dst, in);
    buffer_of(a, in);
    check_overlap(in, dst, a);
    touch_valid(in, a, false);
    touch_valid(in, dst, true);
    const size_t n = size_t(dst.vcol), e = size_t(dst.size);
    float* row = scratch(0, n);
    for (int r = 0; r < dst.vrow; ++r) {
        to_float(a.dtype, bytes_of(a, ub) + size_t(r * a.cols) * e, row, n);
        switch (op) {
            case Op::exp: for (size_t i = 0; i < n; ++i) row[i] = std::exp(row[i]); break;
            case Op::log: for (size_t i = 0; i < n; ++i) row[i] = std::log(row[i]); break;
            case Op::sqrt: for (size_t i = 0; i < n; ++i) row[i] = std::sqrt(row[i]); break;
            case Op::rsqrt: for (size_t i = 0; i < n; ++i) row[i] = 1.0f / std::sqrt(row[i]); break;
            case Op::abs: for (size_t i = 0; i < n; ++i) row[i] = std::fabs(row[i]); break;
            default: for (size_t i = 0; i < n; ++i) row[i] = -row[i];
        }
        from_float(dst.dtype, row, bytes_of(dst, ub) + size_t(r * dst.cols) * e, n);
    }
    trace(in, dst);
}

void expand_scalar(const TileRef& t, double value, Site site) {
    const bool mat = t.loc == pto::TileType::Mat;
    const Instr in = begin("TEXPANDS", mat ? MTE2 : V, site);
    Buffer& b = buffer_of(t, in);
    uint32_t bits = 0;
    if (t.dtype == Dtype::f32 || t.dtype == Dtype::f16 || t.dtype == Dtype::bf16 || t.dtype == Dtype::i32)
        scalar_bits(t.dtype, value, &bits);
    else
        bits = uint32_t(int64_t(value));
    if (mat) {
        touch_tile(in, t, 0, 0, t.rows, t.cols, true);
        fill(t.size, bits, bytes_of(t, b), size_t(t.rows) * size_t(t.cols));
    } else {
        check_valid(in, t, "the result");
        if (t.narrow && t.form == Form::ND && t.vrow > 1)
            fail("layout", "%s: with a static valid width of fewer than all cols the A2/A3 header fills the first "
                 "elements of the tile as if rows were that narrow; make the valid width DYNAMIC or the whole row",
                 at(in).c_str());
        touch_valid(in, t, true);
        const bool nd = t.form == Form::ND;
        const int lines = nd ? t.vrow : t.vcol, across = nd ? t.vcol : t.vrow, pitch = nd ? t.cols : t.rows;
        for (int l = 0; l < lines; ++l)
            fill(t.size, bits, bytes_of(t, b) + size_t(l * pitch) * size_t(t.size), size_t(across));
    }
    trace(in, t);
}

void cast(const TileRef& dst, const TileRef& src, pto::RoundMode mode, Site site) {
    const Instr in = begin("TCVT", V, site);
    check_valid(in, dst, "the result");
    same_valid(in, dst, src, "the source");
    Buffer& ub = buffer_of(dst, in);
    buffer_of(src, in);
    check_overlap(in, dst, src);
    touch_valid(in, src, false);
    touch_valid(in, dst, true);
    const size_t n = size_t(dst.vcol);
    float* row = scratch(0, n);
    for (int r = 0; r < dst.vrow; ++r) {
        to_float(src.dtype, bytes_of(src, ub) + size_t(r * src.cols * src.size), row, n);
        uint8_t* to = bytes_of(dst, ub) + size_t(r * dst.cols * dst.size);
        if (dst.dtype == Dtype::f32 && src.dtype == Dtype::f32 && mode != pto::RoundMode::CAST_NONE) {
            int32_t* whole = reinterpret_cast<int32_t*>(scratch(1, n));
            from_float(Dtype::i32, row, whole, n, mode);
            to_float(Dtype::i32, whole, row, n);
        }
        from_float(dst.dtype, row, to, n, mode);
    }
    trace(in, dst.vrow, dst.vcol, dst.dtype, src.size);
}

void copy(const TileRef& dst, const TileRef& src, Site site) {
    const Instr in = begin("TMOV", V, site);
    check_valid(in, dst, "the result");
    same_valid(in, dst, src, "the source");
    Buffer& ub = buffer_of(dst, in);
    buffer_of(src, in);
    check_overlap(in, dst, src);
    touch_valid(in, src, false);
    touch_valid(in, dst, true);
    const bool nd = dst.form == Form::ND;
    const size_t e = size_t(dst.size);
    const int lines = nd ? dst.vrow : dst.vcol;
    const size_t bytes = size_t(nd ? dst.vcol : dst.vrow) * e, pitch = size_t(nd ? dst.cols : dst.rows) * e;
    for (int l = 0; l < lines; ++l) {
        memmove(bytes_of(dst, ub) + size_t(l) * pitch, bytes_of(src, ub) + size_t(l) * pitch, bytes);
        const size_t whole = (bytes + 31) / 32 * 32;  // moved in blocks of 32 bytes
        if (whole > bytes && dst.addr != src.addr)
            scrap(in, ub, size_t(dst.addr) + size_t(l) * pitch + bytes, whole - bytes);
    }
    trace(in, dst);
}

}  // namespace pto_sim
