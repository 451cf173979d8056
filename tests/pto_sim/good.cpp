// Kernels that obey every rule; test_good.py checks their numbers. They also compile against PTO-ISA's own headers.
#include <pto/pto-inst.hpp>
#include "acl/acl.h"
#include <runtime/rt_ffts.h>

#ifndef PTO_ENTRY
#define PTO_ENTRY extern "C" __global__ AICORE
#endif

using namespace pto;

using Shape2 = Shape<1, 1, 1, DYNAMIC, DYNAMIC>;
using RowStride = Stride<1, 1, 1, DYNAMIC, 1>;
using ColStride = Stride<1, 1, 1, 1, DYNAMIC>;
template <typename T>
using Gm = GlobalTensor<T, Shape2, RowStride, Layout::ND>;
template <typename T>
using GmT = GlobalTensor<T, Shape2, ColStride, Layout::DN>;

template <typename T, int R, int C>
using Vec = Tile<TileType::Vec, T, R, C, BLayout::RowMajor, R, C, SLayout::NoneBox, 512, PadValue::Zero>;
template <typename T, int R, int C>
using VecPart = Tile<TileType::Vec, T, R, C, BLayout::RowMajor, DYNAMIC, DYNAMIC, SLayout::NoneBox, 512, PadValue::Zero>;
template <typename T, int R>
using Column = Tile<TileType::Vec, T, R, 1, BLayout::ColMajor, R, 1, SLayout::NoneBox, 512>;
template <typename T, int R, int C>
using Nz = Tile<TileType::Mat, T, R, C, BLayout::ColMajor, R, C, SLayout::RowMajor, 512, PadValue::Zero>;
template <typename T, int R, int C>
using NzPart = Tile<TileType::Mat, T, R, C, BLayout::ColMajor, DYNAMIC, DYNAMIC, SLayout::RowMajor, 512, PadValue::Zero>;
template <typename T, int R, int C>
using Zn = Tile<TileType::Mat, T, R, C, BLayout::RowMajor, R, C, SLayout::ColMajor, 512, PadValue::Zero>;

#define FLAG(SRC, DST)                  \
    set_flag(SRC, DST, EVENT_ID0);      \
    wait_flag(SRC, DST, EVENT_ID0)

// c = a + b, a tile of 32 x 128 at a time.
PTO_ENTRY void add(__gm__ float *a, __gm__ float *b, __gm__ float *c, int64_t n, uint64_t ffts_addr) {
    set_ffts_base_addr(ffts_addr);
#if defined(__DAV_C220_VEC__)
    set_mask_norm();
    set_vector_mask(-1, -1);
    const int64_t first = get_block_idx() * 2 + get_subblockid();
    for (int64_t i = first; i < n / 4096; i += get_block_num() * 2) {
        Vec<float, 32, 128> x, y;
        TASSIGN(x, 0);
        TASSIGN(y, 16384);
        const Shape2 shape(32, 128);
        const RowStride stride(128);
        Gm<float> ga(a + i * 4096, shape, stride), gb(b + i * 4096, shape, stride), gc(c + i * 4096, shape, stride);
        TLOAD(x, ga);
        TLOAD(y, gb);
        FLAG(PIPE_MTE2, PIPE_V);
        TADD(x, x, y);
        FLAG(PIPE_V, PIPE_MTE3);
        TSTORE(gc, x);
        FLAG(PIPE_MTE3, PIPE_MTE2);
    }
#endif
}

// c[M, N] = op(a) op(b), each operand stored transposed or not; how = 0: by TRESHAPE in L1, 1: by a DN load.
template <typename T, typename O, int M, int K, int N, bool TA, bool TB>
AICORE void product(__gm__ T *a, __gm__ T *b, __gm__ O *c, int64_t how) {
#if defined(__DAV_C220_CUBE__)
    constexpr int b_at = M * K * sizeof(T);
    TileLeft<T, M, K> left;
    TileRight<T, K, N> right;
    TileAcc<float, M, N> acc;
    TASSIGN(left, 0);
    TASSIGN(right, 0);
    TASSIGN(acc, 0);
    if (how == 0) {
        if constexpr (TA) {
            Nz<T, K, M> stored;
            Zn<T, M, K> wanted;
            TASSIGN(stored, 0);
            TRESHAPE(wanted, stored);
            Gm<T> g(a, Shape2(K, M), RowStride(M));
            TLOAD(stored, g);
            FLAG(PIPE_MTE2, PIPE_MTE1);
            TEXTRACT(left, wanted, 0, 0);
        } else {
            Nz<T, M, K> stored;
            TASSIGN(stored, 0);
            Gm<T> g(a, Shape2(M, K), RowStride(K));
            TLOAD(stored, g);
            FLAG(PIPE_MTE2, PIPE_MTE1);
            TMOV(left, stored);
        }
        if constexpr (TB) {
            Nz<T, N, K> stored;
            Zn<T, K, N> wanted;
            TASSIGN(stored, b_at);
            TRESHAPE(wanted, stored);
            Gm<T> g(b, Shape2(N, K), RowStride(K));
            TLOAD(stored, g);
            FLAG(PIPE_MTE2, PIPE_MTE1);
            TEXTRACT(right, wanted, 0, 0);
        } else {
            Nz<T, K, N> stored;
            TASSIGN(stored, b_at);
            Gm<T> g(b, Shape2(K, N), RowStride(N));
            TLOAD(stored, g);
            FLAG(PIPE_MTE2, PIPE_MTE1);
            TEXTRACT(right, stored, 0, 0);
        }
    } else if constexpr (TA && TB) {
        Zn<T, M, K> za;
        Zn<T, K, N> zb;
        TASSIGN(za, 0);
        TASSIGN(zb, b_at);
        GmT<T> ga(a, Shape2(M, K), ColStride(M));
        GmT<T> gb(b, Shape2(K, N), ColStride(K));
        TLOAD(za, ga);
        TLOAD(zb, gb);
        FLAG(PIPE_MTE2, PIPE_MTE1);
        TMOV(left, za);
        TMOV(right, zb);
    }
    FLAG(PIPE_MTE1, PIPE_M);
    TMATMUL(acc, left, right);
    FLAG(PIPE_M, PIPE_FIX);
    Gm<O> gc(c, Shape2(M, N), RowStride(N));
    TSTORE(gc, acc);
    pipe_barrier(PIPE_ALL);
#endif
}

#define PRODUCT(NAME, T, O)                                                                                         \
    PTO_ENTRY void NAME(__gm__ T *a, __gm__ T *b, __gm__ O *c, int64_t ta, int64_t tb, int64_t how, uint64_t ffts) { \
        set_ffts_base_addr(ffts);                                                                                   \
        if (ta && tb) product<T, O, 32, 64, 48, true, true>(a, b, c, how);                                          \
        if (ta && !tb) product<T, O, 32, 64, 48, true, false>(a, b, c, how);                                        \
        if (!ta && tb) product<T, O, 32, 64, 48, false, true>(a, b, c, how);                                        \
        if (!ta && !tb) product<T, O, 32, 64, 48, false, false>(a, b, c, how);                                      \
    }
PRODUCT(product_f16, half, float)
PRODUCT(product_bf16, bfloat16_t, bfloat16_t)
PRODUCT(product_f32, float, half)

// out = a b c, the middle product through L1 as half; b in slices of 32 along k.
PTO_ENTRY void chain(__gm__ half *a, __gm__ half *b, __gm__ half *c, __gm__ float *out, uint64_t ffts_addr) {
    set_ffts_base_addr(ffts_addr);
#if defined(__DAV_C220_CUBE__)
    Nz<half, 64, 64> la, lb, lc, lab;
    TASSIGN(la, 0);
    TASSIGN(lb, 8192);
    TASSIGN(lc, 16384);
    TASSIGN(lab, 24576);
    const Shape2 shape(64, 64);
    const RowStride stride(64);
    Gm<half> ga(a, shape, stride), gb(b, shape, stride), gc(c, shape, stride);
    TLOAD(la, ga);
    TLOAD(lb, gb);
    TLOAD(lc, gc);
    FLAG(PIPE_MTE2, PIPE_MTE1);
    TileAcc<float, 64, 64> acc;
    TASSIGN(acc, 0);
    for (int k = 0; k < 64; k += 32) {
        TileLeft<half, 64, 32> l;
        TileRight<half, 32, 64> r;
        TASSIGN(l, 0);
        TASSIGN(r, 0);
        if (k) {
            FLAG(PIPE_M, PIPE_MTE1);
        }
        TEXTRACT(l, la, 0, k);
        TEXTRACT(r, lb, k, 0);
        FLAG(PIPE_MTE1, PIPE_M);
        if (k == 0) TMATMUL(acc, l, r);
        else TMATMUL_ACC(acc, acc, l, r);
    }
    FLAG(PIPE_M, PIPE_FIX);
    TMOV(lab, acc);
    FLAG(PIPE_FIX, PIPE_MTE1);
    TileLeft<half, 64, 64> l;
    TileRight<half, 64, 64> r;
    TASSIGN(l, 16384);
    TASSIGN(r, 16384);
    TMOV(l, lab);
    TMOV(r, lc);
    FLAG(PIPE_MTE1, PIPE_M);
    FLAG(PIPE_FIX, PIPE_M);
    TMATMUL(acc, l, r);
    FLAG(PIPE_M, PIPE_FIX);
    Gm<float> go(out, shape, stride);
    TSTORE(go, acc);
#endif
}

// Cube to vector to cube and on, n times: s = x y; p = exp(-s^2) rows scaled by w; out = p y. A block a slice of out.
PTO_ENTRY void handshake(__gm__ half *x, __gm__ half *y, __gm__ float *w, __gm__ float *ws, __gm__ half *wp,
                         __gm__ float *out, int64_t n, uint64_t ffts_addr) {
    set_ffts_base_addr(ffts_addr);
    const int64_t block = get_block_idx();
    x += block * n * 4096;
    y += block * 4096;
    w += block * 64;
    ws += block * 4096;
    wp += block * 4096;
    out += block * n * 4096;
#if defined(__DAV_C220_CUBE__)
    const Shape2 shape(64, 64);
    const RowStride stride(64);
    Nz<half, 64, 64> lx, ly, lp;
    TileLeft<half, 64, 64> l;
    TileRight<half, 64, 64> r;
    TileAcc<float, 64, 64> acc, acc2;
    TASSIGN(lx, 0);
    TASSIGN(ly, 8192);
    TASSIGN(lp, 16384);
    TASSIGN(l, 0);
    TASSIGN(r, 0);
    TASSIGN(acc, 0);
    TASSIGN(acc2, 16384);
    Gm<half> gy(y, shape, stride);
    TLOAD(ly, gy);
    FLAG(PIPE_MTE2, PIPE_MTE1);
    TMOV(r, ly);
    // L1 and L0C need no flags of their own: the vector cores' answers order their reuse. L0A does.
    set_flag(PIPE_M, PIPE_MTE1, EVENT_ID1);
    for (int64_t i = 0; i < n; ++i) {
        Gm<half> gx(x + i * 4096, shape, stride);
        TLOAD(lx, gx);
        FLAG(PIPE_MTE2, PIPE_MTE1);
        wait_flag(PIPE_M, PIPE_MTE1, EVENT_ID1);
        TMOV(l, lx);
        FLAG(PIPE_MTE1, PIPE_M);
        TMATMUL(acc, l, r);
        set_flag(PIPE_M, PIPE_MTE1, EVENT_ID1);
        FLAG(PIPE_M, PIPE_FIX);
        Gm<float> gs(ws, shape, stride);
        TSTORE(gs, acc);
        ffts_cross_core_sync(PIPE_FIX, 1 | (2 << 4) | (0 << 8));

        wait_flag_dev(1);
        Gm<half> gp(wp, shape, stride);
        TLOAD(lp, gp);
        FLAG(PIPE_MTE2, PIPE_MTE1);
        wait_flag(PIPE_M, PIPE_MTE1, EVENT_ID1);
        TMOV(l, lp);
        FLAG(PIPE_MTE1, PIPE_M);
        TMATMUL(acc2, l, r);
        set_flag(PIPE_M, PIPE_MTE1, EVENT_ID1);
        FLAG(PIPE_M, PIPE_FIX);
        Gm<float> go(out + i * 4096, shape, stride);
        TSTORE(go, acc2);
    }
    wait_flag(PIPE_M, PIPE_MTE1, EVENT_ID1);
#endif
#if defined(__DAV_C220_VEC__)
    const int64_t row = get_subblockid() * 32;
    const Shape2 shape(32, 64);
    const RowStride stride(64);
    Vec<float, 32, 64> s, t;
    Vec<half, 32, 64> p;
    Column<float, 32> column;
    Vec<float, 1, 32> line;
    TASSIGN(s, 0);
    TASSIGN(t, 8192);
    TASSIGN(p, 16384);
    TASSIGN(column, 24576);
    TASSIGN(line, 24576);
    Gm<float> gw(w + row, Shape2(1, 32), RowStride(32));
    TLOAD(line, gw);
    for (int64_t i = 0; i < n; ++i) {
        wait_flag_dev(0);
        Gm<float> gs(ws + row * 64, shape, stride);
        TLOAD(s, gs);
        FLAG(PIPE_MTE2, PIPE_V);
        TMUL(t, s, s);
        pipe_barrier(PIPE_V);
        TMULS(t, t, -1.0f);
        pipe_barrier(PIPE_V);
        TEXP(t, t);
        pipe_barrier(PIPE_V);
        TROWEXPANDMUL(t, t, column);
        pipe_barrier(PIPE_V);
        TCVT(p, t, RoundMode::CAST_RINT);
        FLAG(PIPE_V, PIPE_MTE3);
        Gm<half> gp(wp + row * 64, shape, stride);
        TSTORE(gp, p);
        // The cube's answer orders the next round after this one's reads; flags of our own would say it twice.
        ffts_cross_core_sync(PIPE_MTE3, 1 | (2 << 4) | (1 << 8));
    }
#endif
}

// The last rows of a are missing: zeros take their place. out = a^T a on the cube, sums of the rows of a on vectors.
PTO_ENTRY void tail(__gm__ half *a, __gm__ float *out, __gm__ float *sums, int64_t rows, uint64_t ffts_addr) {
    set_ffts_base_addr(ffts_addr);
#if defined(__DAV_C220_CUBE__)
    NzPart<half, 64, 64> part(rows, 64);
    Nz<half, 64, 64> full;
    Zn<half, 64, 64> turned;
    TASSIGN(part, 0);
    TASSIGN(full, 0);
    TRESHAPE(turned, full);
    Gm<half> g(a, Shape2(rows, 64), RowStride(64));
    TLOAD(part, g);
    if (rows != 64) TFILLPAD(part, part);
    FLAG(PIPE_MTE2, PIPE_MTE1);
    TileLeft<half, 64, 64> l;
    TileRight<half, 64, 64> r;
    TileAcc<float, 64, 64> acc;
    TASSIGN(l, 0);
    TASSIGN(r, 0);
    TASSIGN(acc, 0);
    TMOV(l, turned);
    TMOV(r, full);
    FLAG(PIPE_MTE1, PIPE_M);
    TMATMUL(acc, l, r);
    FLAG(PIPE_M, PIPE_FIX);
    Gm<float> go(out, Shape2(64, 64), RowStride(64));
    TSTORE(go, acc);
#endif
#if defined(__DAV_C220_VEC__)
    const int64_t first = get_subblockid() * 32;
    int64_t mine = rows - first;
    if (mine > 32) mine = 32;
    Vec<half, 32, 64> all;
    Vec<float, 32, 64> wide, tmp;
    Column<float, 32> sum;
    TASSIGN(all, 0);
    TASSIGN(wide, 4096);
    TASSIGN(tmp, 12288);
    TASSIGN(sum, 20480);
    if (mine > 0) {
        VecPart<half, 32, 64> part(mine, 64);
        TASSIGN(part, 0);
        Gm<half> g(a + first * 64, Shape2(mine, 64), RowStride(64));
        TLOAD(part, g);
        FLAG(PIPE_MTE2, PIPE_V);
        if (mine != 32) TFILLPAD_INPLACE(all, part);
    } else {
        TEXPANDS(all, half(0.0f));
    }
    pipe_barrier(PIPE_V);
    TCVT(wide, all, RoundMode::CAST_NONE);
    pipe_barrier(PIPE_V);
    TROWSUM(sum, wide, tmp);
    FLAG(PIPE_V, PIPE_MTE3);
    Vec<float, 1, 32> line;
    TASSIGN(line, 20480);
    Gm<float> gs(sums + first, Shape2(1, 32), RowStride(32));
    TSTORE(gs, line);
#endif
}

// Many vector instructions on one 16 x 32 tile; each result is a tile of out.
PTO_ENTRY void vectors(__gm__ float *a, __gm__ float *b, __gm__ float *out, uint64_t ffts_addr) {
    set_ffts_base_addr(ffts_addr);
#if defined(__DAV_C220_VEC__)
    if (get_subblockid() != 0) return;
    constexpr int R = 16, C = 32, bytes = R * C * 4;
    using T = Vec<float, R, C>;
    T x, y, z, tmp;
    Vec<float, C, R> turned;
    Column<float, R> column;
    Vec<float, 1, C> line;
    Vec<float, R, 8> wide;
    Tile<TileType::Vec, uint8_t, R, 32> mask;
    TASSIGN(x, 0);
    TASSIGN(y, bytes);
    TASSIGN(z, 2 * bytes);
    TASSIGN(tmp, 3 * bytes);
    TASSIGN(turned, 4 * bytes);
    TASSIGN(column, 5 * bytes);
    TASSIGN(line, 6 * bytes);
    TASSIGN(wide, 7 * bytes);
    TASSIGN(mask, 8 * bytes);
    const Shape2 shape(R, C);
    const RowStride stride(C);
    Gm<float> ga(a, {R, C}, {C}), gb(b, shape, stride);
    TLOAD(x, ga);
    TLOAD(y, gb);
    FLAG(PIPE_MTE2, PIPE_V);
    int64_t at = 0;
#define DONE(TILE, ROWS, COLS)                                         \
    FLAG(PIPE_V, PIPE_MTE3);                                           \
    {                                                                  \
        Gm<float> g(out + at, Shape2(ROWS, COLS), RowStride(COLS));    \
        TSTORE(g, TILE);                                               \
    }                                                                  \
    at += R * C;                                                       \
    FLAG(PIPE_MTE3, PIPE_V)

    TSUB(z, x, y);
    DONE(z, R, C);
    TDIV(z, x, y);
    DONE(z, R, C);
    TMAX(z, x, y);
    DONE(z, R, C);
    TMIN(z, x, y);
    DONE(z, R, C);
    TADDS(z, x, 2.0f);
    DONE(z, R, C);
    TMAXS(z, x, 0.25f);
    DONE(z, R, C);
    TMINS(z, x, 0.25f);
    DONE(z, R, C);
    TLOG(z, y);
    DONE(z, R, C);
    TSQRT(z, y);
    DONE(z, R, C);
    TRSQRT(z, y);
    DONE(z, R, C);
    TTRANS(turned, x, tmp);
    DONE(turned, C, R);
    TROWSUM(column, x, tmp);
    pipe_barrier(PIPE_V);
    TROWEXPANDSUB(z, x, column);
    DONE(z, R, C);
    TROWEXPAND(z, column);
    DONE(z, R, C);
    TROWEXPAND(wide, column);
    pipe_barrier(PIPE_V);
    TROWEXPANDMUL(z, x, wide);
    DONE(z, R, C);
    TROWEXPANDADD(z, x, column, tmp);
    DONE(z, R, C);
    TROWEXPANDDIV(z, x, column, tmp);
    DONE(z, R, C);
    TCOLSUM(line, x);
    pipe_barrier(PIPE_V);
    TCOLEXPAND(z, line);
    DONE(z, R, C);
    TCOLEXPANDMUL(z, x, line);
    DONE(z, R, C);
    TCOLEXPANDSUB(z, x, line);
    DONE(z, R, C);
    TCMP(mask, x, y, CmpMode::GT);
    pipe_barrier(PIPE_V);
    TSEL(z, mask, x, y, tmp);
    DONE(z, R, C);
    TMOV(z, x);
    DONE(z, R, C);
    FLAG(PIPE_V, PIPE_S);
    z.SetValue(3, x.GetValue(5) + 1.0f);
    FLAG(PIPE_S, PIPE_V);
    TMULS(z, z, 2.0f);
    DONE(z, R, C);
#undef DONE
#endif
}

// Every block adds one to its slot; after a device-wide barrier every block's vector 0 sums all slots.
PTO_ENTRY void everyone(__gm__ float *slots, __gm__ float *out, uint64_t ffts_addr) {
    set_ffts_base_addr(ffts_addr);
    const int64_t blocks = get_block_num(), me = get_block_idx();
#if defined(__DAV_C220_VEC__)
    Vec<float, 1, 8> mine;
    TASSIGN(mine, 0);
    if (get_subblockid() == 0) {
        TEXPANDS(mine, float(me + 1));
        FLAG(PIPE_V, PIPE_MTE3);
        Gm<float> g(slots + me * 8, Shape2(1, 8), RowStride(8));
        TSTORE(g, mine);
    }
    pipe_barrier(PIPE_ALL);
    ffts_cross_core_sync(PIPE_MTE3, 1 | (2 << 4) | (12 << 8));
    wait_flag_dev(13);
    if (get_subblockid() == 0) {
        Vec<float, 1, 8> sum, other;
        TASSIGN(sum, 32);
        TASSIGN(other, 64);
        TEXPANDS(sum, 0.0f);
        for (int64_t i = 0; i < blocks; ++i) {
            Gm<float> g(slots + i * 8, Shape2(1, 8), RowStride(8));
            TLOAD(other, g);
            FLAG(PIPE_MTE2, PIPE_V);
            pipe_barrier(PIPE_V);
            TADD(sum, sum, other);
            FLAG(PIPE_V, PIPE_MTE2);
        }
        FLAG(PIPE_V, PIPE_MTE3);
        Gm<float> g(out + me * 8, Shape2(1, 8), RowStride(8));
        TSTORE(g, sum);
    }
#endif
#if defined(__DAV_C220_CUBE__)
    pipe_barrier(PIPE_ALL);
    wait_flag_dev(12);
    ffts_cross_core_sync(PIPE_FIX, 1 | (0 << 4) | (11 << 8));
    wait_flag_dev(11);
    ffts_cross_core_sync(PIPE_FIX, 1 | (2 << 4) | (13 << 8));
#endif
}
