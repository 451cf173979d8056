// Tiles as bytes: where each layout keeps element (row, col), and which byte ranges a region of a tile covers.
#include "engine.hpp"

namespace pto_sim {

const char* dtype_name(Dtype t) {
    static const char* const names[] = {"float", "half",   "bfloat16_t", "int32", "uint32", "int16",
                                        "uint16", "int8", "uint8",      "int64", "uint64"};
    return names[int(t)];
}

static const char* buffer_name(pto::TileType loc) {
    static const char* const names[] = {"UB", "L1", "L0A", "L0B", "L0C"};
    return names[int(loc)];
}

static size_t capacity(pto::TileType loc) {
    static const size_t sizes[] = {192 * 1024, 512 * 1024, 64 * 1024, 64 * 1024, 128 * 1024};
    return sizes[int(loc)];
}

void assign(const TileRef& t, int64_t addr, Site site) {
    const std::string at = where("TASSIGN", site);
    const char* name = buffer_name(t.loc);
    if (core && core->cube == (t.loc == pto::TileType::Vec)) return;  // declared by both kinds of core, used by one
    if (addr < 0) fail("address", "%s: address %lld", at.c_str(), static_cast<long long>(addr));
    if (addr % 32) fail("alignment", "%s: %s address %lld is not a multiple of 32", at.c_str(), name,
                        static_cast<long long>(addr));
    const size_t bytes = size_t(t.rows) * size_t(t.cols) * size_t(t.size);
    if (size_t(addr) + bytes > capacity(t.loc))
        fail("capacity", "%s: %zu bytes at %lld do not fit in the %zu bytes of %s", at.c_str(), bytes,
             static_cast<long long>(addr), capacity(t.loc), name);
}

Buffer& buffer_of(const TileRef& t, const Instr& in) {
    const bool vec = t.loc == pto::TileType::Vec;
    if (vec == core->cube)
        fail("core", "%s: a %s core has no %s", at(in).c_str(), core->cube ? "cube" : "vector", buffer_name(t.loc));
    if (t.addr < 0) fail("address", "%s: a tile in %s has no address; TASSIGN comes first", at(in).c_str(), buffer_name(t.loc));
    switch (t.loc) {
        case pto::TileType::Vec: return core->ub;
        case pto::TileType::Mat: return core->l1;
        case pto::TileType::Left: return core->l0a;
        case pto::TileType::Right: return core->l0b;
        default: return core->l0c;
    }
}

// A compact tile is packed by its valid size, rounded up to whole fractals; any other by its full size.
TileRef physical(const TileRef& t) {
    TileRef out = t;
    if (!t.compact) return out;
    switch (t.form) {
        case Form::ZZ: case Form::NZ:
            out.rows = up(t.vrow, 16);
            out.cols = up(t.vcol, t.block);
            break;
        case Form::ZN:
            out.rows = up(t.vrow, t.block);
            out.cols = up(t.vcol, 16);
            break;
        default: break;
    }
    return out;
}

uint8_t* bytes_of(const TileRef& t, Buffer& buffer) { return buffer.data + t.addr; }

void check_valid(const Instr& in, const TileRef& t, const char* role) {
    if (t.vrow < 1 || t.vcol < 1)
        fail("shape", "%s (%s): %s has %d x %d valid elements; skip the instruction instead", place(in.site).c_str(),
             core->label().c_str(), role, t.vrow, t.vcol);
}

// Calls f(offset in the tile, bytes) for each contiguous range that a region covers; boxed layouts in whole blocks.
template <typename F>
static void ranges(const TileRef& t, int row, int col, int rows, int cols, F f) {
    const size_t e = size_t(t.size), block = size_t(t.block) * e;
    const size_t R = size_t(t.rows), C = size_t(t.cols);
    switch (t.form) {
        case Form::ND:
            if (col == 0 && cols == t.cols) {
                f(size_t(row) * C * e, size_t(rows) * C * e);
            } else {
                for (int r = row; r < row + rows; ++r) f((size_t(r) * C + size_t(col)) * e, size_t(cols) * e);
            }
            break;
        case Form::DN:
            if (row == 0 && rows == t.rows) {
                f(size_t(col) * R * e, size_t(cols) * R * e);
            } else {
                for (int c = col; c < col + cols; ++c) f((size_t(c) * R + size_t(row)) * e, size_t(rows) * e);
            }
            break;
        case Form::NZ:
            for (int b = col / t.block; b * t.block < col + cols; ++b)
                f((size_t(b) * R + size_t(row)) * block, size_t(rows) * block);
            break;
        case Form::ZN:
            for (int b = row / t.block; b * t.block < row + rows; ++b)
                f((size_t(b) * C + size_t(col)) * block, size_t(cols) * block);
            break;
        case Form::ZZ: {
            const size_t fractal = 16 * block, across = C / size_t(t.block);
            const int from = col / t.block, to = (col + cols + t.block - 1) / t.block;
            for (int b = row / 16; b * 16 < row + rows; ++b)
                f((size_t(b) * across + size_t(from)) * fractal, size_t(to - from) * fractal);
            break;
        }
    }
}

void touch_tile(const Instr& in, const TileRef& t, int row, int col, int rows, int cols, bool write, bool needs_known) {
    Buffer& b = buffer_of(t, in);
    ranges(t, row, col, rows, cols, [&](size_t at, size_t bytes) {
        touch(in, b, size_t(t.addr) + at, bytes, write, needs_known);
    });
}

void touch_valid(const Instr& in, const TileRef& t, bool write) { touch_tile(in, t, 0, 0, t.vrow, t.vcol, write); }

// Byte offset of an element, and how many elements follow it contiguously along a row (1 if they do not).
static size_t element(const TileRef& t, int r, int c) {
    const size_t e = size_t(t.size), k = size_t(t.block);
    const size_t R = size_t(t.rows), C = size_t(t.cols), row = size_t(r), col = size_t(c);
    switch (t.form) {
        case Form::ND: return (row * C + col) * e;
        case Form::DN: return (col * R + row) * e;
        case Form::NZ: return ((col / k * R + row) * k + col % k) * e;
        case Form::ZN: return ((row / k * C + col) * k + row % k) * e;
        default: return ((row / 16 * (C / k) + col / k) * 16 * k + row % 16 * k + col % k) * e;
    }
}

template <bool to_tile>
static void transfer(const TileRef& t, uint8_t* base, int row, int col, int rows, int cols, uint8_t* flat) {
    const size_t e = size_t(t.size);
    auto move = [&](size_t at, size_t to, size_t bytes) {
        if (to_tile) memcpy(base + at, flat + to, bytes);
        else memcpy(flat + to, base + at, bytes);
    };
    const bool along_rows = t.form != Form::DN && t.form != Form::ZN;
    const int step = t.form == Form::ND ? cols : t.block;
    for (int r = 0; r < rows; ++r) {
        const size_t out = size_t(r) * size_t(cols) * e;
        if (along_rows) {
            // Regions begin at a block's first column, so a step never crosses a block.
            for (int c = 0; c < cols; c += step)
                move(element(t, row + r, col + c), out + size_t(c) * e, size_t(step < cols - c ? step : cols - c) * e);
        } else {
            const size_t stride = t.form == Form::DN ? size_t(t.rows) * e : size_t(t.block) * e;
            size_t at = element(t, row + r, col);
            if (e == 2) {
                for (int c = 0; c < cols; ++c, at += stride) move(at, out + size_t(c) * 2, 2);
            } else if (e == 4) {
                for (int c = 0; c < cols; ++c, at += stride) move(at, out + size_t(c) * 4, 4);
            } else {
                for (int c = 0; c < cols; ++c, at += stride) move(at, out + size_t(c) * e, e);
            }
        }
    }
}

void gather(const TileRef& t, const uint8_t* base, int row, int col, int rows, int cols, uint8_t* out) {
    transfer<false>(t, const_cast<uint8_t*>(base), row, col, rows, cols, out);
}

void scatter(const TileRef& t, uint8_t* base, int row, int col, int rows, int cols, const uint8_t* from) {
    transfer<true>(t, base, row, col, rows, cols, const_cast<uint8_t*>(from));
}

// ---- the scalar unit

static size_t scalar_offset(const Instr& in, const TileRef& t, uint32_t offset) {
    if (offset >= uint32_t(t.rows * t.cols))
        fail("bounds", "%s (%s): element %u of a tile of %d", place(in.site).c_str(), core->label().c_str(), offset,
             t.rows * t.cols);
    return size_t(t.addr) + size_t(offset) * size_t(t.size);
}

void scalar_read(const TileRef& t, uint32_t offset, void* out, Site site) {
    const Instr in = begin_scalar_read("GetValue", site);
    Buffer& b = buffer_of(t, in);
    const size_t at = scalar_offset(in, t, offset);
    touch(in, b, at, size_t(t.size), false);
    memcpy(out, b.data + at, size_t(t.size));
    trace(in, 1, 1, t.dtype);
}

void scalar_write(const TileRef& t, uint32_t offset, const void* value, Site site) {
    const Instr in = begin("SetValue", S, site);
    Buffer& b = buffer_of(t, in);
    const size_t at = scalar_offset(in, t, offset);
    touch(in, b, at, size_t(t.size), true);
    memcpy(b.data + at, value, size_t(t.size));
    trace(in, 1, 1, t.dtype);
}

}  // namespace pto_sim
