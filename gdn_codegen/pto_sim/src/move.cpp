// Between GM and the chip, and pad fills.
#include "engine.hpp"

namespace pto_sim {

static Buffer& gm_buffer(const Instr& in, const GlobalRef& g, size_t& offset) {
    const uint8_t* p = static_cast<const uint8_t*>(g.data);
    for (auto& b : machine.gm) {
        if (p >= b->data && p < b->data + b->size) {
            offset = size_t(p - b->data);
            return *b;
        }
    }
    // A pointer just outside: name the nearest buffer, it is almost always the one that was meant.
    std::string near = "; no buffer was passed";
    size_t best = SIZE_MAX;
    for (size_t i = 0; i < machine.gm.size(); ++i) {
        const Buffer& b = *machine.gm[i];
        const size_t distance = p < b.data ? size_t(b.data - p) : size_t(p - b.data);
        if (distance < best) {
            best = distance;
            near = "; the nearest is " + b.name + " of " + std::to_string(b.size) + " bytes, and the pointer is at byte " +
                   std::to_string(p - b.data) + " of it";
        }
    }
    fail("bounds", "%s: the global tensor's pointer is in no buffer of the launch%s", at(in).c_str(), near.c_str());
}

// Calls f(byte offset in GM, line of the tile, bytes) for each contiguous line of the global tensor.
template <typename F>
static void lines(const Instr& in, const GlobalRef& g, Buffer& b, size_t start, bool by_columns, F f) {
    const int64_t e = g.size;
    const int64_t inner = by_columns ? g.shape[3] : g.shape[4];
    const int64_t count = by_columns ? g.shape[4] : g.shape[3];
    const int64_t stride = by_columns ? g.stride[4] : g.stride[3];
    int line = 0;
    for (int64_t i = 0; i < g.shape[0]; ++i)
        for (int64_t j = 0; j < g.shape[1]; ++j)
            for (int64_t k = 0; k < g.shape[2]; ++k)
                for (int64_t r = 0; r < count; ++r, ++line) {
                    const int64_t from = int64_t(start) + (i * g.stride[0] + j * g.stride[1] + k * g.stride[2] + r * stride) * e;
                    if (from < 0 || from + inner * e > int64_t(b.size))
                        fail("bounds", "%s: line %d of the global tensor is bytes [%lld, %lld) of %s, which has %zu",
                             at(in).c_str(), line, static_cast<long long>(from),
                             static_cast<long long>(from + inner * e), b.name.c_str(), b.size);
                    f(size_t(from), line, size_t(inner * e));
                }
}

// What the headers assert of the two shapes, and the limits of the DMA's fields.
static void check_shapes(const Instr& in, const TileRef& t, const GlobalRef& g) {
    check_valid(in, t, "the tile");
    for (int i = 0; i < 5; ++i)
        if (g.shape[i] < 1)
            fail("shape", "%s: dim %d of the global tensor is %lld", at(in).c_str(), i, static_cast<long long>(g.shape[i]));
    const bool columns = g.layout == pto::Layout::DN;
    const int64_t outer = g.shape[0] * g.shape[1] * g.shape[2];
    const int64_t rows = columns ? g.shape[3] : outer * g.shape[3];
    const int64_t cols = columns ? outer * g.shape[4] : g.shape[4];
    if (rows != t.vrow || cols != t.vcol)
        fail("shape", "%s: the tile has %d x %d valid elements, the global tensor %lld x %lld", at(in).c_str(), t.vrow,
             t.vcol, static_cast<long long>(rows), static_cast<long long>(cols));
    if (g.stride[columns ? 3 : 4] != 1)
        fail("shape", "%s: the contiguous dim of the global tensor has stride %lld; the DMA takes it as 1",
             at(in).c_str(), static_cast<long long>(g.stride[columns ? 3 : 4]));
    if (g.shape[columns ? 4 : 3] > 4095 && t.loc == pto::TileType::Vec)
        fail("shape", "%s: %lld lines; a DMA takes at most 4095", at(in).c_str(),
             static_cast<long long>(g.shape[columns ? 4 : 3]));
    if (t.loc == pto::TileType::Mat && (g.stride[columns ? 4 : 3] < 1 || g.stride[columns ? 4 : 3] > 65535))
        fail("shape", "%s: a row stride of %lld elements; to L1 it is 1 to 65535", at(in).c_str(),
             static_cast<long long>(g.stride[columns ? 4 : 3]));
}

void load(const TileRef& t, const GlobalRef& g, Site site) {
    const Instr in = begin("TLOAD", MTE2, site);
    check_shapes(in, t, g);
    Buffer& chip = buffer_of(t, in);
    size_t start = 0;
    Buffer& gm = gm_buffer(in, g, start);
    const size_t e = size_t(t.size);
    uint8_t* base = bytes_of(t, chip);
    const bool by_columns = g.layout == pto::Layout::DN;
    if (t.loc == pto::TileType::Vec) {
        const size_t pitch = size_t(by_columns ? t.rows : t.cols) * e;
        const size_t used = size_t(by_columns ? t.vrow : t.vcol) * e;
        const size_t to = (used + 31) / 32 * 32;  // a line is stored in whole blocks of 32 bytes
        lines(in, g, gm, start, by_columns, [&](size_t from, int line, size_t bytes) {
            touch(in, gm, from, bytes, false);
            const size_t where_to = size_t(line) * pitch;
            touch(in, chip, size_t(t.addr) + where_to, used, true);
            memcpy(base + where_to, gm.data + from, bytes);
            if (to == used) return;
            if (t.pad) {
                touch(in, chip, size_t(t.addr) + where_to + used, to - used, true);
                fill(t.size, pad_bits(t.dtype, t.pad), base + where_to + used, (to - used) / e);
            } else {
                scrap(in, chip, size_t(t.addr) + where_to + used, to - used);
            }
        });
    } else {
        // ND to NZ (DN to ZN is the same, transposed): the DMA fills a block's last columns up with zeros.
        TileRef view = t;
        if (by_columns) {
            view.form = Form::NZ;
            std::swap(view.rows, view.cols);
            std::swap(view.vrow, view.vcol);
        }
        const int wide = up(view.vcol, view.block);
        touch_tile(in, view, 0, 0, view.vrow, wide, true);
        std::vector<uint8_t> row(size_t(wide) * e, 0);
        lines(in, g, gm, start, by_columns, [&](size_t from, int line, size_t bytes) {
            touch(in, gm, from, bytes, false);
            memcpy(row.data(), gm.data + from, bytes);
            scatter(view, base, line, 0, 1, wide, row.data());
        });
    }
    trace(in, t);
}

void store(const GlobalRef& g, const TileRef& tile, Site site) {
    const bool acc = tile.loc == pto::TileType::Acc;
    const Instr in = begin("TSTORE", acc ? FIX : MTE3, site);
    check_shapes(in, tile, g);
    const TileRef t = physical(tile);
    Buffer& chip = buffer_of(t, in);
    size_t start = 0;
    Buffer& gm = gm_buffer(in, g, start);
    const uint8_t* base = bytes_of(t, chip);
    const bool by_columns = g.layout == pto::Layout::DN;
    touch_valid(in, t, false);
    if (acc) {
        if (g.shape[0] * g.shape[1] * g.shape[2] != 1)
            fail("shape", "%s: from L0C the global tensor has two dims", at(in).c_str());
        float* row = scratch(0, size_t(t.vcol));
        lines(in, g, gm, start, false, [&](size_t to, int line, size_t bytes) {
            gather(t, base, line, 0, 1, t.vcol, reinterpret_cast<uint8_t*>(row));
            touch(in, gm, to, bytes, true);
            from_float(g.dtype, row, gm.data + to, size_t(t.vcol));
        });
    } else {
        const size_t pitch = size_t(by_columns ? t.rows : t.cols) * size_t(t.size);
        lines(in, g, gm, start, by_columns, [&](size_t to, int line, size_t bytes) {
            touch(in, gm, to, bytes, true);
            memcpy(gm.data + to, base + size_t(line) * pitch, bytes);
        });
    }
    trace(in, t);
}

void fill_pad(const TileRef& dst, const TileRef& src, bool in_place, Site site) {
    const Instr in = begin(in_place ? "TFILLPAD_INPLACE" : "TFILLPAD", V, site);
    check_valid(in, dst, "the result");
    check_valid(in, src, "the source");
    if (src.vrow > dst.vrow)
        fail("shape", "%s: the source has more valid rows than the result", at(in).c_str());
    if (in_place && dst.addr != src.addr)
        fail("address", "%s: source and result are one buffer, but have two addresses", at(in).c_str());
    Buffer& b = buffer_of(dst, in);
    buffer_of(src, in);
    const size_t e = size_t(dst.size), pitch = size_t(dst.cols) * e;
    const int per_block = 32 / dst.size;
    // With one pad value in both types TLOAD has filled the last block of each row; else it is filled here.
    const int from = src.pad == dst.pad ? up(src.vcol, per_block) : src.vcol;
    const uint32_t bits = pad_bits(dst.dtype, dst.pad);
    uint8_t* to = bytes_of(dst, b);
    if (!in_place && dst.addr != src.addr) {
        touch_tile(in, src, 0, 0, src.vrow, from, false);
        touch_tile(in, dst, 0, 0, src.vrow, from, true);
        for (int r = 0; r < src.vrow; ++r)
            memmove(to + size_t(r) * pitch, bytes_of(src, b) + size_t(r) * pitch, size_t(from) * e);
    }
    for (int r = 0; r < dst.vrow; ++r) {
        const int begin_col = r < src.vrow ? from : 0;
        if (begin_col >= dst.cols) continue;
        const size_t where_to = size_t(r) * pitch + size_t(begin_col) * e;
        touch(in, b, size_t(dst.addr) + where_to, pitch - size_t(begin_col) * e, true);
        fill(dst.size, bits, to + where_to, size_t(dst.cols - begin_col));
    }
    trace(in, dst);
}

void fill_pad_mat(const TileRef& t, const TileRef& src, Site site) {
    const Instr in = begin("TFILLPAD", MTE2, site);
    if (!core->cube) fail("core", "%s: L1 belongs to the cube core", at(in).c_str());
    check_valid(in, t, "the tile");
    if (t.addr != src.addr) fail("address", "%s: a Mat tile is filled in place", at(in).c_str());
    Buffer& b = buffer_of(t, in);
    const int wide = up(t.vcol, t.block);
    std::vector<uint8_t> zeros(size_t(t.rows) * size_t(t.cols) * size_t(t.size), 0);
    if (t.vrow < t.rows) {
        touch_tile(in, t, t.vrow, 0, t.rows - t.vrow, wide, true);
        scatter(t, bytes_of(t, b), t.vrow, 0, t.rows - t.vrow, wide, zeros.data());
    }
    if (wide < t.cols) {
        touch_tile(in, t, 0, wide, t.rows, t.cols - wide, true);
        scatter(t, bytes_of(t, b), 0, wide, t.rows, t.cols - wide, zeros.data());
    }
    trace(in, t);
}

}  // namespace pto_sim
