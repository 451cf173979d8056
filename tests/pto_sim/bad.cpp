// One broken rule a case; test_bad.py runs each and expects its stop. `mark` comments name the lines that messages cite.
#include <pto/pto-inst.hpp>
#include "acl/acl.h"
#include <runtime/rt_ffts.h>

#ifndef PTO_ENTRY
#define PTO_ENTRY extern "C" __global__ AICORE
#endif

using namespace pto;

using Shape2 = Shape<1, 1, 1, DYNAMIC, DYNAMIC>;
using RowStride = Stride<1, 1, 1, DYNAMIC, 1>;
template <typename T>
using Gm = GlobalTensor<T, Shape2, RowStride, Layout::ND>;
using Vec = Tile<TileType::Vec, float, 8, 64>;
using VecPart = Tile<TileType::Vec, float, 8, 64, BLayout::RowMajor, DYNAMIC, DYNAMIC>;
using Column = Tile<TileType::Vec, float, 8, 1, BLayout::ColMajor>;
template <int R, int C>
using Nz = Tile<TileType::Mat, half, R, C, BLayout::ColMajor, R, C, SLayout::RowMajor, 512, PadValue::Zero>;
template <int R, int C>
using NzPart = Tile<TileType::Mat, half, R, C, BLayout::ColMajor, DYNAMIC, DYNAMIC, SLayout::RowMajor, 512>;

#define FLAG(SRC, DST)             \
    set_flag(SRC, DST, EVENT_ID0); \
    wait_flag(SRC, DST, EVENT_ID0)

#define CROSS(PIPE, MODE, ID) ffts_cross_core_sync(PIPE, 1 | ((MODE) << 4) | ((ID) << 8))

// in and out hold 512 floats, ws 4096 bytes, h 64 x 64 halves.
PTO_ENTRY void vec_rules(__gm__ float *in, __gm__ float *out, __gm__ float *ws, int64_t which, uint64_t ffts_addr) {
    set_ffts_base_addr(ffts_addr);
#if defined(__DAV_C220_VEC__)
    const int64_t sub = get_subblockid(), block = get_block_idx();
    const Shape2 shape(8, 64);
    const RowStride stride(64);
    Gm<float> gi(in, shape, stride), go(out, shape, stride), gw(ws, shape, stride);
    Vec x, y, z;
    TASSIGN(x, 0);
    TASSIGN(y, 2048);
    TASSIGN(z, 4096);
    // Both vector cores run the cases between 0 and 99 only on core 0: two of them would race on out.
    if (which < 100 && sub != 0) return;
    switch (which) {
        case 0:  // raw
            TLOAD(x, gi);                              // mark raw wrote
            TMULS(y, x, 2.0f);                         // mark raw reads
            break;
        case 1:  // war
            TLOAD(x, gi);
            FLAG(PIPE_MTE2, PIPE_V);
            TMULS(y, x, 2.0f);                         // mark war reads
            TLOAD(x, gi);                              // mark war writes
            break;
        case 2:  // waw
            TEXPANDS(x, 1.0f);                         // mark waw wrote
            TLOAD(x, gi);                              // mark waw writes
            break;
        case 3:  // store-before-compute
            TEXPANDS(x, 1.0f);
            TSTORE(go, x);                             // mark store reads
            break;
        case 4:  // gm-round-trip
            TEXPANDS(x, 1.0f);
            FLAG(PIPE_V, PIPE_MTE3);
            TSTORE(gw, x);                             // mark gm wrote
            TLOAD(y, gw);                              // mark gm reads
            break;
        case 5:  // v-after-v-raw
            TEXPANDS(x, 1.0f);                         // mark vv wrote
            TADDS(y, x, 1.0f);                         // mark vv reads
            break;
        case 6:  // v-after-v-waw
            TEXPANDS(x, 1.0f);
            TEXPANDS(x, 2.0f);
            break;
        case 7:  // v-after-v-war
            TEXPANDS(x, 1.0f);
            pipe_barrier(PIPE_V);
            TADDS(y, x, 1.0f);
            TEXPANDS(x, 2.0f);
            break;
        case 103:  // v-after-v-in-place
            TEXPANDS(x, 1.0f);
            pipe_barrier(PIPE_V);
            TADDS(y, x, 1.0f);
            TADDS(x, x, 2.0f);                         // reads what it overwrites, as the one before does
            break;
        case 8:  // scalar-read
            TLOAD(x, gi);
            FLAG(PIPE_MTE2, PIPE_V);
            (void)x.GetValue(3);                       // mark scalar reads
            break;
        case 9:  // scalar-write
            x.SetValue(3, 1.0f);                       // mark scalar wrote
            pipe_barrier(PIPE_V);
            TEXPANDS(x, 0.0f);
            break;
        case 10:  // address-overlap
            TASSIGN(y, 1024);
            TLOAD(x, gi);
            FLAG(PIPE_MTE2, PIPE_V);
            TEXPANDS(z, 1.0f);
            TLOAD(y, gi);
            FLAG(PIPE_MTE2, PIPE_V);
            TADD(y, x, z);
            break;
        case 11:  // tile-overlap: two live tiles, no order between their writers
            TASSIGN(y, 1024);
            TEXPANDS(x, 1.0f);
            TLOAD(y, gi);
            break;
        case 12:  // wait-without-set
            wait_flag(PIPE_V, PIPE_MTE3, EVENT_ID2);   // mark lonely wait
            break;
        case 13:  // set-twice
            set_flag(PIPE_V, PIPE_MTE3, EVENT_ID3);    // mark first set
            set_flag(PIPE_V, PIPE_MTE3, EVENT_ID3);    // mark second set
            break;
        case 14:  // flag-left
            set_flag(PIPE_V, PIPE_MTE3, EVENT_ID4);    // mark left set
            break;
        case 15:  // event-id
            set_flag(PIPE_V, PIPE_MTE3, (event_t)8);
            break;
        case 16:  // pipe-of-other-core
            set_flag(PIPE_M, PIPE_FIX, EVENT_ID0);
            break;
        case 17:  // flag-to-itself
            set_flag(PIPE_V, PIPE_V, EVENT_ID0);
            break;
        case 18:  // ub-capacity
            TASSIGN(x, 192 * 1024 - 1024);
            break;
        case 19:  // misaligned
            TASSIGN(x, 16);
            break;
        case 20: {  // no-address
            Vec lost;
            TEXPANDS(lost, 1.0f);
            break;
        }
        case 21: {  // gm-bounds
            Gm<float> past(in + 64, shape, stride);
            TLOAD(x, past);                            // mark bounds
            break;
        }
        case 22: {  // gm-foreign
            Gm<float> foreign(out + 100000000, shape, stride);
            TEXPANDS(x, 1.0f);
            FLAG(PIPE_V, PIPE_MTE3);
            TSTORE(foreign, x);
            break;
        }
        case 23:  // write-input
            TEXPANDS(x, 1.0f);
            FLAG(PIPE_V, PIPE_MTE3);
            TSTORE(gi, x);
            break;
        case 24:  // uninitialised
            TADDS(y, x, 1.0f);                         // mark unknown
            break;
        case 25: {  // uninitialised-tail: 40 of 64 columns came, all are read
            VecPart part(8, 40);
            TASSIGN(part, 0);
            Gm<float> g(in, Shape2(8, 40), stride);
            TLOAD(part, g);
            FLAG(PIPE_MTE2, PIPE_V);
            TADDS(y, x, 1.0f);
            break;
        }
        case 26:  // uninitialised-workspace
            TLOAD(x, gw);
            break;
        case 27: {  // uninitialised-output: reading what nobody wrote
            TLOAD(x, go);
            break;
        }
        case 28: {  // header-scratch: without a scratch tile the broadcast goes through UB [184 K, 192 K)
            Column c;
            Vec kept;
            TASSIGN(c, 4096);
            TASSIGN(kept, 184 * 1024);
            TEXPANDS(kept, 1.0f);
            TEXPANDS(x, 1.0f);
            TEXPANDS(c, 1.0f);
            pipe_barrier(PIPE_V);
            TROWEXPANDMUL(y, x, c);
            pipe_barrier(PIPE_V);
            TADDS(z, kept, 1.0f);
            break;
        }
        case 29: {  // scratch-too-small
            Tile<TileType::Vec, float, 8, 256> wide;
            Tile<TileType::Vec, float, 8, 64> tmp;
            Column c;
            TASSIGN(wide, 8192);
            TASSIGN(tmp, 65536);
            TASSIGN(c, 4096);
            TEXPANDS(wide, 1.0f);
            pipe_barrier(PIPE_V);
            TROWSUM(c, wide, tmp);
            break;
        }
        case 30: {  // shifted-overlap
            TASSIGN(y, 32);
            TEXPANDS(x, 1.0f);
            TEXPANDS(z, 1.0f);
            pipe_barrier(PIPE_V);
            TADD(y, x, z);
            break;
        }
        case 60: {  // columns-overlap: 24 columns of rows of 64, 8 columns apart
            using Some = Tile<TileType::Vec, float, 4, 64, BLayout::RowMajor, 4, 24>;
            Some left, right;
            TASSIGN(left, 0);
            TASSIGN(right, 32);
            TEXPANDS(x, 1.0f);
            TEXPANDS(z, 1.0f);
            pipe_barrier(PIPE_V);
            TADD(right, right, left);
            break;
        }
        case 110: {  // other-columns: 24 columns of rows of 64, 24 columns apart, which is fine
            using Some = Tile<TileType::Vec, float, 4, 64, BLayout::RowMajor, 4, 24>;
            Some left, right;
            TASSIGN(left, 0);
            TASSIGN(right, 96);
            TEXPANDS(x, 1.0f);
            TEXPANDS(z, 1.0f);
            pipe_barrier(PIPE_V);
            TADD(right, right, left);
            break;
        }
        case 31: {  // shape-mismatch
            VecPart part(4, 64);
            TASSIGN(part, 8192);
            TEXPANDS(x, 1.0f);
            TEXPANDS(part, 1.0f);
            pipe_barrier(PIPE_V);
            TADD(y, x, part);
            break;
        }
        case 32: {  // load-shape
            Gm<float> small(in, Shape2(4, 64), stride);
            TLOAD(x, small);
            break;
        }
        case 33: {  // no-rows
            VecPart part(0, 64);
            TASSIGN(part, 0);
            Gm<float> g(in, Shape2(0, 64), stride);
            TLOAD(part, g);
            break;
        }
        case 34: {  // valid-too-large
            VecPart part(9, 64);
            break;
        }
        case 35:  // cross-wait-alone
            wait_flag_dev(5);                          // mark waits
            break;
        case 36:  // cross-config
            ffts_cross_core_sync(PIPE_MTE3, 1 | (3 << 4) | (2 << 8));
            break;
        case 37:  // cross-half: only one of the two vector cores signals
            CROSS(PIPE_MTE3, 2, 4);                    // mark half
            break;
        case 38:  // endless
            for (;;) pipe_barrier(PIPE_ALL);
        case 39: {  // fills-as-if-narrow
            Tile<TileType::Vec, float, 8, 64, BLayout::RowMajor, 8, 40> narrow;
            TASSIGN(narrow, 0);
            TEXPANDS(narrow, 1.0f);
            break;
        }
        case 40: {  // row-expand-flags
            Column c;
            TASSIGN(c, 8192);
            TEXPANDS(c, 1.0f);
            set_flag(PIPE_V, PIPE_S, EVENT_ID0);
            TROWEXPAND(x, c);
            break;
        }
        case 100: {  // blocks-race: every core stores to one place
            TEXPANDS(x, 1.0f);
            FLAG(PIPE_V, PIPE_MTE3);
            if (sub == 0) TSTORE(go, x);               // mark blocks
            break;
        }
        case 101: {  // vectors-race
            TEXPANDS(x, 1.0f);
            FLAG(PIPE_V, PIPE_MTE3);
            TSTORE(go, x);
            break;
        }
        case 102: {  // neighbours: two cores write parts of one 32-byte block, which is fine
            Tile<TileType::Vec, float, 1, 8, BLayout::RowMajor, 1, DYNAMIC> some(3);
            TASSIGN(some, 8192);
            TEXPANDS(some, float(sub + 1));
            FLAG(PIPE_V, PIPE_MTE3);
            Gm<float> g(out + sub * 3, Shape2(1, 3), RowStride(3));
            TSTORE(g, some);
            break;
        }
        default: break;
    }
    (void)block;
#endif
}

PTO_ENTRY void cube_rules(__gm__ half *h, __gm__ float *out, __gm__ float *ws, int64_t which, uint64_t ffts_addr) {
    if (which != 1) set_ffts_base_addr(which == 2 ? 5 : ffts_addr);
#if defined(__DAV_C220_CUBE__)
    const Shape2 shape(64, 64);
    const RowStride stride(64);
    Gm<half> gh(h, shape, stride);
    Gm<float> go(out, shape, stride);
    Nz<64, 64> m;
    TileLeft<half, 64, 64> l;
    TileRight<half, 64, 64> r;
    TileAcc<float, 64, 64> acc, acc2;
    TASSIGN(m, 0);
    TASSIGN(l, 0);
    TASSIGN(r, 0);
    TASSIGN(acc, 0);
    TASSIGN(acc2, 16384);
    auto fill_l0 = [&] {
        TLOAD(m, gh);
        FLAG(PIPE_MTE2, PIPE_MTE1);
        TMOV(l, m);
        TMOV(r, m);
        FLAG(PIPE_MTE1, PIPE_M);
    };
    switch (which) {
        case 0:  // l1-before-load
            TLOAD(m, gh);                              // mark l1 wrote
            TMOV(l, m);                                // mark l1 reads
            break;
        case 1:  // no-ffts-base
            CROSS(PIPE_FIX, 2, 0);
            break;
        case 3:  // l0-reuse
            fill_l0();
            TMATMUL(acc, l, r);                        // mark l0 reads
            TMOV(l, m);                                // mark l0 writes
            break;
        case 4:  // store-before-matmul
            fill_l0();
            TMATMUL(acc, l, r);
            TSTORE(go, acc);
            break;
        case 5: {  // vector-instruction
            Tile<TileType::Vec, float, 8, 64> x;
            TEXPANDS(x, 1.0f);
            break;
        }
        case 6: {  // vec-tile-on-cube
            Tile<TileType::Vec, half, 64, 64> x;
            TASSIGN(x, 0);
            TLOAD(x, gh);
            break;
        }
        case 7: {  // tail-not-filled
            NzPart<64, 64> part(40, 64);
            TASSIGN(part, 0);
            Gm<half> g(h, Shape2(40, 64), stride);
            TLOAD(part, g);
            FLAG(PIPE_MTE2, PIPE_MTE1);
            TMOV(l, m);
            break;
        }
        case 8: {  // packed-k: 64 columns lie in L0A, the matmul packs 48
            TileLeft<half, 64, 64, 64, 48> narrow;
            TileRight<half, 64, 64, 48, 64> short_right;
            TASSIGN(narrow, 0);
            TASSIGN(short_right, 0);
            fill_l0();
            TMATMUL(acc, narrow, short_right);
            break;
        }
        case 9: {  // matmul-shapes
            TileRight<half, 32, 64> short_right;
            TASSIGN(short_right, 0);
            fill_l0();
            TMATMUL(acc, l, short_right);
            break;
        }
        case 10:  // two-accumulators
            fill_l0();
            TMATMUL(acc, l, r);
            TMATMUL_ACC(acc2, acc, l, r);
            break;
        case 11: {  // extract-bounds
            TLOAD(m, gh);
            FLAG(PIPE_MTE2, PIPE_MTE1);
            TileLeft<half, 64, 32> part;
            TASSIGN(part, 0);
            TEXTRACT(part, m, 0, 48);
            break;
        }
        case 12: {  // extract-alignment
            TLOAD(m, gh);
            FLAG(PIPE_MTE2, PIPE_MTE1);
            TileLeft<half, 64, 32> part;
            TASSIGN(part, 0);
            TEXTRACT(part, m, 0, 8);
            break;
        }
        case 13:  // l1-capacity
            TASSIGN(m, 512 * 1024 - 4096);
            break;
        case 14:  // l0a-capacity
            TASSIGN(l, 64 * 1024 - 4096);
            break;
        case 15:  // l0b-capacity
            TASSIGN(r, 64 * 1024 - 4096);
            break;
        case 16:  // l0c-capacity
            TASSIGN(acc, 128 * 1024 - 8192);
            break;
        case 17:  // accumulate-on-nothing
            fill_l0();
            TMATMUL_ACC(acc, acc, l, r);
            break;
        case 18: {  // stride-too-long
            TASSIGN(m, 0);
            Gm<half> g(h, Shape2(1, 64), RowStride(70000));
            NzPart<64, 64> one(1, 64);
            TASSIGN(one, 0);
            TLOAD(one, g);
            break;
        }
        default: break;
    }
#endif
#if defined(__DAV_C220_VEC__)
    switch (which) {
        case 19: {  // cube-instruction
            TileLeft<half, 64, 64> l;
            TileRight<half, 64, 64> r;
            TileAcc<float, 64, 64> acc;
            TMATMUL(acc, l, r);
            break;
        }
        default: break;
    }
#endif
}

// Cube and vector cores together.
PTO_ENTRY void cross_rules(__gm__ float *in, __gm__ float *out, __gm__ float *ws, int64_t which, uint64_t ffts_addr) {
    set_ffts_base_addr(ffts_addr);
    const Shape2 shape(8, 64);
    const RowStride stride(64);
    Gm<float> gw(ws, shape, stride);
#if defined(__DAV_C220_VEC__)
    const int64_t sub = get_subblockid();
    Vec x;
    TASSIGN(x, 0);
    switch (which) {
        case 0:  // signal-before-store: it comes too early to order anything
            CROSS(PIPE_MTE3, 2, 9);
            if (sub == 0) {
                TEXPANDS(x, 1.0f);
                FLAG(PIPE_V, PIPE_MTE3);
                TSTORE(gw, x);                         // mark cross wrote
            }
            break;
        case 1:  // wrong-pipe: the signal does not wait for the store
            if (sub == 0) {
                TEXPANDS(x, 1.0f);
                FLAG(PIPE_V, PIPE_MTE3);
                TSTORE(gw, x);
            }
            CROSS(PIPE_V, 2, 1);
            break;
        case 2:  // crossed-waits
            wait_flag_dev(3);                          // mark vector waits
            CROSS(PIPE_MTE3, 2, 4);
            break;
        case 3:  // signal-left
            break;
        case 4:  // too-many-signals
            for (int i = 0; i < 16; ++i) CROSS(PIPE_MTE3, 2, 6);
            break;
        case 5:  // one-vector-missing
            if (sub == 0) CROSS(PIPE_MTE3, 2, 7);
            break;
        case 6:  // early-reuse: the vector cores store again before the cube has read
            for (int i = 0; i < 2; ++i) {
                if (sub == 0) {
                    TEXPANDS(x, 1.0f);
                    FLAG(PIPE_V, PIPE_MTE3);
                    TSTORE(gw, x);                     // mark early writes
                    FLAG(PIPE_MTE3, PIPE_V);
                    FLAG(PIPE_V, PIPE_S);
                }
                CROSS(PIPE_MTE3, 2, 8);
            }
            break;
        default: break;
    }
#endif
#if defined(__DAV_C220_CUBE__)
    Tile<TileType::Mat, float, 16, 64, BLayout::ColMajor, DYNAMIC, DYNAMIC, SLayout::RowMajor, 512> m(8, 64);
    TASSIGN(m, 0);
    switch (which) {
        case 0:
            wait_flag_dev(9);
            TLOAD(m, gw);                              // mark cross reads
            break;
        case 1:
            wait_flag_dev(1);
            TLOAD(m, gw);
            break;
        case 2:
            wait_flag_dev(4);                          // mark cube waits
            CROSS(PIPE_FIX, 2, 3);
            break;
        case 3:
            CROSS(PIPE_FIX, 2, 5);                     // mark left signal
            break;
        case 5:
            wait_flag_dev(7);
            break;
        case 6:
            wait_flag_dev(8);
            TLOAD(m, gw);                              // mark early reads
            wait_flag_dev(8);
            TLOAD(m, gw);
            break;
        default: break;
    }
#endif
}
