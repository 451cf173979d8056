"""Token t: S <- exp(g) S; u = beta (v - S^T k); S <- S + k u^T; o = scale S^T q.

Generated PTO C++: schedule staged, chunks of 64 tokens, layout bthd, float16. Needs torch, and on an Ascend A2 or A3
torch_npu, bisheng (CANN) and PTO-ISA's headers; CPU tensors run in the simulator of gdn_codegen, which needs g++.
Made by: gdn_codegen build --target pto --chunk 64 --layout bthd --algorithm gated_delta_rule --schedule staged --dtype float16 --head-dim-k 128 --head-dim-v 128
"""
import contextlib
import ctypes
import fcntl
import functools
import hashlib
import itertools
import math
import operator
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch

# C name; kinds of its tensors for the simulator (0 read, 1 written, 2 between cores, 3 read and written); kinds of its REGIONS;
# where its CONSTANTS begin; how many of its integers are strides
SYMBOLS = {
    "G": (
        "gated_delta_rule_G_fp16", [0],
        {"G_ws": 1},
        {}, 0),
    "A": (
        "gated_delta_rule_A_fp16", [0, 0],
        {"G_ws": 0, "A_ws": 1, "k_kT_channel": 2},
        {"strictly_lower_fill": 0}, 0),
    "Tinv": (
        "gated_delta_rule_Tinv_fp16", [],
        {"A_ws": 0, "Tinv_ws": 1, "diagonal_stack_A_4_f16_channel": 2, "Tinv_rows_2_f16_channel": 2, "diagonal_stack_A_8_f16_channel": 2, "diagonal_stack_16_f16_channel": 2, "diagonal_stack_A_4_f16_channel1": 2, "Tinv_rows_2_f16_channel1": 2, "diagonal_stack_A_8_f16_channel1": 2, "diagonal_stack_16_f16_channel1": 2},
        {"minus_identity_float16": 0, "pairs_1_mask_of_16": 8192, "eye_mask_of_16": 12288, "pairs_2_mask_of_16": 16384, "pairs_4_mask_of_16": 20480, "pairs_8_mask_of_16": 24576, "identity_float16_16": 28672}, 0),
    "U_weight_U_offset": (
        "gated_delta_rule_U_weight_U_offset_fp16", [0, 0, 0],
        {"G_ws": 0, "Tinv_ws": 0, "U_weight_ws": 1, "U_offset_ws": 1, "beta_v_f16_channel": 2, "beta_exp_G_k_f16_channel": 2},
        {}, 0),
    "S_U": (
        "gated_delta_rule_S_U_fp16", [0, 0, 1],
        {"G_ws": 0, "U_weight_ws": 0, "U_offset_ws": 0, "S_ws": 1, "U_ws": 1, "S_f16_0_channel": 2, "S_f16_1_channel": 2, "U_weight_S_0_channel": 2, "U_weight_S_1_channel": 2, "U_decay_to_end_f16_0_channel": 2, "U_decay_to_end_f16_1_channel": 2, "S_next_0_part_channel": 2, "S_next_1_part_channel": 2},
        {}, 0),
    "o": (
        "gated_delta_rule_o_fp16", [0, 0, 1],
        {"G_ws": 0, "S_ws": 0, "U_ws": 0, "q_S_channel": 2, "q_kT_channel": 2, "q_kT_D_f16_channel": 2, "o_sum_part_channel": 2, "q_S_channel1": 2, "q_kT_channel1": 2, "q_kT_D_f16_channel1": 2, "o_sum_part_channel1": 2},
        {"lower_fill": 0}, 0),
}
# regions of the workspace: what has a tile, its dims and dtype
REGIONS = {
    "G_ws": ("slot", [64], "float32"),
    "A_ws": ("slot", [64, 64], "float16"),
    "k_kT_channel": ("group", [64, 64], "float32"),
    "Tinv_ws": ("slot", [64, 64], "float16"),
    "diagonal_stack_A_4_f16_channel": ("group", [64, 16], "float16"),
    "Tinv_rows_2_f16_channel": ("group", [64, 16], "float16"),
    "diagonal_stack_A_8_f16_channel": ("group", [64, 16], "float16"),
    "diagonal_stack_16_f16_channel": ("group", [64, 16], "float16"),
    "diagonal_stack_A_4_f16_channel1": ("group", [64, 16], "float16"),
    "Tinv_rows_2_f16_channel1": ("group", [64, 16], "float16"),
    "diagonal_stack_A_8_f16_channel1": ("group", [64, 16], "float16"),
    "diagonal_stack_16_f16_channel1": ("group", [64, 16], "float16"),
    "U_weight_ws": ("slot", [64, 128], "float16"),
    "U_offset_ws": ("slot", [64, 128], "float32"),
    "beta_v_f16_channel": ("group", [64, 128], "float16"),
    "beta_exp_G_k_f16_channel": ("group", [64, 128], "float16"),
    "S_ws": ("slot", [128, 128], "float16"),
    "U_ws": ("slot", [64, 128], "float16"),
    "S_f16_0_channel": ("group", [128, 64], "float16"),
    "S_f16_1_channel": ("group", [128, 64], "float16"),
    "U_weight_S_0_channel": ("group", [64, 64], "float32"),
    "U_weight_S_1_channel": ("group", [64, 64], "float32"),
    "U_decay_to_end_f16_0_channel": ("group", [64, 64], "float16"),
    "U_decay_to_end_f16_1_channel": ("group", [64, 64], "float16"),
    "S_next_0_part_channel": ("group", [128, 64], "float32"),
    "S_next_1_part_channel": ("group", [128, 64], "float32"),
    "q_S_channel": ("group", [64, 128], "float32"),
    "q_kT_channel": ("group", [64, 64], "float32"),
    "q_kT_D_f16_channel": ("group", [64, 64], "float16"),
    "o_sum_part_channel": ("group", [64, 128], "float32"),
    "q_S_channel1": ("group", [64, 128], "float32"),
    "q_kT_channel1": ("group", [64, 64], "float32"),
    "q_kT_D_f16_channel1": ("group", [64, 64], "float16"),
    "o_sum_part_channel1": ("group", [64, 128], "float32"),
}
# masks: kind[:size], value kept, value elsewhere; shape; dtype
CONSTANTS = {
    "strictly_lower_fill": ("strictly_lower 0.0 -inf", [64, 64], "float32"),
    "minus_identity_float16": ("eye -1.0 0.0", [64, 64], "float16"),
    "pairs_1_mask_of_16": ("pairs:1 1.0 0.0", [64, 16], "float32"),
    "eye_mask_of_16": ("eye 1.0 0.0", [64, 16], "float32"),
    "pairs_2_mask_of_16": ("pairs:2 1.0 0.0", [64, 16], "float32"),
    "pairs_4_mask_of_16": ("pairs:4 1.0 0.0", [64, 16], "float32"),
    "pairs_8_mask_of_16": ("pairs:8 1.0 0.0", [64, 16], "float32"),
    "identity_float16_16": ("eye 1.0 0.0", [16, 16], "float16"),
    "lower_fill": ("lower 0.0 -inf", [64, 64], "float32"),
}

SOURCE = r'''
// Token t: S <- exp(g) S; u = beta (v - S^T k); S <- S + k u^T; o = scale S^T q.
// Generated PTO C++ for Ascend A2 and A3: schedule staged, chunks of 64 tokens, layout bthd, float16.
// Made by: gdn_codegen build --target pto --chunk 64 --layout bthd --algorithm gated_delta_rule --schedule staged --dtype float16 --head-dim-k 128 --head-dim-v 128
#include <pto/pto-inst.hpp>
#include "acl/acl.h"
#include <runtime/rt_ffts.h>
using namespace pto;

#ifndef PTO_ENTRY
#define PTO_ENTRY extern "C" __global__ AICORE
#endif

#if defined(__CCE_AICORE__)
// Tiles in UB: rows of values; a vector as a column; a vector with a stride of 32 bytes; and tiles with fewer valid rows.
template <typename E, int Rows, int Cols>
using UbTile = Tile<TileType::Vec, E, Rows, Cols, BLayout::RowMajor, Rows, Cols, SLayout::NoneBox, 512, PadValue::Zero>;
template <typename E, int Rows, int Cols>
using UbPart = Tile<TileType::Vec, E, Rows, Cols, BLayout::RowMajor, DYNAMIC, DYNAMIC>;
template <typename E, int Rows, int Cols, int Valid>
using UbBlock = Tile<TileType::Vec, E, Rows, Cols, BLayout::RowMajor, Rows, Valid>;
template <typename E, int Rows>
using UbCol = Tile<TileType::Vec, E, Rows, 1, BLayout::ColMajor, Rows, 1>;
template <typename E, int Rows>
using UbWide = Tile<TileType::Vec, E, Rows, 32 / sizeof(E), BLayout::RowMajor, Rows, 1>;
template <typename E, int Rows>
using UbWidePart = Tile<TileType::Vec, E, Rows, 32 / sizeof(E), BLayout::RowMajor, DYNAMIC, 1>;
// Tiles in L1, the transposed view of one, and tiles with fewer valid rows.
template <typename E, int Rows, int Cols>
using L1Tile = Tile<TileType::Mat, E, Rows, Cols, BLayout::ColMajor, Rows, Cols, SLayout::RowMajor, 512, PadValue::Zero>;
template <typename E, int Rows, int Cols>
using L1View = Tile<TileType::Mat, E, Rows, Cols, BLayout::RowMajor, Rows, Cols, SLayout::ColMajor, 512, PadValue::Zero>;
template <typename E, int Rows, int Cols>
using L1Part = Tile<TileType::Mat, E, Rows, Cols, BLayout::ColMajor, DYNAMIC, DYNAMIC, SLayout::RowMajor, 512, PadValue::Zero>;
template <typename E, int Rows, int Cols>
using AccPart = TileAcc<E, Rows, Cols, DYNAMIC, DYNAMIC>;
// Rows in global memory.
template <typename E>
using Gm = GlobalTensor<E, Shape<1, 1, 1, DYNAMIC, DYNAMIC>, Stride<1, 1, 1, DYNAMIC, 1>>;

// A view of rows in memory. It lives until the end of the statement that calls, whose instruction takes it by reference.
template <typename E>
AICORE inline Gm<E> &view(__gm__ E *at, int64_t rows, int64_t cols, int64_t stride, Gm<E> &&made = Gm<E>())
{
    made = Gm<E>(at, Shape<1, 1, 1, DYNAMIC, DYNAMIC>(rows, cols), Stride<1, 1, 1, DYNAMIC, 1>(stride));
    return made;
}

// A tile at an address in bytes. valid: how many of its rows and columns hold values, if its type does not say.
template <typename X, typename... Valid>
AICORE inline X tile_at(int64_t address, Valid... valid)
{
    X tile(valid...);
    TASSIGN(tile, address);
    return tile;
}

// Gives tiles their addresses.
template <typename X, int N>
AICORE inline void place(X (&tiles)[N], const int64_t (&at)[N])
{
    for (int64_t i = 0; i < N; ++i) TASSIGN(tiles[i], at[i]);
}

// An event of a pipe, in turn.
AICORE inline event_t event_id(int64_t n)
{
    return static_cast<event_t>(n % 8);
}

// Element of token t of a head in a caller's tensor of bthd, and elements from token to token.
AICORE inline int64_t token_at(int64_t heads, int64_t head, int64_t dim, int64_t b, int64_t tokens, int64_t t)
{
    return ((b * tokens + t) * heads + head) * dim;
}

AICORE inline int64_t token_stride(int64_t heads, int64_t dim)
{
    return heads * dim;
}

// The last sequence whose first chunk slot, cu_seqlens[n] / chunk + n, is not after `slot`.
AICORE inline int64_t sequence_of(__gm__ int32_t *cu_seqlens, int64_t sequences, int64_t slot, int64_t chunk)
{
    int64_t low = 0, high = sequences - 1;
    while (low < high) {
        const int64_t middle = (low + high + 1) / 2;
        if (cu_seqlens[middle] / chunk + middle <= slot) low = middle;
        else high = middle - 1;
    }
    return low;
}

// Of a chunk's valid rows, those that fall to vector core `sub`, which holds `half` rows.
AICORE inline int64_t part_of(int64_t rows, int64_t sub, int64_t half)
{
    const int64_t left = rows - sub * half;
    if (left < 0) return 0;
    return left < half ? left : half;
}

// The flag `id` between a cube core and its vector cores.
AICORE inline uint64_t group_flag(uint64_t id)
{
    return 1 | (2 << 4) | (id << 8);
}

// The flag `id` by which all cores of a kind join.
AICORE inline uint64_t all_flag(uint64_t id)
{
    return 1 | (id << 8);
}

#if defined(__DAV_C220_VEC__) || (defined(__DAV_VEC__) && !defined(__CPU_SIM))
// Zeroes the rows of a tile past its first `rows`.
template <typename Whole, typename Part>
AICORE inline void fill_rows(Whole &whole, Part &part, int64_t rows, int64_t address)
{
    if (rows >= Whole::Rows) return;
    if (rows > 0) {
        TFILLPAD_INPLACE(whole, part);
    } else {
        auto bits = tile_at<UbTile<float, Whole::Rows, Whole::Cols * sizeof(typename Whole::DType) / sizeof(float)>>(address);
        TEXPANDS(bits, 0.0f);
    }
}

// Zeroes a tile past its first `rows`, and past the columns that memory has.
template <typename Whole, typename Part>
AICORE inline void fill_tile(Whole &whole, Part &part, int64_t rows, int64_t address)
{
    if (rows > 0) TFILLPAD_INPLACE(whole, part);
    else fill_rows(whole, part, rows, address);
}

// Zeroes a vector past its first `rows`.
template <typename Whole, typename Part>
AICORE inline void fill_row(Whole &whole, Part &part, int64_t rows)
{
    if (rows >= Whole::Cols) return;
    if (rows > 0) TFILLPAD_INPLACE(whole, part);
    else TEXPANDS(whole, 0.0f);
}

template <typename Part>
AICORE inline void fill_wide(Part &part, int64_t rows, int64_t address)
{
    if (rows >= Part::Rows) return;
    auto whole = tile_at<UbTile<typename Part::DType, Part::Rows, Part::Cols>>(address);
    TFILLPAD_INPLACE(whole, part);
}

// Adds row `of` of the tile at address `at` to each of `width` rows from `to` on. So in `Count` places, each `Step` rows after the
// one before. No row is both read and written.
template <int Count, int Step, typename X>
AICORE inline void add_rows(X &, int64_t at, int64_t to, int64_t of, int64_t width)
{
    constexpr int64_t row = X::Cols * sizeof(typename X::DType);
    for (int64_t i = 0; i < width; ++i) {
        using Row = UbBlock<typename X::DType, Count, Step * X::Cols, X::Cols>;
        auto sum = tile_at<Row>(at + (to + i) * row), term = tile_at<Row>(at + of * row);
        TADD(sum, sum, term);
    }
}

// Casts of the diagonal blocks of `Size` rows of a tile, the first at address `from`, to a stack of blocks.
template <int Size, typename Stack, typename X>
AICORE inline void diagonal_stack(Stack &, int64_t to, X &, int64_t from)
{
    for (int64_t i = 0; i < Stack::Rows; i += Size) {
        auto block = tile_at<UbBlock<typename X::DType, Size, X::Cols, Size>>(from + i * (X::Cols + 1) * sizeof(typename X::DType));
        auto out = tile_at<UbTile<typename Stack::DType, Size, Size>>(to + i * Size * sizeof(typename Stack::DType));
        TCVT(out, block, RoundMode::CAST_NONE);
    }
}
#endif

#if defined(__DAV_C220_CUBE__) || (defined(__DAV_CUBE__) && !defined(__CPU_SIM))
// Products of the blocks of 16 rows in stacks of `Rows` rows, which are contiguous block by block in L0A, L0B and L0C.
template <typename E, int Rows, bool Adds>
AICORE inline void stacked_product(int64_t out, int64_t left, int64_t right)
{
    for (int64_t i = 0; i < Rows; i += 16) {
        auto sum = tile_at<TileAcc<float, 16, 16>>(out + i * 16 * sizeof(float));
        auto a = tile_at<TileLeft<E, 16, 16>>(left + i * 16 * sizeof(E));
        auto b = tile_at<TileRight<E, 16, 16>>(right + i * 16 * sizeof(E));
        if constexpr (Adds) TMATMUL_ACC(sum, sum, a, b);
        else TMATMUL(sum, a, b);
    }
}

// Moves of blocks of a tile in L1 to an operand buffer, where they lie one after the other: the first from (row, col), each of
// `Count` so many rows and columns after the one before.
template <typename Block, int Count, typename X>
AICORE inline void extract_blocks(int64_t to, X &tile, int64_t row, int64_t col, int64_t rows, int64_t cols)
{
    for (int64_t i = 0; i < Count; ++i) {
        auto block = tile_at<Block>(to + i * Block::Numel * sizeof(typename Block::DType));
        TEXTRACT(block, tile, row + i * rows, col + i * cols);
    }
}

// Moves of `Count` blocks of `Size` rows from a stack of `Rows` rows in L0C to a tile in L1: the first to address `to`, each `step`
// bytes after the one before. They go by columns of 16, which are contiguous in both.
template <int Size, int Rows, int Count, typename X>
AICORE inline void insert_blocks(X &, int64_t to, int64_t step, int64_t from)
{
    for (int64_t i = 0; i < Count; ++i) {
        for (int64_t j = 0; j < Size / 16; ++j) {
            auto block = tile_at<TileAcc<float, Size, 16>>(from + (i * Size + j * Rows) * 16 * sizeof(float));
            auto out = tile_at<L1Tile<typename X::DType, Size, 16>>(to + i * step + j * X::Rows * 16 * sizeof(typename X::DType));
            TMOV(out, block);
        }
    }
}
#endif
#endif

/**
 * @brief G over chunks.
 * g: input, token, [C] float32
 * G_ws: workspace, slot, [C] float32, in workspace
 */
PTO_ENTRY void gated_delta_rule_G_fp16(
    __gm__ uint8_t *g_bytes,
    __gm__ uint8_t *workspace,
    __gm__ uint8_t *table_bytes,
    __gm__ uint8_t *cu_seqlens_bytes,
    int64_t N,
    int64_t T,
    int64_t batched,
    int64_t H,
    int64_t HV,
    int64_t slots,
    uint64_t ffts)
{
#if defined(__CCE_AICORE__)
    set_ffts_base_addr(ffts);
#if defined(__DAV_C220_VEC__) || (defined(__DAV_VEC__) && !defined(__CPU_SIM))
    set_mask_norm();
    set_vector_mask(-1, -1);
    __gm__ int64_t *table = reinterpret_cast<__gm__ int64_t *>(table_bytes);
    __gm__ float *g_gm = reinterpret_cast<__gm__ float *>(g_bytes);
    __gm__ float *G_ws_gm = reinterpret_cast<__gm__ float *>(workspace + table[0]);
    __gm__ int32_t *cu_seqlens = reinterpret_cast<__gm__ int32_t *>(cu_seqlens_bytes);
    const int64_t sub = get_subblockid();
    auto g = tile_at<UbTile<float, 64, 8>>(0x0);
    auto g_rows = tile_at<UbTile<float, 64, 8>>(0x1000);
    auto exp_g_rows = tile_at<UbTile<float, 64, 8>>(0x1800);
    auto exp_g_rows_times_0 = tile_at<UbTile<float, 64, 8>>(0x1800);
    auto g_rows_maximum = tile_at<UbTile<float, 64, 8>>(0x1000);
    auto g_rows_maximum_sum = tile_at<UbTile<float, 64, 8>>(0x1000);
    auto G = tile_at<UbTile<float, 8, 64>>(0x2800);
    auto G_scratch = tile_at<UbTile<float, 64, 8>>(0x2000);
    set_flag(PIPE_V, PIPE_MTE2, EVENT_ID0);  // g -> g_raw
    set_flag(PIPE_MTE3, PIPE_V, EVENT_ID0);  // G -> G
    for (int64_t item = get_block_idx(); item < slots * ((HV + 15) / 16); item += get_block_num()) {
        const int64_t hv = item % ((HV + 15) / 16) * 16;
        const int64_t heads = HV - hv < 16 ? HV - hv : 16;
        const int64_t mine = part_of(heads, sub, 8);
        const int64_t slot = item / ((HV + 15) / 16), n = sequence_of(cu_seqlens, N, slot, 64);
        const int64_t first = cu_seqlens[n], length = cu_seqlens[n + 1] - first, b = n * batched;
        const int64_t c = slot - first / 64 - n;
        if (c * 64 >= length) continue;
        const int64_t t = first - b * T + c * 64;
        const int64_t rows = length - c * 64 < 64 ? length - c * 64 : 64;
        wait_flag(PIPE_V, PIPE_MTE2, EVENT_ID0);  // g -> g_raw
        auto g_raw = tile_at<UbPart<float, 64, 8>>(0x0, rows, mine);
        if (mine > 0) TLOAD(g_raw, view(g_gm + token_at(HV, hv + sub * 8, 1, b, T, t), rows, mine, token_stride(HV, 1)));
        set_flag(PIPE_MTE2, PIPE_V, EVENT_ID0);  // g_raw -> g
        wait_flag(PIPE_MTE2, PIPE_V, EVENT_ID0);  // g_raw -> g
        if (rows < 64 || mine < 8) fill_tile(g, g_raw, mine, 0x0);
        pipe_barrier(PIPE_V);
        TMOV(g_rows, g);
        set_flag(PIPE_V, PIPE_MTE2, EVENT_ID0);  // g -> g_raw
        pipe_barrier(PIPE_V);
        // G = cumsum(g)
        TEXP(exp_g_rows, g_rows);
        pipe_barrier(PIPE_V);
        TMULS(exp_g_rows_times_0, exp_g_rows, 0.0f);
        TMAXS(g_rows_maximum, g_rows, -105.0f);
        pipe_barrier(PIPE_V);
        TADD(g_rows_maximum_sum, g_rows_maximum, exp_g_rows_times_0);
        pipe_barrier(PIPE_V);
        add_rows<8, 8>(g_rows_maximum_sum, 0x1000, 1, 0, 1);
        pipe_barrier(PIPE_V);
        add_rows<8, 8>(g_rows_maximum_sum, 0x1000, 2, 1, 1);
        pipe_barrier(PIPE_V);
        add_rows<8, 8>(g_rows_maximum_sum, 0x1000, 3, 2, 1);
        pipe_barrier(PIPE_V);
        add_rows<8, 8>(g_rows_maximum_sum, 0x1000, 4, 3, 1);
        pipe_barrier(PIPE_V);
        add_rows<8, 8>(g_rows_maximum_sum, 0x1000, 5, 4, 1);
        pipe_barrier(PIPE_V);
        add_rows<8, 8>(g_rows_maximum_sum, 0x1000, 6, 5, 1);
        pipe_barrier(PIPE_V);
        add_rows<8, 8>(g_rows_maximum_sum, 0x1000, 7, 6, 1);
        pipe_barrier(PIPE_V);
        add_rows<1, 1>(g_rows_maximum_sum, 0x1000, 15, 7, 1);
        pipe_barrier(PIPE_V);
        add_rows<1, 1>(g_rows_maximum_sum, 0x1000, 23, 15, 1);
        pipe_barrier(PIPE_V);
        add_rows<1, 1>(g_rows_maximum_sum, 0x1000, 31, 23, 1);
        pipe_barrier(PIPE_V);
        add_rows<1, 1>(g_rows_maximum_sum, 0x1000, 39, 31, 1);
        pipe_barrier(PIPE_V);
        add_rows<1, 1>(g_rows_maximum_sum, 0x1000, 47, 39, 1);
        pipe_barrier(PIPE_V);
        add_rows<1, 1>(g_rows_maximum_sum, 0x1000, 55, 47, 1);
        pipe_barrier(PIPE_V);
        add_rows<1, 1>(g_rows_maximum_sum, 0x1000, 63, 55, 1);
        pipe_barrier(PIPE_V);
        add_rows<7, 8>(g_rows_maximum_sum, 0x1000, 8, 7, 7);
        wait_flag(PIPE_MTE3, PIPE_V, EVENT_ID0);  // G -> G
        pipe_barrier(PIPE_V);
        TTRANS(G, g_rows_maximum_sum, G_scratch);
        set_flag(PIPE_V, PIPE_MTE3, EVENT_ID0);  // G -> store
        wait_flag(PIPE_V, PIPE_MTE3, EVENT_ID0);  // G -> store
        if (mine > 0) {
            auto valid = tile_at<UbPart<float, 8, 64>>(0x2800, mine, 64);
            TSTORE(view(G_ws_gm + (slot * HV + hv) * 64 + sub * 512, mine, 64, 64), valid);
        }
        set_flag(PIPE_MTE3, PIPE_V, EVENT_ID0);  // G -> G
    }
    wait_flag(PIPE_V, PIPE_MTE2, EVENT_ID0);  // g -> g_raw
    wait_flag(PIPE_MTE3, PIPE_V, EVENT_ID0);  // G -> G
#endif
#endif
}

/**
 * @brief A over chunks.
 * k: input, token, [C, K] float16
 * beta: input, token, [C] float32
 * G_ws: workspace, slot, [C] float32, in workspace
 * A_ws: workspace, slot, [C, C] float16, in workspace
 * k_kT_channel: workspace, block, [C, C] float32, in workspace
 * strictly_lower_fill: workspace, const, [C, C] float32, in constants
 */
PTO_ENTRY void gated_delta_rule_A_fp16(
    __gm__ uint8_t *k_bytes,
    __gm__ uint8_t *beta_bytes,
    __gm__ uint8_t *workspace,
    __gm__ uint8_t *constants,
    __gm__ uint8_t *table_bytes,
    __gm__ uint8_t *cu_seqlens_bytes,
    int64_t N,
    int64_t T,
    int64_t batched,
    int64_t H,
    int64_t HV,
    int64_t slots,
    uint64_t ffts)
{
#if defined(__CCE_AICORE__)
    set_ffts_base_addr(ffts);
#if defined(__DAV_C220_CUBE__) || (defined(__DAV_CUBE__) && !defined(__CPU_SIM))
    __gm__ int64_t *table = reinterpret_cast<__gm__ int64_t *>(table_bytes);
    __gm__ half *k_gm = reinterpret_cast<__gm__ half *>(k_bytes);
    __gm__ float *k_kT_channel_gm = reinterpret_cast<__gm__ float *>(workspace + table[2]);
    __gm__ int32_t *cu_seqlens = reinterpret_cast<__gm__ int32_t *>(cu_seqlens_bytes);
    auto k = tile_at<L1Tile<half, 64, 128>>(0x0);
    auto k_kT_left = tile_at<TileLeft<half, 64, 128>>(0x0);
    auto k_kT_right = tile_at<TileRight<half, 128, 64>>(0x0);
    auto k_kT = tile_at<TileAcc<float, 64, 64>>(0x0);
    set_flag(PIPE_MTE1, PIPE_MTE2, EVENT_ID0);  // k -> k_raw
    set_flag(PIPE_M, PIPE_MTE1, EVENT_ID0);  // k_kT_left -> k_kT_left
    set_flag(PIPE_FIX, PIPE_M, EVENT_ID0);  // k_kT -> k_kT
    for (int64_t item = get_block_idx(); item < slots * HV; item += get_block_num()) {
        const int64_t hv = item % HV, h = hv / (HV / H);
        const int64_t slot = item / HV, n = sequence_of(cu_seqlens, N, slot, 64);
        const int64_t first = cu_seqlens[n], length = cu_seqlens[n + 1] - first, b = n * batched;
        const int64_t c = slot - first / 64 - n;
        if (c * 64 >= length) continue;
        const int64_t t = first - b * T + c * 64;
        const int64_t rows = length - c * 64 < 64 ? length - c * 64 : 64;
        wait_flag(PIPE_MTE1, PIPE_MTE2, EVENT_ID0);  // k -> k_raw
        auto k_raw = tile_at<L1Part<half, 64, 128>>(0x0, rows, 128);
        TLOAD(k_raw, view(k_gm + token_at(H, h, 128, b, T, t), rows, 128, token_stride(H, 128)));
        if (rows < 64) TFILLPAD(k_raw, k_raw);
        set_flag(PIPE_MTE2, PIPE_MTE1, EVENT_ID0);  // k -> k_kT_left
        wait_flag(PIPE_MTE2, PIPE_MTE1, EVENT_ID0);  // k -> k_kT_left
        wait_flag(PIPE_M, PIPE_MTE1, EVENT_ID0);  // k_kT_left -> k_kT_left
        TEXTRACT(k_kT_left, k, 0, 0);
        L1View<half, 128, 64> k_kT_right_from;
        TRESHAPE(k_kT_right_from, k);
        TEXTRACT(k_kT_right, k_kT_right_from, 0, 0);
        set_flag(PIPE_MTE1, PIPE_M, EVENT_ID0);  // k_kT_right -> k_kT
        set_flag(PIPE_MTE1, PIPE_MTE2, EVENT_ID0);  // k -> k_raw
        wait_flag(PIPE_MTE1, PIPE_M, EVENT_ID0);  // k_kT_right -> k_kT
        wait_flag(PIPE_FIX, PIPE_M, EVENT_ID0);  // k_kT -> k_kT
        // A = beta[:, None] * (k @ k.T) * D
        TMATMUL(k_kT, k_kT_left, k_kT_right);
        set_flag(PIPE_M, PIPE_FIX, EVENT_ID0);  // k_kT -> store
        set_flag(PIPE_M, PIPE_MTE1, EVENT_ID0);  // k_kT_left -> k_kT_left
        wait_flag(PIPE_M, PIPE_FIX, EVENT_ID0);  // k_kT -> store
        wait_flag_dev(1);  // k_kT_channel -> store
        TSTORE(view(k_kT_channel_gm + get_block_idx() * 4096, 64, 64, 64), k_kT);
        ffts_cross_core_sync(PIPE_FIX, group_flag(0));  // k_kT_channel -> k_kT_in
        set_flag(PIPE_FIX, PIPE_M, EVENT_ID0);  // k_kT -> k_kT
    }
    wait_flag(PIPE_MTE1, PIPE_MTE2, EVENT_ID0);  // k -> k_raw
    wait_flag(PIPE_M, PIPE_MTE1, EVENT_ID0);  // k_kT_left -> k_kT_left
    wait_flag(PIPE_FIX, PIPE_M, EVENT_ID0);  // k_kT -> k_kT
    wait_flag_dev(1);  // k_kT_channel -> store
#endif
#if defined(__DAV_C220_VEC__) || (defined(__DAV_VEC__) && !defined(__CPU_SIM))
    set_mask_norm();
    set_vector_mask(-1, -1);
    __gm__ int64_t *table = reinterpret_cast<__gm__ int64_t *>(table_bytes);
    __gm__ float *beta_gm = reinterpret_cast<__gm__ float *>(beta_bytes);
    __gm__ float *G_ws_gm = reinterpret_cast<__gm__ float *>(workspace + table[0]);
    __gm__ half *A_ws_gm = reinterpret_cast<__gm__ half *>(workspace + table[1]);
    __gm__ float *k_kT_channel_gm = reinterpret_cast<__gm__ float *>(workspace + table[2]);
    __gm__ float *strictly_lower_fill_gm = reinterpret_cast<__gm__ float *>(constants + 0);
    __gm__ int32_t *cu_seqlens = reinterpret_cast<__gm__ int32_t *>(cu_seqlens_bytes);
    const int64_t sub = get_subblockid();
    auto strictly_lower_fill = tile_at<UbTile<float, 32, 64>>(0x0);
    auto G = tile_at<UbTile<float, 1, 64>>(0x2000);
    auto G_col = tile_at<UbCol<float, 32>>(0x2000 + sub * 128);
    auto G_times_minus_1 = tile_at<UbTile<float, 1, 64>>(0x2100);
    auto beta_wide = tile_at<UbWide<float, 64>>(0x2200);
    auto G_times_expand = tile_at<UbTile<float, 32, 64>>(0x2a00);
    auto G_minus_G = tile_at<UbTile<float, 32, 64>>(0x2a00);
    auto lower_G_minus_G = tile_at<UbTile<float, 32, 64>>(0x2a00);
    auto beta = tile_at<UbTile<float, 1, 64>>(0x5200);
    auto beta_col = tile_at<UbCol<float, 32>>(0x5200 + sub * 128);
    auto D = tile_at<UbTile<float, 32, 64>>(0x2a00);
    auto k_kT_in = tile_at<UbTile<float, 32, 64>>(0x5300);
    auto beta_k_kT = tile_at<UbTile<float, 32, 64>>(0x5300);
    auto A = tile_at<UbTile<float, 32, 64>>(0x5300);
    auto A_f16 = tile_at<UbTile<half, 32, 64>>(0x7300);
    auto beta_scratch = tile_at<UbTile<float, 64, 8>>(0x4a00);
    // D = exp(strictly_lower(G[:, None] - G[None, :], fill=-inf))
    TLOAD(strictly_lower_fill, view(strictly_lower_fill_gm + sub * 32 * 64, 32, 64, 64));
    set_flag(PIPE_V, PIPE_MTE2, EVENT_ID0);  // G_col -> G
    set_flag(PIPE_V, PIPE_MTE2, EVENT_ID1);  // beta_wide -> beta_raw
    ffts_cross_core_sync(PIPE_MTE2, group_flag(1));  // k_kT_channel -> store
    set_flag(PIPE_V, PIPE_MTE2, EVENT_ID2);  // A -> k_kT_in
    set_flag(PIPE_MTE3, PIPE_V, EVENT_ID0);  // A_f16 -> A_f16
    for (int64_t item = get_block_idx(); item < slots * HV; item += get_block_num()) {
        const int64_t hv = item % HV;
        const int64_t slot = item / HV, n = sequence_of(cu_seqlens, N, slot, 64);
        const int64_t first = cu_seqlens[n], length = cu_seqlens[n + 1] - first, b = n * batched;
        const int64_t c = slot - first / 64 - n;
        if (c * 64 >= length) continue;
        const int64_t t = first - b * T + c * 64;
        const int64_t rows = length - c * 64 < 64 ? length - c * 64 : 64;
        wait_flag(PIPE_V, PIPE_MTE2, EVENT_ID0);  // G_col -> G
        TLOAD(G, view(G_ws_gm + (slot * HV + hv) * 64, 1, 64, 64));
        set_flag(PIPE_MTE2, PIPE_V, EVENT_ID0);  // G -> G_times_minus_1
        wait_flag(PIPE_MTE2, PIPE_V, EVENT_ID0);  // G -> G_times_minus_1
        TMULS(G_times_minus_1, G, -1.0f);
        wait_flag(PIPE_V, PIPE_MTE2, EVENT_ID1);  // beta_wide -> beta_raw
        auto beta_raw = tile_at<UbWidePart<float, 64>>(0x2200, rows);
        TLOAD(beta_raw, view(beta_gm + token_at(HV, hv, 1, b, T, t), rows, 1, token_stride(HV, 1)));
        set_flag(PIPE_MTE2, PIPE_V, EVENT_ID1);  // beta_raw -> beta_wide
        wait_flag(PIPE_MTE2, PIPE_V, EVENT_ID1);  // beta_raw -> beta_wide
        fill_wide(beta_raw, rows, 0x2200);
        pipe_barrier(PIPE_V);
        TCOLEXPAND(G_times_expand, G_times_minus_1);
        pipe_barrier(PIPE_V);
        TROWEXPANDADD(G_minus_G, G_times_expand, G_col);
        set_flag(PIPE_V, PIPE_MTE2, EVENT_ID0);  // G_col -> G
        pipe_barrier(PIPE_V);
        TADD(lower_G_minus_G, G_minus_G, strictly_lower_fill);
        TTRANS(beta, beta_wide, beta_scratch);
        set_flag(PIPE_V, PIPE_MTE2, EVENT_ID1);  // beta_wide -> beta_raw
        // A = beta[:, None] * (k @ k.T) * D
        pipe_barrier(PIPE_V);
        // D = exp(strictly_lower(G[:, None] - G[None, :], fill=-inf))
        TEXP(D, lower_G_minus_G);
        wait_flag_dev(0);  // k_kT_channel -> k_kT_in
        wait_flag(PIPE_V, PIPE_MTE2, EVENT_ID2);  // A -> k_kT_in
        TLOAD(k_kT_in, view(k_kT_channel_gm + get_block_idx() * 4096 + sub * 32 * 64, 32, 64, 64));
        set_flag(PIPE_MTE2, PIPE_V, EVENT_ID2);  // k_kT_in -> beta_k_kT
        ffts_cross_core_sync(PIPE_MTE2, group_flag(1));  // k_kT_channel -> store
        wait_flag(PIPE_MTE2, PIPE_V, EVENT_ID2);  // k_kT_in -> beta_k_kT
        // A = beta[:, None] * (k @ k.T) * D
        TROWEXPANDMUL(beta_k_kT, k_kT_in, beta_col);
        pipe_barrier(PIPE_V);
        TMUL(A, beta_k_kT, D);
        wait_flag(PIPE_MTE3, PIPE_V, EVENT_ID0);  // A_f16 -> A_f16
        pipe_barrier(PIPE_V);
        TCVT(A_f16, A, RoundMode::CAST_RINT);
        set_flag(PIPE_V, PIPE_MTE3, EVENT_ID0);  // A_f16 -> store
        set_flag(PIPE_V, PIPE_MTE2, EVENT_ID2);  // A -> k_kT_in
        wait_flag(PIPE_V, PIPE_MTE3, EVENT_ID0);  // A_f16 -> store
        TSTORE(view(A_ws_gm + (slot * HV + hv) * 4096 + sub * 32 * 64, 32, 64, 64), A_f16);
        set_flag(PIPE_MTE3, PIPE_V, EVENT_ID0);  // A_f16 -> A_f16
    }
    wait_flag(PIPE_V, PIPE_MTE2, EVENT_ID0);  // G_col -> G
    wait_flag(PIPE_V, PIPE_MTE2, EVENT_ID1);  // beta_wide -> beta_raw
    wait_flag(PIPE_V, PIPE_MTE2, EVENT_ID2);  // A -> k_kT_in
    wait_flag(PIPE_MTE3, PIPE_V, EVENT_ID0);  // A_f16 -> A_f16
#endif
#endif
}

/**
 * @brief Tinv over chunks.
 * A_ws: workspace, slot, [C, C] float16, in workspace
 * Tinv_ws: workspace, slot, [C, C] float16, in workspace
 * diagonal_stack_A_4_f16_channel: workspace, block, [C, 16] float16, in workspace
 * Tinv_rows_2_f16_channel: workspace, block, [C, 16] float16, in workspace
 * diagonal_stack_A_8_f16_channel: workspace, block, [C, 16] float16, in workspace
 * diagonal_stack_16_f16_channel: workspace, block, [C, 16] float16, in workspace
 * diagonal_stack_A_4_f16_channel1: workspace, block, [C, 16] float16, in workspace
 * Tinv_rows_2_f16_channel1: workspace, block, [C, 16] float16, in workspace
 * diagonal_stack_A_8_f16_channel1: workspace, block, [C, 16] float16, in workspace
 * diagonal_stack_16_f16_channel1: workspace, block, [C, 16] float16, in workspace
 * minus_identity_float16: workspace, const, [C, C] float16, in constants
 * pairs_1_mask_of_16: workspace, const, [C, 16] float32, in constants
 * eye_mask_of_16: workspace, const, [C, 16] float32, in constants
 * pairs_2_mask_of_16: workspace, const, [C, 16] float32, in constants
 * pairs_4_mask_of_16: workspace, const, [C, 16] float32, in constants
 * pairs_8_mask_of_16: workspace, const, [C, 16] float32, in constants
 * identity_float16_16: workspace, const, [16, 16] float16, in constants
 */
PTO_ENTRY void gated_delta_rule_Tinv_fp16(
    __gm__ uint8_t *workspace,
    __gm__ uint8_t *constants,
    __gm__ uint8_t *table_bytes,
    __gm__ uint8_t *cu_seqlens_bytes,
    int64_t N,
    int64_t T,
    int64_t batched,
    int64_t H,
    int64_t HV,
    int64_t slots,
    uint64_t ffts)
{
#if defined(__CCE_AICORE__)
    set_ffts_base_addr(ffts);
#if defined(__DAV_C220_CUBE__) || (defined(__DAV_CUBE__) && !defined(__CPU_SIM))
    __gm__ int64_t *table = reinterpret_cast<__gm__ int64_t *>(table_bytes);
    __gm__ half *A_ws_gm = reinterpret_cast<__gm__ half *>(workspace + table[0]);
    __gm__ half *Tinv_ws_gm = reinterpret_cast<__gm__ half *>(workspace + table[1]);
    __gm__ half *diagonal_stack_A_4_f16_channel_gm = reinterpret_cast<__gm__ half *>(workspace + table[2]);
    __gm__ half *Tinv_rows_2_f16_channel_gm = reinterpret_cast<__gm__ half *>(workspace + table[3]);
    __gm__ half *diagonal_stack_A_8_f16_channel_gm = reinterpret_cast<__gm__ half *>(workspace + table[4]);
    __gm__ half *diagonal_stack_16_f16_channel_gm = reinterpret_cast<__gm__ half *>(workspace + table[5]);
    __gm__ half *diagonal_stack_A_4_f16_channel1_gm = reinterpret_cast<__gm__ half *>(workspace + table[6]);
    __gm__ half *Tinv_rows_2_f16_channel1_gm = reinterpret_cast<__gm__ half *>(workspace + table[7]);
    __gm__ half *diagonal_stack_A_8_f16_channel1_gm = reinterpret_cast<__gm__ half *>(workspace + table[8]);
    __gm__ half *diagonal_stack_16_f16_channel1_gm = reinterpret_cast<__gm__ half *>(workspace + table[9]);
    __gm__ half *minus_identity_float16_gm = reinterpret_cast<__gm__ half *>(constants + 0);
    __gm__ half *identity_float16_16_gm = reinterpret_cast<__gm__ half *>(constants + 28672);
    __gm__ int32_t *cu_seqlens = reinterpret_cast<__gm__ int32_t *>(cu_seqlens_bytes);
    auto minus_identity = tile_at<L1Tile<half, 64, 64>>(0x0);
    auto identity = tile_at<L1Tile<half, 16, 16>>(0x2000);
    auto Tinv_zeros = tile_at<L1Tile<half, 64, 64>>(0x2200);
    auto A_cube = tile_at<L1Tile<half, 64, 64>>(0x4200);
    auto Tinv_zeros_h1 = tile_at<L1Tile<half, 64, 64>>(0x6200);
    auto diagonal_stack_A_4_f16_in = tile_at<L1Tile<half, 64, 16>>(0x8200);
    auto Tinv_rows_2_f16_in = tile_at<L1Tile<half, 64, 16>>(0x8a00);
    auto Tinv_below_4_left = tile_at<TileLeft<half, 64, 16>>(0x0);
    auto Tinv_below_4_right = tile_at<TileRight<half, 64, 16>>(0x0);
    auto Tinv_below_4 = tile_at<TileAcc<float, 64, 16>>(0x0);
    auto diagonal_stack_A_4_f16_in_h1 = tile_at<L1Tile<half, 64, 16>>(0x9200);
    auto Tinv_below_4_f16 = tile_at<L1Tile<half, 64, 16>>(0x9a00);
    auto identity_product_left = tile_at<TileLeft<half, 64, 16>>(0x8000);
    auto identity_product_right = tile_at<TileRight<half, 16, 16>>(0x8000);
    auto identity_product = tile_at<TileAcc<float, 64, 16>>(0x1000);
    auto Tinv_rows_2_f16_in_h1 = tile_at<L1Tile<half, 64, 16>>(0xa200);
    auto Tinv_below_4_left_h1 = tile_at<TileLeft<half, 64, 16>>(0x0);
    auto Tinv_below_4_right_h1 = tile_at<TileRight<half, 64, 16>>(0x0);
    auto Tinv_below_4_h1 = tile_at<TileAcc<float, 64, 16>>(0x2000);
    auto diagonal_stack_A_8_f16_in = tile_at<L1Tile<half, 64, 16>>(0xaa00);
    auto diagonal_stack_A_8_f16_in_h1 = tile_at<L1Tile<half, 64, 16>>(0xb200);
    auto Tinv_rows_4_left = tile_at<TileLeft<half, 64, 16>>(0x8000);
    auto Tinv_rows_4_right = tile_at<TileRight<half, 64, 16>>(0x8000);
    auto Tinv_rows_4 = tile_at<TileAcc<float, 64, 16>>(0x1000);
    auto Tinv_below_4_f16_h1 = tile_at<L1Tile<half, 64, 16>>(0xba00);
    auto diagonal_stack_16_f16_in = tile_at<L1Tile<half, 64, 16>>(0xc200);
    auto identity_product_left_h1 = tile_at<TileLeft<half, 64, 16>>(0x0);
    auto identity_product_right_h1 = tile_at<TileRight<half, 16, 16>>(0x0);
    auto identity_product_h1 = tile_at<TileAcc<float, 64, 16>>(0x3000);
    auto Tinv_rows_4_f16 = tile_at<L1Tile<half, 64, 16>>(0xca00);
    auto diagonal_stack_16_f16_in_h1 = tile_at<L1Tile<half, 64, 16>>(0xd200);
    auto Tinv_rows_4_left_h1 = tile_at<TileLeft<half, 64, 16>>(0x8000);
    auto Tinv_rows_4_right_h1 = tile_at<TileRight<half, 64, 16>>(0x8000);
    auto Tinv_rows_4_h1 = tile_at<TileAcc<float, 64, 16>>(0x3000);
    auto A_cube_h1 = tile_at<L1Tile<half, 64, 64>>(0xda00);
    auto Tinv_below_8_left = tile_at<TileLeft<half, 64, 16>>(0x0);
    auto Tinv_below_8_right = tile_at<TileRight<half, 64, 16>>(0x0);
    auto Tinv_below_8 = tile_at<TileAcc<float, 64, 16>>(0x4000);
    auto Tinv_rows_4_f16_h1 = tile_at<L1Tile<half, 64, 16>>(0xfa00);
    auto Tinv_below_8_f16 = tile_at<L1Tile<half, 64, 16>>(0x10200);
    auto Tinv_below_8_left_h1 = tile_at<TileLeft<half, 64, 16>>(0x8000);
    auto Tinv_below_8_right_h1 = tile_at<TileRight<half, 64, 16>>(0x8000);
    auto Tinv_below_8_h1 = tile_at<TileAcc<float, 64, 16>>(0x5000);
    auto Tinv_rows_8_left = tile_at<TileLeft<half, 64, 16>>(0x0);
    auto Tinv_rows_8_right = tile_at<TileRight<half, 64, 16>>(0x0);
    auto Tinv_rows_8 = tile_at<TileAcc<float, 64, 16>>(0x1000);
    auto Tinv_below_8_f16_h1 = tile_at<L1Tile<half, 64, 16>>(0x10a00);
    auto Tinv_rows_8_f16 = tile_at<L1Tile<half, 64, 16>>(0x11200);
    auto Tinv_rows_8_left_h1 = tile_at<TileLeft<half, 64, 16>>(0x8000);
    auto Tinv_rows_8_right_h1 = tile_at<TileRight<half, 64, 16>>(0x8000);
    auto Tinv_rows_8_h1 = tile_at<TileAcc<float, 64, 16>>(0x3000);
    auto Tinv_below_16_left = tile_at<TileLeft<half, 64, 16>>(0x0);
    auto Tinv_below_16_right = tile_at<TileRight<half, 64, 16>>(0x0);
    auto Tinv_below_16 = tile_at<TileAcc<float, 64, 16>>(0x6000);
    auto Tinv_rows_8_f16_h1 = tile_at<L1Tile<half, 64, 16>>(0x11a00);
    auto Tinv_below_16_f16 = tile_at<L1Tile<half, 64, 16>>(0x12200);
    auto Tinv_below_16_left_h1 = tile_at<TileLeft<half, 64, 16>>(0x8000);
    auto Tinv_below_16_right_h1 = tile_at<TileRight<half, 64, 16>>(0x8000);
    auto Tinv_below_16_h1 = tile_at<TileAcc<float, 64, 16>>(0x7000);
    auto Tinv_rows_16_left = tile_at<TileLeft<half, 64, 16>>(0x0);
    auto Tinv_rows_16_right = tile_at<TileRight<half, 64, 16>>(0x0);
    auto Tinv_below_16_f16_h1 = tile_at<L1Tile<half, 64, 16>>(0x12a00);
    auto Tinv_blocks_16 = tile_at<L1Tile<half, 64, 64>>(0x2200);
    auto Tinv_rows_16_left_h1 = tile_at<TileLeft<half, 64, 16>>(0x8000);
    auto Tinv_rows_16_right_h1 = tile_at<TileRight<half, 64, 16>>(0x8000);
    auto Tinv_below_32 = tile_at<TileAcc<float, 32, 16>>(0x8000);
    auto Tinv_blocks_16_h1 = tile_at<L1Tile<half, 64, 64>>(0x6200);
    auto Tinv_below_32_f16 = tile_at<L1Tile<half, 32, 16>>(0x13200);
    auto Tinv_below_32_h1 = tile_at<TileAcc<float, 32, 16>>(0x8800);
    auto Tinv_corner_32_right = tile_at<TileRight<half, 32, 16>>(0x0);
    auto Tinv_below_32_f16_h1 = tile_at<L1Tile<half, 32, 16>>(0x13600);
    auto Tinv_blocks_32 = tile_at<L1Tile<half, 64, 64>>(0x2200);
    auto Tinv_corner_32_right_h1 = tile_at<TileRight<half, 32, 16>>(0x8000);
    auto Tinv_below_64_left = tile_at<TileLeft<half, 32, 32>>(0x0);
    auto Tinv_below_64_right = tile_at<TileRight<half, 32, 32>>(0x0);
    auto Tinv_below_64 = tile_at<TileAcc<float, 32, 32>>(0xa000);
    auto Tinv_blocks_32_h1 = tile_at<L1Tile<half, 64, 64>>(0x6200);
    auto Tinv_below_64_f16 = tile_at<L1Tile<half, 32, 32>>(0x13a00);
    auto Tinv_below_64_left_h1 = tile_at<TileLeft<half, 32, 32>>(0x8000);
    auto Tinv_below_64_right_h1 = tile_at<TileRight<half, 32, 32>>(0x8000);
    auto Tinv_below_64_h1 = tile_at<TileAcc<float, 32, 32>>(0xb000);
    auto Tinv_corner_64_left = tile_at<TileLeft<half, 32, 32>>(0x0);
    auto Tinv_corner_64_right = tile_at<TileRight<half, 32, 32>>(0x0);
    auto Tinv_corner_64 = tile_at<TileAcc<float, 32, 32>>(0xc000);
    auto Tinv_below_64_f16_h1 = tile_at<L1Tile<half, 32, 32>>(0x14200);
    auto Tinv_blocks_64 = tile_at<L1Tile<half, 64, 64>>(0x2200);
    auto Tinv_corner_64_left_h1 = tile_at<TileLeft<half, 32, 32>>(0x8000);
    auto Tinv_corner_64_right_h1 = tile_at<TileRight<half, 32, 32>>(0x8000);
    auto Tinv_corner_64_h1 = tile_at<TileAcc<float, 32, 32>>(0xd000);
    auto Tinv_blocks_64_h1 = tile_at<L1Tile<half, 64, 64>>(0x6200);
    auto Tinv_left = tile_at<TileLeft<half, 64, 64>>(0x0);
    auto Tinv_right = tile_at<TileRight<half, 64, 64>>(0x0);
    auto Tinv = tile_at<TileAcc<float, 64, 64>>(0xe000);
    auto Tinv_left_h1 = tile_at<TileLeft<half, 64, 64>>(0x8000);
    auto Tinv_right_h1 = tile_at<TileRight<half, 64, 64>>(0x8000);
    auto Tinv_h1 = tile_at<TileAcc<float, 64, 64>>(0x12000);
    // Tinv = unit_lower_inverse(A)
    TLOAD(minus_identity, view(minus_identity_float16_gm, 64, 64, 64));
    TLOAD(identity, view(identity_float16_16_gm, 16, 16, 16));
    set_flag(PIPE_MTE1, PIPE_MTE2, EVENT_ID0);  // Tinv_blocks_64 -> Tinv_zeros
    ffts_cross_core_sync(PIPE_MTE2, group_flag(1));  // diagonal_stack_A_4_f16_channel -> store
    ffts_cross_core_sync(PIPE_MTE2, group_flag(2));  // Tinv_rows_2_f16_channel -> store
    set_flag(PIPE_MTE1, PIPE_MTE2, EVENT_ID1);  // Tinv_blocks_64_h1 -> Tinv_zeros_h1
    ffts_cross_core_sync(PIPE_MTE2, group_flag(3));  // diagonal_stack_A_4_f16_channel1 -> store
    ffts_cross_core_sync(PIPE_MTE2, group_flag(4));  // Tinv_rows_2_f16_channel1 -> store
    ffts_cross_core_sync(PIPE_MTE2, group_flag(5));  // diagonal_stack_A_8_f16_channel -> store
    set_flag(PIPE_M, PIPE_MTE1, EVENT_ID0);  // Tinv_left -> Tinv_below_4_left
    ffts_cross_core_sync(PIPE_MTE2, group_flag(6));  // diagonal_stack_A_8_f16_channel1 -> store
    set_flag(PIPE_M, PIPE_MTE1, EVENT_ID1);  // Tinv_left_h1 -> identity_product_left
    ffts_cross_core_sync(PIPE_MTE2, group_flag(7));  // diagonal_stack_16_f16_channel -> store
    ffts_cross_core_sync(PIPE_MTE2, group_flag(8));  // diagonal_stack_16_f16_channel1 -> store
    for (int64_t item = get_block_idx(); item < slots * ((HV + 1) / 2); item += get_block_num()) {
        const int64_t hv = item % ((HV + 1) / 2) * 2;
        const int64_t hv_1 = hv + 1 < HV ? hv + 1 : HV - 1;
        const int64_t slot = item / ((HV + 1) / 2), n = sequence_of(cu_seqlens, N, slot, 64);
        const int64_t first = cu_seqlens[n], length = cu_seqlens[n + 1] - first;
        const int64_t c = slot - first / 64 - n;
        if (c * 64 >= length) continue;
        wait_flag(PIPE_MTE1, PIPE_MTE2, EVENT_ID0);  // Tinv_blocks_64 -> Tinv_zeros
        TEXPANDS(Tinv_zeros, 0.0f);
        TLOAD(A_cube, view(A_ws_gm + (slot * HV + hv) * 4096, 64, 64, 64));
        wait_flag(PIPE_MTE1, PIPE_MTE2, EVENT_ID1);  // Tinv_blocks_64_h1 -> Tinv_zeros_h1
        TEXPANDS(Tinv_zeros_h1, 0.0f);
        wait_flag_dev(0);  // diagonal_stack_A_4_f16_channel -> diagonal_stack_A_4_f16_in
        TLOAD(diagonal_stack_A_4_f16_in, view(diagonal_stack_A_4_f16_channel_gm + get_block_idx() * 1024, 64, 16, 16));
        set_flag(PIPE_MTE2, PIPE_MTE1, EVENT_ID0);  // diagonal_stack_A_4_f16_in -> Tinv_below_4_left
        ffts_cross_core_sync(PIPE_MTE2, group_flag(1));  // diagonal_stack_A_4_f16_channel -> store
        wait_flag_dev(0);  // Tinv_rows_2_f16_channel -> Tinv_rows_2_f16_in
        TLOAD(Tinv_rows_2_f16_in, view(Tinv_rows_2_f16_channel_gm + get_block_idx() * 1024, 64, 16, 16));
        set_flag(PIPE_MTE2, PIPE_MTE1, EVENT_ID1);  // Tinv_rows_2_f16_in -> Tinv_below_4_right
        ffts_cross_core_sync(PIPE_MTE2, group_flag(2));  // Tinv_rows_2_f16_channel -> store
        wait_flag(PIPE_MTE2, PIPE_MTE1, EVENT_ID0);  // diagonal_stack_A_4_f16_in -> Tinv_below_4_left
        wait_flag(PIPE_M, PIPE_MTE1, EVENT_ID0);  // Tinv_left -> Tinv_below_4_left
        TEXTRACT(Tinv_below_4_left, diagonal_stack_A_4_f16_in, 0, 0);
        wait_flag(PIPE_MTE2, PIPE_MTE1, EVENT_ID1);  // Tinv_rows_2_f16_in -> Tinv_below_4_right
        TEXTRACT(Tinv_below_4_right, Tinv_rows_2_f16_in, 0, 0);
        set_flag(PIPE_MTE1, PIPE_M, EVENT_ID0);  // Tinv_below_4_right -> Tinv_below_4
        wait_flag(PIPE_MTE1, PIPE_M, EVENT_ID0);  // Tinv_below_4_right -> Tinv_below_4
        stacked_product<half, 64, false>(0x0, 0x0, 0x0);  // Tinv_below_4
        set_flag(PIPE_M, PIPE_FIX, EVENT_ID0);  // Tinv_below_4 -> Tinv_below_4_f16
        set_flag(PIPE_M, PIPE_MTE1, EVENT_ID2);  // Tinv_below_4_left -> Tinv_below_4_left_h1
        wait_flag_dev(0);  // diagonal_stack_A_4_f16_channel1 -> diagonal_stack_A_4_f16_in_h1
        TLOAD(diagonal_stack_A_4_f16_in_h1, view(diagonal_stack_A_4_f16_channel1_gm + get_block_idx() * 1024, 64, 16, 16));
        set_flag(PIPE_MTE2, PIPE_MTE1, EVENT_ID2);  // diagonal_stack_A_4_f16_in_h1 -> Tinv_below_4_left_h1
        ffts_cross_core_sync(PIPE_MTE2, group_flag(3));  // diagonal_stack_A_4_f16_channel1 -> store
        wait_flag(PIPE_M, PIPE_FIX, EVENT_ID0);  // Tinv_below_4 -> Tinv_below_4_f16
        TMOV(Tinv_below_4_f16, Tinv_below_4);
        set_flag(PIPE_FIX, PIPE_MTE1, EVENT_ID0);  // Tinv_below_4_f16 -> Tinv_rows_4_right
        wait_flag(PIPE_M, PIPE_MTE1, EVENT_ID1);  // Tinv_left_h1 -> identity_product_left
        TEXTRACT(identity_product_left, Tinv_rows_2_f16_in, 0, 0);
        TEXTRACT(identity_product_right, identity, 0, 0);
        set_flag(PIPE_MTE1, PIPE_M, EVENT_ID1);  // identity_product_right -> identity_product
        wait_flag(PIPE_MTE1, PIPE_M, EVENT_ID1);  // identity_product_right -> identity_product
        TMATMUL(identity_product, identity_product_left, identity_product_right);
        set_flag(PIPE_M, PIPE_MTE1, EVENT_ID3);  // identity_product_left -> Tinv_rows_4_left
        wait_flag_dev(0);  // Tinv_rows_2_f16_channel1 -> Tinv_rows_2_f16_in_h1
        TLOAD(Tinv_rows_2_f16_in_h1, view(Tinv_rows_2_f16_channel1_gm + get_block_idx() * 1024, 64, 16, 16));
        set_flag(PIPE_MTE2, PIPE_MTE1, EVENT_ID3);  // Tinv_rows_2_f16_in_h1 -> Tinv_below_4_right_h1
        ffts_cross_core_sync(PIPE_MTE2, group_flag(4));  // Tinv_rows_2_f16_channel1 -> store
        wait_flag(PIPE_MTE2, PIPE_MTE1, EVENT_ID2);  // diagonal_stack_A_4_f16_in_h1 -> Tinv_below_4_left_h1
        wait_flag(PIPE_M, PIPE_MTE1, EVENT_ID2);  // Tinv_below_4_left -> Tinv_below_4_left_h1
        TEXTRACT(Tinv_below_4_left_h1, diagonal_stack_A_4_f16_in_h1, 0, 0);
        wait_flag(PIPE_MTE2, PIPE_MTE1, EVENT_ID3);  // Tinv_rows_2_f16_in_h1 -> Tinv_below_4_right_h1
        TEXTRACT(Tinv_below_4_right_h1, Tinv_rows_2_f16_in_h1, 0, 0);
        set_flag(PIPE_MTE1, PIPE_M, EVENT_ID2);  // Tinv_below_4_right_h1 -> Tinv_below_4_h1
        wait_flag(PIPE_MTE1, PIPE_M, EVENT_ID2);  // Tinv_below_4_right_h1 -> Tinv_below_4_h1
        stacked_product<half, 64, false>(0x2000, 0x0, 0x0);  // Tinv_below_4_h1
        set_flag(PIPE_M, PIPE_FIX, EVENT_ID1);  // Tinv_below_4_h1 -> Tinv_below_4_f16_h1
        set_flag(PIPE_M, PIPE_MTE1, EVENT_ID4);  // Tinv_below_4_left_h1 -> identity_product_left_h1
        wait_flag_dev(0);  // diagonal_stack_A_8_f16_channel -> diagonal_stack_A_8_f16_in
        TLOAD(diagonal_stack_A_8_f16_in, view(diagonal_stack_A_8_f16_channel_gm + get_block_idx() * 1024, 64, 16, 16));
        ffts_cross_core_sync(PIPE_MTE2, group_flag(5));  // diagonal_stack_A_8_f16_channel -> store
        wait_flag_dev(0);  // diagonal_stack_A_8_f16_channel1 -> diagonal_stack_A_8_f16_in_h1
        TLOAD(diagonal_stack_A_8_f16_in_h1, view(diagonal_stack_A_8_f16_channel1_gm + get_block_idx() * 1024, 64, 16, 16));
        ffts_cross_core_sync(PIPE_MTE2, group_flag(6));  // diagonal_stack_A_8_f16_channel1 -> store
        wait_flag(PIPE_M, PIPE_MTE1, EVENT_ID3);  // identity_product_left -> Tinv_rows_4_left
        TEXTRACT(Tinv_rows_4_left, Tinv_rows_2_f16_in, 0, 0);
        wait_flag(PIPE_FIX, PIPE_MTE1, EVENT_ID0);  // Tinv_below_4_f16 -> Tinv_rows_4_right
        TEXTRACT(Tinv_rows_4_right, Tinv_below_4_f16, 0, 0);
        set_flag(PIPE_MTE1, PIPE_M, EVENT_ID3);  // Tinv_rows_4_right -> Tinv_rows_4
        wait_flag(PIPE_MTE1, PIPE_M, EVENT_ID3);  // Tinv_rows_4_right -> Tinv_rows_4
        stacked_product<half, 64, true>(0x1000, 0x8000, 0x8000);  // Tinv_rows_4
        set_flag(PIPE_M, PIPE_FIX, EVENT_ID2);  // Tinv_rows_4 -> Tinv_rows_4_f16
        set_flag(PIPE_M, PIPE_MTE1, EVENT_ID5);  // Tinv_rows_4_left -> Tinv_rows_4_left_h1
        wait_flag(PIPE_M, PIPE_FIX, EVENT_ID1);  // Tinv_below_4_h1 -> Tinv_below_4_f16_h1
        TMOV(Tinv_below_4_f16_h1, Tinv_below_4_h1);
        set_flag(PIPE_FIX, PIPE_MTE1, EVENT_ID1);  // Tinv_below_4_f16_h1 -> Tinv_rows_4_right_h1
        wait_flag_dev(0);  // diagonal_stack_16_f16_channel -> diagonal_stack_16_f16_in
        TLOAD(diagonal_stack_16_f16_in, view(diagonal_stack_16_f16_channel_gm + get_block_idx() * 1024, 64, 16, 16));
        ffts_cross_core_sync(PIPE_MTE2, group_flag(7));  // diagonal_stack_16_f16_channel -> store
        wait_flag(PIPE_M, PIPE_MTE1, EVENT_ID4);  // Tinv_below_4_left_h1 -> identity_product_left_h1
        TEXTRACT(identity_product_left_h1, Tinv_rows_2_f16_in_h1, 0, 0);
        TEXTRACT(identity_product_right_h1, identity, 0, 0);
        set_flag(PIPE_MTE1, PIPE_M, EVENT_ID4);  // identity_product_right_h1 -> identity_product_h1
        wait_flag(PIPE_MTE1, PIPE_M, EVENT_ID4);  // identity_product_right_h1 -> identity_product_h1
        TMATMUL(identity_product_h1, identity_product_left_h1, identity_product_right_h1);
        wait_flag(PIPE_M, PIPE_FIX, EVENT_ID2);  // Tinv_rows_4 -> Tinv_rows_4_f16
        TMOV(Tinv_rows_4_f16, Tinv_rows_4);
        wait_flag_dev(0);  // diagonal_stack_16_f16_channel1 -> diagonal_stack_16_f16_in_h1
        TLOAD(diagonal_stack_16_f16_in_h1, view(diagonal_stack_16_f16_channel1_gm + get_block_idx() * 1024, 64, 16, 16));
        ffts_cross_core_sync(PIPE_MTE2, group_flag(8));  // diagonal_stack_16_f16_channel1 -> store
        wait_flag(PIPE_M, PIPE_MTE1, EVENT_ID5);  // Tinv_rows_4_left -> Tinv_rows_4_left_h1
        TEXTRACT(Tinv_rows_4_left_h1, Tinv_rows_2_f16_in_h1, 0, 0);
        wait_flag(PIPE_FIX, PIPE_MTE1, EVENT_ID1);  // Tinv_below_4_f16_h1 -> Tinv_rows_4_right_h1
        TEXTRACT(Tinv_rows_4_right_h1, Tinv_below_4_f16_h1, 0, 0);
        set_flag(PIPE_MTE1, PIPE_M, EVENT_ID5);  // Tinv_rows_4_right_h1 -> Tinv_rows_4_h1
        wait_flag(PIPE_MTE1, PIPE_M, EVENT_ID5);  // Tinv_rows_4_right_h1 -> Tinv_rows_4_h1
        stacked_product<half, 64, true>(0x3000, 0x8000, 0x8000);  // Tinv_rows_4_h1
        TLOAD(A_cube_h1, view(A_ws_gm + (slot * HV + hv_1) * 4096, 64, 64, 64));
        pipe_barrier(PIPE_ALL);
        TEXTRACT(Tinv_below_8_left, diagonal_stack_A_8_f16_in, 0, 0);
        TEXTRACT(Tinv_below_8_right, Tinv_rows_4_f16, 0, 0);
        set_flag(PIPE_MTE1, PIPE_M, EVENT_ID6);  // Tinv_below_8_right -> Tinv_below_8
        wait_flag(PIPE_MTE1, PIPE_M, EVENT_ID6);  // Tinv_below_8_right -> Tinv_below_8
        stacked_product<half, 64, false>(0x4000, 0x0, 0x0);  // Tinv_below_8
        set_flag(PIPE_M, PIPE_FIX, EVENT_ID3);  // Tinv_below_8 -> Tinv_below_8_f16
        set_flag(PIPE_M, PIPE_MTE1, EVENT_ID6);  // Tinv_below_8_left -> Tinv_rows_8_left
        TMOV(Tinv_rows_4_f16_h1, Tinv_rows_4_h1);
        set_flag(PIPE_FIX, PIPE_MTE1, EVENT_ID2);  // Tinv_rows_4_f16_h1 -> Tinv_below_8_right_h1
        wait_flag(PIPE_M, PIPE_FIX, EVENT_ID3);  // Tinv_below_8 -> Tinv_below_8_f16
        TMOV(Tinv_below_8_f16, Tinv_below_8);
        set_flag(PIPE_FIX, PIPE_MTE1, EVENT_ID3);  // Tinv_below_8_f16 -> Tinv_rows_8_right
        TEXTRACT(Tinv_below_8_left_h1, diagonal_stack_A_8_f16_in_h1, 0, 0);
        wait_flag(PIPE_FIX, PIPE_MTE1, EVENT_ID2);  // Tinv_rows_4_f16_h1 -> Tinv_below_8_right_h1
        TEXTRACT(Tinv_below_8_right_h1, Tinv_rows_4_f16_h1, 0, 0);
        set_flag(PIPE_MTE1, PIPE_M, EVENT_ID7);  // Tinv_below_8_right_h1 -> Tinv_below_8_h1
        wait_flag(PIPE_MTE1, PIPE_M, EVENT_ID7);  // Tinv_below_8_right_h1 -> Tinv_below_8_h1
        stacked_product<half, 64, false>(0x5000, 0x8000, 0x8000);  // Tinv_below_8_h1
        set_flag(PIPE_M, PIPE_FIX, EVENT_ID4);  // Tinv_below_8_h1 -> Tinv_below_8_f16_h1
        set_flag(PIPE_M, PIPE_MTE1, EVENT_ID7);  // Tinv_below_8_left_h1 -> Tinv_rows_8_left_h1
        wait_flag(PIPE_M, PIPE_MTE1, EVENT_ID6);  // Tinv_below_8_left -> Tinv_rows_8_left
        TEXTRACT(Tinv_rows_8_left, Tinv_rows_4_f16, 0, 0);
        wait_flag(PIPE_FIX, PIPE_MTE1, EVENT_ID3);  // Tinv_below_8_f16 -> Tinv_rows_8_right
        TEXTRACT(Tinv_rows_8_right, Tinv_below_8_f16, 0, 0);
        set_flag(PIPE_MTE1, PIPE_M, EVENT_ID0);  // Tinv_rows_8_right -> Tinv_rows_8
        wait_flag(PIPE_MTE1, PIPE_M, EVENT_ID0);  // Tinv_rows_8_right -> Tinv_rows_8
        stacked_product<half, 64, true>(0x1000, 0x0, 0x0);  // Tinv_rows_8
        set_flag(PIPE_M, PIPE_FIX, EVENT_ID5);  // Tinv_rows_8 -> Tinv_rows_8_f16
        set_flag(PIPE_M, PIPE_MTE1, EVENT_ID0);  // Tinv_rows_8_left -> Tinv_below_16_left
        wait_flag(PIPE_M, PIPE_FIX, EVENT_ID4);  // Tinv_below_8_h1 -> Tinv_below_8_f16_h1
        TMOV(Tinv_below_8_f16_h1, Tinv_below_8_h1);
        set_flag(PIPE_FIX, PIPE_MTE1, EVENT_ID4);  // Tinv_below_8_f16_h1 -> Tinv_rows_8_right_h1
        wait_flag(PIPE_M, PIPE_FIX, EVENT_ID5);  // Tinv_rows_8 -> Tinv_rows_8_f16
        TMOV(Tinv_rows_8_f16, Tinv_rows_8);
        set_flag(PIPE_FIX, PIPE_MTE1, EVENT_ID5);  // Tinv_rows_8_f16 -> Tinv_below_16_right
        wait_flag(PIPE_M, PIPE_MTE1, EVENT_ID7);  // Tinv_below_8_left_h1 -> Tinv_rows_8_left_h1
        TEXTRACT(Tinv_rows_8_left_h1, Tinv_rows_4_f16_h1, 0, 0);
        wait_flag(PIPE_FIX, PIPE_MTE1, EVENT_ID4);  // Tinv_below_8_f16_h1 -> Tinv_rows_8_right_h1
        TEXTRACT(Tinv_rows_8_right_h1, Tinv_below_8_f16_h1, 0, 0);
        set_flag(PIPE_MTE1, PIPE_M, EVENT_ID1);  // Tinv_rows_8_right_h1 -> Tinv_rows_8_h1
        wait_flag(PIPE_MTE1, PIPE_M, EVENT_ID1);  // Tinv_rows_8_right_h1 -> Tinv_rows_8_h1
        stacked_product<half, 64, true>(0x3000, 0x8000, 0x8000);  // Tinv_rows_8_h1
        set_flag(PIPE_M, PIPE_FIX, EVENT_ID6);  // Tinv_rows_8_h1 -> Tinv_rows_8_f16_h1
        set_flag(PIPE_M, PIPE_MTE1, EVENT_ID1);  // Tinv_rows_8_left_h1 -> Tinv_below_16_left_h1
        wait_flag(PIPE_M, PIPE_MTE1, EVENT_ID0);  // Tinv_rows_8_left -> Tinv_below_16_left
        TEXTRACT(Tinv_below_16_left, diagonal_stack_16_f16_in, 0, 0);
        wait_flag(PIPE_FIX, PIPE_MTE1, EVENT_ID5);  // Tinv_rows_8_f16 -> Tinv_below_16_right
        TEXTRACT(Tinv_below_16_right, Tinv_rows_8_f16, 0, 0);
        set_flag(PIPE_MTE1, PIPE_M, EVENT_ID2);  // Tinv_below_16_right -> Tinv_below_16
        wait_flag(PIPE_MTE1, PIPE_M, EVENT_ID2);  // Tinv_below_16_right -> Tinv_below_16
        stacked_product<half, 64, false>(0x6000, 0x0, 0x0);  // Tinv_below_16
        set_flag(PIPE_M, PIPE_FIX, EVENT_ID7);  // Tinv_below_16 -> Tinv_below_16_f16
        set_flag(PIPE_M, PIPE_MTE1, EVENT_ID2);  // Tinv_below_16_left -> Tinv_rows_16_left
        wait_flag(PIPE_M, PIPE_FIX, EVENT_ID6);  // Tinv_rows_8_h1 -> Tinv_rows_8_f16_h1
        TMOV(Tinv_rows_8_f16_h1, Tinv_rows_8_h1);
        set_flag(PIPE_FIX, PIPE_MTE1, EVENT_ID6);  // Tinv_rows_8_f16_h1 -> Tinv_below_16_right_h1
        wait_flag(PIPE_M, PIPE_FIX, EVENT_ID7);  // Tinv_below_16 -> Tinv_below_16_f16
        TMOV(Tinv_below_16_f16, Tinv_below_16);
        set_flag(PIPE_FIX, PIPE_MTE1, EVENT_ID7);  // Tinv_below_16_f16 -> Tinv_rows_16_right
        wait_flag(PIPE_M, PIPE_MTE1, EVENT_ID1);  // Tinv_rows_8_left_h1 -> Tinv_below_16_left_h1
        TEXTRACT(Tinv_below_16_left_h1, diagonal_stack_16_f16_in_h1, 0, 0);
        wait_flag(PIPE_FIX, PIPE_MTE1, EVENT_ID6);  // Tinv_rows_8_f16_h1 -> Tinv_below_16_right_h1
        TEXTRACT(Tinv_below_16_right_h1, Tinv_rows_8_f16_h1, 0, 0);
        set_flag(PIPE_MTE1, PIPE_M, EVENT_ID3);  // Tinv_below_16_right_h1 -> Tinv_below_16_h1
        wait_flag(PIPE_MTE1, PIPE_M, EVENT_ID3);  // Tinv_below_16_right_h1 -> Tinv_below_16_h1
        stacked_product<half, 64, false>(0x7000, 0x8000, 0x8000);  // Tinv_below_16_h1
        set_flag(PIPE_M, PIPE_FIX, EVENT_ID0);  // Tinv_below_16_h1 -> Tinv_below_16_f16_h1
        set_flag(PIPE_M, PIPE_MTE1, EVENT_ID3);  // Tinv_below_16_left_h1 -> Tinv_rows_16_left_h1
        wait_flag(PIPE_M, PIPE_MTE1, EVENT_ID2);  // Tinv_below_16_left -> Tinv_rows_16_left
        TEXTRACT(Tinv_rows_16_left, Tinv_rows_8_f16, 0, 0);
        wait_flag(PIPE_FIX, PIPE_MTE1, EVENT_ID7);  // Tinv_below_16_f16 -> Tinv_rows_16_right
        TEXTRACT(Tinv_rows_16_right, Tinv_below_16_f16, 0, 0);
        set_flag(PIPE_MTE1, PIPE_M, EVENT_ID4);  // Tinv_rows_16_right -> Tinv_rows_16
        wait_flag(PIPE_MTE1, PIPE_M, EVENT_ID4);  // Tinv_rows_16_right -> Tinv_rows_16
        stacked_product<half, 64, true>(0x1000, 0x0, 0x0);  // Tinv_rows_16
        set_flag(PIPE_M, PIPE_FIX, EVENT_ID1);  // Tinv_rows_16 -> Tinv_blocks_16
        set_flag(PIPE_M, PIPE_MTE1, EVENT_ID4);  // Tinv_rows_16_left -> Tinv_below_32_left
        wait_flag(PIPE_M, PIPE_FIX, EVENT_ID0);  // Tinv_below_16_h1 -> Tinv_below_16_f16_h1
        TMOV(Tinv_below_16_f16_h1, Tinv_below_16_h1);
        set_flag(PIPE_FIX, PIPE_MTE1, EVENT_ID0);  // Tinv_below_16_f16_h1 -> Tinv_rows_16_right_h1
        wait_flag(PIPE_M, PIPE_FIX, EVENT_ID1);  // Tinv_rows_16 -> Tinv_blocks_16
        insert_blocks<16, 64, 4>(Tinv_blocks_16, 0x2200, 2560, 0x1000);
        set_flag(PIPE_FIX, PIPE_MTE1, EVENT_ID1);  // Tinv_blocks_16 -> Tinv_below_32_right
        wait_flag(PIPE_M, PIPE_MTE1, EVENT_ID3);  // Tinv_below_16_left_h1 -> Tinv_rows_16_left_h1
        TEXTRACT(Tinv_rows_16_left_h1, Tinv_rows_8_f16_h1, 0, 0);
        wait_flag(PIPE_FIX, PIPE_MTE1, EVENT_ID0);  // Tinv_below_16_f16_h1 -> Tinv_rows_16_right_h1
        TEXTRACT(Tinv_rows_16_right_h1, Tinv_below_16_f16_h1, 0, 0);
        set_flag(PIPE_MTE1, PIPE_M, EVENT_ID5);  // Tinv_rows_16_right_h1 -> Tinv_rows_16_h1
        wait_flag(PIPE_MTE1, PIPE_M, EVENT_ID5);  // Tinv_rows_16_right_h1 -> Tinv_rows_16_h1
        stacked_product<half, 64, true>(0x3000, 0x8000, 0x8000);  // Tinv_rows_16_h1
        set_flag(PIPE_M, PIPE_FIX, EVENT_ID2);  // Tinv_rows_16_h1 -> Tinv_blocks_16_h1
        set_flag(PIPE_M, PIPE_MTE1, EVENT_ID5);  // Tinv_rows_16_left_h1 -> Tinv_below_32_left_h1
        wait_flag(PIPE_M, PIPE_MTE1, EVENT_ID4);  // Tinv_rows_16_left -> Tinv_below_32_left
        extract_blocks<TileLeft<half, 16, 16>, 2>(0x0, A_cube, 16, 0, 32, 32);
        wait_flag(PIPE_FIX, PIPE_MTE1, EVENT_ID1);  // Tinv_blocks_16 -> Tinv_below_32_right
        extract_blocks<TileRight<half, 16, 16>, 2>(0x0, Tinv_blocks_16, 0, 0, 32, 32);
        set_flag(PIPE_MTE1, PIPE_M, EVENT_ID6);  // Tinv_below_32_right -> Tinv_below_32
        wait_flag(PIPE_MTE1, PIPE_M, EVENT_ID6);  // Tinv_below_32_right -> Tinv_below_32
        stacked_product<half, 32, false>(0x8000, 0x0, 0x0);  // Tinv_below_32
        set_flag(PIPE_M, PIPE_FIX, EVENT_ID3);  // Tinv_below_32 -> Tinv_below_32_f16
        set_flag(PIPE_M, PIPE_MTE1, EVENT_ID6);  // Tinv_below_32_left -> Tinv_corner_32_left
        wait_flag(PIPE_M, PIPE_FIX, EVENT_ID2);  // Tinv_rows_16_h1 -> Tinv_blocks_16_h1
        insert_blocks<16, 64, 4>(Tinv_blocks_16_h1, 0x6200, 2560, 0x3000);
        set_flag(PIPE_FIX, PIPE_MTE1, EVENT_ID2);  // Tinv_blocks_16_h1 -> Tinv_below_32_right_h1
        wait_flag(PIPE_M, PIPE_FIX, EVENT_ID3);  // Tinv_below_32 -> Tinv_below_32_f16
        TMOV(Tinv_below_32_f16, Tinv_below_32);
        set_flag(PIPE_FIX, PIPE_MTE1, EVENT_ID3);  // Tinv_below_32_f16 -> Tinv_corner_32_right
        wait_flag(PIPE_M, PIPE_MTE1, EVENT_ID5);  // Tinv_rows_16_left_h1 -> Tinv_below_32_left_h1
        extract_blocks<TileLeft<half, 16, 16>, 2>(0x8000, A_cube_h1, 16, 0, 32, 32);
        wait_flag(PIPE_FIX, PIPE_MTE1, EVENT_ID2);  // Tinv_blocks_16_h1 -> Tinv_below_32_right_h1
        extract_blocks<TileRight<half, 16, 16>, 2>(0x8000, Tinv_blocks_16_h1, 0, 0, 32, 32);
        set_flag(PIPE_MTE1, PIPE_M, EVENT_ID7);  // Tinv_below_32_right_h1 -> Tinv_below_32_h1
        wait_flag(PIPE_MTE1, PIPE_M, EVENT_ID7);  // Tinv_below_32_right_h1 -> Tinv_below_32_h1
        stacked_product<half, 32, false>(0x8800, 0x8000, 0x8000);  // Tinv_below_32_h1
        set_flag(PIPE_M, PIPE_FIX, EVENT_ID4);  // Tinv_below_32_h1 -> Tinv_below_32_f16_h1
        set_flag(PIPE_M, PIPE_MTE1, EVENT_ID7);  // Tinv_below_32_left_h1 -> Tinv_corner_32_left_h1
        wait_flag(PIPE_M, PIPE_MTE1, EVENT_ID6);  // Tinv_below_32_left -> Tinv_corner_32_left
        extract_blocks<TileLeft<half, 16, 16>, 2>(0x0, Tinv_blocks_16, 16, 16, 32, 32);
        wait_flag(PIPE_FIX, PIPE_MTE1, EVENT_ID3);  // Tinv_below_32_f16 -> Tinv_corner_32_right
        TEXTRACT(Tinv_corner_32_right, Tinv_below_32_f16, 0, 0);
        set_flag(PIPE_MTE1, PIPE_M, EVENT_ID0);  // Tinv_corner_32_right -> Tinv_corner_32
        wait_flag(PIPE_MTE1, PIPE_M, EVENT_ID0);  // Tinv_corner_32_right -> Tinv_corner_32
        stacked_product<half, 32, false>(0x9000, 0x0, 0x0);  // Tinv_corner_32
        set_flag(PIPE_M, PIPE_FIX, EVENT_ID5);  // Tinv_corner_32 -> Tinv_blocks_32
        set_flag(PIPE_M, PIPE_MTE1, EVENT_ID0);  // Tinv_corner_32_left -> Tinv_below_64_left
        wait_flag(PIPE_M, PIPE_FIX, EVENT_ID4);  // Tinv_below_32_h1 -> Tinv_below_32_f16_h1
        TMOV(Tinv_below_32_f16_h1, Tinv_below_32_h1);
        set_flag(PIPE_FIX, PIPE_MTE1, EVENT_ID4);  // Tinv_below_32_f16_h1 -> Tinv_corner_32_right_h1
        wait_flag(PIPE_M, PIPE_FIX, EVENT_ID5);  // Tinv_corner_32 -> Tinv_blocks_32
        insert_blocks<16, 32, 2>(Tinv_blocks_32, 0x2400, 5120, 0x9000);
        set_flag(PIPE_FIX, PIPE_MTE1, EVENT_ID5);  // Tinv_blocks_32 -> Tinv_below_64_right
        wait_flag(PIPE_M, PIPE_MTE1, EVENT_ID7);  // Tinv_below_32_left_h1 -> Tinv_corner_32_left_h1
        extract_blocks<TileLeft<half, 16, 16>, 2>(0x8000, Tinv_blocks_16_h1, 16, 16, 32, 32);
        wait_flag(PIPE_FIX, PIPE_MTE1, EVENT_ID4);  // Tinv_below_32_f16_h1 -> Tinv_corner_32_right_h1
        TEXTRACT(Tinv_corner_32_right_h1, Tinv_below_32_f16_h1, 0, 0);
        set_flag(PIPE_MTE1, PIPE_M, EVENT_ID1);  // Tinv_corner_32_right_h1 -> Tinv_corner_32_h1
        wait_flag(PIPE_MTE1, PIPE_M, EVENT_ID1);  // Tinv_corner_32_right_h1 -> Tinv_corner_32_h1
        stacked_product<half, 32, false>(0x9800, 0x8000, 0x8000);  // Tinv_corner_32_h1
        set_flag(PIPE_M, PIPE_FIX, EVENT_ID6);  // Tinv_corner_32_h1 -> Tinv_blocks_32_h1
        set_flag(PIPE_M, PIPE_MTE1, EVENT_ID1);  // Tinv_corner_32_left_h1 -> Tinv_below_64_left_h1
        wait_flag(PIPE_M, PIPE_MTE1, EVENT_ID0);  // Tinv_corner_32_left -> Tinv_below_64_left
        TEXTRACT(Tinv_below_64_left, A_cube, 32, 0);
        wait_flag(PIPE_FIX, PIPE_MTE1, EVENT_ID5);  // Tinv_blocks_32 -> Tinv_below_64_right
        TEXTRACT(Tinv_below_64_right, Tinv_blocks_32, 0, 0);
        set_flag(PIPE_MTE1, PIPE_M, EVENT_ID2);  // Tinv_below_64_right -> Tinv_below_64
        wait_flag(PIPE_MTE1, PIPE_M, EVENT_ID2);  // Tinv_below_64_right -> Tinv_below_64
        TMATMUL(Tinv_below_64, Tinv_below_64_left, Tinv_below_64_right);
        set_flag(PIPE_M, PIPE_FIX, EVENT_ID7);  // Tinv_below_64 -> Tinv_below_64_f16
        set_flag(PIPE_M, PIPE_MTE1, EVENT_ID2);  // Tinv_below_64_left -> Tinv_corner_64_left
        wait_flag(PIPE_M, PIPE_FIX, EVENT_ID6);  // Tinv_corner_32_h1 -> Tinv_blocks_32_h1
        insert_blocks<16, 32, 2>(Tinv_blocks_32_h1, 0x6400, 5120, 0x9800);
        set_flag(PIPE_FIX, PIPE_MTE1, EVENT_ID6);  // Tinv_blocks_32_h1 -> Tinv_below_64_right_h1
        wait_flag(PIPE_M, PIPE_FIX, EVENT_ID7);  // Tinv_below_64 -> Tinv_below_64_f16
        TMOV(Tinv_below_64_f16, Tinv_below_64);
        set_flag(PIPE_FIX, PIPE_MTE1, EVENT_ID7);  // Tinv_below_64_f16 -> Tinv_corner_64_right
        wait_flag(PIPE_M, PIPE_MTE1, EVENT_ID1);  // Tinv_corner_32_left_h1 -> Tinv_below_64_left_h1
        TEXTRACT(Tinv_below_64_left_h1, A_cube_h1, 32, 0);
        wait_flag(PIPE_FIX, PIPE_MTE1, EVENT_ID6);  // Tinv_blocks_32_h1 -> Tinv_below_64_right_h1
        TEXTRACT(Tinv_below_64_right_h1, Tinv_blocks_32_h1, 0, 0);
        set_flag(PIPE_MTE1, PIPE_M, EVENT_ID3);  // Tinv_below_64_right_h1 -> Tinv_below_64_h1
        wait_flag(PIPE_MTE1, PIPE_M, EVENT_ID3);  // Tinv_below_64_right_h1 -> Tinv_below_64_h1
        TMATMUL(Tinv_below_64_h1, Tinv_below_64_left_h1, Tinv_below_64_right_h1);
        set_flag(PIPE_M, PIPE_FIX, EVENT_ID0);  // Tinv_below_64_h1 -> Tinv_below_64_f16_h1
        set_flag(PIPE_M, PIPE_MTE1, EVENT_ID3);  // Tinv_below_64_left_h1 -> Tinv_corner_64_left_h1
        wait_flag(PIPE_M, PIPE_MTE1, EVENT_ID2);  // Tinv_below_64_left -> Tinv_corner_64_left
        TEXTRACT(Tinv_corner_64_left, Tinv_blocks_32, 32, 32);
        wait_flag(PIPE_FIX, PIPE_MTE1, EVENT_ID7);  // Tinv_below_64_f16 -> Tinv_corner_64_right
        TEXTRACT(Tinv_corner_64_right, Tinv_below_64_f16, 0, 0);
        set_flag(PIPE_MTE1, PIPE_M, EVENT_ID4);  // Tinv_corner_64_right -> Tinv_corner_64
        wait_flag(PIPE_MTE1, PIPE_M, EVENT_ID4);  // Tinv_corner_64_right -> Tinv_corner_64
        TMATMUL(Tinv_corner_64, Tinv_corner_64_left, Tinv_corner_64_right);
        set_flag(PIPE_M, PIPE_FIX, EVENT_ID1);  // Tinv_corner_64 -> Tinv_blocks_64
        wait_flag(PIPE_M, PIPE_FIX, EVENT_ID0);  // Tinv_below_64_h1 -> Tinv_below_64_f16_h1
        TMOV(Tinv_below_64_f16_h1, Tinv_below_64_h1);
        set_flag(PIPE_FIX, PIPE_MTE1, EVENT_ID0);  // Tinv_below_64_f16_h1 -> Tinv_corner_64_right_h1
        wait_flag(PIPE_M, PIPE_FIX, EVENT_ID1);  // Tinv_corner_64 -> Tinv_blocks_64
        insert_blocks<32, 32, 1>(Tinv_blocks_64, 0x2600, 0, 0xc000);
        set_flag(PIPE_FIX, PIPE_MTE1, EVENT_ID1);  // Tinv_blocks_64 -> Tinv_left
        wait_flag(PIPE_M, PIPE_MTE1, EVENT_ID3);  // Tinv_below_64_left_h1 -> Tinv_corner_64_left_h1
        TEXTRACT(Tinv_corner_64_left_h1, Tinv_blocks_32_h1, 32, 32);
        wait_flag(PIPE_FIX, PIPE_MTE1, EVENT_ID0);  // Tinv_below_64_f16_h1 -> Tinv_corner_64_right_h1
        TEXTRACT(Tinv_corner_64_right_h1, Tinv_below_64_f16_h1, 0, 0);
        set_flag(PIPE_MTE1, PIPE_M, EVENT_ID5);  // Tinv_corner_64_right_h1 -> Tinv_corner_64_h1
        wait_flag(PIPE_MTE1, PIPE_M, EVENT_ID5);  // Tinv_corner_64_right_h1 -> Tinv_corner_64_h1
        TMATMUL(Tinv_corner_64_h1, Tinv_corner_64_left_h1, Tinv_corner_64_right_h1);
        set_flag(PIPE_M, PIPE_FIX, EVENT_ID2);  // Tinv_corner_64_h1 -> Tinv_blocks_64_h1
        wait_flag(PIPE_M, PIPE_FIX, EVENT_ID2);  // Tinv_corner_64_h1 -> Tinv_blocks_64_h1
        insert_blocks<32, 32, 1>(Tinv_blocks_64_h1, 0x6600, 0, 0xd000);
        set_flag(PIPE_FIX, PIPE_MTE1, EVENT_ID2);  // Tinv_blocks_64_h1 -> Tinv_left_h1
        wait_flag(PIPE_FIX, PIPE_MTE1, EVENT_ID1);  // Tinv_blocks_64 -> Tinv_left
        TEXTRACT(Tinv_left, Tinv_blocks_64, 0, 0);
        set_flag(PIPE_MTE1, PIPE_MTE2, EVENT_ID0);  // Tinv_blocks_64 -> Tinv_zeros
        TEXTRACT(Tinv_right, minus_identity, 0, 0);
        set_flag(PIPE_MTE1, PIPE_M, EVENT_ID6);  // Tinv_right -> Tinv
        wait_flag(PIPE_MTE1, PIPE_M, EVENT_ID6);  // Tinv_right -> Tinv
        TMATMUL(Tinv, Tinv_left, Tinv_right);
        set_flag(PIPE_M, PIPE_FIX, EVENT_ID3);  // Tinv -> store
        set_flag(PIPE_M, PIPE_MTE1, EVENT_ID0);  // Tinv_left -> Tinv_below_4_left
        wait_flag(PIPE_M, PIPE_FIX, EVENT_ID3);  // Tinv -> store
        TSTORE(view(Tinv_ws_gm + (slot * HV + hv) * 4096, 64, 64, 64), Tinv);
        wait_flag(PIPE_FIX, PIPE_MTE1, EVENT_ID2);  // Tinv_blocks_64_h1 -> Tinv_left_h1
        TEXTRACT(Tinv_left_h1, Tinv_blocks_64_h1, 0, 0);
        set_flag(PIPE_MTE1, PIPE_MTE2, EVENT_ID1);  // Tinv_blocks_64_h1 -> Tinv_zeros_h1
        TEXTRACT(Tinv_right_h1, minus_identity, 0, 0);
        set_flag(PIPE_MTE1, PIPE_M, EVENT_ID7);  // Tinv_right_h1 -> Tinv_h1
        wait_flag(PIPE_MTE1, PIPE_M, EVENT_ID7);  // Tinv_right_h1 -> Tinv_h1
        TMATMUL(Tinv_h1, Tinv_left_h1, Tinv_right_h1);
        set_flag(PIPE_M, PIPE_FIX, EVENT_ID4);  // Tinv_h1 -> store
        set_flag(PIPE_M, PIPE_MTE1, EVENT_ID1);  // Tinv_left_h1 -> identity_product_left
        wait_flag(PIPE_M, PIPE_FIX, EVENT_ID4);  // Tinv_h1 -> store
        TSTORE(view(Tinv_ws_gm + (slot * HV + hv_1) * 4096, 64, 64, 64), Tinv_h1);
    }
    wait_flag(PIPE_MTE1, PIPE_MTE2, EVENT_ID0);  // Tinv_blocks_64 -> Tinv_zeros
    wait_flag(PIPE_MTE1, PIPE_MTE2, EVENT_ID1);  // Tinv_blocks_64_h1 -> Tinv_zeros_h1
    wait_flag(PIPE_M, PIPE_MTE1, EVENT_ID0);  // Tinv_left -> Tinv_below_4_left
    wait_flag(PIPE_M, PIPE_MTE1, EVENT_ID1);  // Tinv_left_h1 -> identity_product_left
#endif
#if defined(__DAV_C220_VEC__) || (defined(__DAV_VEC__) && !defined(__CPU_SIM))
    set_mask_norm();
    set_vector_mask(-1, -1);
    __gm__ int64_t *table = reinterpret_cast<__gm__ int64_t *>(table_bytes);
    __gm__ half *A_ws_gm = reinterpret_cast<__gm__ half *>(workspace + table[0]);
    __gm__ half *diagonal_stack_A_4_f16_channel_gm = reinterpret_cast<__gm__ half *>(workspace + table[2]);
    __gm__ half *Tinv_rows_2_f16_channel_gm = reinterpret_cast<__gm__ half *>(workspace + table[3]);
    __gm__ half *diagonal_stack_A_8_f16_channel_gm = reinterpret_cast<__gm__ half *>(workspace + table[4]);
    __gm__ half *diagonal_stack_16_f16_channel_gm = reinterpret_cast<__gm__ half *>(workspace + table[5]);
    __gm__ half *diagonal_stack_A_4_f16_channel1_gm = reinterpret_cast<__gm__ half *>(workspace + table[6]);
    __gm__ half *Tinv_rows_2_f16_channel1_gm = reinterpret_cast<__gm__ half *>(workspace + table[7]);
    __gm__ half *diagonal_stack_A_8_f16_channel1_gm = reinterpret_cast<__gm__ half *>(workspace + table[8]);
    __gm__ half *diagonal_stack_16_f16_channel1_gm = reinterpret_cast<__gm__ half *>(workspace + table[9]);
    __gm__ float *pairs_1_mask_of_16_gm = reinterpret_cast<__gm__ float *>(constants + 8192);
    __gm__ float *eye_mask_of_16_gm = reinterpret_cast<__gm__ float *>(constants + 12288);
    __gm__ float *pairs_2_mask_of_16_gm = reinterpret_cast<__gm__ float *>(constants + 16384);
    __gm__ float *pairs_4_mask_of_16_gm = reinterpret_cast<__gm__ float *>(constants + 20480);
    __gm__ float *pairs_8_mask_of_16_gm = reinterpret_cast<__gm__ float *>(constants + 24576);
    __gm__ int32_t *cu_seqlens = reinterpret_cast<__gm__ int32_t *>(cu_seqlens_bytes);
    const int64_t sub = get_subblockid();
    auto pairs_1_mask_of_16 = tile_at<UbTile<float, 32, 16>>(0x0);
    auto eye_mask_of_16 = tile_at<UbTile<float, 32, 16>>(0x800);
    auto pairs_2_mask_of_16 = tile_at<UbTile<float, 32, 16>>(0x1000);
    auto pairs_4_mask_of_16 = tile_at<UbTile<float, 32, 16>>(0x1800);
    auto pairs_8_mask_of_16 = tile_at<UbTile<float, 32, 16>>(0x2000);
    auto A = tile_at<UbTile<half, 32, 64>>(0x2800);
    auto diagonal_stack_A = tile_at<UbTile<float, 32, 16>>(0x3800);
    auto A_h1 = tile_at<UbTile<half, 32, 64>>(0x4000);
    auto diagonal_stack_A_2 = tile_at<UbTile<float, 32, 16>>(0x5000);
    auto Tinv_rows_2 = tile_at<UbTile<float, 32, 16>>(0x5000);
    auto diagonal_stack_A_4 = tile_at<UbTile<float, 32, 16>>(0x5800);
    auto diagonal_stack_A_4_f16 = tile_at<UbTile<half, 32, 16>>(0x6000);
    auto Tinv_rows_2_f16 = tile_at<UbTile<half, 32, 16>>(0x6400);
    auto diagonal_stack_A_h1 = tile_at<UbTile<float, 32, 16>>(0x6800);
    auto diagonal_stack_A_2_h1 = tile_at<UbTile<float, 32, 16>>(0x7000);
    auto Tinv_rows_2_h1 = tile_at<UbTile<float, 32, 16>>(0x7000);
    auto diagonal_stack_A_4_h1 = tile_at<UbTile<float, 32, 16>>(0x7800);
    auto diagonal_stack_A_4_f16_h1 = tile_at<UbTile<half, 32, 16>>(0x8000);
    auto Tinv_rows_2_f16_h1 = tile_at<UbTile<half, 32, 16>>(0x8400);
    auto diagonal_stack_A_8 = tile_at<UbTile<float, 32, 16>>(0x8800);
    auto diagonal_stack_A_8_f16 = tile_at<UbTile<half, 32, 16>>(0x9000);
    auto diagonal_stack_A_8_h1 = tile_at<UbTile<float, 32, 16>>(0x9400);
    auto diagonal_stack_A_8_f16_h1 = tile_at<UbTile<half, 32, 16>>(0x9c00);
    auto diagonal_stack_16 = tile_at<UbTile<float, 32, 16>>(0x3800);
    auto diagonal_stack_16_f16 = tile_at<UbTile<half, 32, 16>>(0xa000);
    auto diagonal_stack_16_h1 = tile_at<UbTile<float, 32, 16>>(0x6800);
    auto diagonal_stack_16_f16_h1 = tile_at<UbTile<half, 32, 16>>(0xa400);
    // Tinv = unit_lower_inverse(A)
    TLOAD(pairs_1_mask_of_16, view(pairs_1_mask_of_16_gm + sub * 32 * 16, 32, 16, 16));
    TLOAD(eye_mask_of_16, view(eye_mask_of_16_gm + sub * 32 * 16, 32, 16, 16));
    TLOAD(pairs_2_mask_of_16, view(pairs_2_mask_of_16_gm + sub * 32 * 16, 32, 16, 16));
    TLOAD(pairs_4_mask_of_16, view(pairs_4_mask_of_16_gm + sub * 32 * 16, 32, 16, 16));
    TLOAD(pairs_8_mask_of_16, view(pairs_8_mask_of_16_gm + sub * 32 * 16, 32, 16, 16));
    set_flag(PIPE_V, PIPE_MTE2, EVENT_ID0);  // A -> A
    set_flag(PIPE_V, PIPE_MTE2, EVENT_ID1);  // A_h1 -> A_h1
    set_flag(PIPE_MTE3, PIPE_V, EVENT_ID0);  // diagonal_stack_A_4_f16 -> diagonal_stack_A_4_f16
    set_flag(PIPE_MTE3, PIPE_V, EVENT_ID1);  // Tinv_rows_2_f16 -> Tinv_rows_2_f16
    set_flag(PIPE_MTE3, PIPE_V, EVENT_ID2);  // diagonal_stack_A_4_f16_h1 -> diagonal_stack_A_4_f16_h1
    set_flag(PIPE_MTE3, PIPE_V, EVENT_ID3);  // Tinv_rows_2_f16_h1 -> Tinv_rows_2_f16_h1
    set_flag(PIPE_MTE3, PIPE_V, EVENT_ID4);  // diagonal_stack_A_8_f16 -> diagonal_stack_A_8_f16
    set_flag(PIPE_MTE3, PIPE_V, EVENT_ID5);  // diagonal_stack_A_8_f16_h1 -> diagonal_stack_A_8_f16_h1
    set_flag(PIPE_MTE3, PIPE_V, EVENT_ID6);  // diagonal_stack_16_f16 -> diagonal_stack_16_f16
    set_flag(PIPE_MTE3, PIPE_V, EVENT_ID7);  // diagonal_stack_16_f16_h1 -> diagonal_stack_16_f16_h1
    for (int64_t item = get_block_idx(); item < slots * ((HV + 1) / 2); item += get_block_num()) {
        const int64_t hv = item % ((HV + 1) / 2) * 2;
        const int64_t hv_1 = hv + 1 < HV ? hv + 1 : HV - 1;
        const int64_t slot = item / ((HV + 1) / 2), n = sequence_of(cu_seqlens, N, slot, 64);
        const int64_t first = cu_seqlens[n], length = cu_seqlens[n + 1] - first;
        const int64_t c = slot - first / 64 - n;
        if (c * 64 >= length) continue;
        wait_flag(PIPE_V, PIPE_MTE2, EVENT_ID0);  // A -> A
        TLOAD(A, view(A_ws_gm + (slot * HV + hv) * 4096 + sub * 32 * 64, 32, 64, 64));
        set_flag(PIPE_MTE2, PIPE_V, EVENT_ID0);  // A -> diagonal_stack_A
        wait_flag(PIPE_MTE2, PIPE_V, EVENT_ID0);  // A -> diagonal_stack_A
        diagonal_stack<16>(diagonal_stack_A, 0x3800, A, 0x2800 + sub * 64);
        set_flag(PIPE_V, PIPE_MTE2, EVENT_ID0);  // A -> A
        wait_flag(PIPE_V, PIPE_MTE2, EVENT_ID1);  // A_h1 -> A_h1
        TLOAD(A_h1, view(A_ws_gm + (slot * HV + hv_1) * 4096 + sub * 32 * 64, 32, 64, 64));
        set_flag(PIPE_MTE2, PIPE_V, EVENT_ID1);  // A_h1 -> diagonal_stack_A_h1
        pipe_barrier(PIPE_V);
        TMUL(diagonal_stack_A_2, diagonal_stack_A, pairs_1_mask_of_16);
        pipe_barrier(PIPE_V);
        TSUB(Tinv_rows_2, diagonal_stack_A_2, eye_mask_of_16);
        TMUL(diagonal_stack_A_4, diagonal_stack_A, pairs_2_mask_of_16);
        wait_flag(PIPE_MTE3, PIPE_V, EVENT_ID0);  // diagonal_stack_A_4_f16 -> diagonal_stack_A_4_f16
        pipe_barrier(PIPE_V);
        TCVT(diagonal_stack_A_4_f16, diagonal_stack_A_4, RoundMode::CAST_RINT);
        set_flag(PIPE_V, PIPE_MTE3, EVENT_ID0);  // diagonal_stack_A_4_f16 -> store
        wait_flag(PIPE_MTE3, PIPE_V, EVENT_ID1);  // Tinv_rows_2_f16 -> Tinv_rows_2_f16
        TCVT(Tinv_rows_2_f16, Tinv_rows_2, RoundMode::CAST_RINT);
        set_flag(PIPE_V, PIPE_MTE3, EVENT_ID1);  // Tinv_rows_2_f16 -> store
        wait_flag(PIPE_V, PIPE_MTE3, EVENT_ID0);  // diagonal_stack_A_4_f16 -> store
        wait_flag_dev(1);  // diagonal_stack_A_4_f16_channel -> store
        TSTORE(view(diagonal_stack_A_4_f16_channel_gm + get_block_idx() * 1024 + sub * 32 * 16, 32, 16, 16), diagonal_stack_A_4_f16);
        ffts_cross_core_sync(PIPE_MTE3, group_flag(0));  // diagonal_stack_A_4_f16_channel -> diagonal_stack_A_4_f16_in
        set_flag(PIPE_MTE3, PIPE_V, EVENT_ID0);  // diagonal_stack_A_4_f16 -> diagonal_stack_A_4_f16
        wait_flag(PIPE_V, PIPE_MTE3, EVENT_ID1);  // Tinv_rows_2_f16 -> store
        wait_flag_dev(2);  // Tinv_rows_2_f16_channel -> store
        TSTORE(view(Tinv_rows_2_f16_channel_gm + get_block_idx() * 1024 + sub * 32 * 16, 32, 16, 16), Tinv_rows_2_f16);
        ffts_cross_core_sync(PIPE_MTE3, group_flag(0));  // Tinv_rows_2_f16_channel -> Tinv_rows_2_f16_in
        set_flag(PIPE_MTE3, PIPE_V, EVENT_ID1);  // Tinv_rows_2_f16 -> Tinv_rows_2_f16
        wait_flag(PIPE_MTE2, PIPE_V, EVENT_ID1);  // A_h1 -> diagonal_stack_A_h1
        diagonal_stack<16>(diagonal_stack_A_h1, 0x6800, A_h1, 0x4000 + sub * 64);
        set_flag(PIPE_V, PIPE_MTE2, EVENT_ID1);  // A_h1 -> A_h1
        pipe_barrier(PIPE_V);
        TMUL(diagonal_stack_A_2_h1, diagonal_stack_A_h1, pairs_1_mask_of_16);
        pipe_barrier(PIPE_V);
        TSUB(Tinv_rows_2_h1, diagonal_stack_A_2_h1, eye_mask_of_16);
        TMUL(diagonal_stack_A_4_h1, diagonal_stack_A_h1, pairs_2_mask_of_16);
        wait_flag(PIPE_MTE3, PIPE_V, EVENT_ID2);  // diagonal_stack_A_4_f16_h1 -> diagonal_stack_A_4_f16_h1
        pipe_barrier(PIPE_V);
        TCVT(diagonal_stack_A_4_f16_h1, diagonal_stack_A_4_h1, RoundMode::CAST_RINT);
        set_flag(PIPE_V, PIPE_MTE3, EVENT_ID2);  // diagonal_stack_A_4_f16_h1 -> store
        wait_flag(PIPE_MTE3, PIPE_V, EVENT_ID3);  // Tinv_rows_2_f16_h1 -> Tinv_rows_2_f16_h1
        TCVT(Tinv_rows_2_f16_h1, Tinv_rows_2_h1, RoundMode::CAST_RINT);
        set_flag(PIPE_V, PIPE_MTE3, EVENT_ID3);  // Tinv_rows_2_f16_h1 -> store
        wait_flag(PIPE_V, PIPE_MTE3, EVENT_ID2);  // diagonal_stack_A_4_f16_h1 -> store
        wait_flag_dev(3);  // diagonal_stack_A_4_f16_channel1 -> store
        TSTORE(view(diagonal_stack_A_4_f16_channel1_gm + get_block_idx() * 1024 + sub * 32 * 16, 32, 16, 16), diagonal_stack_A_4_f16_h1);
        ffts_cross_core_sync(PIPE_MTE3, group_flag(0));  // diagonal_stack_A_4_f16_channel1 -> diagonal_stack_A_4_f16_in_h1
        set_flag(PIPE_MTE3, PIPE_V, EVENT_ID2);  // diagonal_stack_A_4_f16_h1 -> diagonal_stack_A_4_f16_h1
        wait_flag(PIPE_V, PIPE_MTE3, EVENT_ID3);  // Tinv_rows_2_f16_h1 -> store
        wait_flag_dev(4);  // Tinv_rows_2_f16_channel1 -> store
        TSTORE(view(Tinv_rows_2_f16_channel1_gm + get_block_idx() * 1024 + sub * 32 * 16, 32, 16, 16), Tinv_rows_2_f16_h1);
        ffts_cross_core_sync(PIPE_MTE3, group_flag(0));  // Tinv_rows_2_f16_channel1 -> Tinv_rows_2_f16_in_h1
        set_flag(PIPE_MTE3, PIPE_V, EVENT_ID3);  // Tinv_rows_2_f16_h1 -> Tinv_rows_2_f16_h1
        TMUL(diagonal_stack_A_8, diagonal_stack_A, pairs_4_mask_of_16);
        wait_flag(PIPE_MTE3, PIPE_V, EVENT_ID4);  // diagonal_stack_A_8_f16 -> diagonal_stack_A_8_f16
        pipe_barrier(PIPE_V);
        TCVT(diagonal_stack_A_8_f16, diagonal_stack_A_8, RoundMode::CAST_RINT);
        set_flag(PIPE_V, PIPE_MTE3, EVENT_ID4);  // diagonal_stack_A_8_f16 -> store
        wait_flag(PIPE_V, PIPE_MTE3, EVENT_ID4);  // diagonal_stack_A_8_f16 -> store
        wait_flag_dev(5);  // diagonal_stack_A_8_f16_channel -> store
        TSTORE(view(diagonal_stack_A_8_f16_channel_gm + get_block_idx() * 1024 + sub * 32 * 16, 32, 16, 16), diagonal_stack_A_8_f16);
        ffts_cross_core_sync(PIPE_MTE3, group_flag(0));  // diagonal_stack_A_8_f16_channel -> diagonal_stack_A_8_f16_in
        set_flag(PIPE_MTE3, PIPE_V, EVENT_ID4);  // diagonal_stack_A_8_f16 -> diagonal_stack_A_8_f16
        TMUL(diagonal_stack_A_8_h1, diagonal_stack_A_h1, pairs_4_mask_of_16);
        wait_flag(PIPE_MTE3, PIPE_V, EVENT_ID5);  // diagonal_stack_A_8_f16_h1 -> diagonal_stack_A_8_f16_h1
        pipe_barrier(PIPE_V);
        TCVT(diagonal_stack_A_8_f16_h1, diagonal_stack_A_8_h1, RoundMode::CAST_RINT);
        set_flag(PIPE_V, PIPE_MTE3, EVENT_ID5);  // diagonal_stack_A_8_f16_h1 -> store
        wait_flag(PIPE_V, PIPE_MTE3, EVENT_ID5);  // diagonal_stack_A_8_f16_h1 -> store
        wait_flag_dev(6);  // diagonal_stack_A_8_f16_channel1 -> store
        TSTORE(view(diagonal_stack_A_8_f16_channel1_gm + get_block_idx() * 1024 + sub * 32 * 16, 32, 16, 16), diagonal_stack_A_8_f16_h1);
        ffts_cross_core_sync(PIPE_MTE3, group_flag(0));  // diagonal_stack_A_8_f16_channel1 -> diagonal_stack_A_8_f16_in_h1
        set_flag(PIPE_MTE3, PIPE_V, EVENT_ID5);  // diagonal_stack_A_8_f16_h1 -> diagonal_stack_A_8_f16_h1
        TMUL(diagonal_stack_16, diagonal_stack_A, pairs_8_mask_of_16);
        wait_flag(PIPE_MTE3, PIPE_V, EVENT_ID6);  // diagonal_stack_16_f16 -> diagonal_stack_16_f16
        pipe_barrier(PIPE_V);
        TCVT(diagonal_stack_16_f16, diagonal_stack_16, RoundMode::CAST_RINT);
        set_flag(PIPE_V, PIPE_MTE3, EVENT_ID6);  // diagonal_stack_16_f16 -> store
        wait_flag(PIPE_V, PIPE_MTE3, EVENT_ID6);  // diagonal_stack_16_f16 -> store
        wait_flag_dev(7);  // diagonal_stack_16_f16_channel -> store
        TSTORE(view(diagonal_stack_16_f16_channel_gm + get_block_idx() * 1024 + sub * 32 * 16, 32, 16, 16), diagonal_stack_16_f16);
        ffts_cross_core_sync(PIPE_MTE3, group_flag(0));  // diagonal_stack_16_f16_channel -> diagonal_stack_16_f16_in
        set_flag(PIPE_MTE3, PIPE_V, EVENT_ID6);  // diagonal_stack_16_f16 -> diagonal_stack_16_f16
        TMUL(diagonal_stack_16_h1, diagonal_stack_A_h1, pairs_8_mask_of_16);
        wait_flag(PIPE_MTE3, PIPE_V, EVENT_ID7);  // diagonal_stack_16_f16_h1 -> diagonal_stack_16_f16_h1
        pipe_barrier(PIPE_V);
        TCVT(diagonal_stack_16_f16_h1, diagonal_stack_16_h1, RoundMode::CAST_RINT);
        set_flag(PIPE_V, PIPE_MTE3, EVENT_ID7);  // diagonal_stack_16_f16_h1 -> store
        wait_flag(PIPE_V, PIPE_MTE3, EVENT_ID7);  // diagonal_stack_16_f16_h1 -> store
        wait_flag_dev(8);  // diagonal_stack_16_f16_channel1 -> store
        TSTORE(view(diagonal_stack_16_f16_channel1_gm + get_block_idx() * 1024 + sub * 32 * 16, 32, 16, 16), diagonal_stack_16_f16_h1);
        ffts_cross_core_sync(PIPE_MTE3, group_flag(0));  // diagonal_stack_16_f16_channel1 -> diagonal_stack_16_f16_in_h1
        set_flag(PIPE_MTE3, PIPE_V, EVENT_ID7);  // diagonal_stack_16_f16_h1 -> diagonal_stack_16_f16_h1
    }
    wait_flag(PIPE_V, PIPE_MTE2, EVENT_ID0);  // A -> A
    wait_flag(PIPE_V, PIPE_MTE2, EVENT_ID1);  // A_h1 -> A_h1
    wait_flag(PIPE_MTE3, PIPE_V, EVENT_ID0);  // diagonal_stack_A_4_f16 -> diagonal_stack_A_4_f16
    wait_flag(PIPE_MTE3, PIPE_V, EVENT_ID1);  // Tinv_rows_2_f16 -> Tinv_rows_2_f16
    wait_flag_dev(1);  // diagonal_stack_A_4_f16_channel -> store
    wait_flag_dev(2);  // Tinv_rows_2_f16_channel -> store
    wait_flag(PIPE_MTE3, PIPE_V, EVENT_ID2);  // diagonal_stack_A_4_f16_h1 -> diagonal_stack_A_4_f16_h1
    wait_flag(PIPE_MTE3, PIPE_V, EVENT_ID3);  // Tinv_rows_2_f16_h1 -> Tinv_rows_2_f16_h1
    wait_flag_dev(3);  // diagonal_stack_A_4_f16_channel1 -> store
    wait_flag_dev(4);  // Tinv_rows_2_f16_channel1 -> store
    wait_flag(PIPE_MTE3, PIPE_V, EVENT_ID4);  // diagonal_stack_A_8_f16 -> diagonal_stack_A_8_f16
    wait_flag_dev(5);  // diagonal_stack_A_8_f16_channel -> store
    wait_flag(PIPE_MTE3, PIPE_V, EVENT_ID5);  // diagonal_stack_A_8_f16_h1 -> diagonal_stack_A_8_f16_h1
    wait_flag_dev(6);  // diagonal_stack_A_8_f16_channel1 -> store
    wait_flag(PIPE_MTE3, PIPE_V, EVENT_ID6);  // diagonal_stack_16_f16 -> diagonal_stack_16_f16
    wait_flag_dev(7);  // diagonal_stack_16_f16_channel -> store
    wait_flag(PIPE_MTE3, PIPE_V, EVENT_ID7);  // diagonal_stack_16_f16_h1 -> diagonal_stack_16_f16_h1
    wait_flag_dev(8);  // diagonal_stack_16_f16_channel1 -> store
#endif
#endif
}

/**
 * @brief U_weight_U_offset over chunks.
 * k: input, token, [C, K] float16
 * v: input, token, [C, V] float16
 * beta: input, token, [C] float32
 * G_ws: workspace, slot, [C] float32, in workspace
 * Tinv_ws: workspace, slot, [C, C] float16, in workspace
 * U_weight_ws: workspace, slot, [C, K] float16, in workspace
 * U_offset_ws: workspace, slot, [C, V] float32, in workspace
 * beta_v_f16_channel: workspace, block, [C, V] float16, in workspace
 * beta_exp_G_k_f16_channel: workspace, block, [C, K] float16, in workspace
 */
PTO_ENTRY void gated_delta_rule_U_weight_U_offset_fp16(
    __gm__ uint8_t *k_bytes,
    __gm__ uint8_t *v_bytes,
    __gm__ uint8_t *beta_bytes,
    __gm__ uint8_t *workspace,
    __gm__ uint8_t *table_bytes,
    __gm__ uint8_t *cu_seqlens_bytes,
    int64_t N,
    int64_t T,
    int64_t batched,
    int64_t H,
    int64_t HV,
    int64_t slots,
    uint64_t ffts)
{
#if defined(__CCE_AICORE__)
    set_ffts_base_addr(ffts);
#if defined(__DAV_C220_CUBE__) || (defined(__DAV_CUBE__) && !defined(__CPU_SIM))
    __gm__ int64_t *table = reinterpret_cast<__gm__ int64_t *>(table_bytes);
    __gm__ half *Tinv_ws_gm = reinterpret_cast<__gm__ half *>(workspace + table[1]);
    __gm__ half *U_weight_ws_gm = reinterpret_cast<__gm__ half *>(workspace + table[2]);
    __gm__ float *U_offset_ws_gm = reinterpret_cast<__gm__ float *>(workspace + table[3]);
    __gm__ half *beta_v_f16_channel_gm = reinterpret_cast<__gm__ half *>(workspace + table[4]);
    __gm__ half *beta_exp_G_k_f16_channel_gm = reinterpret_cast<__gm__ half *>(workspace + table[5]);
    __gm__ int32_t *cu_seqlens = reinterpret_cast<__gm__ int32_t *>(cu_seqlens_bytes);
    auto Tinv = tile_at<L1Tile<half, 64, 64>>(0x0);
    auto beta_v_f16_in = tile_at<L1Tile<half, 64, 128>>(0x2000);
    auto U_offset_left = tile_at<TileLeft<half, 64, 64>>(0x0);
    auto U_offset_right = tile_at<TileRight<half, 64, 128>>(0x0);
    auto U_offset = tile_at<TileAcc<float, 64, 128>>(0x0);
    auto beta_exp_G_k_f16_in = tile_at<L1Tile<half, 64, 128>>(0x6000);
    auto U_weight_left = tile_at<TileLeft<half, 64, 64>>(0x8000);
    auto U_weight_right = tile_at<TileRight<half, 64, 128>>(0x8000);
    auto U_weight = tile_at<TileAcc<float, 64, 128>>(0x8000);
    set_flag(PIPE_MTE1, PIPE_MTE2, EVENT_ID0);  // Tinv -> Tinv
    ffts_cross_core_sync(PIPE_MTE2, group_flag(1));  // beta_v_f16_channel -> store
    ffts_cross_core_sync(PIPE_MTE2, group_flag(2));  // beta_exp_G_k_f16_channel -> store
    set_flag(PIPE_M, PIPE_MTE1, EVENT_ID0);  // U_offset_left -> U_offset_left
    set_flag(PIPE_FIX, PIPE_M, EVENT_ID0);  // U_offset -> U_offset
    set_flag(PIPE_MTE1, PIPE_MTE2, EVENT_ID1);  // beta_exp_G_k_f16_in -> beta_exp_G_k_f16_in
    set_flag(PIPE_M, PIPE_MTE1, EVENT_ID1);  // U_weight_left -> U_weight_left
    set_flag(PIPE_FIX, PIPE_M, EVENT_ID1);  // U_weight_f16 -> U_weight
    for (int64_t item = get_block_idx(); item < slots * HV; item += get_block_num()) {
        const int64_t hv = item % HV;
        const int64_t slot = item / HV, n = sequence_of(cu_seqlens, N, slot, 64);
        const int64_t first = cu_seqlens[n], length = cu_seqlens[n + 1] - first;
        const int64_t c = slot - first / 64 - n;
        if (c * 64 >= length) continue;
        wait_flag(PIPE_MTE1, PIPE_MTE2, EVENT_ID0);  // Tinv -> Tinv
        TLOAD(Tinv, view(Tinv_ws_gm + (slot * HV + hv) * 4096, 64, 64, 64));
        set_flag(PIPE_MTE2, PIPE_MTE1, EVENT_ID0);  // Tinv -> U_offset_left
        wait_flag_dev(0);  // beta_v_f16_channel -> beta_v_f16_in
        TLOAD(beta_v_f16_in, view(beta_v_f16_channel_gm + get_block_idx() * 8192, 64, 128, 128));
        set_flag(PIPE_MTE2, PIPE_MTE1, EVENT_ID1);  // beta_v_f16_in -> U_offset_right
        ffts_cross_core_sync(PIPE_MTE2, group_flag(1));  // beta_v_f16_channel -> store
        wait_flag(PIPE_MTE2, PIPE_MTE1, EVENT_ID0);  // Tinv -> U_offset_left
        wait_flag(PIPE_M, PIPE_MTE1, EVENT_ID0);  // U_offset_left -> U_offset_left
        TEXTRACT(U_offset_left, Tinv, 0, 0);
        wait_flag(PIPE_MTE2, PIPE_MTE1, EVENT_ID1);  // beta_v_f16_in -> U_offset_right
        TEXTRACT(U_offset_right, beta_v_f16_in, 0, 0);
        set_flag(PIPE_MTE1, PIPE_M, EVENT_ID0);  // U_offset_right -> U_offset
        wait_flag(PIPE_MTE1, PIPE_M, EVENT_ID0);  // U_offset_right -> U_offset
        wait_flag(PIPE_FIX, PIPE_M, EVENT_ID0);  // U_offset -> U_offset
        // U_offset = Tinv @ (beta[:, None] * v)
        TMATMUL(U_offset, U_offset_left, U_offset_right);
        set_flag(PIPE_M, PIPE_FIX, EVENT_ID0);  // U_offset -> store
        set_flag(PIPE_M, PIPE_MTE1, EVENT_ID0);  // U_offset_left -> U_offset_left
        wait_flag_dev(0);  // beta_exp_G_k_f16_channel -> beta_exp_G_k_f16_in
        wait_flag(PIPE_MTE1, PIPE_MTE2, EVENT_ID1);  // beta_exp_G_k_f16_in -> beta_exp_G_k_f16_in
        TLOAD(beta_exp_G_k_f16_in, view(beta_exp_G_k_f16_channel_gm + get_block_idx() * 8192, 64, 128, 128));
        set_flag(PIPE_MTE2, PIPE_MTE1, EVENT_ID2);  // beta_exp_G_k_f16_in -> U_weight_right
        ffts_cross_core_sync(PIPE_MTE2, group_flag(2));  // beta_exp_G_k_f16_channel -> store
        wait_flag(PIPE_M, PIPE_FIX, EVENT_ID0);  // U_offset -> store
        TSTORE(view(U_offset_ws_gm + (slot * HV + hv) * 8192, 64, 128, 128), U_offset);
        set_flag(PIPE_FIX, PIPE_M, EVENT_ID0);  // U_offset -> U_offset
        wait_flag(PIPE_M, PIPE_MTE1, EVENT_ID1);  // U_weight_left -> U_weight_left
        TEXTRACT(U_weight_left, Tinv, 0, 0);
        set_flag(PIPE_MTE1, PIPE_MTE2, EVENT_ID0);  // Tinv -> Tinv
        wait_flag(PIPE_MTE2, PIPE_MTE1, EVENT_ID2);  // beta_exp_G_k_f16_in -> U_weight_right
        TEXTRACT(U_weight_right, beta_exp_G_k_f16_in, 0, 0);
        set_flag(PIPE_MTE1, PIPE_M, EVENT_ID1);  // U_weight_right -> U_weight
        set_flag(PIPE_MTE1, PIPE_MTE2, EVENT_ID1);  // beta_exp_G_k_f16_in -> beta_exp_G_k_f16_in
        wait_flag(PIPE_MTE1, PIPE_M, EVENT_ID1);  // U_weight_right -> U_weight
        wait_flag(PIPE_FIX, PIPE_M, EVENT_ID1);  // U_weight_f16 -> U_weight
        // U_weight = Tinv @ (beta[:, None] * (exp(G)[:, None] * k))
        TMATMUL(U_weight, U_weight_left, U_weight_right);
        set_flag(PIPE_M, PIPE_FIX, EVENT_ID1);  // U_weight -> store
        set_flag(PIPE_M, PIPE_MTE1, EVENT_ID1);  // U_weight_left -> U_weight_left
        wait_flag(PIPE_M, PIPE_FIX, EVENT_ID1);  // U_weight -> store
        TSTORE(view(U_weight_ws_gm + (slot * HV + hv) * 8192, 64, 128, 128), U_weight);
        set_flag(PIPE_FIX, PIPE_M, EVENT_ID1);  // U_weight_f16 -> U_weight
    }
    wait_flag(PIPE_MTE1, PIPE_MTE2, EVENT_ID0);  // Tinv -> Tinv
    wait_flag(PIPE_M, PIPE_MTE1, EVENT_ID0);  // U_offset_left -> U_offset_left
    wait_flag(PIPE_FIX, PIPE_M, EVENT_ID0);  // U_offset -> U_offset
    wait_flag(PIPE_MTE1, PIPE_MTE2, EVENT_ID1);  // beta_exp_G_k_f16_in -> beta_exp_G_k_f16_in
    wait_flag(PIPE_M, PIPE_MTE1, EVENT_ID1);  // U_weight_left -> U_weight_left
    wait_flag(PIPE_FIX, PIPE_M, EVENT_ID1);  // U_weight_f16 -> U_weight
#endif
#if defined(__DAV_C220_VEC__) || (defined(__DAV_VEC__) && !defined(__CPU_SIM))
    set_mask_norm();
    set_vector_mask(-1, -1);
    __gm__ int64_t *table = reinterpret_cast<__gm__ int64_t *>(table_bytes);
    __gm__ half *k_gm = reinterpret_cast<__gm__ half *>(k_bytes);
    __gm__ half *v_gm = reinterpret_cast<__gm__ half *>(v_bytes);
    __gm__ float *beta_gm = reinterpret_cast<__gm__ float *>(beta_bytes);
    __gm__ float *G_ws_gm = reinterpret_cast<__gm__ float *>(workspace + table[0]);
    __gm__ half *beta_v_f16_channel_gm = reinterpret_cast<__gm__ half *>(workspace + table[4]);
    __gm__ half *beta_exp_G_k_f16_channel_gm = reinterpret_cast<__gm__ half *>(workspace + table[5]);
    __gm__ int32_t *cu_seqlens = reinterpret_cast<__gm__ int32_t *>(cu_seqlens_bytes);
    const int64_t sub = get_subblockid();
    auto v = tile_at<UbTile<half, 32, 128>>(0x0);
    auto k = tile_at<UbTile<half, 32, 128>>(0x2000);
    auto v_f32 = tile_at<UbTile<float, 32, 128>>(0x4000);
    auto k_f32 = tile_at<UbTile<float, 32, 128>>(0x8000);
    auto beta_wide = tile_at<UbWide<float, 64>>(0xc000);
    auto G = tile_at<UbTile<float, 1, 64>>(0xc800);
    auto beta = tile_at<UbTile<float, 1, 64>>(0xd100);
    auto beta_col = tile_at<UbCol<float, 32>>(0xd100 + sub * 128);
    auto beta_v = tile_at<UbTile<float, 32, 128>>(0x4000);
    auto exp_G = tile_at<UbTile<float, 1, 64>>(0xc800);
    auto exp_G_col = tile_at<UbCol<float, 32>>(0xc800 + sub * 128);
    auto exp_G_k = tile_at<UbTile<float, 32, 128>>(0x8000);
    auto beta_v_f16 = tile_at<UbTile<half, 32, 128>>(0xd200);
    auto beta_exp_G_k = tile_at<UbTile<float, 32, 128>>(0x8000);
    auto beta_exp_G_k_f16 = tile_at<UbTile<half, 32, 128>>(0xf200);
    auto beta_scratch = tile_at<UbTile<float, 64, 8>>(0xc900);
    set_flag(PIPE_V, PIPE_MTE2, EVENT_ID0);  // v -> v_raw
    set_flag(PIPE_V, PIPE_MTE2, EVENT_ID1);  // k -> k_raw
    set_flag(PIPE_V, PIPE_MTE2, EVENT_ID2);  // beta_wide -> beta_raw
    set_flag(PIPE_V, PIPE_MTE2, EVENT_ID3);  // exp_G_col -> G
    set_flag(PIPE_MTE3, PIPE_V, EVENT_ID0);  // beta_v_f16 -> beta_v_f16
    set_flag(PIPE_MTE3, PIPE_V, EVENT_ID1);  // beta_exp_G_k_f16 -> beta_exp_G_k_f16
    for (int64_t item = get_block_idx(); item < slots * HV; item += get_block_num()) {
        const int64_t hv = item % HV, h = hv / (HV / H);
        const int64_t slot = item / HV, n = sequence_of(cu_seqlens, N, slot, 64);
        const int64_t first = cu_seqlens[n], length = cu_seqlens[n + 1] - first, b = n * batched;
        const int64_t c = slot - first / 64 - n;
        if (c * 64 >= length) continue;
        const int64_t t = first - b * T + c * 64;
        const int64_t rows = length - c * 64 < 64 ? length - c * 64 : 64;
        const int64_t part = part_of(rows, sub, 32);
        wait_flag(PIPE_V, PIPE_MTE2, EVENT_ID0);  // v -> v_raw
        auto v_raw = tile_at<UbPart<half, 32, 128>>(0x0, part, 128);
        if (part > 0) TLOAD(v_raw, view(v_gm + token_at(HV, hv, 128, b, T, t + sub * 32), part, 128, token_stride(HV, 128)));
        set_flag(PIPE_MTE2, PIPE_V, EVENT_ID0);  // v_raw -> v
        wait_flag(PIPE_MTE2, PIPE_V, EVENT_ID0);  // v_raw -> v
        fill_rows(v, v_raw, part, 0x0);
        wait_flag(PIPE_V, PIPE_MTE2, EVENT_ID1);  // k -> k_raw
        auto k_raw = tile_at<UbPart<half, 32, 128>>(0x2000, part, 128);
        if (part > 0) TLOAD(k_raw, view(k_gm + token_at(H, h, 128, b, T, t + sub * 32), part, 128, token_stride(H, 128)));
        set_flag(PIPE_MTE2, PIPE_V, EVENT_ID1);  // k_raw -> k
        wait_flag(PIPE_MTE2, PIPE_V, EVENT_ID1);  // k_raw -> k
        fill_rows(k, k_raw, part, 0x2000);
        pipe_barrier(PIPE_V);
        TCVT(v_f32, v, RoundMode::CAST_NONE);
        set_flag(PIPE_V, PIPE_MTE2, EVENT_ID0);  // v -> v_raw
        TCVT(k_f32, k, RoundMode::CAST_NONE);
        set_flag(PIPE_V, PIPE_MTE2, EVENT_ID1);  // k -> k_raw
        wait_flag(PIPE_V, PIPE_MTE2, EVENT_ID2);  // beta_wide -> beta_raw
        auto beta_raw = tile_at<UbWidePart<float, 64>>(0xc000, rows);
        TLOAD(beta_raw, view(beta_gm + token_at(HV, hv, 1, b, T, t), rows, 1, token_stride(HV, 1)));
        set_flag(PIPE_MTE2, PIPE_V, EVENT_ID2);  // beta_raw -> beta_wide
        wait_flag(PIPE_MTE2, PIPE_V, EVENT_ID2);  // beta_raw -> beta_wide
        fill_wide(beta_raw, rows, 0xc000);
        wait_flag(PIPE_V, PIPE_MTE2, EVENT_ID3);  // exp_G_col -> G
        TLOAD(G, view(G_ws_gm + (slot * HV + hv) * 64, 1, 64, 64));
        set_flag(PIPE_MTE2, PIPE_V, EVENT_ID3);  // G -> exp_G
        pipe_barrier(PIPE_V);
        TTRANS(beta, beta_wide, beta_scratch);
        set_flag(PIPE_V, PIPE_MTE2, EVENT_ID2);  // beta_wide -> beta_raw
        // A = strictly_lower(beta[:, None] * (k @ k.T) * D)
        pipe_barrier(PIPE_V);
        // U_offset = Tinv @ (beta[:, None] * v)
        TROWEXPANDMUL(beta_v, v_f32, beta_col);
        wait_flag(PIPE_MTE2, PIPE_V, EVENT_ID3);  // G -> exp_G
        // U_weight = Tinv @ (beta[:, None] * (exp(G)[:, None] * k))
        TEXP(exp_G, G);
        pipe_barrier(PIPE_V);
        TROWEXPANDMUL(exp_G_k, k_f32, exp_G_col);
        set_flag(PIPE_V, PIPE_MTE2, EVENT_ID3);  // exp_G_col -> G
        wait_flag(PIPE_MTE3, PIPE_V, EVENT_ID0);  // beta_v_f16 -> beta_v_f16
        TCVT(beta_v_f16, beta_v, RoundMode::CAST_RINT);
        set_flag(PIPE_V, PIPE_MTE3, EVENT_ID0);  // beta_v_f16 -> store
        pipe_barrier(PIPE_V);
        TROWEXPANDMUL(beta_exp_G_k, exp_G_k, beta_col);
        wait_flag(PIPE_V, PIPE_MTE3, EVENT_ID0);  // beta_v_f16 -> store
        wait_flag_dev(1);  // beta_v_f16_channel -> store
        TSTORE(view(beta_v_f16_channel_gm + get_block_idx() * 8192 + sub * 32 * 128, 32, 128, 128), beta_v_f16);
        ffts_cross_core_sync(PIPE_MTE3, group_flag(0));  // beta_v_f16_channel -> beta_v_f16_in
        set_flag(PIPE_MTE3, PIPE_V, EVENT_ID0);  // beta_v_f16 -> beta_v_f16
        wait_flag(PIPE_MTE3, PIPE_V, EVENT_ID1);  // beta_exp_G_k_f16 -> beta_exp_G_k_f16
        pipe_barrier(PIPE_V);
        TCVT(beta_exp_G_k_f16, beta_exp_G_k, RoundMode::CAST_RINT);
        set_flag(PIPE_V, PIPE_MTE3, EVENT_ID1);  // beta_exp_G_k_f16 -> store
        wait_flag(PIPE_V, PIPE_MTE3, EVENT_ID1);  // beta_exp_G_k_f16 -> store
        wait_flag_dev(2);  // beta_exp_G_k_f16_channel -> store
        TSTORE(view(beta_exp_G_k_f16_channel_gm + get_block_idx() * 8192 + sub * 32 * 128, 32, 128, 128), beta_exp_G_k_f16);
        ffts_cross_core_sync(PIPE_MTE3, group_flag(0));  // beta_exp_G_k_f16_channel -> beta_exp_G_k_f16_in
        set_flag(PIPE_MTE3, PIPE_V, EVENT_ID1);  // beta_exp_G_k_f16 -> beta_exp_G_k_f16
    }
    wait_flag(PIPE_V, PIPE_MTE2, EVENT_ID0);  // v -> v_raw
    wait_flag(PIPE_V, PIPE_MTE2, EVENT_ID1);  // k -> k_raw
    wait_flag(PIPE_V, PIPE_MTE2, EVENT_ID2);  // beta_wide -> beta_raw
    wait_flag(PIPE_V, PIPE_MTE2, EVENT_ID3);  // exp_G_col -> G
    wait_flag(PIPE_MTE3, PIPE_V, EVENT_ID0);  // beta_v_f16 -> beta_v_f16
    wait_flag_dev(1);  // beta_v_f16_channel -> store
    wait_flag(PIPE_MTE3, PIPE_V, EVENT_ID1);  // beta_exp_G_k_f16 -> beta_exp_G_k_f16
    wait_flag_dev(2);  // beta_exp_G_k_f16_channel -> store
#endif
#endif
}

/**
 * @brief S_U over sequences.
 * k: input, token, [C, K] float16
 * initial_state: input, sequence, [K, V] float32 (optional)
 * final_state: output, sequence, [K, V] float32 (optional)
 * G_ws: workspace, slot, [C] float32, in workspace
 * U_weight_ws: workspace, slot, [C, K] float16, in workspace
 * U_offset_ws: workspace, slot, [C, V] float32, in workspace
 * S_ws: workspace, slot, [K, V] float16, in workspace
 * U_ws: workspace, slot, [C, V] float16, in workspace
 * S_f16_0_channel: workspace, block, [K, 64] float16, in workspace
 * S_f16_1_channel: workspace, block, [K, 64] float16, in workspace
 * U_weight_S_0_channel: workspace, block, [C, 64] float32, in workspace
 * U_weight_S_1_channel: workspace, block, [C, 64] float32, in workspace
 * U_decay_to_end_f16_0_channel: workspace, block, [C, 64] float16, in workspace
 * U_decay_to_end_f16_1_channel: workspace, block, [C, 64] float16, in workspace
 * S_next_0_part_channel: workspace, block, [K, 64] float32, in workspace
 * S_next_1_part_channel: workspace, block, [K, 64] float32, in workspace
 */
PTO_ENTRY void gated_delta_rule_S_U_fp16(
    __gm__ uint8_t *k_bytes,
    __gm__ uint8_t *initial_state_bytes,
    __gm__ uint8_t *final_state_bytes,
    __gm__ uint8_t *workspace,
    __gm__ uint8_t *table_bytes,
    __gm__ uint8_t *cu_seqlens_bytes,
    int64_t N,
    int64_t T,
    int64_t batched,
    int64_t H,
    int64_t HV,
    int64_t slots,
    int64_t has_initial_state,
    int64_t has_final_state,
    uint64_t ffts)
{
#if defined(__CCE_AICORE__)
    set_ffts_base_addr(ffts);
#if defined(__DAV_C220_CUBE__) || (defined(__DAV_CUBE__) && !defined(__CPU_SIM))
    __gm__ int64_t *table = reinterpret_cast<__gm__ int64_t *>(table_bytes);
    __gm__ half *k_gm = reinterpret_cast<__gm__ half *>(k_bytes);
    __gm__ half *U_weight_ws_gm = reinterpret_cast<__gm__ half *>(workspace + table[1]);
    __gm__ half *S_f16_0_channel_gm = reinterpret_cast<__gm__ half *>(workspace + table[5]);
    __gm__ half *S_f16_1_channel_gm = reinterpret_cast<__gm__ half *>(workspace + table[6]);
    __gm__ float *U_weight_S_0_channel_gm = reinterpret_cast<__gm__ float *>(workspace + table[7]);
    __gm__ float *U_weight_S_1_channel_gm = reinterpret_cast<__gm__ float *>(workspace + table[8]);
    __gm__ half *U_decay_to_end_f16_0_channel_gm = reinterpret_cast<__gm__ half *>(workspace + table[9]);
    __gm__ half *U_decay_to_end_f16_1_channel_gm = reinterpret_cast<__gm__ half *>(workspace + table[10]);
    __gm__ float *S_next_0_part_channel_gm = reinterpret_cast<__gm__ float *>(workspace + table[11]);
    __gm__ float *S_next_1_part_channel_gm = reinterpret_cast<__gm__ float *>(workspace + table[12]);
    __gm__ int32_t *cu_seqlens = reinterpret_cast<__gm__ int32_t *>(cu_seqlens_bytes);
    auto U_weight = tile_at<L1Tile<half, 64, 128>>(0x0);
    auto k = tile_at<L1Tile<half, 64, 128>>(0x4000);
    auto S_f16_0_in = tile_at<L1Tile<half, 128, 64>>(0x8000);
    auto S_f16_1_in = tile_at<L1Tile<half, 128, 64>>(0xc000);
    auto U_weight_S_0_left = tile_at<TileLeft<half, 64, 128>>(0x0);
    auto U_weight_S_0_right = tile_at<TileRight<half, 128, 64>>(0x0);
    auto U_weight_S_0 = tile_at<TileAcc<float, 64, 64>>(0x0);
    auto U_weight_S_1_left = tile_at<TileLeft<half, 64, 128>>(0x8000);
    auto U_weight_S_1_right = tile_at<TileRight<half, 128, 64>>(0x8000);
    auto U_weight_S_1 = tile_at<TileAcc<float, 64, 64>>(0x4000);
    auto U_decay_to_end_f16_0_in = tile_at<L1Tile<half, 64, 64>>(0x10000);
    auto S_next_0_part_left = tile_at<TileLeft<half, 128, 64>>(0x0);
    auto S_next_0_part_right = tile_at<TileRight<half, 64, 64>>(0x0);
    auto S_next_0_part = tile_at<TileAcc<float, 128, 64>>(0x8000);
    auto U_decay_to_end_f16_1_in = tile_at<L1Tile<half, 64, 64>>(0x12000);
    auto S_next_1_part_left = tile_at<TileLeft<half, 128, 64>>(0x8000);
    auto S_next_1_part_right = tile_at<TileRight<half, 64, 64>>(0x8000);
    auto S_next_1_part = tile_at<TileAcc<float, 128, 64>>(0x10000);
    for (int64_t item = get_block_idx(); item < N * HV; item += get_block_num()) {
        const int64_t hv = item % HV, h = hv / (HV / H);
        const int64_t n = item / HV, b = n * batched;
        const int64_t first = cu_seqlens[n], length = cu_seqlens[n + 1] - first;
        pipe_barrier(PIPE_ALL);
        set_flag(PIPE_MTE1, PIPE_MTE2, EVENT_ID0);  // k -> k_raw
        for (int64_t c = 0; c * 64 < length; ++c) {
            const int64_t slot = first / 64 + n + c;
            const int64_t t = first - b * T + c * 64;
            const int64_t rows = length - c * 64 < 64 ? length - c * 64 : 64;
            TLOAD(U_weight, view(U_weight_ws_gm + (slot * HV + hv) * 8192, 64, 128, 128));
            set_flag(PIPE_MTE2, PIPE_MTE1, EVENT_ID0);  // U_weight -> U_weight_S_0_left
            wait_flag(PIPE_MTE1, PIPE_MTE2, EVENT_ID0);  // k -> k_raw
            auto k_raw = tile_at<L1Part<half, 64, 128>>(0x4000, rows, 128);
            TLOAD(k_raw, view(k_gm + token_at(H, h, 128, b, T, t), rows, 128, token_stride(H, 128)));
            if (rows < 64) TFILLPAD(k_raw, k_raw);
            wait_flag_dev(0);  // S_f16_0_channel -> S_f16_0_in
            TLOAD(S_f16_0_in, view(S_f16_0_channel_gm + get_block_idx() * 8192, 128, 64, 64));
            set_flag(PIPE_MTE2, PIPE_MTE1, EVENT_ID1);  // S_f16_0_in -> U_weight_S_0_right
            wait_flag_dev(0);  // S_f16_1_channel -> S_f16_1_in
            TLOAD(S_f16_1_in, view(S_f16_1_channel_gm + get_block_idx() * 8192, 128, 64, 64));
            set_flag(PIPE_MTE2, PIPE_MTE1, EVENT_ID2);  // S_f16_1_in -> U_weight_S_1_right
            wait_flag(PIPE_MTE2, PIPE_MTE1, EVENT_ID0);  // U_weight -> U_weight_S_0_left
            TEXTRACT(U_weight_S_0_left, U_weight, 0, 0);
            wait_flag(PIPE_MTE2, PIPE_MTE1, EVENT_ID1);  // S_f16_0_in -> U_weight_S_0_right
            TEXTRACT(U_weight_S_0_right, S_f16_0_in, 0, 0);
            set_flag(PIPE_MTE1, PIPE_M, EVENT_ID0);  // U_weight_S_0_right -> U_weight_S_0
            wait_flag(PIPE_MTE1, PIPE_M, EVENT_ID0);  // U_weight_S_0_right -> U_weight_S_0
            // U = U_offset - U_weight @ S
            TMATMUL(U_weight_S_0, U_weight_S_0_left, U_weight_S_0_right);
            set_flag(PIPE_M, PIPE_FIX, EVENT_ID0);  // U_weight_S_0 -> store
            TEXTRACT(U_weight_S_1_left, U_weight, 0, 0);
            wait_flag(PIPE_MTE2, PIPE_MTE1, EVENT_ID2);  // S_f16_1_in -> U_weight_S_1_right
            TEXTRACT(U_weight_S_1_right, S_f16_1_in, 0, 0);
            set_flag(PIPE_MTE1, PIPE_M, EVENT_ID1);  // U_weight_S_1_right -> U_weight_S_1
            wait_flag(PIPE_MTE1, PIPE_M, EVENT_ID1);  // U_weight_S_1_right -> U_weight_S_1
            TMATMUL(U_weight_S_1, U_weight_S_1_left, U_weight_S_1_right);
            set_flag(PIPE_M, PIPE_FIX, EVENT_ID1);  // U_weight_S_1 -> store
            wait_flag(PIPE_M, PIPE_FIX, EVENT_ID0);  // U_weight_S_0 -> store
            TSTORE(view(U_weight_S_0_channel_gm + get_block_idx() * 4096, 64, 64, 64), U_weight_S_0);
            ffts_cross_core_sync(PIPE_FIX, group_flag(1));  // U_weight_S_0_channel -> U_weight_S_0_in
            wait_flag(PIPE_M, PIPE_FIX, EVENT_ID1);  // U_weight_S_1 -> store
            TSTORE(view(U_weight_S_1_channel_gm + get_block_idx() * 4096, 64, 64, 64), U_weight_S_1);
            ffts_cross_core_sync(PIPE_FIX, group_flag(1));  // U_weight_S_1_channel -> U_weight_S_1_in
            wait_flag_dev(0);  // U_decay_to_end_f16_0_channel -> U_decay_to_end_f16_0_in
            TLOAD(U_decay_to_end_f16_0_in, view(U_decay_to_end_f16_0_channel_gm + get_block_idx() * 4096, 64, 64, 64));
            set_flag(PIPE_MTE2, PIPE_MTE1, EVENT_ID3);  // U_decay_to_end_f16_0_in -> S_next_0_part_right
            L1View<half, 128, 64> S_next_0_part_left_from;
            TRESHAPE(S_next_0_part_left_from, k);
            TEXTRACT(S_next_0_part_left, S_next_0_part_left_from, 0, 0);
            wait_flag(PIPE_MTE2, PIPE_MTE1, EVENT_ID3);  // U_decay_to_end_f16_0_in -> S_next_0_part_right
            TEXTRACT(S_next_0_part_right, U_decay_to_end_f16_0_in, 0, 0);
            set_flag(PIPE_MTE1, PIPE_M, EVENT_ID2);  // S_next_0_part_right -> S_next_0_part
            wait_flag(PIPE_MTE1, PIPE_M, EVENT_ID2);  // S_next_0_part_right -> S_next_0_part
            // S = exp(last(G)) * S + k.T @ (exp(last(G) - G)[:, None] * U)
            TMATMUL(S_next_0_part, S_next_0_part_left, S_next_0_part_right);
            set_flag(PIPE_M, PIPE_FIX, EVENT_ID2);  // S_next_0_part -> store
            wait_flag_dev(0);  // U_decay_to_end_f16_1_channel -> U_decay_to_end_f16_1_in
            TLOAD(U_decay_to_end_f16_1_in, view(U_decay_to_end_f16_1_channel_gm + get_block_idx() * 4096, 64, 64, 64));
            set_flag(PIPE_MTE2, PIPE_MTE1, EVENT_ID4);  // U_decay_to_end_f16_1_in -> S_next_1_part_right
            wait_flag(PIPE_M, PIPE_FIX, EVENT_ID2);  // S_next_0_part -> store
            TSTORE(view(S_next_0_part_channel_gm + get_block_idx() * 8192, 128, 64, 64), S_next_0_part);
            ffts_cross_core_sync(PIPE_FIX, group_flag(1));  // S_next_0_part_channel -> S_next_0_part_in
            L1View<half, 128, 64> S_next_1_part_left_from;
            TRESHAPE(S_next_1_part_left_from, k);
            TEXTRACT(S_next_1_part_left, S_next_1_part_left_from, 0, 0);
            set_flag(PIPE_MTE1, PIPE_MTE2, EVENT_ID0);  // k -> k_raw
            wait_flag(PIPE_MTE2, PIPE_MTE1, EVENT_ID4);  // U_decay_to_end_f16_1_in -> S_next_1_part_right
            TEXTRACT(S_next_1_part_right, U_decay_to_end_f16_1_in, 0, 0);
            set_flag(PIPE_MTE1, PIPE_M, EVENT_ID3);  // S_next_1_part_right -> S_next_1_part
            wait_flag(PIPE_MTE1, PIPE_M, EVENT_ID3);  // S_next_1_part_right -> S_next_1_part
            TMATMUL(S_next_1_part, S_next_1_part_left, S_next_1_part_right);
            set_flag(PIPE_M, PIPE_FIX, EVENT_ID3);  // S_next_1_part -> store
            wait_flag(PIPE_M, PIPE_FIX, EVENT_ID3);  // S_next_1_part -> store
            TSTORE(view(S_next_1_part_channel_gm + get_block_idx() * 8192, 128, 64, 64), S_next_1_part);
            ffts_cross_core_sync(PIPE_FIX, group_flag(1));  // S_next_1_part_channel -> S_next_1_part_in
        }
        wait_flag(PIPE_MTE1, PIPE_MTE2, EVENT_ID0);  // k -> k_raw
    }
#endif
#if defined(__DAV_C220_VEC__) || (defined(__DAV_VEC__) && !defined(__CPU_SIM))
    set_mask_norm();
    set_vector_mask(-1, -1);
    __gm__ int64_t *table = reinterpret_cast<__gm__ int64_t *>(table_bytes);
    __gm__ float *initial_state_gm = reinterpret_cast<__gm__ float *>(initial_state_bytes);
    __gm__ float *final_state_gm = reinterpret_cast<__gm__ float *>(final_state_bytes);
    __gm__ float *G_ws_gm = reinterpret_cast<__gm__ float *>(workspace + table[0]);
    __gm__ float *U_offset_ws_gm = reinterpret_cast<__gm__ float *>(workspace + table[2]);
    __gm__ half *S_ws_gm = reinterpret_cast<__gm__ half *>(workspace + table[3]);
    __gm__ half *U_ws_gm = reinterpret_cast<__gm__ half *>(workspace + table[4]);
    __gm__ half *S_f16_0_channel_gm = reinterpret_cast<__gm__ half *>(workspace + table[5]);
    __gm__ half *S_f16_1_channel_gm = reinterpret_cast<__gm__ half *>(workspace + table[6]);
    __gm__ float *U_weight_S_0_channel_gm = reinterpret_cast<__gm__ float *>(workspace + table[7]);
    __gm__ float *U_weight_S_1_channel_gm = reinterpret_cast<__gm__ float *>(workspace + table[8]);
    __gm__ half *U_decay_to_end_f16_0_channel_gm = reinterpret_cast<__gm__ half *>(workspace + table[9]);
    __gm__ half *U_decay_to_end_f16_1_channel_gm = reinterpret_cast<__gm__ half *>(workspace + table[10]);
    __gm__ float *S_next_0_part_channel_gm = reinterpret_cast<__gm__ float *>(workspace + table[11]);
    __gm__ float *S_next_1_part_channel_gm = reinterpret_cast<__gm__ float *>(workspace + table[12]);
    __gm__ int32_t *cu_seqlens = reinterpret_cast<__gm__ int32_t *>(cu_seqlens_bytes);
    const int64_t sub = get_subblockid();
    auto S_0_0_raw = tile_at<UbTile<float, 64, 64>>(0x0);
    auto S_0_0 = tile_at<UbTile<float, 64, 64>>(0x0);
    auto S_0_1_raw = tile_at<UbTile<float, 64, 64>>(0x4000);
    auto S_0_1 = tile_at<UbTile<float, 64, 64>>(0x4000);
    auto S_0_2 = tile_at<UbTile<float, 64, 64>>(0x0);
    auto S_1 = tile_at<UbTile<float, 64, 64>>(0x4000);
    auto S_f16_0 = tile_at<UbTile<half, 64, 64>>(0x8000);
    auto U_offset_0 = tile_at<UbTile<float, 32, 64>>(0xa000);
    auto S_f16_1 = tile_at<UbTile<half, 64, 64>>(0xc000);
    auto U_offset_1 = tile_at<UbTile<float, 32, 64>>(0xe000);
    auto G = tile_at<UbTile<float, 1, 64>>(0x10000);
    auto G_times_minus_1 = tile_at<UbTile<float, 1, 64>>(0x10100);
    auto last_G_minus_G = tile_at<UbTile<float, 1, 64>>(0x10100);
    auto decay_to_end = tile_at<UbTile<float, 1, 64>>(0x10100);
    auto decay_to_end_col = tile_at<UbCol<float, 32>>(0x10100 + sub * 128);
    auto exp_G = tile_at<UbTile<float, 1, 64>>(0x10000);
    auto chunk_decay_S_0 = tile_at<UbTile<float, 64, 64>>(0x10200);
    auto chunk_decay_S_1 = tile_at<UbTile<float, 64, 64>>(0x14200);
    auto U_weight_S_0_in = tile_at<UbTile<float, 32, 64>>(0x18200);
    auto U_0 = tile_at<UbTile<float, 32, 64>>(0xa000);
    auto U_decay_to_end_0 = tile_at<UbTile<float, 32, 64>>(0x1a200);
    auto U_weight_S_1_in = tile_at<UbTile<float, 32, 64>>(0x1c200);
    auto U_decay_to_end_f16_0 = tile_at<UbTile<half, 32, 64>>(0x1e200);
    auto U_f16_0 = tile_at<UbTile<half, 32, 64>>(0x1f200);
    auto U_1 = tile_at<UbTile<float, 32, 64>>(0xe000);
    auto U_decay_to_end_1 = tile_at<UbTile<float, 32, 64>>(0x20200);
    auto U_decay_to_end_f16_1 = tile_at<UbTile<half, 32, 64>>(0x22200);
    auto U_f16_1 = tile_at<UbTile<half, 32, 64>>(0x23200);
    auto S_next_0_part_in = tile_at<UbTile<float, 64, 64>>(0x24200);
    auto S_next_0 = tile_at<UbTile<float, 64, 64>>(0x0);
    auto S_next_1_part_in = tile_at<UbTile<float, 64, 64>>(0x28200);
    auto S_next_1 = tile_at<UbTile<float, 64, 64>>(0x4000);
    set_flag(PIPE_MTE3, PIPE_MTE2, EVENT_ID0);  // S_T_0 -> S_0_0_raw
    set_flag(PIPE_MTE3, PIPE_MTE2, EVENT_ID1);  // S_T_1 -> S_0_1_raw
    for (int64_t item = get_block_idx(); item < N * HV; item += get_block_num()) {
        const int64_t hv = item % HV;
        const int64_t n = item / HV;
        const int64_t first = cu_seqlens[n], length = cu_seqlens[n + 1] - first;
        wait_flag(PIPE_MTE3, PIPE_MTE2, EVENT_ID0);  // S_T_0 -> S_0_0_raw
        if (has_initial_state) TLOAD(S_0_0_raw, view(initial_state_gm + (n * HV + hv) * 16384 + sub * 64 * 128 + 0, 64, 64, 128));
        set_flag(PIPE_MTE2, PIPE_V, EVENT_ID0);  // S_0_0_raw -> S_0_0
        wait_flag(PIPE_MTE2, PIPE_V, EVENT_ID0);  // S_0_0_raw -> S_0_0
        if (!has_initial_state) TEXPANDS(S_0_0, 0);
        wait_flag(PIPE_MTE3, PIPE_MTE2, EVENT_ID1);  // S_T_1 -> S_0_1_raw
        if (has_initial_state) TLOAD(S_0_1_raw, view(initial_state_gm + (n * HV + hv) * 16384 + sub * 64 * 128 + 64, 64, 64, 128));
        set_flag(PIPE_MTE2, PIPE_V, EVENT_ID1);  // S_0_1_raw -> S_0_1
        wait_flag(PIPE_MTE2, PIPE_V, EVENT_ID1);  // S_0_1_raw -> S_0_1
        if (!has_initial_state) TEXPANDS(S_0_1, 0);
        set_flag(PIPE_V, PIPE_MTE2, EVENT_ID0);  // U_1 -> U_offset_1
        for (int64_t c = 0; c * 64 < length; ++c) {
            const int64_t slot = first / 64 + n + c;
            pipe_barrier(PIPE_V);
            TCVT(S_f16_0, S_0_2, RoundMode::CAST_RINT);
            set_flag(PIPE_V, PIPE_MTE3, EVENT_ID0);  // S_f16_0 -> store
            TLOAD(U_offset_0, view(U_offset_ws_gm + (slot * HV + hv) * 8192 + sub * 32 * 128 + 0, 32, 64, 128));
            TCVT(S_f16_1, S_1, RoundMode::CAST_RINT);
            set_flag(PIPE_V, PIPE_MTE3, EVENT_ID1);  // S_f16_1 -> store
            wait_flag(PIPE_V, PIPE_MTE3, EVENT_ID0);  // S_f16_0 -> store
            TSTORE(view(S_f16_0_channel_gm + get_block_idx() * 8192 + sub * 64 * 64, 64, 64, 64), S_f16_0);
            ffts_cross_core_sync(PIPE_MTE3, group_flag(0));  // S_f16_0_channel -> S_f16_0_in
            wait_flag(PIPE_V, PIPE_MTE2, EVENT_ID0);  // U_1 -> U_offset_1
            TLOAD(U_offset_1, view(U_offset_ws_gm + (slot * HV + hv) * 8192 + sub * 32 * 128 + 64, 32, 64, 128));
            TSTORE(view(S_ws_gm + (slot * HV + hv) * 16384 + sub * 64 * 128 + 0, 64, 64, 128), S_f16_0);
            TLOAD(G, view(G_ws_gm + (slot * HV + hv) * 64, 1, 64, 64));
            set_flag(PIPE_MTE2, PIPE_V, EVENT_ID2);  // G -> G_times_minus_1
            set_flag(PIPE_MTE2, PIPE_S, EVENT_ID0);  // G -> last_G
            wait_flag(PIPE_V, PIPE_MTE3, EVENT_ID1);  // S_f16_1 -> store
            TSTORE(view(S_f16_1_channel_gm + get_block_idx() * 8192 + sub * 64 * 64, 64, 64, 64), S_f16_1);
            ffts_cross_core_sync(PIPE_MTE3, group_flag(0));  // S_f16_1_channel -> S_f16_1_in
            wait_flag(PIPE_MTE2, PIPE_V, EVENT_ID2);  // G -> G_times_minus_1
            // S = exp(last(G)) * S + k.T @ (exp(last(G) - G)[:, None] * U)
            TMULS(G_times_minus_1, G, -1.0f);
            wait_flag(PIPE_MTE2, PIPE_S, EVENT_ID0);  // G -> last_G
            const float last_G = G.GetValue(63);
            pipe_barrier(PIPE_V);
            TADDS(last_G_minus_G, G_times_minus_1, last_G);
            pipe_barrier(PIPE_V);
            TEXP(decay_to_end, last_G_minus_G);
            TEXP(exp_G, G);
            set_flag(PIPE_V, PIPE_S, EVENT_ID0);  // exp_G -> chunk_decay
            wait_flag(PIPE_V, PIPE_S, EVENT_ID0);  // exp_G -> chunk_decay
            const float chunk_decay = exp_G.GetValue(63);
            TMULS(chunk_decay_S_0, S_0_2, chunk_decay);
            TSTORE(view(S_ws_gm + (slot * HV + hv) * 16384 + sub * 64 * 128 + 64, 64, 64, 128), S_f16_1);
            TMULS(chunk_decay_S_1, S_1, chunk_decay);
            wait_flag_dev(1);  // U_weight_S_0_channel -> U_weight_S_0_in
            TLOAD(U_weight_S_0_in, view(U_weight_S_0_channel_gm + get_block_idx() * 4096 + sub * 32 * 64, 32, 64, 64));
            set_flag(PIPE_MTE2, PIPE_V, EVENT_ID3);  // U_weight_S_0_in -> U_0
            wait_flag(PIPE_MTE2, PIPE_V, EVENT_ID3);  // U_weight_S_0_in -> U_0
            // U = U_offset - U_weight @ S
            TSUB(U_0, U_offset_0, U_weight_S_0_in);
            pipe_barrier(PIPE_V);
            // S = exp(last(G)) * S + k.T @ (exp(last(G) - G)[:, None] * U)
            TROWEXPANDMUL(U_decay_to_end_0, U_0, decay_to_end_col);
            wait_flag_dev(1);  // U_weight_S_1_channel -> U_weight_S_1_in
            TLOAD(U_weight_S_1_in, view(U_weight_S_1_channel_gm + get_block_idx() * 4096 + sub * 32 * 64, 32, 64, 64));
            set_flag(PIPE_MTE2, PIPE_V, EVENT_ID4);  // U_weight_S_1_in -> U_1
            pipe_barrier(PIPE_V);
            TCVT(U_decay_to_end_f16_0, U_decay_to_end_0, RoundMode::CAST_RINT);
            set_flag(PIPE_V, PIPE_MTE3, EVENT_ID2);  // U_decay_to_end_f16_0 -> store
            wait_flag(PIPE_V, PIPE_MTE3, EVENT_ID2);  // U_decay_to_end_f16_0 -> store
            TSTORE(view(U_decay_to_end_f16_0_channel_gm + get_block_idx() * 4096 + sub * 32 * 64, 32, 64, 64), U_decay_to_end_f16_0);
            ffts_cross_core_sync(PIPE_MTE3, group_flag(0));  // U_decay_to_end_f16_0_channel -> U_decay_to_end_f16_0_in
            TCVT(U_f16_0, U_0, RoundMode::CAST_RINT);
            set_flag(PIPE_V, PIPE_MTE3, EVENT_ID3);  // U_f16_0 -> store
            wait_flag(PIPE_MTE2, PIPE_V, EVENT_ID4);  // U_weight_S_1_in -> U_1
            // U = U_offset - U_weight @ S
            TSUB(U_1, U_offset_1, U_weight_S_1_in);
            wait_flag(PIPE_V, PIPE_MTE3, EVENT_ID3);  // U_f16_0 -> store
            TSTORE(view(U_ws_gm + (slot * HV + hv) * 8192 + sub * 32 * 128 + 0, 32, 64, 128), U_f16_0);
            pipe_barrier(PIPE_V);
            // S = exp(last(G)) * S + k.T @ (exp(last(G) - G)[:, None] * U)
            TROWEXPANDMUL(U_decay_to_end_1, U_1, decay_to_end_col);
            pipe_barrier(PIPE_V);
            TCVT(U_decay_to_end_f16_1, U_decay_to_end_1, RoundMode::CAST_RINT);
            set_flag(PIPE_V, PIPE_MTE3, EVENT_ID4);  // U_decay_to_end_f16_1 -> store
            wait_flag(PIPE_V, PIPE_MTE3, EVENT_ID4);  // U_decay_to_end_f16_1 -> store
            TSTORE(view(U_decay_to_end_f16_1_channel_gm + get_block_idx() * 4096 + sub * 32 * 64, 32, 64, 64), U_decay_to_end_f16_1);
            ffts_cross_core_sync(PIPE_MTE3, group_flag(0));  // U_decay_to_end_f16_1_channel -> U_decay_to_end_f16_1_in
            TCVT(U_f16_1, U_1, RoundMode::CAST_RINT);
            set_flag(PIPE_V, PIPE_MTE3, EVENT_ID5);  // U_f16_1 -> store
            set_flag(PIPE_V, PIPE_MTE2, EVENT_ID0);  // U_1 -> U_offset_1
            wait_flag(PIPE_V, PIPE_MTE3, EVENT_ID5);  // U_f16_1 -> store
            TSTORE(view(U_ws_gm + (slot * HV + hv) * 8192 + sub * 32 * 128 + 64, 32, 64, 128), U_f16_1);
            wait_flag_dev(1);  // S_next_0_part_channel -> S_next_0_part_in
            TLOAD(S_next_0_part_in, view(S_next_0_part_channel_gm + get_block_idx() * 8192 + sub * 64 * 64, 64, 64, 64));
            set_flag(PIPE_MTE2, PIPE_V, EVENT_ID5);  // S_next_0_part_in -> S_next_0
            wait_flag(PIPE_MTE2, PIPE_V, EVENT_ID5);  // S_next_0_part_in -> S_next_0
            TADD(S_next_0, chunk_decay_S_0, S_next_0_part_in);
            wait_flag_dev(1);  // S_next_1_part_channel -> S_next_1_part_in
            TLOAD(S_next_1_part_in, view(S_next_1_part_channel_gm + get_block_idx() * 8192 + sub * 64 * 64, 64, 64, 64));
            set_flag(PIPE_MTE2, PIPE_V, EVENT_ID6);  // S_next_1_part_in -> S_next_1
            wait_flag(PIPE_MTE2, PIPE_V, EVENT_ID6);  // S_next_1_part_in -> S_next_1
            TADD(S_next_1, chunk_decay_S_1, S_next_1_part_in);
        }
        wait_flag(PIPE_V, PIPE_MTE2, EVENT_ID0);  // U_1 -> U_offset_1
        set_flag(PIPE_V, PIPE_MTE3, EVENT_ID6);  // S_next_0 -> store
        wait_flag(PIPE_V, PIPE_MTE3, EVENT_ID6);  // S_next_0 -> store
        if (has_final_state) TSTORE(view(final_state_gm + (n * HV + hv) * 16384 + sub * 64 * 128 + 0, 64, 64, 128), S_0_2);
        set_flag(PIPE_MTE3, PIPE_MTE2, EVENT_ID0);  // S_T_0 -> S_0_0_raw
        if (has_final_state) TSTORE(view(final_state_gm + (n * HV + hv) * 16384 + sub * 64 * 128 + 64, 64, 64, 128), S_1);
        set_flag(PIPE_MTE3, PIPE_MTE2, EVENT_ID1);  // S_T_1 -> S_0_1_raw
    }
    wait_flag(PIPE_MTE3, PIPE_MTE2, EVENT_ID0);  // S_T_0 -> S_0_0_raw
    wait_flag(PIPE_MTE3, PIPE_MTE2, EVENT_ID1);  // S_T_1 -> S_0_1_raw
#endif
#endif
}

/**
 * @brief o over chunks.
 * q: input, token, [C, K] float16
 * k: input, token, [C, K] float16
 * o: output, token, [C, V] float16
 * G_ws: workspace, slot, [C] float32, in workspace
 * S_ws: workspace, slot, [K, V] float16, in workspace
 * U_ws: workspace, slot, [C, V] float16, in workspace
 * q_S_channel: workspace, block, [C, V] float32, in workspace
 * q_kT_channel: workspace, block, [C, C] float32, in workspace
 * q_kT_D_f16_channel: workspace, block, [C, C] float16, in workspace
 * o_sum_part_channel: workspace, block, [C, V] float32, in workspace
 * q_S_channel1: workspace, block, [C, V] float32, in workspace
 * q_kT_channel1: workspace, block, [C, C] float32, in workspace
 * q_kT_D_f16_channel1: workspace, block, [C, C] float16, in workspace
 * o_sum_part_channel1: workspace, block, [C, V] float32, in workspace
 * lower_fill: workspace, const, [C, C] float32, in constants
 */
PTO_ENTRY void gated_delta_rule_o_fp16(
    __gm__ uint8_t *q_bytes,
    __gm__ uint8_t *k_bytes,
    __gm__ uint8_t *o_bytes,
    __gm__ uint8_t *workspace,
    __gm__ uint8_t *constants,
    __gm__ uint8_t *table_bytes,
    __gm__ uint8_t *cu_seqlens_bytes,
    int64_t N,
    int64_t T,
    int64_t batched,
    int64_t H,
    int64_t HV,
    int64_t slots,
    float scale,
    uint64_t ffts)
{
#if defined(__CCE_AICORE__)
    set_ffts_base_addr(ffts);
#if defined(__DAV_C220_CUBE__) || (defined(__DAV_CUBE__) && !defined(__CPU_SIM))
    __gm__ int64_t *table = reinterpret_cast<__gm__ int64_t *>(table_bytes);
    __gm__ half *q_gm = reinterpret_cast<__gm__ half *>(q_bytes);
    __gm__ half *k_gm = reinterpret_cast<__gm__ half *>(k_bytes);
    __gm__ half *S_ws_gm = reinterpret_cast<__gm__ half *>(workspace + table[1]);
    __gm__ half *U_ws_gm = reinterpret_cast<__gm__ half *>(workspace + table[2]);
    __gm__ float *q_S_channel_gm = reinterpret_cast<__gm__ float *>(workspace + table[3]);
    __gm__ float *q_kT_channel_gm = reinterpret_cast<__gm__ float *>(workspace + table[4]);
    __gm__ half *q_kT_D_f16_channel_gm = reinterpret_cast<__gm__ half *>(workspace + table[5]);
    __gm__ float *o_sum_part_channel_gm = reinterpret_cast<__gm__ float *>(workspace + table[6]);
    __gm__ float *q_S_channel1_gm = reinterpret_cast<__gm__ float *>(workspace + table[7]);
    __gm__ float *q_kT_channel1_gm = reinterpret_cast<__gm__ float *>(workspace + table[8]);
    __gm__ half *q_kT_D_f16_channel1_gm = reinterpret_cast<__gm__ half *>(workspace + table[9]);
    __gm__ float *o_sum_part_channel1_gm = reinterpret_cast<__gm__ float *>(workspace + table[10]);
    __gm__ int32_t *cu_seqlens = reinterpret_cast<__gm__ int32_t *>(cu_seqlens_bytes);
    auto q = tile_at<L1Tile<half, 64, 128>>(0x0);
    auto k = tile_at<L1Tile<half, 64, 128>>(0x4000);
    auto q_h1 = tile_at<L1Tile<half, 64, 128>>(0x8000);
    auto q_kT_left = tile_at<TileLeft<half, 64, 128>>(0x0);
    auto q_kT_right = tile_at<TileRight<half, 128, 64>>(0x0);
    auto q_kT = tile_at<TileAcc<float, 64, 64>>(0x0);
    auto k_h1 = tile_at<L1Tile<half, 64, 128>>(0xc000);
    auto S = tile_at<L1Tile<half, 128, 128>>(0x10000);
    auto q_kT_left_h1 = tile_at<TileLeft<half, 64, 128>>(0x8000);
    auto q_kT_right_h1 = tile_at<TileRight<half, 128, 64>>(0x8000);
    auto q_kT_h1 = tile_at<TileAcc<float, 64, 64>>(0x4000);
    auto S_h1 = tile_at<L1Tile<half, 128, 128>>(0x18000);
    auto q_S_left = tile_at<TileLeft<half, 64, 128>>(0x0);
    auto q_S_right = tile_at<TileRight<half, 128, 128>>(0x0);
    auto q_S = tile_at<TileAcc<float, 64, 128>>(0x8000);
    auto U = tile_at<L1Tile<half, 64, 128>>(0x20000);
    auto q_S_left_h1 = tile_at<TileLeft<half, 64, 128>>(0x8000);
    auto q_S_right_h1 = tile_at<TileRight<half, 128, 128>>(0x8000);
    auto q_S_h1 = tile_at<TileAcc<float, 64, 128>>(0x10000);
    auto U_h1 = tile_at<L1Tile<half, 64, 128>>(0x24000);
    auto q_kT_D_f16_in = tile_at<L1Tile<half, 64, 64>>(0x28000);
    auto q_kT_D_f16_in_h1 = tile_at<L1Tile<half, 64, 64>>(0x2a000);
    auto o_sum_part_left = tile_at<TileLeft<half, 64, 64>>(0x0);
    auto o_sum_part_right = tile_at<TileRight<half, 64, 128>>(0x0);
    auto o_sum_part = tile_at<TileAcc<float, 64, 128>>(0x18000);
    auto o_sum_part_left_h1 = tile_at<TileLeft<half, 64, 64>>(0x8000);
    auto o_sum_part_right_h1 = tile_at<TileRight<half, 64, 128>>(0x8000);
    auto o_sum_part_h1 = tile_at<TileAcc<float, 64, 128>>(0x0);
    set_flag(PIPE_MTE1, PIPE_MTE2, EVENT_ID0);  // q -> q_raw
    set_flag(PIPE_MTE1, PIPE_MTE2, EVENT_ID1);  // q_h1 -> q_raw_h1
    set_flag(PIPE_M, PIPE_MTE1, EVENT_ID0);  // o_sum_part_left -> q_kT_left
    set_flag(PIPE_FIX, PIPE_M, EVENT_ID0);  // o_sum_part_h1 -> q_kT
    set_flag(PIPE_M, PIPE_MTE1, EVENT_ID1);  // o_sum_part_left_h1 -> q_kT_left_h1
    set_flag(PIPE_MTE1, PIPE_MTE2, EVENT_ID2);  // S_h1 -> S_h1
    set_flag(PIPE_MTE1, PIPE_MTE2, EVENT_ID3);  // U -> U
    set_flag(PIPE_MTE1, PIPE_MTE2, EVENT_ID4);  // U_h1 -> U_h1
    for (int64_t item = get_block_idx(); item < slots * ((HV + 1) / 2); item += get_block_num()) {
        const int64_t hv = item % ((HV + 1) / 2) * 2, h = hv / (HV / H);
        const int64_t hv_1 = hv + 1 < HV ? hv + 1 : HV - 1, h_1 = hv_1 / (HV / H);
        const int64_t slot = item / ((HV + 1) / 2), n = sequence_of(cu_seqlens, N, slot, 64);
        const int64_t first = cu_seqlens[n], length = cu_seqlens[n + 1] - first, b = n * batched;
        const int64_t c = slot - first / 64 - n;
        if (c * 64 >= length) continue;
        const int64_t t = first - b * T + c * 64;
        const int64_t rows = length - c * 64 < 64 ? length - c * 64 : 64;
        wait_flag(PIPE_MTE1, PIPE_MTE2, EVENT_ID0);  // q -> q_raw
        auto q_raw = tile_at<L1Part<half, 64, 128>>(0x0, rows, 128);
        TLOAD(q_raw, view(q_gm + token_at(H, h, 128, b, T, t), rows, 128, token_stride(H, 128)));
        if (rows < 64) TFILLPAD(q_raw, q_raw);
        set_flag(PIPE_MTE2, PIPE_MTE1, EVENT_ID0);  // q -> q_kT_left
        auto k_raw = tile_at<L1Part<half, 64, 128>>(0x4000, rows, 128);
        TLOAD(k_raw, view(k_gm + token_at(H, h, 128, b, T, t), rows, 128, token_stride(H, 128)));
        if (rows < 64) TFILLPAD(k_raw, k_raw);
        set_flag(PIPE_MTE2, PIPE_MTE1, EVENT_ID1);  // k -> q_kT_right
        wait_flag(PIPE_MTE1, PIPE_MTE2, EVENT_ID1);  // q_h1 -> q_raw_h1
        auto q_raw_h1 = tile_at<L1Part<half, 64, 128>>(0x8000, rows, 128);
        TLOAD(q_raw_h1, view(q_gm + token_at(H, h_1, 128, b, T, t), rows, 128, token_stride(H, 128)));
        if (rows < 64) TFILLPAD(q_raw_h1, q_raw_h1);
        set_flag(PIPE_MTE2, PIPE_MTE1, EVENT_ID2);  // q_h1 -> q_kT_left_h1
        wait_flag(PIPE_MTE2, PIPE_MTE1, EVENT_ID0);  // q -> q_kT_left
        wait_flag(PIPE_M, PIPE_MTE1, EVENT_ID0);  // o_sum_part_left -> q_kT_left
        TEXTRACT(q_kT_left, q, 0, 0);
        wait_flag(PIPE_MTE2, PIPE_MTE1, EVENT_ID1);  // k -> q_kT_right
        L1View<half, 128, 64> q_kT_right_from;
        TRESHAPE(q_kT_right_from, k);
        TEXTRACT(q_kT_right, q_kT_right_from, 0, 0);
        set_flag(PIPE_MTE1, PIPE_M, EVENT_ID0);  // q_kT_right -> q_kT
        wait_flag(PIPE_MTE1, PIPE_M, EVENT_ID0);  // q_kT_right -> q_kT
        wait_flag(PIPE_FIX, PIPE_M, EVENT_ID0);  // o_sum_part_h1 -> q_kT
        // o = scale * (exp(G)[:, None] * (q @ S) + ((q @ k.T) * D) @ U)
        TMATMUL(q_kT, q_kT_left, q_kT_right);
        set_flag(PIPE_M, PIPE_FIX, EVENT_ID0);  // q_kT -> store
        set_flag(PIPE_M, PIPE_MTE1, EVENT_ID2);  // q_kT_left -> q_S_left
        auto k_raw_h1 = tile_at<L1Part<half, 64, 128>>(0xc000, rows, 128);
        TLOAD(k_raw_h1, view(k_gm + token_at(H, h_1, 128, b, T, t), rows, 128, token_stride(H, 128)));
        if (rows < 64) TFILLPAD(k_raw_h1, k_raw_h1);
        set_flag(PIPE_MTE2, PIPE_MTE1, EVENT_ID3);  // k_h1 -> q_kT_right_h1
        wait_flag(PIPE_M, PIPE_FIX, EVENT_ID0);  // q_kT -> store
        TSTORE(view(q_kT_channel_gm + get_block_idx() * 4096, 64, 64, 64), q_kT);
        ffts_cross_core_sync(PIPE_FIX, group_flag(0));  // q_kT_channel -> q_kT_in
        TLOAD(S, view(S_ws_gm + (slot * HV + hv) * 16384, 128, 128, 128));
        set_flag(PIPE_MTE2, PIPE_MTE1, EVENT_ID4);  // S -> q_S_right
        wait_flag(PIPE_MTE2, PIPE_MTE1, EVENT_ID2);  // q_h1 -> q_kT_left_h1
        wait_flag(PIPE_M, PIPE_MTE1, EVENT_ID1);  // o_sum_part_left_h1 -> q_kT_left_h1
        TEXTRACT(q_kT_left_h1, q_h1, 0, 0);
        wait_flag(PIPE_MTE2, PIPE_MTE1, EVENT_ID3);  // k_h1 -> q_kT_right_h1
        L1View<half, 128, 64> q_kT_right_h1_from;
        TRESHAPE(q_kT_right_h1_from, k_h1);
        TEXTRACT(q_kT_right_h1, q_kT_right_h1_from, 0, 0);
        set_flag(PIPE_MTE1, PIPE_M, EVENT_ID1);  // q_kT_right_h1 -> q_kT_h1
        wait_flag(PIPE_MTE1, PIPE_M, EVENT_ID1);  // q_kT_right_h1 -> q_kT_h1
        TMATMUL(q_kT_h1, q_kT_left_h1, q_kT_right_h1);
        set_flag(PIPE_M, PIPE_FIX, EVENT_ID1);  // q_kT_h1 -> store
        set_flag(PIPE_M, PIPE_MTE1, EVENT_ID3);  // q_kT_left_h1 -> q_S_left_h1
        wait_flag(PIPE_M, PIPE_FIX, EVENT_ID1);  // q_kT_h1 -> store
        TSTORE(view(q_kT_channel1_gm + get_block_idx() * 4096, 64, 64, 64), q_kT_h1);
        ffts_cross_core_sync(PIPE_FIX, group_flag(0));  // q_kT_channel1 -> q_kT_in_h1
        wait_flag(PIPE_MTE1, PIPE_MTE2, EVENT_ID2);  // S_h1 -> S_h1
        TLOAD(S_h1, view(S_ws_gm + (slot * HV + hv_1) * 16384, 128, 128, 128));
        set_flag(PIPE_MTE2, PIPE_MTE1, EVENT_ID5);  // S_h1 -> q_S_right_h1
        wait_flag(PIPE_M, PIPE_MTE1, EVENT_ID2);  // q_kT_left -> q_S_left
        TEXTRACT(q_S_left, q, 0, 0);
        set_flag(PIPE_MTE1, PIPE_MTE2, EVENT_ID0);  // q -> q_raw
        wait_flag(PIPE_MTE2, PIPE_MTE1, EVENT_ID4);  // S -> q_S_right
        TEXTRACT(q_S_right, S, 0, 0);
        set_flag(PIPE_MTE1, PIPE_M, EVENT_ID2);  // q_S_right -> q_S
        wait_flag(PIPE_MTE1, PIPE_M, EVENT_ID2);  // q_S_right -> q_S
        TMATMUL(q_S, q_S_left, q_S_right);
        set_flag(PIPE_M, PIPE_FIX, EVENT_ID2);  // q_S -> store
        set_flag(PIPE_M, PIPE_MTE1, EVENT_ID4);  // q_S_left -> o_sum_part_left
        wait_flag(PIPE_MTE1, PIPE_MTE2, EVENT_ID3);  // U -> U
        TLOAD(U, view(U_ws_gm + (slot * HV + hv) * 8192, 64, 128, 128));
        wait_flag(PIPE_M, PIPE_MTE1, EVENT_ID3);  // q_kT_left_h1 -> q_S_left_h1
        TEXTRACT(q_S_left_h1, q_h1, 0, 0);
        set_flag(PIPE_MTE1, PIPE_MTE2, EVENT_ID1);  // q_h1 -> q_raw_h1
        wait_flag(PIPE_MTE2, PIPE_MTE1, EVENT_ID5);  // S_h1 -> q_S_right_h1
        TEXTRACT(q_S_right_h1, S_h1, 0, 0);
        set_flag(PIPE_MTE1, PIPE_M, EVENT_ID3);  // q_S_right_h1 -> q_S_h1
        set_flag(PIPE_MTE1, PIPE_MTE2, EVENT_ID2);  // S_h1 -> S_h1
        wait_flag(PIPE_MTE1, PIPE_M, EVENT_ID3);  // q_S_right_h1 -> q_S_h1
        TMATMUL(q_S_h1, q_S_left_h1, q_S_right_h1);
        set_flag(PIPE_M, PIPE_FIX, EVENT_ID3);  // q_S_h1 -> store
        set_flag(PIPE_M, PIPE_MTE1, EVENT_ID5);  // q_S_left_h1 -> o_sum_part_left_h1
        wait_flag(PIPE_M, PIPE_FIX, EVENT_ID2);  // q_S -> store
        wait_flag_dev(2);  // q_S_channel -> store
        TSTORE(view(q_S_channel_gm + get_block_idx() * 8192, 64, 128, 128), q_S);
        ffts_cross_core_sync(PIPE_FIX, group_flag(0));  // q_S_channel -> q_S_in
        wait_flag(PIPE_MTE1, PIPE_MTE2, EVENT_ID4);  // U_h1 -> U_h1
        TLOAD(U_h1, view(U_ws_gm + (slot * HV + hv_1) * 8192, 64, 128, 128));
        wait_flag_dev(1);  // q_kT_D_f16_channel -> q_kT_D_f16_in
        TLOAD(q_kT_D_f16_in, view(q_kT_D_f16_channel_gm + get_block_idx() * 4096, 64, 64, 64));
        set_flag(PIPE_MTE2, PIPE_MTE1, EVENT_ID6);  // q_kT_D_f16_in -> o_sum_part_left
        wait_flag(PIPE_M, PIPE_FIX, EVENT_ID3);  // q_S_h1 -> store
        TSTORE(view(q_S_channel1_gm + get_block_idx() * 8192, 64, 128, 128), q_S_h1);
        ffts_cross_core_sync(PIPE_FIX, group_flag(0));  // q_S_channel1 -> q_S_in_h1
        wait_flag_dev(1);  // q_kT_D_f16_channel1 -> q_kT_D_f16_in_h1
        TLOAD(q_kT_D_f16_in_h1, view(q_kT_D_f16_channel1_gm + get_block_idx() * 4096, 64, 64, 64));
        set_flag(PIPE_MTE2, PIPE_MTE1, EVENT_ID7);  // q_kT_D_f16_in_h1 -> o_sum_part_left_h1
        wait_flag(PIPE_MTE2, PIPE_MTE1, EVENT_ID6);  // q_kT_D_f16_in -> o_sum_part_left
        wait_flag(PIPE_M, PIPE_MTE1, EVENT_ID4);  // q_S_left -> o_sum_part_left
        TEXTRACT(o_sum_part_left, q_kT_D_f16_in, 0, 0);
        TEXTRACT(o_sum_part_right, U, 0, 0);
        set_flag(PIPE_MTE1, PIPE_M, EVENT_ID4);  // o_sum_part_right -> o_sum_part
        set_flag(PIPE_MTE1, PIPE_MTE2, EVENT_ID3);  // U -> U
        wait_flag(PIPE_MTE1, PIPE_M, EVENT_ID4);  // o_sum_part_right -> o_sum_part
        TMATMUL(o_sum_part, o_sum_part_left, o_sum_part_right);
        set_flag(PIPE_M, PIPE_FIX, EVENT_ID4);  // o_sum_part -> store
        set_flag(PIPE_M, PIPE_MTE1, EVENT_ID0);  // o_sum_part_left -> q_kT_left
        wait_flag(PIPE_MTE2, PIPE_MTE1, EVENT_ID7);  // q_kT_D_f16_in_h1 -> o_sum_part_left_h1
        wait_flag(PIPE_M, PIPE_MTE1, EVENT_ID5);  // q_S_left_h1 -> o_sum_part_left_h1
        TEXTRACT(o_sum_part_left_h1, q_kT_D_f16_in_h1, 0, 0);
        TEXTRACT(o_sum_part_right_h1, U_h1, 0, 0);
        set_flag(PIPE_MTE1, PIPE_M, EVENT_ID5);  // o_sum_part_right_h1 -> o_sum_part_h1
        set_flag(PIPE_MTE1, PIPE_MTE2, EVENT_ID4);  // U_h1 -> U_h1
        wait_flag(PIPE_MTE1, PIPE_M, EVENT_ID5);  // o_sum_part_right_h1 -> o_sum_part_h1
        TMATMUL(o_sum_part_h1, o_sum_part_left_h1, o_sum_part_right_h1);
        set_flag(PIPE_M, PIPE_FIX, EVENT_ID5);  // o_sum_part_h1 -> store
        set_flag(PIPE_M, PIPE_MTE1, EVENT_ID1);  // o_sum_part_left_h1 -> q_kT_left_h1
        wait_flag(PIPE_M, PIPE_FIX, EVENT_ID4);  // o_sum_part -> store
        TSTORE(view(o_sum_part_channel_gm + get_block_idx() * 8192, 64, 128, 128), o_sum_part);
        ffts_cross_core_sync(PIPE_FIX, group_flag(0));  // o_sum_part_channel -> o_sum_part_in
        wait_flag(PIPE_M, PIPE_FIX, EVENT_ID5);  // o_sum_part_h1 -> store
        TSTORE(view(o_sum_part_channel1_gm + get_block_idx() * 8192, 64, 128, 128), o_sum_part_h1);
        ffts_cross_core_sync(PIPE_FIX, group_flag(0));  // o_sum_part_channel1 -> o_sum_part_in_h1
        set_flag(PIPE_FIX, PIPE_M, EVENT_ID0);  // o_sum_part_h1 -> q_kT
    }
    wait_flag(PIPE_MTE1, PIPE_MTE2, EVENT_ID0);  // q -> q_raw
    wait_flag(PIPE_MTE1, PIPE_MTE2, EVENT_ID1);  // q_h1 -> q_raw_h1
    wait_flag(PIPE_M, PIPE_MTE1, EVENT_ID0);  // o_sum_part_left -> q_kT_left
    wait_flag(PIPE_FIX, PIPE_M, EVENT_ID0);  // o_sum_part_h1 -> q_kT
    wait_flag(PIPE_M, PIPE_MTE1, EVENT_ID1);  // o_sum_part_left_h1 -> q_kT_left_h1
    wait_flag(PIPE_MTE1, PIPE_MTE2, EVENT_ID2);  // S_h1 -> S_h1
    wait_flag(PIPE_MTE1, PIPE_MTE2, EVENT_ID3);  // U -> U
    wait_flag_dev(2);  // q_S_channel -> store
    wait_flag(PIPE_MTE1, PIPE_MTE2, EVENT_ID4);  // U_h1 -> U_h1
#endif
#if defined(__DAV_C220_VEC__) || (defined(__DAV_VEC__) && !defined(__CPU_SIM))
    set_mask_norm();
    set_vector_mask(-1, -1);
    __gm__ int64_t *table = reinterpret_cast<__gm__ int64_t *>(table_bytes);
    __gm__ half *o_gm = reinterpret_cast<__gm__ half *>(o_bytes);
    __gm__ float *G_ws_gm = reinterpret_cast<__gm__ float *>(workspace + table[0]);
    __gm__ float *q_S_channel_gm = reinterpret_cast<__gm__ float *>(workspace + table[3]);
    __gm__ float *q_kT_channel_gm = reinterpret_cast<__gm__ float *>(workspace + table[4]);
    __gm__ half *q_kT_D_f16_channel_gm = reinterpret_cast<__gm__ half *>(workspace + table[5]);
    __gm__ float *o_sum_part_channel_gm = reinterpret_cast<__gm__ float *>(workspace + table[6]);
    __gm__ float *q_S_channel1_gm = reinterpret_cast<__gm__ float *>(workspace + table[7]);
    __gm__ float *q_kT_channel1_gm = reinterpret_cast<__gm__ float *>(workspace + table[8]);
    __gm__ half *q_kT_D_f16_channel1_gm = reinterpret_cast<__gm__ half *>(workspace + table[9]);
    __gm__ float *o_sum_part_channel1_gm = reinterpret_cast<__gm__ float *>(workspace + table[10]);
    __gm__ float *lower_fill_gm = reinterpret_cast<__gm__ float *>(constants + 0);
    __gm__ int32_t *cu_seqlens = reinterpret_cast<__gm__ int32_t *>(cu_seqlens_bytes);
    const int64_t sub = get_subblockid();
    auto lower_fill = tile_at<UbTile<float, 32, 64>>(0x0);
    auto G = tile_at<UbTile<float, 1, 64>>(0x2000);
    auto G_col = tile_at<UbCol<float, 32>>(0x2000 + sub * 128);
    auto G_times_minus_1 = tile_at<UbTile<float, 1, 64>>(0x2100);
    auto G_h1 = tile_at<UbTile<float, 1, 64>>(0x2200);
    auto G_col_h1 = tile_at<UbCol<float, 32>>(0x2200 + sub * 128);
    auto G_times_expand = tile_at<UbTile<float, 32, 64>>(0x2300);
    auto G_minus_G = tile_at<UbTile<float, 32, 64>>(0x2300);
    auto G_times_minus_1_h1 = tile_at<UbTile<float, 1, 64>>(0x4300);
    auto G_times_expand_h1 = tile_at<UbTile<float, 32, 64>>(0x4400);
    auto lower_G_minus_G = tile_at<UbTile<float, 32, 64>>(0x2300);
    auto G_minus_G_h1 = tile_at<UbTile<float, 32, 64>>(0x4400);
    auto D = tile_at<UbTile<float, 32, 64>>(0x2300);
    auto lower_G_minus_G_h1 = tile_at<UbTile<float, 32, 64>>(0x4400);
    auto D_h1 = tile_at<UbTile<float, 32, 64>>(0x4400);
    auto exp_G = tile_at<UbTile<float, 1, 64>>(0x2000);
    auto exp_G_col = tile_at<UbCol<float, 32>>(0x2000 + sub * 128);
    auto exp_G_h1 = tile_at<UbTile<float, 1, 64>>(0x2200);
    auto exp_G_col_h1 = tile_at<UbCol<float, 32>>(0x2200 + sub * 128);
    auto q_kT_in = tile_at<UbTile<float, 32, 64>>(0x6400);
    auto q_kT_D = tile_at<UbTile<float, 32, 64>>(0x6400);
    auto q_kT_D_f16 = tile_at<UbTile<half, 32, 64>>(0x8400);
    auto q_kT_in_h1 = tile_at<UbTile<float, 32, 64>>(0x9400);
    auto q_kT_D_h1 = tile_at<UbTile<float, 32, 64>>(0x9400);
    auto q_kT_D_f16_h1 = tile_at<UbTile<half, 32, 64>>(0xb400);
    auto q_S_in = tile_at<UbTile<float, 32, 128>>(0xc400);
    auto exp_G_q_S = tile_at<UbTile<float, 32, 128>>(0xc400);
    auto q_S_in_h1 = tile_at<UbTile<float, 32, 128>>(0x10400);
    auto exp_G_q_S_h1 = tile_at<UbTile<float, 32, 128>>(0x10400);
    auto o_sum_part_in = tile_at<UbTile<float, 32, 128>>(0x14400);
    auto o_sum = tile_at<UbTile<float, 32, 128>>(0xc400);
    auto o_sum_part_in_h1 = tile_at<UbTile<float, 32, 128>>(0x18400);
    auto o = tile_at<UbTile<float, 32, 128>>(0xc400);
    auto o_f16 = tile_at<UbTile<half, 32, 128>>(0x1c400);
    auto o_sum_h1 = tile_at<UbTile<float, 32, 128>>(0x10400);
    auto o_h1 = tile_at<UbTile<float, 32, 128>>(0x10400);
    auto o_f16_h1 = tile_at<UbTile<half, 32, 128>>(0x1e400);
    // D = exp(lower(G[:, None] - G[None, :], fill=-inf))
    TLOAD(lower_fill, view(lower_fill_gm + sub * 32 * 64, 32, 64, 64));
    set_flag(PIPE_V, PIPE_MTE2, EVENT_ID0);  // exp_G_col -> G
    set_flag(PIPE_V, PIPE_MTE2, EVENT_ID1);  // exp_G_col_h1 -> G_h1
    ffts_cross_core_sync(PIPE_MTE2, group_flag(2));  // q_S_channel -> store
    set_flag(PIPE_V, PIPE_MTE2, EVENT_ID2);  // o -> q_S_in
    for (int64_t item = get_block_idx(); item < slots * ((HV + 1) / 2); item += get_block_num()) {
        const int64_t hv = item % ((HV + 1) / 2) * 2;
        const int64_t hv_1 = hv + 1 < HV ? hv + 1 : HV - 1;
        const int64_t slot = item / ((HV + 1) / 2), n = sequence_of(cu_seqlens, N, slot, 64);
        const int64_t first = cu_seqlens[n], length = cu_seqlens[n + 1] - first, b = n * batched;
        const int64_t c = slot - first / 64 - n;
        if (c * 64 >= length) continue;
        const int64_t t = first - b * T + c * 64;
        const int64_t rows = length - c * 64 < 64 ? length - c * 64 : 64;
        const int64_t part = part_of(rows, sub, 32);
        wait_flag(PIPE_V, PIPE_MTE2, EVENT_ID0);  // exp_G_col -> G
        TLOAD(G, view(G_ws_gm + (slot * HV + hv) * 64, 1, 64, 64));
        set_flag(PIPE_MTE2, PIPE_V, EVENT_ID0);  // G -> G_times_minus_1
        wait_flag(PIPE_MTE2, PIPE_V, EVENT_ID0);  // G -> G_times_minus_1
        TMULS(G_times_minus_1, G, -1.0f);
        wait_flag(PIPE_V, PIPE_MTE2, EVENT_ID1);  // exp_G_col_h1 -> G_h1
        TLOAD(G_h1, view(G_ws_gm + (slot * HV + hv_1) * 64, 1, 64, 64));
        set_flag(PIPE_MTE2, PIPE_V, EVENT_ID1);  // G_h1 -> G_times_minus_1_h1
        pipe_barrier(PIPE_V);
        TCOLEXPAND(G_times_expand, G_times_minus_1);
        pipe_barrier(PIPE_V);
        TROWEXPANDADD(G_minus_G, G_times_expand, G_col);
        wait_flag(PIPE_MTE2, PIPE_V, EVENT_ID1);  // G_h1 -> G_times_minus_1_h1
        TMULS(G_times_minus_1_h1, G_h1, -1.0f);
        pipe_barrier(PIPE_V);
        TCOLEXPAND(G_times_expand_h1, G_times_minus_1_h1);
        TADD(lower_G_minus_G, G_minus_G, lower_fill);
        pipe_barrier(PIPE_V);
        TROWEXPANDADD(G_minus_G_h1, G_times_expand_h1, G_col_h1);
        TEXP(D, lower_G_minus_G);
        pipe_barrier(PIPE_V);
        TADD(lower_G_minus_G_h1, G_minus_G_h1, lower_fill);
        pipe_barrier(PIPE_V);
        TEXP(D_h1, lower_G_minus_G_h1);
        // exp_G = exp(G)
        TEXP(exp_G, G);
        TEXP(exp_G_h1, G_h1);
        wait_flag_dev(0);  // q_kT_channel -> q_kT_in
        TLOAD(q_kT_in, view(q_kT_channel_gm + get_block_idx() * 4096 + sub * 32 * 64, 32, 64, 64));
        set_flag(PIPE_MTE2, PIPE_V, EVENT_ID2);  // q_kT_in -> q_kT_D
        wait_flag(PIPE_MTE2, PIPE_V, EVENT_ID2);  // q_kT_in -> q_kT_D
        // o = scale * (exp(G)[:, None] * (q @ S) + ((q @ k.T) * D) @ U)
        TMUL(q_kT_D, q_kT_in, D);
        pipe_barrier(PIPE_V);
        TCVT(q_kT_D_f16, q_kT_D, RoundMode::CAST_RINT);
        set_flag(PIPE_V, PIPE_MTE3, EVENT_ID0);  // q_kT_D_f16 -> store
        wait_flag(PIPE_V, PIPE_MTE3, EVENT_ID0);  // q_kT_D_f16 -> store
        TSTORE(view(q_kT_D_f16_channel_gm + get_block_idx() * 4096 + sub * 32 * 64, 32, 64, 64), q_kT_D_f16);
        ffts_cross_core_sync(PIPE_MTE3, group_flag(1));  // q_kT_D_f16_channel -> q_kT_D_f16_in
        wait_flag_dev(0);  // q_kT_channel1 -> q_kT_in_h1
        TLOAD(q_kT_in_h1, view(q_kT_channel1_gm + get_block_idx() * 4096 + sub * 32 * 64, 32, 64, 64));
        set_flag(PIPE_MTE2, PIPE_V, EVENT_ID3);  // q_kT_in_h1 -> q_kT_D_h1
        wait_flag(PIPE_MTE2, PIPE_V, EVENT_ID3);  // q_kT_in_h1 -> q_kT_D_h1
        TMUL(q_kT_D_h1, q_kT_in_h1, D_h1);
        pipe_barrier(PIPE_V);
        TCVT(q_kT_D_f16_h1, q_kT_D_h1, RoundMode::CAST_RINT);
        set_flag(PIPE_V, PIPE_MTE3, EVENT_ID1);  // q_kT_D_f16_h1 -> store
        wait_flag(PIPE_V, PIPE_MTE3, EVENT_ID1);  // q_kT_D_f16_h1 -> store
        TSTORE(view(q_kT_D_f16_channel1_gm + get_block_idx() * 4096 + sub * 32 * 64, 32, 64, 64), q_kT_D_f16_h1);
        ffts_cross_core_sync(PIPE_MTE3, group_flag(1));  // q_kT_D_f16_channel1 -> q_kT_D_f16_in_h1
        wait_flag_dev(0);  // q_S_channel -> q_S_in
        wait_flag(PIPE_V, PIPE_MTE2, EVENT_ID2);  // o -> q_S_in
        TLOAD(q_S_in, view(q_S_channel_gm + get_block_idx() * 8192 + sub * 32 * 128, 32, 128, 128));
        set_flag(PIPE_MTE2, PIPE_V, EVENT_ID4);  // q_S_in -> exp_G_q_S
        ffts_cross_core_sync(PIPE_MTE2, group_flag(2));  // q_S_channel -> store
        wait_flag(PIPE_MTE2, PIPE_V, EVENT_ID4);  // q_S_in -> exp_G_q_S
        TROWEXPANDMUL(exp_G_q_S, q_S_in, exp_G_col);
        set_flag(PIPE_V, PIPE_MTE2, EVENT_ID0);  // exp_G_col -> G
        wait_flag_dev(0);  // q_S_channel1 -> q_S_in_h1
        TLOAD(q_S_in_h1, view(q_S_channel1_gm + get_block_idx() * 8192 + sub * 32 * 128, 32, 128, 128));
        set_flag(PIPE_MTE2, PIPE_V, EVENT_ID5);  // q_S_in_h1 -> exp_G_q_S_h1
        wait_flag(PIPE_MTE2, PIPE_V, EVENT_ID5);  // q_S_in_h1 -> exp_G_q_S_h1
        pipe_barrier(PIPE_V);
        TROWEXPANDMUL(exp_G_q_S_h1, q_S_in_h1, exp_G_col_h1);
        set_flag(PIPE_V, PIPE_MTE2, EVENT_ID1);  // exp_G_col_h1 -> G_h1
        wait_flag_dev(0);  // o_sum_part_channel -> o_sum_part_in
        TLOAD(o_sum_part_in, view(o_sum_part_channel_gm + get_block_idx() * 8192 + sub * 32 * 128, 32, 128, 128));
        set_flag(PIPE_MTE2, PIPE_V, EVENT_ID6);  // o_sum_part_in -> o_sum
        wait_flag(PIPE_MTE2, PIPE_V, EVENT_ID6);  // o_sum_part_in -> o_sum
        TADD(o_sum, exp_G_q_S, o_sum_part_in);
        wait_flag_dev(0);  // o_sum_part_channel1 -> o_sum_part_in_h1
        TLOAD(o_sum_part_in_h1, view(o_sum_part_channel1_gm + get_block_idx() * 8192 + sub * 32 * 128, 32, 128, 128));
        set_flag(PIPE_MTE2, PIPE_V, EVENT_ID7);  // o_sum_part_in_h1 -> o_sum_h1
        pipe_barrier(PIPE_V);
        TMULS(o, o_sum, scale);
        pipe_barrier(PIPE_V);
        TCVT(o_f16, o, RoundMode::CAST_RINT);
        set_flag(PIPE_V, PIPE_MTE3, EVENT_ID2);  // o_f16 -> store
        set_flag(PIPE_V, PIPE_MTE2, EVENT_ID2);  // o -> q_S_in
        wait_flag(PIPE_V, PIPE_MTE3, EVENT_ID2);  // o_f16 -> store
        if (part > 0) {
            auto valid = tile_at<UbPart<half, 32, 128>>(0x1c400, part, 128);
            TSTORE(view(o_gm + token_at(HV, hv, 128, b, T, t + sub * 32), part, 128, token_stride(HV, 128)), valid);
        }
        wait_flag(PIPE_MTE2, PIPE_V, EVENT_ID7);  // o_sum_part_in_h1 -> o_sum_h1
        TADD(o_sum_h1, exp_G_q_S_h1, o_sum_part_in_h1);
        pipe_barrier(PIPE_V);
        TMULS(o_h1, o_sum_h1, scale);
        pipe_barrier(PIPE_V);
        TCVT(o_f16_h1, o_h1, RoundMode::CAST_RINT);
        set_flag(PIPE_V, PIPE_MTE3, EVENT_ID3);  // o_f16_h1 -> store
        wait_flag(PIPE_V, PIPE_MTE3, EVENT_ID3);  // o_f16_h1 -> store
        if (part > 0) {
            auto valid = tile_at<UbPart<half, 32, 128>>(0x1e400, part, 128);
            TSTORE(view(o_gm + token_at(HV, hv_1, 128, b, T, t + sub * 32), part, 128, token_stride(HV, 128)), valid);
        }
    }
    wait_flag(PIPE_V, PIPE_MTE2, EVENT_ID0);  // exp_G_col -> G
    wait_flag(PIPE_V, PIPE_MTE2, EVENT_ID1);  // exp_G_col_h1 -> G_h1
    wait_flag(PIPE_V, PIPE_MTE2, EVENT_ID2);  // o -> q_S_in
#endif
#endif
}

#if !defined(__CCE_AICORE__) && !defined(__CPU_SIM)
// Host side: one launcher a kernel; 0, or 1 where the runtime has no address for flags between cores.
extern "C" int call_gated_delta_rule_G_fp16(
    uint32_t block_dim,
    void *stream,
    uint8_t *g_bytes,
    uint8_t *workspace,
    uint8_t *table_bytes,
    uint8_t *cu_seqlens_bytes,
    int64_t N,
    int64_t T,
    int64_t batched,
    int64_t H,
    int64_t HV,
    int64_t slots)
{
    uint64_t ffts = 0;
    uint32_t length = 0;
    if (rtGetC2cCtrlAddr(&ffts, &length) != 0) return 1;
    gated_delta_rule_G_fp16<<<block_dim, nullptr, stream>>>(g_bytes, workspace, table_bytes, cu_seqlens_bytes, N, T, batched, H, HV, slots, ffts);
    return 0;
}
extern "C" int call_gated_delta_rule_A_fp16(
    uint32_t block_dim,
    void *stream,
    uint8_t *k_bytes,
    uint8_t *beta_bytes,
    uint8_t *workspace,
    uint8_t *constants,
    uint8_t *table_bytes,
    uint8_t *cu_seqlens_bytes,
    int64_t N,
    int64_t T,
    int64_t batched,
    int64_t H,
    int64_t HV,
    int64_t slots)
{
    uint64_t ffts = 0;
    uint32_t length = 0;
    if (rtGetC2cCtrlAddr(&ffts, &length) != 0) return 1;
    gated_delta_rule_A_fp16<<<block_dim, nullptr, stream>>>(k_bytes, beta_bytes, workspace, constants, table_bytes, cu_seqlens_bytes, N, T, batched, H, HV, slots, ffts);
    return 0;
}
extern "C" int call_gated_delta_rule_Tinv_fp16(
    uint32_t block_dim,
    void *stream,
    uint8_t *workspace,
    uint8_t *constants,
    uint8_t *table_bytes,
    uint8_t *cu_seqlens_bytes,
    int64_t N,
    int64_t T,
    int64_t batched,
    int64_t H,
    int64_t HV,
    int64_t slots)
{
    uint64_t ffts = 0;
    uint32_t length = 0;
    if (rtGetC2cCtrlAddr(&ffts, &length) != 0) return 1;
    gated_delta_rule_Tinv_fp16<<<block_dim, nullptr, stream>>>(workspace, constants, table_bytes, cu_seqlens_bytes, N, T, batched, H, HV, slots, ffts);
    return 0;
}
extern "C" int call_gated_delta_rule_U_weight_U_offset_fp16(
    uint32_t block_dim,
    void *stream,
    uint8_t *k_bytes,
    uint8_t *v_bytes,
    uint8_t *beta_bytes,
    uint8_t *workspace,
    uint8_t *table_bytes,
    uint8_t *cu_seqlens_bytes,
    int64_t N,
    int64_t T,
    int64_t batched,
    int64_t H,
    int64_t HV,
    int64_t slots)
{
    uint64_t ffts = 0;
    uint32_t length = 0;
    if (rtGetC2cCtrlAddr(&ffts, &length) != 0) return 1;
    gated_delta_rule_U_weight_U_offset_fp16<<<block_dim, nullptr, stream>>>(k_bytes, v_bytes, beta_bytes, workspace, table_bytes, cu_seqlens_bytes, N, T, batched, H, HV, slots, ffts);
    return 0;
}
extern "C" int call_gated_delta_rule_S_U_fp16(
    uint32_t block_dim,
    void *stream,
    uint8_t *k_bytes,
    uint8_t *initial_state_bytes,
    uint8_t *final_state_bytes,
    uint8_t *workspace,
    uint8_t *table_bytes,
    uint8_t *cu_seqlens_bytes,
    int64_t N,
    int64_t T,
    int64_t batched,
    int64_t H,
    int64_t HV,
    int64_t slots,
    int64_t has_initial_state,
    int64_t has_final_state)
{
    uint64_t ffts = 0;
    uint32_t length = 0;
    if (rtGetC2cCtrlAddr(&ffts, &length) != 0) return 1;
    gated_delta_rule_S_U_fp16<<<block_dim, nullptr, stream>>>(k_bytes, initial_state_bytes, final_state_bytes, workspace, table_bytes, cu_seqlens_bytes, N, T, batched, H, HV, slots, has_initial_state, has_final_state, ffts);
    return 0;
}
extern "C" int call_gated_delta_rule_o_fp16(
    uint32_t block_dim,
    void *stream,
    uint8_t *q_bytes,
    uint8_t *k_bytes,
    uint8_t *o_bytes,
    uint8_t *workspace,
    uint8_t *constants,
    uint8_t *table_bytes,
    uint8_t *cu_seqlens_bytes,
    int64_t N,
    int64_t T,
    int64_t batched,
    int64_t H,
    int64_t HV,
    int64_t slots,
    float scale)
{
    uint64_t ffts = 0;
    uint32_t length = 0;
    if (rtGetC2cCtrlAddr(&ffts, &length) != 0) return 1;
    gated_delta_rule_o_fp16<<<block_dim, nullptr, stream>>>(q_bytes, k_bytes, o_bytes, workspace, constants, table_bytes, cu_seqlens_bytes, N, T, batched, H, HV, slots, scale, ffts);
    return 0;
}
#endif
'''


# --- host: the same text in every generated module -------------------------------------------------------------------
@dataclass(frozen=True)
class PartCost:
    """The cost of parts of a sequence that run side by side, from which the number of parts follows.

    chunk_us: microseconds in which a walk does one chunk.
    fold_us: microseconds in which one part's summary is applied to the state.
    launch_us: microseconds of one kernel for summaries, besides its chunks, where all parts need them; idle_us: of one that finds
      that none is needed.
    split_us: microseconds that parts with warm-ups cost besides their chunks: kernels that bound the length of warm-ups, and the
      longer start of a walk.
    summary_us: microseconds in which one chunk is summed up.
    warm_up_chunks: length of the warm-up that a part's walk has on average, in chunks.
    longest_warm_up_chunks: how many more chunks the longest warm-up of a sequence has.
    least_part_chunks: in parts of fewer chunks some heads need summaries.
    resident: walks that one multiprocessor runs at a time.
    start_chunks: what a walk costs besides its chunks, in chunks: its first loads, and its final state.
    warm_up_limit: in a call with summaries the longest warm-up has this many chunks more than a part. A longer one takes more
      time than summaries.
    crowded: how many times its chunks' time a part takes where there are more parts of uneven sequences than the GPU runs at a
      time. Warm-ups of the heads that forget slowly then delay other parts.
    """

    chunk_us: float
    fold_us: float
    launch_us: float
    split_us: float
    summary_us: float
    warm_up_chunks: float
    longest_warm_up_chunks: float
    least_part_chunks: float
    resident: int
    idle_us: float
    crowded: float
    start_chunks: float = 0.0
    warm_up_limit: int = 50


@dataclass
class NativeCall:
    """A call as data, for the native launcher (runtime/call/native_launcher.py).

    sources: for each tensor of `Tables.tensors`, where it comes from: ("given", its index in (*given, *states, *outs, *buffers,
      indices), the shape that kernels see), ("fixed", the tensor), ("result", a tensor like it, the shape that kernels see) or
      ("workspace", a tensor like it).
    launches: (launch, indices of its tensors in `Tables.tensors`, indices of its numbers in `Tables.scalars`).
    rows: makes cu_seqlens for rows of equal length, for calls without it.
    """

    sources: list[tuple[Any, ...]]
    launches: list[tuple[Any, list[int], list[int]]]
    rows: Callable[[], Any]


@dataclass(frozen=True)
class Tables:
    """The facts of a build. A row of a tensor begins with its name. Dims are those of one tile. Dtypes are torch's names.

    name: the name of the build. function: the name of the generated function. chunk: tokens of a chunk. layout: "bthd" or
    "bhtd". dtype: the dtype of input tiles.
    inputs: (name, "H" or "HV", dims after [batch, tokens, heads], dtype).
    head_inputs: (name, default, dims after [value heads], dtype): one number or vector for each value head. The default is None
    if the caller must give it.
    chunk_inputs: (name, dims, dtype): one tile for each chunk slot and value head, such as the state before each chunk.
    chunk_dims: for each of chunk_inputs and saved, the extents of its tiles without padding, in the page's order. None stands for
    the tokens of a chunk. held: those of chunk_inputs whose rows past a sequence's end repeat the last one, as running sums do.
    sums: those that are running sums of rows -> the name of what is summed, and whether a token's sum leaves out its own row.
    initial, final: (name, dims): one tile of `state_dtype` for each sequence and value head.
    checkpoints: (name, dims): one tile of `state_dtype` for each checkpoint and value head. rows: they lie in rows of the
    caller's memory, one row for each sequence and one tile for each token. slots: they lie in the pool. positions: they lie in
    rows of the caller's memory, one tile each, which `checkpoint_rows` gives for each chunk.
    outputs: (name, dims after [batch, tokens, value heads], dtype).
    workspaces: (name, dims, dtype): one tile for each chunk slot and value head. saved: those that a call returns. zeroed: those
    of saved that callers add up over all slots: a gradient's shares by chunk. The host clears them first.
    backward: chunks are walked from the last to the first.
    end_workspaces: one tile for each sequence and value head. counters: (name,): one integer. declined: the counter that is not
    zero if the first of two builds has declined a call; both run only in a pair. shared: (name,), if all tiles between kernels
    and cores lie in one workspace, which the launcher divides. places: (name,), if kernels choose the chunks of parts.
    part_workspaces: one tile for each part and value head.
    indices: names of the tensors of integers: pool slots and the like. by_token: those with an integer for each token.
    scalars: the caller's numbers and their defaults. A default is None if the caller must give the number.
    kernels: (name, grid: one instance for each of "chunks", "parts" or "sequences", blocks of a split dim, tensors, numbers).
    ints: for each kernel, the integers that it gets besides the sizes.
    heads: head counts compiled in, by name. heads_per_instance: value heads of a key head that one kernel instance handles.
    units: elements that divide the strides of a tensor. Kernels get strides in these units. The default is 1.
    pool: states are slots of a pool. in_place: the final state overwrites the initial state. strided: kernels get strides.
    cleared: kernels clear rows that no sequence covers, if the host asks for it.

    part_cost: the cost model that gives the number of parts that run side by side; None for a build without such. pipelined: True
    if kernels are launched once for each part, one part after the other. part_chunks: chunks of a part, 0 to choose. most: the
    most parts that a warm-up may reach back. summaries: kernels that compute summaries of parts. bounds: kernels that bound the
    length of a warm-up. They run in calls with several parts; with `declined` in all calls, as one of them clears the counter.
    warm_ups: True if the length of a warm-up is found at run time. forgets: the one of chunk_inputs of which it is found.

    decays: inputs that are logs of decays. state: "kv" or "vk",
    the order of a state's dims. tf32: True if a GPU multiplies float32 as tf32. check_chunks: chunks of the longest sequence of
    the self-check.
    """

    #: The fields whose tensors a call holds, in this order. `indices` come last.
    ORDER: ClassVar[tuple[str, ...]] = ("inputs", "head_inputs", "chunk_inputs", "initial", "final", "checkpoints", "outputs",
                                        "workspaces", "end_workspaces", "counters", "shared", "places", "part_workspaces")

    name: str
    function: str
    chunk: int
    layout: str
    dtype: str
    inputs: tuple[tuple[str, str, tuple[int, ...], str], ...]
    outputs: tuple[tuple[str, tuple[int, ...], str], ...]
    kernels: tuple[tuple[str, str, int, tuple[str, ...], tuple[str, ...]], ...]
    ints: Mapping[str, tuple[str, ...]]
    scalars: Mapping[str, float | None] = field(default_factory=dict)
    head_inputs: tuple[tuple[str, float | None, tuple[int, ...], str], ...] = ()
    chunk_inputs: tuple[tuple[str, tuple[int, ...], str], ...] = ()
    initial: tuple[tuple[str, tuple[int, ...]], ...] = ()
    final: tuple[tuple[str, tuple[int, ...]], ...] = ()
    checkpoints: tuple[tuple[str, tuple[int, ...]], ...] = ()
    workspaces: tuple[tuple[str, tuple[int, ...], str], ...] = ()
    saved: tuple[str, ...] = ()
    zeroed: tuple[str, ...] = ()
    chunk_dims: Mapping[str, tuple[int | None, ...]] = field(default_factory=dict)
    held: tuple[str, ...] = ()
    sums: Mapping[str, tuple[str, bool]] = field(default_factory=dict)
    backward: bool = False
    end_workspaces: tuple[tuple[str, tuple[int, ...], str], ...] = ()
    counters: tuple[tuple[str], ...] = ()
    declined: str = ""
    shared: tuple[tuple[str], ...] = ()
    places: tuple[tuple[str], ...] = ()
    part_workspaces: tuple[tuple[str, tuple[int, ...], str], ...] = ()
    indices: tuple[str, ...] = ()
    by_token: tuple[str, ...] = ()
    rows: bool = False
    slots: bool = False
    positions: bool = False
    heads: Mapping[str, int] = field(default_factory=dict)
    heads_per_instance: int = 1
    units: Mapping[str, int] = field(default_factory=dict)
    state: str = "kv"
    state_dtype: str = "float32"
    pool: bool = False
    in_place: bool = False
    strided: bool = False
    cleared: bool = False
    part_cost: PartCost | None = None
    pipelined: bool = False
    part_chunks: int = 0
    most: int = 0
    summaries: tuple[str, ...] = ()
    bounds: tuple[str, ...] = ()
    warm_ups: bool = False
    forgets: str = ""
    decays: tuple[str, ...] = ()
    tf32: bool = False
    check_chunks: int = 3

    @property
    def in_parts(self) -> bool:
        """Whether kernels run over parts of sequences."""
        return self.part_cost is not None or self.pipelined

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of a call's tensors, in the order in which the host holds them."""
        return (*(row[0] for rows in self.ORDER for row in getattr(self, rows)), *self.indices)

    @property
    def numbers(self) -> tuple[str, ...]:
        """Those of `indices` that the caller gives."""
        return tuple(n for n in self.indices if n != "final_indices")

    def place(self, rows: str) -> slice:
        """The slice of `tensors` that belongs to the field `rows`."""
        before = self.ORDER[:self.ORDER.index(rows)]
        first = sum(len(getattr(self, n)) for n in before)
        return slice(first, first + len(getattr(self, rows)))

    @property
    def outs(self) -> tuple[str, ...]:
        """Names of the arguments for the caller's output memory."""
        return ("out",) if len(self.outputs) == 1 else tuple(f"out_{row[0]}" for row in self.outputs)

    def kernel(self, name: str) -> tuple[str, str, int, tuple[str, ...], tuple[str, ...]]:
        """The row of a kernel."""
        return next(row for row in self.kernels if row[0] == name)


_FLOATS = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_kept: dict[Any, torch.Tensor] = {}
_counts: dict[Any, torch.Tensor] = {}


def _fail(argument: str, got: object, accepted: str) -> NoReturn:
    raise ValueError(f"{argument}: got {got}; accepted: {accepted}")


# --- what kernels can read -------------------------------------------------------------------------------------------
def _is_transformed() -> bool:
    """Whether tensors of torch.func's transforms, or dual ones, may be among those of a call."""
    return torch.autograd.forward_ad._current_level >= 0 or torch._C._functorch.maybe_current_level() is not None


def _check_memory(name: str, x: torch.Tensor) -> None:
    """A dense tensor whose values are those in its memory, because kernels see memory alone."""
    if x.is_nested or x.layout != torch.strided:
        _fail(name, "a nested tensor" if x.is_nested else x.layout, "a dense tensor")
    if torch.compiler.is_compiling():
        return
    if torch._C._is_tracing():
        _fail(name, "a tensor of torch.jit.trace, which does not see kernels", "a call under torch.compile or torch.export")
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        _fail(name, "a tensor of vmap, grad, jvp or another transform", "a plain tensor: backward() and torch.autograd.grad "
              "differentiate the op, transforms do not")
    if torch.autograd.forward_ad._current_level >= 0 and torch.autograd.forward_ad.unpack_dual(x).tangent is not None:  # type: ignore[no-untyped-call]
        _fail(name, "a dual tensor of forward-mode differentiation", "its primal, because the op computes gradients only")
    if x.is_neg():
        _fail(name, "a view with torch's negative bit", "x.resolve_neg(), which copies it")


# --- numbers ---------------------------------------------------------------------------------------------------------
def _python_number(x: Any) -> Any:
    """The int or float that a scalar of numpy holds, or an array or tensor of rank 0 on the CPU. `x` itself if it is anything
    else: also a tensor whose value a trace does not know, or whose gradient the number would lose."""
    if type(x) in (int, float) or x is None:
        return x
    if isinstance(x, torch.Tensor):
        if type(x) is not torch.Tensor or x.ndim or x.device.type != "cpu" or x.requires_grad or _is_transformed():
            return x
        seen = torch.compiler.is_compiling() or torch._C._is_tracing() or torch._C._len_torch_dispatch_stack()
        return x if seen else x.item()
    kind = getattr(getattr(x, "dtype", None), "kind", "") if getattr(x, "ndim", None) == 0 else ""
    return float(x) if kind == "f" else int(x) if kind in ("i", "u") else x


def _integer(x: Any) -> Any:
    """The int that an integer of numpy holds, `x` itself if it is anything else. What a call decides by its options is kept, so
    arrays and tensors, whose values may change, are no options."""
    if type(x) is int or x is None or isinstance(x, torch.Tensor) or type(x).__hash__ is None:
        return x
    return _python_number(x)


# --- strides and copies ----------------------------------------------------------------------------------------------
def _is_apart(x: torch.Tensor) -> bool:
    """True if no two indices of `x` share an element: the stride of each dim exceeds the reach of all finer dims."""
    reach = 1
    for far, n in sorted((far, n) for far, n in zip(x.stride(), x.shape, strict=True) if n > 1):
        if far < reach:
            return x.numel() == 0
        reach += far * (n - 1)
    return True


def _dense(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of this shape."""
    out, far = [], 1
    for n in reversed(shape):
        out.append(far)
        far *= n or 1
    return tuple(reversed(out))


def _is_plain(x: torch.Tensor, dtype: torch.dtype) -> bool:
    """True if `x` has this dtype and the strides of a contiguous tensor."""
    return x.dtype == dtype and x.stride() == _dense(x.shape)


def _plain(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x` in `dtype`, contiguous, aligned to 16 bytes and with the strides of its shape: torch does not normalise those of
    size 1."""
    x = x.to(dtype).contiguous()
    return (x.clone() if x.data_ptr() % 16 else x).view(-1).view(x.shape)


def _flat(name: str, x: torch.Tensor) -> torch.Tensor:
    """A pool as a flat view of its elements from the first to the last, with the gaps between slots."""
    if x.data_ptr() % 16:
        _fail(name, f"an address of {x.data_ptr() % 16} past a multiple of 16 bytes", "memory aligned to 16 bytes")
    slots, each = x.shape[0], math.prod(x.shape[1:])
    return x.as_strided((min(slots, 1) * ((slots - 1) * x.stride(0) + each),), (1,))


def _steps(strides: Sequence[int], layout: str) -> tuple[int, ...]:
    """The strides of batch, token and head, in elements."""
    return strides[0], *(strides[1:3] if layout == "bthd" else strides[2:0:-1])


def _is_elsewhere(device: torch.device) -> bool:
    """True if `device` is a CUDA device other than the current one."""
    return device.type == "cuda" and torch._C._cuda_getDevice() != device.index


# --- tensors that a call makes ---------------------------------------------------------------------------------------
#: `_new(x)`: an uninitialised tensor with the shape, dtype and device of `x`. With `_kin(...)` as `x` it takes half the time of
#: `torch.empty`.
_new = functools.partial(torch.empty_like, memory_format=torch.contiguous_format)


@functools.lru_cache(maxsize=256)
def _made(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor that calls share, in inference mode or not. Kernels do not write to it."""
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=dtype, device=device)


def _kin(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A one-element tensor expanded to a shape: an argument for `_new`."""
    return _made((1,), dtype, device).expand(shape)


def _stream(device: torch.device) -> Any:
    """The current stream: its address if torch gives it, because the object costs 4 us."""
    address = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return address(device.index) if address else torch.cuda.current_stream(device)


def _filled(make: Callable[..., torch.Tensor], *about: Any) -> torch.Tensor:
    """The tensor make(*about). Calls on one stream share it. The last item of `about` is the device. A captured graph makes a
    tensor of its own, and fills it each time it runs."""
    cuda = about[-1].type == "cuda"
    key = (make, *about, _stream(about[-1]) if cuda else None)
    kept = not (cuda and torch.cuda.is_current_stream_capturing())
    x = _kept.get(key) if kept else None
    if x is None:
        x = make(*about)
        if kept:
            if len(_kept) >= 64:
                _kept.clear()
            _kept[key] = x
    return x


def _equal_rows(batch: int, tokens: int, device: torch.device) -> torch.Tensor:
    """cu_seqlens of rows of equal length: int32 [batch + 1]."""
    if not tokens:
        return torch.zeros(batch + 1, dtype=torch.int32, device=device)
    return torch.arange(0, batch * tokens + 1, tokens, dtype=torch.int32, device=device)


def _unread_rows(batch: int, tokens: int, device: torch.device) -> torch.Tensor:
    """In place of cu_seqlens of equal rows, for kernels over single tokens: they compute it, and do not read this. So a captured
    graph does not fill it."""
    return torch.empty(batch + 1, dtype=torch.int32, device=device)


def _in_order(count: int, device: torch.device) -> Any:
    """The numbers 0, 1, ... as int32 [count]. All streams and captured graphs share them, so they are never freed. None while a
    graph is captured and they do not exist."""
    size = max(1024, 1 << (count - 1).bit_length())
    if (size, device) not in _counts:
        cuda = device.type == "cuda"
        if cuda and torch.cuda.is_current_stream_capturing():
            return None
        with torch.inference_mode(False):
            _counts[size, device] = torch.arange(size, dtype=torch.int32, device=device)
        if cuda:
            torch.cuda.current_stream(device).synchronize()
    return _counts[size, device][:count]


def _full(shape: tuple[int, ...], value: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full(shape, value, dtype=dtype, device=device)


def _picker(at: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """A function that picks the tensors at these indices, as a tuple. `itemgetter` is faster, but gives a single item bare."""
    return operator.itemgetter(*at) if len(at) > 1 else lambda memory: tuple(memory[i] for i in at)


#: What the integers of a tensor say.
_WHAT = {"state_indices": "slot", "num_accepted_tokens": "number", "intermediate_state_indices": "row",
         "retrieve_parent_token": "parent", "checkpoint_rows": "row"}
_ANY_FLOAT = tuple(_FLOATS.values())
_LARGEST = torch.finfo(torch.float32).max


# --- one argument ----------------------------------------------------------------------------------------------------
def _check_tensor(name: str, x: Any) -> None:
    """A tensor, whatever its dtype."""
    if not isinstance(x, torch.Tensor):
        _fail(name, type(x).__name__, "a torch.Tensor")


def _check_dtype(name: str, dtype: Any, accepted: Sequence[torch.dtype], why: str = "") -> None:
    """One of some dtypes. why: what the text adds to them."""
    if dtype not in accepted:
        _fail(name, dtype, ", ".join(map(str, accepted)) + why)


def _check_built_for(name: str, x: Any, dtype: str, number: bool) -> None:
    """A tensor of `dtype`. number: one value for each token or head. 16-bit ones are accepted where the module takes float32."""
    _check_tensor(name, x)
    widens = number and dtype == "float32"
    _check_dtype(name, x.dtype, *((_ANY_FLOAT,) if widens else ((_FLOATS[dtype],), " (this module was built for it)")))


def _check_integers(name: str, x: Any) -> None:
    """A tensor of integers."""
    if not isinstance(x, torch.Tensor) or x.dtype not in (torch.int32, torch.int64):
        _fail(name, getattr(x, "dtype", type(x).__name__), "an int32 or int64 tensor")


def _check_rank(name: str, x: torch.Tensor, rank: int, layout: str) -> None:
    """A tensor of so many dims."""
    if x.ndim != rank:
        _fail(name, f"rank {x.ndim}", f"rank {rank}, layout {layout}")


def _check_device(name: str, x: torch.Tensor, device: torch.device) -> None:
    """A tensor on this device."""
    if x.device != device:
        _fail(name, f"device {x.device}", f"device {device}")


def _check_number(name: str, x: Any) -> float:
    """`x` as a float. A tensor on a GPU is refused, because reading it would wait for its device."""
    number = _python_number(x)
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        _fail(name, type(x).__name__, "a number, or None")
    if not abs(number) <= _LARGEST:
        _fail(name, number if isinstance(number, float) else f"an int of {len(str(number))} digits",
              "a number that float32 holds")
    return float(number)


def _check_flag(name: str, x: Any) -> bool:
    """`x`, which must be True or False."""
    if x is not True and x is not False:
        _fail(name, type(x).__name__ if isinstance(x, torch.Tensor) else repr(x), "True or False")
    return bool(x)


def _check_chunks(name: str, x: Any, least: int) -> int:
    """`x` as a number of chunks."""
    chunks = _integer(x)
    if isinstance(chunks, bool) or not isinstance(chunks, int) or not least <= chunks < 2**31:
        _fail(name, repr(x), f"a number of chunks from {least} to {2**31 - 1}")
    return chunks


def _check_given(tensors: Iterable[tuple[str, Any]]) -> None:
    """No tensor that kernels cannot read, and none that requires grad where torch records. tensors: (name, tensor or None)."""
    recorded, seen = torch.is_grad_enabled(), _is_transformed() or torch._C._is_tracing()
    for name, x in tensors:
        if isinstance(x, torch.Tensor):
            if recorded and x.requires_grad:
                _fail(name, "a tensor that requires grad", "inference only: call under torch.no_grad(), or detach it")
            if seen or x.is_neg() or x.is_nested or x.layout != torch.strided:  # each call waits for these
                _check_memory(name, x)


# --- the arguments of a call -----------------------------------------------------------------------------------------
def _check_inputs(given: Sequence[Any], inputs: Sequence[tuple[str, str, tuple[int, ...], str]],
                  head_inputs: Sequence[tuple[str, float | None, tuple[int, ...], str]], layout: str, compiled: Mapping[str, int],
                  batched: int) -> tuple[int, int, int, int, torch.device]:
    """B, T, H, HV and the device of a call's inputs.

    given: a tensor for each row of `inputs`, [B, T, heads, ...] or [B, heads, T, ...] by `layout`, then one [HV, ...] or None for
      each row of `head_inputs`. compiled: head counts that the kernels have, by name. batched: value heads of a key head that
      one kernel instance handles.
    """
    seen: dict[str, int] = {}
    device = getattr(given[0], "device", None)
    for (name, heads, dims, dtype), x in zip(inputs, given, strict=False):
        _check_built_for(name, x, dtype, not dims)
        if x.device != device:
            _fail(name, f"device {x.device}", f"device {device}, that of {inputs[0][0]}")
        tokens, head = (1, 2) if layout == "bthd" else (2, 1)
        _check_rank(name, x, 3 + len(dims), layout)
        if tuple(x.shape[3:]) != dims:
            _fail(name, f"shape {tuple(x.shape)}", f"last dim {dims[0]} (this module was built for it)")
        if compiled and x.shape[head] != compiled[heads]:
            _fail(name, f"shape {tuple(x.shape)}", f"{heads} = {compiled[heads]} heads (this module was built for them)")
        for key, size in (("B", x.shape[0]), ("T", x.shape[tokens]), (heads, x.shape[head])):
            if seen.setdefault(key, size) != size:
                _fail(name, f"shape {tuple(x.shape)}", f"{key} = {seen[key]}, as the inputs before it have")
    value_heads = seen.get("HV", seen.get("H", 0))
    key_heads = seen.get("H", value_heads)
    if min(key_heads, value_heads) < 1 or value_heads % key_heads:
        _fail("heads", f"H = {key_heads}, HV = {value_heads}", "HV a multiple of H, both at least 1")
    if value_heads // key_heads % batched:
        _fail("heads", f"H = {key_heads}, HV = {value_heads}",
              f"HV a multiple of {batched} H: an instance of this module has {batched} value heads of one key head")
    for (name, default, dims, dtype), x in zip(head_inputs, given[len(inputs):], strict=False):
        if x is None and default is not None:
            continue
        _check_built_for(name, x, dtype, True)
        if tuple(x.shape) != (value_heads, *dims):
            _fail(name, f"shape {tuple(x.shape)}",
                  f"shape {(value_heads, *dims)}, one {'vector' if dims else 'number'} for each value head")
        if x.device != device:
            _fail(name, f"device {x.device}", f"device {device}, that of {inputs[0][0]}")
    return seen["B"], seen["T"], key_heads, value_heads, given[0].device


def _check_sequences(cu_seqlens: Any, batch: int, device: torch.device) -> int:
    """The number of sequences in cu_seqlens."""
    _check_integers("cu_seqlens", cu_seqlens)
    if cu_seqlens.ndim != 1 or cu_seqlens.numel() < 2:
        _fail("cu_seqlens", f"shape {tuple(cu_seqlens.shape)}", "shape [N + 1] with N >= 1")
    _check_device("cu_seqlens", cu_seqlens, device)
    if batch != 1:
        _fail("cu_seqlens", f"inputs with B = {batch}", "inputs with B = 1, because cu_seqlens packs the sequences into one row")
    sequences: int = cu_seqlens.numel() - 1
    return sequences


def _check_ends(cu_seqlens: torch.Tensor, tokens: int) -> None:
    """Check the values of cu_seqlens. On a GPU this waits for the device."""
    ends = cu_seqlens.tolist()
    if ends[0] != 0 or ends[-1] > tokens or any(a > b for a, b in itertools.pairwise(ends)):
        _fail("cu_seqlens", ends if len(ends) < 12 else f"{ends[:5]} ... {ends[-3:]}",
              f"values that start at 0, never fall and end at most at T = {tokens}")


def _check_state(name: str, x: Any, shape: tuple[int, ...], device: torch.device, dtypes: Sequence[torch.dtype],
                 written: bool = False) -> None:
    """Check a state [N, HV, ...]. written: True if the call writes to it. Then no two indices may share an element."""
    _check_tensor(name, x)
    if tuple(x.shape) != shape:
        _fail(name, tuple(x.shape), f"shape {shape}")
    _check_dtype(name, x.dtype, dtypes)
    _check_device(name, x, device)
    if written and not _is_apart(x):
        _fail(name, f"strides {x.stride()}", "elements that do not overlap")


def _check_pool(name: str, x: Any, tile: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> int:
    """Elements from one slot to the next of a pool [slots, *tile]. There may be gaps between slots. Each slot has to be dense and
    aligned to 16 bytes."""
    _check_tensor(name, x)
    if tuple(x.shape[1:]) != tile or x.ndim != 1 + len(tile):
        _fail(name, tuple(x.shape), f"shape [slots, {', '.join(map(str, tile))}]")
    _check_dtype(name, x.dtype, (dtype,))
    _check_device(name, x, device)
    dense, size = _dense(tile), math.prod(tile)
    inner = tuple(own if n == 1 else given for n, own, given in zip(tile, dense, x.stride()[1:], strict=True))
    stride = size if x.shape[0] < 2 else x.stride(0)
    if inner != dense or stride < size or stride * x.element_size() % 16:
        _fail(name, f"strides {x.stride()}", f"strides (n, {', '.join(map(str, dense))}), n at least {size} and "
                                             "n elements a multiple of 16 bytes")
    return stride


def _check_indices(name: str, indices: Any, sequences: int, device: torch.device, least: int = -1) -> None:
    """Check a tensor of integers: one for each sequence, or `least` or more for each if that is not -1."""
    _check_integers(name, indices)
    shape = tuple(indices.shape)
    if least < 0 and shape != (sequences,):
        _fail(name, f"shape {shape}", f"shape ({sequences},), one {_WHAT[name]} for each sequence")
    if least >= 0 and not (indices.ndim == 2 and shape[0] == sequences and shape[1] >= least):
        _fail(name, f"shape {shape}", f"shape ({sequences}, {least} or more), one {_WHAT[name]} for each token of each sequence")
    _check_device(name, indices, device)


def _check_rows(name: str, x: Any, tile: tuple[int, ...], tokens: int, device: torch.device, dtype: torch.dtype) -> int:
    """Elements from one row to the next of a buffer [rows, tokens or more, *tile] for states by token."""
    _check_tensor(name, x)
    if x.ndim != 2 + len(tile) or tuple(x.shape[2:]) != tile or x.shape[1] < tokens:
        _fail(name, f"shape {tuple(x.shape)}", f"shape [rows, {tokens} or more, {', '.join(map(str, tile))}]")
    return _check_pool(name, x, tuple(x.shape[1:]), device, dtype)


def _check_slots(seen: Sequence[int], name: str, slots: int, written: bool) -> None:
    """Check the values of a tensor with the slot or row of each sequence. written: True if states are written there. Sequences
    run side by side, so two of them would race for one slot. They may share a slot that is only read."""
    what = _WHAT[name]
    if any(not -1 <= i < slots for i in seen):
        _fail(name, seen if len(seen) < 12 else f"{seen[:5]} ... {seen[-3:]}",
              f"{what}s from 0 to {slots - 1}, or -1 to skip a sequence")
    owner: dict[int, int] = {}
    for n, i in enumerate(seen):
        if written and i >= 0 and owner.setdefault(i, n) != n:
            _fail(name, f"{what} {i} for sequences {owner[i]} and {n}",
                  f"a different {what} for each sequence whose state is written, or -1 to skip a sequence")


def _check_accepted(accepted: Sequence[int], slots: Sequence[Sequence[int]]) -> None:
    """Check the values of num_accepted_tokens. slots: those of each sequence."""
    for n, (count, own) in enumerate(zip(accepted, slots, strict=True)):
        if not 1 <= count <= len(own):
            _fail("num_accepted_tokens", f"{count} for sequence {n}", f"1 to {len(own)}, as many as state_indices has slots")


def _check_slots_by_token(slots: Sequence[Sequence[int]], first: Sequence[int], lengths: Sequence[int], pool: int, written: bool
                          ) -> None:
    """Check the values of state_indices [N, tokens]. first: the slot of each sequence's initial state. written: True if states
    are written to the slots. Then no other token may write a slot, and no other sequence may start from it."""
    owner: dict[int, tuple[int, int]] = {}
    for n, (own, at, length) in enumerate(zip(slots, first, lengths, strict=True)):
        if length > len(own):
            _fail("state_indices", f"{len(own)} slots for the {length} tokens of sequence {n}", "a slot for each token")
        for i in (at, *own[:length]):
            if not -1 <= i < pool:
                _fail("state_indices", f"slot {i} for sequence {n}", f"slots from 0 to {pool - 1}, or -1")
        for t, i in enumerate(own[:length] if written else ()):
            if i >= 0 and owner.setdefault(i, (n, t)) != (n, t):
                _fail("state_indices", f"slot {i} for token {owner[i][1]} of sequence {owner[i][0]} and token {t} of {n}",
                      "a different slot for each token of each sequence, or -1 to store no state")
    for n, at in enumerate(first):
        if at in owner and owner[at][0] != n:
            _fail("state_indices", f"slot {at}, from which sequence {n} starts, for a token of sequence {owner[at][0]}",
                  "a different slot for each token of each sequence")


def _check_parents(parents: Sequence[Sequence[int]], lengths: Sequence[int], kept: Sequence[Sequence[bool]]) -> None:
    """Check the values of retrieve_parent_token. kept: for each token of each sequence, whether its state is stored. The parent
    of a first token is not read."""
    for n, (own, length, there) in enumerate(zip(parents, lengths, kept, strict=True)):
        if length > len(own):
            _fail("retrieve_parent_token", f"{len(own)} parents for {length} tokens of sequence {n}", "a parent for each token")
        for t in range(1, length):
            if not -1 <= own[t] < t or (0 <= own[t] < t - 1 and not there[own[t]]):
                _fail("retrieve_parent_token", f"{own[t]} for token {t} of sequence {n}",
                      f"an earlier token whose state is stored, from 0 to {t - 1}, or -1 for the initial state")


def _check_out(name: str, x: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Check the caller's memory for an output."""
    _check_tensor(name, x)
    if tuple(x.shape) != shape:
        _fail(name, tuple(x.shape), f"shape {shape}")
    if x.dtype != dtype or x.device != device:
        _fail(name, f"{x.dtype} on {x.device}", f"{dtype} on {device}")
    if x.stride(-1) != 1 or not _is_apart(x):
        _fail(name, f"strides {x.stride()}", "a last dim that is dense, and elements that do not overlap")


def _check_buffers(buffers: Sequence[Any], shapes: Sequence[tuple[str, tuple[int, ...], Any]], device: torch.device,
                   dtype: torch.dtype) -> list[bool]:
    """Check callers' buffers for results with these names and shapes. Returns, for each, True if kernels can use it directly."""
    for x, (name, shape, _) in zip(buffers, shapes, strict=True):
        if x is not None:
            _check_state(name, x, shape, device, (dtype,), written=True)
    return [x is None or _is_plain(x, dtype) for x in buffers]


#: How much of the longest walk the last of uneven walks takes after the rest have ended. Fitted to 32 packs on an H100.
TAIL = 0.4
#: Where kernels choose the chunks of a part, a call has kernels for summaries if a sequence may have more chunks than the limit
#: of warm-ups (`warm_up_limit`) times this. Without them a head that forgets nothing warms up from the start of its sequence. Of
#: packs with a sequence of 52 to 69 chunks on an H200, calls without them took 0.78 to 0.91 times as long with gates as a layer
#: draws them, and 0.90 to 1.66 times where a quarter of the heads forgot slowly.
ALL_WARMED = 1.5
#: The most sequences whose lengths a kernel compares to choose the parts. With more it would take as long as a few chunks.
COMPARED = 256
#: Where kernels choose the chunks of a part, they choose at least so many that parts fill the GPU once, and of long sequences
#: FINEST times, with LONG chunks or more. The host launches instances for the shortest parts, and so many as run at a time take a
#: microsecond if they have no part.
FINEST, LONG = 3, 32
#: How many parts that follow one another a sequence has, and the least chunks of one.
PIPELINED, LEAST_PIPELINED = 3, 16


@dataclass(frozen=True)
class _Lengths:
    """What a host knows of the sequences of a call, in chunks.

    longest: the longest sequence. others, rest: how many others there are, and how long each of them is. possible: the longest
    that summaries may be needed for. The values of cu_seqlens may change after the choice, so that is one with all tokens, except
    where kernels choose the chunks of a part (`chosen`).
    """

    longest: int
    others: int
    rest: float
    possible: int
    chosen: bool = False


def _lengths(tokens: int, sequences: int, packed: bool, longest: int, chunk: int, chosen: bool = False) -> _Lengths:
    """What is known of `sequences` sequences with so many tokens in all.

    packed: whether they may differ in length. longest: tokens of the longest, 0 if the host does not know. A pack then counts as
    one sequence of all tokens: a long one is split whatever the others are. Otherwise the others have the same length. So do
    all if the longest, which may be a little more, is at most an eighth longer than the mean. chosen: whether kernels choose the
    chunks of a part.
    """
    possible = max(1, -(-tokens // (chunk if packed else chunk * sequences)))
    if not packed:
        return _Lengths(possible, sequences - 1, possible, possible)
    if not longest or sequences == 1:
        return _Lengths(possible, 0, 0, possible, chosen and sequences > 1)
    if 8 * longest * sequences <= 9 * tokens:
        mean = -(-tokens // (chunk * sequences))
        return _Lengths(mean, sequences - 1, mean, -(-longest // chunk) if chosen else possible, chosen)
    longest = min(tokens, longest)
    chunks = -(-longest // chunk)
    rest = max(1, (tokens - longest) / (chunk * (sequences - 1)) + .5)  # the last chunk of a sequence is half full on average
    return _Lengths(chunks, sequences - 1, rest, chunks if chosen else possible, chosen)


def _needs_summaries(chunks: int, span: int, most: int, cost: PartCost, chosen: bool = False) -> bool:
    """True if a call with a sequence of `chunks` chunks has kernels for summaries: warm-ups may take more time than these.

    That is so if a whole part may begin later than the longest warm-up reaches. span: chunks of a part. most: the longest
    warm-up, in parts. chosen: whether kernels choose the chunks of a part; then the length of the sequence decides (ALL_WARMED).

    Results are right in any case. Without summaries a warm-up may reach back to the start of the sequence, however far that is.
    """
    if chosen:
        return chunks > ALL_WARMED * cost.warm_up_limit
    return chunks - span > min(most * span, span + cost.warm_up_limit)


def _split_parts(parts: int, tokens: int, size: int) -> int:
    """Of the parts of a pack, how many belong to sequences of several parts, at most. size: the fewest tokens of a
    part. Such a sequence has more, and so fewer than 2 parts for each `size` of them. Where kernels choose parts, these come
    first (choose_parts.cuh)."""
    return min(parts, max(1, 2 * tokens // size))


def _cheapest_span(x: _Lengths, instances: int, units: int, cost: PartCost, summaries: int, most: int, warms_up: bool
                   ) -> int | None:
    """The number of chunks of a part with the least `cost`; None for no parts. It tries parts that fill the GPU up to four times.

    instances: kernel instances of a part. units: instances that the GPU runs at a time.
    most: the longest warm-up, in parts. summaries: the number of kernels that a call launches for summaries.
    warms_up: True if the walk of a part may start with a warm-up. Otherwise each part needs a summary of the parts before it.
    """
    sequences, chunks, even = 1 + x.others, x.longest + x.others * x.rest, x.others == 0 or x.rest == x.longest

    def makespan(walk: float, walks: int, total: float, crowded: float = 1.0) -> float:
        """Chunks until all walks have ended. The longest one has `walk` chunks, all have `total` times `instances`.

        Equal walks run in waves. Of others, the last one to start ends a part of a walk after the rest. Equal parts of several
        sequences that run in waves are `crowded`, too.
        """
        waves = -(-walks * instances // units)
        if even:
            return waves * walk * (crowded if waves > 1 and sequences > 1 else 1)
        walk, share = walk + cost.start_chunks, (total + walks * cost.start_chunks) * instances / units
        return max(walk, share if waves == 1 else crowded * share + TAIL * walk)

    best, least = None, makespan(x.longest, sequences, chunks) * cost.chunk_us
    for n in range(2, x.longest + 1):
        span = -(-x.longest // n)
        of_longest = -(-x.longest // span)
        parts = of_longest * sequences if even else of_longest + x.others * max(1, math.ceil(x.rest / span))
        if ((n - 1) * sequences if even else parts - sequences) * instances > 4 * units:
            break
        if warms_up:
            before = (of_longest - 1) * span
            warm_up = min(cost.warm_up_chunks, before)
            done = makespan(span + warm_up, parts, chunks + (parts - sequences) * warm_up, cost.crowded)
            us = cost.split_us + (done + min(cost.longest_warm_up_chunks, before - warm_up)) * cost.chunk_us
            if _needs_summaries(x.possible, span, most, cost, x.chosen):
                us += summaries * cost.idle_us  # most heads need none
                if span < cost.least_part_chunks:
                    us += 3 * span * cost.summary_us
        else:
            summed = -(-(parts - sequences) * instances // units)
            us = (makespan(span, parts, chunks) + 2 * summed * span) * cost.chunk_us
            us += of_longest * cost.fold_us + summaries * cost.launch_us
        if us < least:
            best, least = span, us
    return best


class Plan:
    """The plan of calls whose arguments differ only in their values. Raises ValueError that names a bad argument.

    given: one tensor for each row of `Tables.inputs`, `head_inputs` and `chunk_inputs`. states: one for each row of `initial`.
    outs: one for each row of `outputs`. buffers: the caller's memory for `final` and `checkpoints`, or None. wanted: True if
    final states are wanted. every: chunks from one checkpoint to the next. longest: tokens of the longest sequence, 0 if not
    known; parts and their summaries depend on it, and nothing else. call: runs the plan (host/call.py).
    """

    call: Callable[..., list[Any]]

    def __init__(self, host: Any, given: Sequence[Any], states: Sequence[Any], outs: Sequence[Any], cu_seqlens: Any,
                 buffers: Sequence[Any], wanted: bool, indices: Sequence[Any] = (), every: int = 0, longest: int = 0) -> None:
        """Checks the arguments, then lays out results and workspaces, then chooses the launches."""
        t: Tables = host.tables
        self.host, self.tables, self.wanted, self.every, self.longest = host, t, wanted, every, longest
        self.state = _FLOATS[t.state_dtype]
        self.batch, self.tokens, self.heads, self.value_heads, self.device = _check_inputs(
            given, t.inputs, t.head_inputs, t.layout, t.heads, t.heads_per_instance)
        self.packed = cu_seqlens is not None
        self.equal_rows = _unread_rows if t.chunk == 1 and self.tokens else _equal_rows
        self.sequences = _check_sequences(cu_seqlens, self.batch, self.device) if self.packed else self.batch
        self.slots = self.batch * self.tokens // t.chunk + self.sequences
        # for each argument: what replaces None, whether it is passed without a copy, its alignment in bytes, its dtype
        self.expected: list[tuple[Any, bool, int, torch.dtype]] = []
        self.lacking: list[tuple[Any, ...]] = []  # for absent head inputs: index, then arguments of _full
        self.ints: dict[str, int] = {}  # integers that kernels get, by name
        self.pool_slots: list[int] = []  # slots of each pool
        self.expect_inputs(given)
        self.expect_chunk_inputs(given[len(given) - len(t.chunk_inputs):])
        self.expect_numbers(indices, buffers)
        self.expect_states(states)
        self.expect_buffers(buffers)
        self.expect_outs(outs)
        self.lay_out()
        self.count(given, states, outs)
        self.launches, self.more = self.launched(), list[torch.Tensor]()  # more: like tensors that only an earlier build has
        self.ends_as_they_are = self.packed and _is_plain(cu_seqlens, torch.int32)
        looks = host.check or self.device.type == "cpu"
        self.check_ends, self.check_numbers = self.packed and looks, bool(t.indices) and looks
        self.native = self.native_arguments(given, states, outs, buffers)

    # --- arguments ---
    def expect_inputs(self, given: Sequence[Any]) -> None:
        """Inputs. Strided kernels read an input without a copy if they accept it as a view."""
        t = self.tables
        for (name, _, dims, dtype), x in zip(t.inputs, given, strict=False):
            plain = self.host.is_view(name, x, dims, _FLOATS[dtype]) if t.strided else _is_plain(x, _FLOATS[dtype])
            self.expected.append((None, plain, 1 if t.strided else 16, _FLOATS[dtype]))
        first = len(t.inputs)
        for n, ((_, default, dims, dtype), x) in enumerate(zip(t.head_inputs, given[first:], strict=False), first):
            self.expected.append((None, x is None or _is_plain(x, _FLOATS[dtype]), 16, _FLOATS[dtype]))
            if x is None:
                self.lacking.append((n, (self.value_heads, *dims), default, _FLOATS[dtype], self.device))

    def expect_chunk_inputs(self, given: Sequence[Any]) -> None:
        """Tensors with a tile for each chunk slot, as another module stored them."""
        for (name, dims, dtype), x in zip(self.tables.chunk_inputs, given, strict=True):
            _check_state(name, x, (self.slots, self.value_heads, *dims), self.device, (_FLOATS[dtype],))
            self.expected.append((None, _is_plain(x, _FLOATS[dtype]), 16, _FLOATS[dtype]))

    def expect_numbers(self, indices: Sequence[Any], buffers: Sequence[Any]) -> None:
        """Tensors of integers: pool slots and the like. `as_integers`: for each that the caller may give, True if none is copied.
        `in_order`: those that are 0, 1, ... for the sequences: rows without indices, and final states outside a pool."""
        t = self.tables
        self.in_order = [name for name, x in zip(t.numbers, indices, strict=True) if x is None]
        if "final_indices" in t.indices and buffers[0] is None:
            self.in_order.append("final_indices")
        self.as_integers: list[bool] = []
        for name, x in zip(t.numbers, indices, strict=True):
            if x is not None or name != "intermediate_state_indices":  # without it sequences have rows in order
                least = 0 if self.packed else -(-self.tokens // t.chunk)
                _check_indices(name, x, self.sequences, self.device, least if name in t.by_token else -1)
            if name in t.by_token:
                self.ints[f"{name}_width"] = x.shape[1]
            self.as_integers.append(x is None or _is_plain(x, torch.int32))

    def expect_states(self, states: Sequence[Any]) -> None:
        """Initial states: slots of a pool, or one tile for each sequence, or None."""
        t = self.tables
        for (name, dims), x in zip(t.initial, states, strict=True):
            tile = (self.value_heads, *dims)
            if t.pool:
                self.ints[f"{name}_stride"] = _check_pool(name, x, tile, self.device, self.state)
                self.pool_slots.append(x.shape[0])
                continue
            if t.in_place:
                _check_state(name, x, (self.sequences, *tile), self.device, (self.state,), written=True)
            elif x is not None:
                dtypes = _ANY_FLOAT if t.state_dtype == "float32" else (self.state,)
                _check_state(name, x, (self.sequences, *tile), self.device, dtypes)
            absent = _made((0, *tile), self.state, self.device)
            self.expected.append((absent, x is None or _is_plain(x, self.state), 16, self.state))

    def expect_buffers(self, buffers: Sequence[Any]) -> None:
        """The caller's memory for final states and checkpoints. `as_they_are`: for each, True if it is passed without a copy.
        `state_kin`: for each, the tensor that replaces an unwanted one or None, and a tensor like the one that a call makes."""
        t = self.tables
        lent: list[tuple[str, tuple[int, ...], Any]] = []
        for (name, dims), x in zip(t.final, buffers, strict=False):
            shape, tile = (self.sequences, self.value_heads, *dims), (self.value_heads, *dims)
            absent = None if self.wanted else _made((0, *tile), self.state, self.device)
            if t.pool:
                self.ints[f"{name}_stride"] = math.prod(tile)
                if x is not None:
                    self.ints[f"{name}_stride"] = _check_pool(name, x, tile, self.device, self.state)
                    self.pool_slots.append(x.shape[0])
                    shape, absent = tuple(x.shape), None
            lent.append((name, shape, absent))
        self.stored_rows = self.row_tokens = 0
        if t.rows:
            for (name, dims), x in zip(t.checkpoints, buffers[len(t.final):], strict=True):
                self.ints[f"{name}_stride"] = _check_rows(name, x, (self.value_heads, *dims), 0 if self.packed else self.tokens,
                                                          self.device, self.state)
                self.stored_rows, self.row_tokens = x.shape[:2]
                lent.append((name, tuple(x.shape), None))
        elif t.positions:
            for (name, dims), x in zip(t.checkpoints, buffers[len(t.final):], strict=True):
                self.ints[f"{name}_stride"] = _check_pool(name, x, (self.value_heads, *dims), self.device, self.state)
                self.stored_rows = x.shape[0]
                lent.append((name, tuple(x.shape), None))
        elif t.checkpoints:
            rows = self.batch * self.tokens // (self.every * t.chunk)
            lent += [(name, (rows, self.value_heads, *dims), None) for name, dims in t.checkpoints]
        self.as_they_are = _check_buffers(buffers, lent, self.device, self.state)
        if t.rows or t.positions:  # they are written where they lie
            self.as_they_are[len(t.final):] = [True] * len(t.checkpoints)
        if t.pool:
            self.as_they_are[:len(t.final)] = [True] * len(t.final)
        self.state_kin = [(absent, _kin(shape, self.state, self.device)) for _, shape, absent in lent]

    def expect_outs(self, outs: Sequence[Any]) -> None:
        """The caller's memory for outputs. `made`: shapes and dtypes of the tensors that a call makes. `fits`: for each output,
        True if the caller's memory is used without a copy."""
        t = self.tables
        rows = ((self.batch, self.tokens, self.value_heads) if t.layout == "bthd" else
                (self.batch, self.value_heads, self.tokens))
        self.made: list[tuple[tuple[int, ...], torch.dtype]] = [((*rows, *dims), _FLOATS[dtype]) for _, dims, dtype in t.outputs]
        self.fits: list[bool] = []
        for argument, (name, dims, _), x, (shape, dtype) in zip(t.outs, t.outputs, outs, self.made, strict=True):
            if x is not None:
                _check_out(argument, x, shape, dtype, self.device)
            self.fits.append(x is not None and (self.host.is_view(name, x, dims, dtype) if t.strided else _is_plain(x, dtype)))

    # --- what the call makes ---
    def lay_out(self) -> None:
        """Shapes of workspaces, the number of parts, and their chunks. Without summaries no kernel reads the workspaces of
        parts, and empty tensors replace them (`unread`). Where kernels choose the chunks of a part, `span` is the fewest."""
        t = self.tables
        self.span = self.parts = self.summed = 0
        unread: list[tuple[tuple[int, ...], torch.dtype]] = []
        self.made += [((self.slots, self.value_heads, *dims), _FLOATS[dtype]) for _, dims, dtype in t.workspaces]
        self.made += [((self.sequences, self.value_heads, *dims), _FLOATS[dtype]) for _, dims, dtype in t.end_workspaces]
        self.made += [((1,), torch.int32)] * len(t.counters)
        if t.shared:
            held = self.host.shared_bytes(self.slots, self.sequences, self.value_heads, self.device)
            self.made.append(((held,), torch.uint8))
        if t.part_cost is not None:
            self.span = self.host.span(self.batch * self.tokens, self.sequences, self.value_heads, self.device, self.packed,
                                       self.longest)
            chooses = self.host.chooses_parts(self.device, self.packed, self.sequences)
            longest = min(self.longest, self.tokens) if chooses and self.longest else self.tokens
            self.summed = int(bool(t.summaries) and _needs_summaries(-(-longest // t.chunk), self.span, t.most, t.part_cost,
                                                                     chooses))
            if chooses:
                self.span = self.host.finest(self.span, self.tokens, self.value_heads, self.device)
            self.ints["part_instances"] = self.host.part_instances(self.value_heads)
            self.ints["units"], self.ints["least_span"] = self.host.units(self.device) if chooses else 0, self.span
            self.parts = self.batch * self.tokens // (t.chunk * self.span) + self.sequences
            self.made += [((4 + 4 * self.parts * chooses,), torch.int32)] * len(t.places)
            shapes = [((self.parts, self.value_heads, *dims), _FLOATS[dtype]) for _, dims, dtype in t.part_workspaces]
            if self.summed:
                self.made += shapes
            else:
                unread = [((0, *shape[1:]), dtype) for shape, dtype in shapes]
        if t.pipelined:
            self.span = self.host.pipelined_span(self.tokens)
            if self.sequences * self.span * self.value_heads >= 2 ** 31:
                _fail("cu_seqlens", f"{self.sequences} sequences in {self.tokens} tokens",
                      "fewer, as partition='pipelined' has a block for each chunk that each sequence may have")
            self.parts = self.batch * self.tokens // (t.chunk * self.span) + self.sequences
            self.made += [((self.parts, self.value_heads, *dims), _FLOATS[dtype]) for _, dims, dtype in t.part_workspaces]
        self.unread = [_made(shape, dtype, self.device) for shape, dtype in unread]
        self.kin = [_kin(shape, dtype, self.device) for shape, dtype in self.made]

    def count(self, given: Sequence[Any], states: Sequence[Any], outs: Sequence[Any]) -> None:
        """The integers that kernels get besides the sizes, by name."""
        t, ints = self.tables, self.ints
        ints.update({f"has_{name}": int(x is not None) for (name, _), x in zip(t.initial, states, strict=True)})
        ints.update({f"has_{name}": int(self.wanted) for name, _ in t.final})
        # outputs that a call makes are zero in rows that no sequence covers
        self.clears = t.pool or self.packed
        if t.cleared:
            ints.update({f"clear_{row[0]}": int(self.clears and x is None) for row, x in zip(t.outputs, outs, strict=True)})
        ints["summed"], ints["checkpoint_chunks"] = self.summed, self.every
        if any("blocks_at_a_time" in names for names in t.ints.values()):
            ints["blocks_at_a_time"] = torch.cuda.get_device_properties(self.device).multi_processor_count
        if not t.strided:
            return
        goes = [plain for _, plain, *_ in self.expected[:len(t.inputs)]]
        places = [x.stride() if plain else _dense(x.shape) for x, plain in zip(given, goes, strict=False)]
        places += [x.stride() if fit else _dense(shape) for x, fit, (shape, _) in zip(outs, self.fits, self.made, strict=False)]
        for name, strides in zip([row[0] for row in t.inputs] + [row[0] for row in t.outputs], places, strict=True):
            for axis, far in zip("bth", _steps(strides, t.layout), strict=True):
                ints[f"{name}_stride_{axis}"] = far // t.units.get(name, 1)

    def launched(self) -> list[tuple[Any, list[int], list[int]]]:
        """For each kernel that a call launches: the launch, the indices of its tensors, and those of its numbers."""
        t = self.tables
        counts = {"chunks": self.slots, "parts": self.parts, "sequences": self.sequences}
        if t.pipelined:
            counts = {"chunks": self.sequences * self.span, "parts": self.sequences}
        sizes = (self.sequences, self.tokens, int(not self.packed and self.tokens > 0), self.heads, self.value_heads, self.slots)
        first = bool(t.declined) and self.host.earlier is None  # of a pair: such a kernel clears the counter
        skipped = *(() if self.summed else t.summaries), *(t.bounds if self.span * t.chunk >= self.tokens and not first else ())
        fewer: dict[str, int] = {}  # parts of kernels that have nothing to do for a sequence of one part
        if self.ints.get("units"):
            split = _split_parts(self.parts, self.tokens, t.chunk * self.span)
            fewer = {n: split for n, grid, *_ in t.kernels if grid == "parts" and n in (*t.summaries, *t.bounds)}
        instances = {row[0]: fewer.get(row[0], counts[row[1]]) * self.value_heads * row[2]
                     for row in t.kernels if row[0] not in skipped}
        if together := getattr(self.host.launcher, "together", None):
            together(tuple(n for n, count in instances.items() if count), self.device)
        found, order, numbers = [], {n: at for at, n in enumerate(t.tensors)}, list(t.scalars)
        many = max(1, -(-self.tokens // (t.chunk * self.span))) if t.pipelined else 1
        for part, (name, _, _, tensors, scalars) in itertools.product(range(many), t.kernels):
            of_parts = (part if t.pipelined else fewer.get(name, self.parts), self.span) if self.span else ()
            if count := instances.get(name):
                launch = self.host.launcher(name, count, (*sizes, *of_parts), [self.ints[n] for n in t.ints[name]], self.device)
                found.append((launch, [order[n] for n in tensors], [numbers.index(n) for n in scalars]))
        return found

    # --- as data ---
    def native_arguments(self, given: Sequence[Any], states: Sequence[Any], outs: Sequence[Any], buffers: Sequence[Any]
                    ) -> NativeCall | None:
        """The call as data. None if a call copies, fills or checks the values of some tensor."""
        t = self.tables
        as_it_is = (all(plain for _, plain, *_ in self.expected) and all(self.as_they_are) and not self.lacking
                    and all(x is None or fit for x, fit in zip(outs, self.fits, strict=True)))
        looked_at = self.check_ends or self.check_numbers or (self.packed and not self.ends_as_they_are) or bool(t.zeroed)
        in_order = _in_order(self.sequences, self.device) if self.in_order else None
        if not as_it_is or looked_at or not all(self.as_integers) or (self.in_order and in_order is None):
            return None
        first_out = len(given) + len(states)
        first_buffer = first_out + len(outs)
        sources: list[tuple[Any, ...]] = [
            ("fixed", absent) if x is None else ("given", n, tuple(x.shape))
            for n, (x, (absent, *_)) in enumerate(zip(given if t.pool else (*given, *states), self.expected, strict=True))]
        if t.pool:
            sources += [("given", n, tuple(_flat(name, x).shape))
                        for n, ((name, _), x) in enumerate(zip(t.initial, states, strict=True), len(given))]
        for n, (x, (absent, like)) in enumerate(zip(buffers, self.state_kin, strict=True), first_buffer):
            flat = t.pool if n < first_buffer + len(t.final) else t.rows or t.positions
            lies = functools.partial(_flat, "") if flat else lambda x: x
            sources.append(("given", n, tuple(lies(x).shape)) if x is not None else
                           ("result", like, (math.prod(like.shape),) if flat else tuple(like.shape)) if absent is None else
                           ("fixed", lies(absent)))
        sources += [("given", n, tuple(x.shape)) if x is not None else ("result", like, tuple(like.shape))
                    for n, (x, like) in enumerate(zip(outs, self.kin, strict=False), first_out)]
        sources += [("workspace", like) for like in self.kin[len(outs):]]
        sources += [("fixed", x) for x in self.unread]
        first_number = first_buffer + len(buffers)
        for name in t.indices:
            n = first_number + t.numbers.index(name if name in t.numbers else "state_indices")
            width = (self.ints[f"{name}_width"],) if name in t.by_token else ()
            sources.append(("fixed", in_order) if name in self.in_order else ("given", n, (self.sequences, *width)))
        rows = functools.partial(_filled, self.equal_rows, self.batch, self.tokens, self.device)
        return NativeCall(sources, self.launches, rows)


def _launch_first(plan: Plan, first: Plan) -> None:
    """Let `plan` launch the kernels of `first` before its own. Both have the same arguments and results, and `first` declines
    calls by a counter (`Tables.declined`), which both share. The workspaces of `first` lie after all tensors of `plan`."""
    tables, others, place = plan.tables, first.tables, dict[int, int]()
    # neither copies what the other reads as it is, and strides have the same units
    read = [[x[1:] for x in p.expected] for p in (plan, first)]
    assert read[0] == read[1] and (plan.fits, tables.units) == (first.fits, others.units)
    assert not first.unread and not others.shared
    workspaces = range(others.place("workspaces").start, others.place("part_workspaces").stop)
    more: list[torch.Tensor] = []
    for n, name in enumerate(others.tensors):
        if n not in workspaces:
            place[n] = tables.tensors.index(name)
        elif name == others.declined:
            place[n] = tables.tensors.index(tables.declined)
        else:
            place[n] = len(tables.tensors) + len(more)
            more.append(first.kin[n - workspaces.start + len(others.outputs)])
    numbers = [list(tables.scalars).index(n) for n in others.scalars]
    launches = [(launch, [place[n] for n in tensors], [numbers[n] for n in used]) for launch, tensors, used in first.launches]
    plan.more, plan.launches = more, [*launches, *plan.launches]
    if plan.native is not None:
        sources = [*plan.native.sources, *(("workspace", x) for x in more)]
        plan.native = None if first.native is None else NativeCall(sources, plan.launches, plan.native.rows)


def _aligned(given: Sequence[Any], outs: Sequence[Any]) -> list[bool]:
    """For each tensor: True if its address is a multiple of 16 bytes. None counts as aligned."""
    return [x is None or x.data_ptr() % 16 == 0 for x in (*given, *outs)]


def _plain_ones(tensors: Iterable[tuple[Any, bool]], dtype: torch.dtype) -> list[Any]:
    """Each tensor itself if kernels accept it, else a contiguous copy. tensors: (tensor, True if its strides fit)."""
    return [x if fits and x.data_ptr() % 16 == 0 else _plain(x, dtype) for x, fits in tensors]


def _in_pools(t: Tables, states: Sequence[Any], buffers: Sequence[Any], held: Sequence[Any]) -> list[Any]:
    """Pools as flat tensors: first those of initial states, then those of final states, from the caller or from this call."""
    if any(x is not None and x.data_ptr() == y.data_ptr() for x in buffers[:len(t.final)] for y in states):
        _fail(t.final[0][0], "the memory of an initial state",
              "another pool, or a build with state=pool/in_place, which overwrites initial states")
    return [_flat(row[0], x) for row, x in (*zip(t.initial, states, strict=True), *zip(t.final, held, strict=False))]


def _take_outs(memory: list[Any], first: int, outs: Sequence[Any], fits: Sequence[bool], aligned: int) -> list[tuple[int, Any]]:
    """Put the caller's outputs into `memory`, from index `first` on. Returns (index, caller's tensor) of the outputs for which
    kernels write a copy first."""
    copied = []
    for at, (x, fit) in enumerate(zip(outs, fits, strict=True), first):
        if x is not None:
            memory[at] = x if fit and x.data_ptr() % aligned == 0 else _plain(x, x.dtype)
            if memory[at] is not x:
                copied.append((at, x))
    return copied


def _give_back(memory: list[Any], wanted: Iterable[tuple[int, Any]]) -> None:
    """Copy results to the caller's tensors, and put these into `memory`. wanted: (index, caller's tensor)."""
    for at, x in wanted:
        if memory[at].data_ptr() != x.data_ptr():
            x.copy_(memory[at])
        memory[at] = x


def _touch(*tensors: Any) -> None:
    """Tell torch that the caller's tensors were overwritten: one that a gradient needs is then an error in its backward pass."""
    torch.autograd.graph.increment_version([x for x in tensors if x is not None])


def _fill(p: Plan, memory: Sequence[Any], outs: Sequence[Any], buffers: Sequence[Any]) -> None:
    """Fill the tensors that this call allocated: with NaN if tests ask for it, and outputs with zeros, for the rows that no
    sequence covers. A gradient's shares by chunk start as zeros, because callers add up all slots, also those without a chunk."""
    if p.host.poison:
        for x, buffer in itertools.zip_longest(memory[p.tables.place("final").start:], buffers):
            if buffer is None:
                x.fill_(float("nan") if x.is_floating_point() else -1)
    if p.clears and not p.tables.cleared:
        for x, out in zip(memory[p.host.outputs], outs, strict=True):
            if out is None:
                x.zero_()
    for name in p.tables.zeroed:
        memory[p.tables.tensors.index(name)].zero_()


def _looked_at(p: Plan, given: Sequence[Any], cu_seqlens: Any, buffers: Sequence[Any], indices: Any) -> Sequence[Any]:
    """The inputs, with defaults for absent ones. The values of cu_seqlens and of indices are checked if the plan says so."""
    if p.check_ends:
        _check_ends(cu_seqlens, p.tokens)
    if p.check_numbers:
        _check_numbers(p, cu_seqlens, buffers, indices)
    if p.lacking:
        given = list(given)
        for at, *about in p.lacking:
            given[at] = _filled(_full, *about)
    return given


def _check_numbers(p: Plan, cu_seqlens: Any, buffers: Sequence[Any], indices: Any) -> None:
    """Check the values of the tensors of integers. On a GPU this waits for the device."""
    t = p.tables
    found = {name: x.tolist() for name, x in zip(t.numbers, indices, strict=True) if x is not None}
    lengths = [p.tokens] * p.sequences if cu_seqlens is None else cu_seqlens.diff().tolist()
    slots, rows = found.get("state_indices", []), found.get("intermediate_state_indices", list(range(p.sequences)))
    kept = [[True] * p.tokens] * p.sequences
    if "state_indices" in t.by_token:
        accepted = found.get("num_accepted_tokens", [1] * p.sequences)
        _check_accepted(accepted, slots)
        first = [own[n - 1] for own, n in zip(slots, accepted, strict=True)]
        lengths = [0 if at < 0 else n for at, n in zip(first, lengths, strict=True)]  # a skipped sequence has no tokens
        _check_slots_by_token(slots, first, lengths, min(p.pool_slots), t.slots)
        kept = [[x >= 0 for x in own] for own in slots] if t.slots else kept
    elif t.pool:
        _check_slots(slots, "state_indices", min(p.pool_slots), t.in_place or any(x is not None for x in buffers[:len(t.final)]))
        lengths = [0 if at < 0 else n for at, n in zip(slots, lengths, strict=True)]
    if t.rows:
        if max(lengths, default=0) > p.row_tokens:
            _fail(t.checkpoints[0][0], f"rows of {p.row_tokens} states", f"{max(lengths)} or more, as a sequence has tokens")
        _check_slots(rows, "intermediate_state_indices", p.stored_rows, True)
        kept = [[row >= 0] * p.tokens for row in rows]
    for n, row in enumerate(found.get("checkpoint_rows", ())):
        if any(not -1 <= i < p.stored_rows for i in row):
            _fail("checkpoint_rows", f"{row} for sequence {n}", f"rows from 0 to {p.stored_rows - 1}, or -1 to store no state")
    if "retrieve_parent_token" in found:
        _check_parents(found["retrieve_parent_token"], lengths, kept)


def _integers(p: Plan, indices: Any) -> list[Any]:
    """The tensors of integers that kernels read. Final states in other memory than initial ones have the same slots."""
    found = {name: x if fits and x.data_ptr() % 16 == 0 else _plain(x, torch.int32)
             for name, x, fits in zip(p.tables.numbers, indices, p.as_integers, strict=True) if x is not None}
    for name in p.in_order:
        found[name] = _in_order(p.sequences, p.device)
        if found[name] is None:  # a graph that is captured before they exist has its own
            found[name] = torch.arange(p.sequences, dtype=torch.int32, device=p.device)
    return [found.get(name, found.get("state_indices")) for name in p.tables.indices]


def _last(p: Plan, indices: Any) -> list[Any]:
    """The last tensors of a call: those of integers, and those that only an earlier build has."""
    made = [x.fill_(math.nan) if p.host.poison and x.is_floating_point() else x for x in map(_new, p.more)]
    return [*_integers(p, indices), *made] if p.tables.indices else made


def caller(p: Plan, given: Sequence[Any], outs: Sequence[Any], buffers: Sequence[Any]) -> Callable[..., list[Any]]:
    """A function that runs the plan: (given, numbers, states, outs, cu_seqlens, buffers, indices) -> the call's tensors, in the
    order of `Tables.tensors`. The arguments here are those that the plan was made for."""
    host, t, device, batch, tokens, state = p.host, p.tables, p.device, p.batch, p.tokens, p.state
    equal_rows = p.equal_rows
    pool, expected, state_kin, as_they_are, kin = t.pool, p.expected, p.state_kin, p.as_they_are, p.kin
    unread, fits, ends_are_plain = p.unread, p.fits, p.ends_as_they_are
    picked = [(launch, _picker(tensors), numbers) for launch, tensors, numbers in p.launches]
    unwanted = [x for x, _ in state_kin] if all(x is not None for x, _ in state_kin) else None
    any_out, lends = any(x is not None for x in outs), any(x is not None for x in buffers)
    moved, fills = lends or pool or t.in_place, p.clears and not t.cleared or host.poison or bool(t.zeroed)
    touches = any_out or lends or t.in_place
    special = p.check_ends or p.check_numbers or bool(p.lacking)
    lies = _aligned(given, outs) if t.strided else None
    rows = t.checkpoints if t.rows or t.positions else ()
    first_out, first_final = t.place("outputs").start, host.final.start

    def call(given: Any, numbers: Any, states: Any, outs: Any, cu_seqlens: Any, buffers: Any, indices: Any = ()) -> list[Any]:
        """Launch the plan's kernels on these arguments."""
        if _is_elsewhere(device):
            with torch.cuda.device(device):
                return call(given, numbers, states, outs, cu_seqlens, buffers, indices)
        if lies is not None and _aligned(given, outs) != lies:
            return host.run(given, numbers, states, outs, cu_seqlens, buffers, p.wanted, indices,  # type: ignore[no-any-return]
                            p.every, p.longest)
        if special:
            given = _looked_at(p, given, cu_seqlens, buffers, indices)
        memory = [absent if x is None else x if plain and x.data_ptr() % aligned == 0 else _plain(x, dtype)
                  for x, (absent, plain, aligned, dtype) in zip(given if pool else (*given, *states), expected)]
        held = unwanted or [x if x is not None else _new(like) if absent is None else absent
                            for x, (absent, like) in zip(buffers, state_kin)]
        if pool:
            memory += _in_pools(t, states, buffers, held)
            memory += _plain_ones(list(zip(held, as_they_are))[len(t.final):], state)
        else:
            memory += _plain_ones(zip(held, as_they_are), state) if lends else held
        if rows:
            memory[-len(rows):] = [_flat(name, x) for (name, _), x in zip(rows, held[-len(rows):])]
        memory += map(_new, kin)
        memory += unread
        if fills:
            _fill(p, memory, outs, buffers)
        copied = _take_outs(memory, first_out, outs, fits, 1 if t.strided else 16) if any_out else ()
        if cu_seqlens is None:
            ends = _filled(equal_rows, batch, tokens, device)
        else:
            ends = cu_seqlens if ends_are_plain and cu_seqlens.data_ptr() % 16 == 0 else _plain(cu_seqlens, torch.int32)
        if t.indices or p.more:
            memory += _last(p, indices)
        for launch, tensors, used in picked:
            launch(tensors(memory), ends, [numbers[i] for i in used] if used else [])
        if copied:
            _give_back(memory, copied)
        if moved:
            _give_back(memory, enumerate((*states, *held) if t.in_place else held, first_final))
        if touches:
            _touch(*outs, *buffers, *(states if t.in_place else ()))
        return memory

    return call


def _kind(x: Any) -> Any:
    """The properties of an argument that a plan depends on."""
    return (x.shape, x.stride(), x.dtype, x.device) if isinstance(x, torch.Tensor) else type(x)


def _kind_and_place(x: Any) -> Any:
    """`_kind` for strided kernels. Alignment decides whether they read a tensor without a copy."""
    return (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16 == 0) if isinstance(x, torch.Tensor) else type(x)


def _untraced(call: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """call(*args, **named), at which torch.compile breaks its graph. It could not trace launches."""
    from torch._dynamo import disable  # torch.compile has imported it, which takes seconds
    return disable(call)(*args, **named)  # type: ignore[no-untyped-call]


_untraced._torchdynamo_disable = True  # type: ignore[attr-defined]  # what `disable` sets


def _parts_wanted(build: int) -> int:
    """Chunks of a part, from GDN_CODEGEN_PART_CHUNKS, else from the build; 0 to choose."""
    said = os.environ.get("GDN_CODEGEN_PART_CHUNKS", str(build))
    if not said.isdecimal():
        raise ValueError(f"GDN_CODEGEN_PART_CHUNKS: got {said!r}; accepted: the chunks of a part, 0 to choose")
    return int(said)


class Host:
    """The calls of one module.

    launcher: (kernel, instances, sizes, integers, device) -> a function that launches the kernel on its tensors, cu_seqlens and
      numbers. sizes: sequences, tokens of a row, 1 if rows are equal sequences, H, HV, chunk slots. A build with parts adds the
      number of parts, and chunks of a part.
    accepts_view: accepts_view(name, tensor): True if strided kernels can read this tensor without a copy. Its rows are dense.

    poison: outputs and workspaces start as NaN, for tests (GDN_CODEGEN_POISON=1). check: the values of cu_seqlens and
    state_indices are checked on a GPU too, and the call waits for that (GDN_CODEGEN_CHECK=1). partition, part_chunks: True if
    sequences are split into parts, and chunks of a part, 0 to choose (GDN_CODEGEN_PARTITION, GDN_CODEGEN_PART_CHUNKS). plans: by
    kind of arguments. earlier: of the second module of a pair, the Host of the first one (`Tables.declined`).
    """

    def __init__(self, tables: Tables, launcher: Callable[..., Callable[..., None]],
                 accepts_view: Callable[[str, torch.Tensor], bool] = lambda name, x: True) -> None:
        """Reads the environment variables once, and works out which results a call returns. It plans nothing yet."""
        self.tables, self.launcher, self.accepts_view = tables, launcher, accepts_view
        self.shared_bytes: Any = getattr(launcher, "workspace_bytes", None)  # of a launcher that divides one workspace
        self.poison = os.environ.get("GDN_CODEGEN_POISON") == "1"
        self.check = os.environ.get("GDN_CODEGEN_CHECK") == "1"
        self.partition = os.environ.get("GDN_CODEGEN_PARTITION") != "0"
        self.part_chunks = _parts_wanted(tables.part_chunks) if tables.in_parts else 0
        self.plans: dict[Any, Plan] = {}
        self.earlier: Host | None = None
        self.kind = _kind_and_place if tables.strided else _kind
        self.outputs = tables.place("outputs")
        self.checkpoints = slice(0) if tables.rows or tables.positions else tables.place("checkpoints")  # the caller has its rows
        self.final = tables.place("initial") if tables.in_place else tables.place("final")
        places = range(len(tables.tensors))
        self.saved = [tables.tensors.index(n) for n in tables.saved]
        self.returned = _picker([*(n for x in (self.outputs, self.final, self.checkpoints) for n in places[x]), *self.saved])

    # --- a call ---
    def __call__(self, given: Sequence[Any], numbers: Sequence[Any], states: Sequence[Any], outs: Sequence[Any], cu_seqlens: Any,
                 buffers: Sequence[Any], output_final_state: Any, indices: Sequence[Any] = (), every: Any = 0) -> tuple[Any, ...]:
        """Outputs, final states or None, checkpoints, tiles of chunks. Arguments: those of Plan, the caller's numbers."""
        if torch.compiler.is_dynamo_compiling():
            return _untraced(self, given, numbers, states, outs, cu_seqlens, buffers, output_final_state, indices, every)  # type: ignore[no-any-return]
        t = self.tables
        _check_given(zip(t.tensors, (*given, *states), strict=False))
        values = self.numbers_of(numbers)
        if t.checkpoints and not (t.rows or t.positions):
            every = _check_chunks("checkpoint_chunks", every, 1)
        wanted = t.in_place
        if t.final:
            wanted = _check_flag("output_final_state", output_final_state) or any(x is not None for x in buffers[:len(t.final)])
        return self.results(self.run(given, values, states, outs, cu_seqlens, buffers, wanted, indices, every), wanted)

    def run(self, given: Sequence[Any], numbers: Sequence[float], states: Sequence[Any], outs: Sequence[Any], cu_seqlens: Any,
            buffers: Sequence[Any], wanted: bool, indices: Sequence[Any] = (), every: int = 0, longest: int = 0) -> list[Any]:
        """Launch every kernel; the call's tensors, as Tables.tensors names them."""
        plan = self.prepare(given, states, outs, cu_seqlens, buffers, wanted, indices, every, longest)
        return plan.call(given, numbers, states, outs, cu_seqlens, buffers, indices)

    def prepare(self, given: Sequence[Any], states: Sequence[Any], outs: Sequence[Any], cu_seqlens: Any, buffers: Sequence[Any],
                wanted: bool, indices: Sequence[Any] = (), every: int = 0, longest: int = 0) -> Plan:
        """The plan of arguments of this kind. It is made once, and checks them then. It launches those of `earlier` first."""
        by_cost = any(x is not None and x.tables.part_cost is not None for x in (self, self.earlier))
        kind, longest = self.kind, longest if by_cost else 0
        key = (*map(kind, given), *map(kind, states), *map(kind, outs), kind(cu_seqlens), *map(kind, buffers), wanted,
               *map(kind, indices), every, longest)
        plan = self.plans.get(key)
        if plan is None:
            if self.tables.declined and self.earlier is None:
                _fail("schedule", self.tables.name, "a build that runs alone; this one is half of a pair, which ops choose")
            plan = Plan(self, given, states, outs, cu_seqlens, buffers, wanted, indices, every, longest)
            if self.earlier is not None:
                first = Plan(self.earlier, given, states, outs, cu_seqlens, buffers, wanted, indices, every, longest)
                _launch_first(plan, first)
            plan.call = caller(plan, given, outs, buffers)
            if len(self.plans) >= 256:
                self.plans.clear()
            self.plans[key] = plan
        return plan

    def numbers_of(self, given: Sequence[Any]) -> tuple[float, ...]:
        """The caller's numbers, the page's defaults where None is given."""
        values = []
        for (name, default), x in zip(self.tables.scalars.items(), given, strict=True):
            if x is not None:
                values.append(_check_number(name, x))
            elif default is not None:
                values.append(float(default))
            else:
                _fail(name, None, "a number: the page has no default")
        return tuple(values)

    def results(self, memory: Sequence[Any], wanted: bool) -> tuple[Any, ...]:
        """What a call returns, of its tensors."""
        if wanted:
            return self.returned(memory)
        return (*memory[self.outputs], *(None for _ in self.tables.initial), *memory[self.checkpoints],
                *(memory[n] for n in self.saved))

    # --- what a build makes of sizes ---
    def is_view(self, name: str, x: torch.Tensor, dims: tuple[int, ...], dtype: torch.dtype) -> bool:
        """Whether kernels that go by strides read and write `x` where it lies."""
        return x.dtype == dtype and (not dims or x.stride(-1) == 1) and self.accepts_view(name, x)

    def span(self, tokens: int, sequences: int, value_heads: int, device: torch.device, packed: bool = True,
             longest: int = 0) -> int:
        """Chunks of a part: those that the build's costs make cheapest, or all that there are.

        packed, longest: whether sequences may differ in length, and tokens of the longest, 0 if it is known to the device alone.
        """
        t, every = self.tables, tokens // self.tables.chunk + 1
        if not self.partition or t.part_cost is None:
            return every
        if self.part_chunks or not sequences or device.type == "cpu":
            return min(self.part_chunks or every, every)
        known = _lengths(tokens, sequences, packed, longest, t.chunk, self.chooses_parts(device, packed, sequences))
        return _cheapest_span(known, self.part_instances(value_heads), self.units(device), t.part_cost, len(t.summaries), t.most,
                              t.warm_ups) or every

    def pipelined_span(self, tokens: int) -> int:
        """Chunks of a part where parts follow one another. tokens: the most that a sequence may have."""
        chunks = max(1, -(-tokens // self.tables.chunk))
        wanted = self.part_chunks or max(LEAST_PIPELINED, -(-chunks // PIPELINED))
        return min(wanted, chunks) if self.partition else chunks

    def chooses_parts(self, device: torch.device, packed: bool, sequences: int) -> bool:
        """Whether kernels choose the chunks of a part from the lengths of packed sequences."""
        given = any("units" in names for names in self.tables.ints.values())
        several = packed and 1 < sequences <= COMPARED
        return given and several and self.partition and not self.part_chunks and device.type != "cpu"

    def finest(self, span: int, tokens: int, value_heads: int, device: torch.device) -> int:
        """The fewest chunks of a part that kernels may choose, if `span` is best for one sequence of all tokens."""
        chunks = -(-tokens // self.tables.chunk)
        share = -(-chunks * self.part_instances(value_heads) // self.units(device))
        return min(span, max(2, min(share, max(-(-share // FINEST), LONG))))

    def part_instances(self, value_heads: int) -> int:
        """The instances of a part in the kernels that walk parts."""
        t = self.tables
        others = (*t.bounds, *t.summaries)
        return value_heads * max(row[2] for row in t.kernels if row[1] == "parts" and row[0] not in others)

    def units(self, device: torch.device) -> int:
        """How many instances of a part the GPU runs at a time."""
        assert self.tables.part_cost is not None
        return self.tables.part_cost.resident * torch.cuda.get_device_properties(device).multi_processor_count

    def workspace_bytes(self, tokens: int, sequences: int, value_heads: int, device: Any = "cpu") -> int:
        """Bytes that a call holds between its kernels, and between cores: `tokens` in all, of `sequences` sequences. device: that
        of the call, for builds that make parts or whose launcher divides one workspace. With those of `earlier`; without
        integers."""
        t = self.tables
        held = [(tokens // t.chunk + sequences, t.workspaces), (sequences, t.end_workspaces)]
        if t.part_cost is not None:
            span = self.span(tokens, sequences, value_heads, torch.device(device))
            chooses = self.chooses_parts(torch.device(device), True, sequences)
            if _needs_summaries(-(-tokens // t.chunk), span, t.most, t.part_cost, chooses):
                if chooses:
                    span = self.finest(span, tokens, value_heads, torch.device(device))
                held.append((tokens // (t.chunk * span) + sequences, t.part_workspaces))
        if t.pipelined:
            span = self.pipelined_span(-(-tokens // max(1, sequences)))  # of rows; a pack has longer parts
            held.append((tokens // (t.chunk * span) + sequences, t.part_workspaces))
        others = self.earlier.workspace_bytes(tokens, sequences, value_heads, device) if self.earlier is not None else 0
        if t.shared:
            others += self.shared_bytes(tokens // t.chunk + sequences, sequences, value_heads, torch.device(device))
        return others + sum(n * value_heads * math.prod(dims) * _FLOATS[dtype].itemsize
                            for n, rows in held for _, dims, dtype in rows)


def _unit_lower_inverse(x: torch.Tensor) -> torch.Tensor:
    eye = torch.eye(x.shape[-1], dtype=x.dtype, device="cpu")
    inverse: torch.Tensor = torch.linalg.solve_triangular(eye + x, eye.expand_as(x), upper=False, unitriangular=True)
    return inverse


def _decayed_product(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor, before: torch.Tensor | None = None) -> torch.Tensor:
    decay = ((x if before is None else before)[..., :, None, :] - x[..., None, :, :]).exp()  # of positive numbers, too, above
    kept = torch.ones(x.shape[-2], x.shape[-2], dtype=x.dtype, device="cpu").tril(0 if before is None else -1) > 0
    return torch.where(kept[..., None], a[..., :, None, :] * b[..., None, :, :] * decay, 0.0).sum(-1)


def _decayed_matmul(p: torch.Tensor, b: torch.Tensor, x: torch.Tensor, before: torch.Tensor | None = None,
                    transposed: bool = False) -> torch.Tensor:
    decay = ((x if before is None else before)[..., :, None, :] - x[..., None, :, :]).exp()  # of positive numbers, too, above
    kept = torch.ones(x.shape[-2], x.shape[-2], dtype=x.dtype, device="cpu").tril(-1) > 0
    each = p[..., None] * torch.where(kept[..., None], decay, 0.0)
    return (each * b[..., :, None, :]).sum(-3) if transposed else (each * b[..., None, :, :]).sum(-2)


#: A function of the module: the page on float64 tiles, (inputs, states, numbers) -> outputs, outputs of the chunk, next states.
_Page = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor], Sequence[torch.Tensor]], list[torch.Tensor]]


@dataclass(frozen=True)
class Expected:
    """The page's results in float64. outs: [T, HV, ...]. finals: [N, HV, ...]. after: for each state, by (sequence, chunk), the
    state after a chunk [HV, ...]. saved: for each output of chunks, the same."""

    outs: list[torch.Tensor]
    finals: list[torch.Tensor]
    after: list[dict[tuple[int, int], torch.Tensor]]
    saved: list[dict[tuple[int, int], torch.Tensor]]


def parent_of(n: int, t: int) -> int:
    """The parent of token t of sequence n in a tree of draft tokens: an earlier token, or -1 for the initial state."""
    return (7 * t + n) % (t + 1) - 1


class CheckProblem:
    """The problem of a self-check.

    It has sequences of one token, of one chunk, of no token, and one longer than the pipeline depth, with a ragged tail. One
    token is repeated. Heads forget nothing, little and much; where there are fewer heads than RATES, sequences come in groups
    with rates of their own. There are initial states. Rows are as large as they may be without results that grow beyond what
    every dtype holds.
    """

    DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
    #: Half of the distance from 1 to the next number of a dtype.
    ROUNDING = {"float32": 2 ** -24, "float16": 2 ** -11, "bfloat16": 2 ** -8}
    #: Tokens of a chunk of the page here: a divisor of all chunks. A page that reads or gives something of each chunk has the
    #: module's chunk.
    STEP = 16
    #: The mean log decay of a token, by value head, without its sign: strong, none, weak, medium.
    RATES = (2.0, 0.0, 0.02, 0.3)
    #: The largest log decay of a token where all heads forget fast, by value head, without its sign. The least is half of it. So
    #: warm-ups have one chunk of 16 tokens, and several.
    FAST = (4.0, 0.25)
    #: The value of inputs between 0 and 1, such as beta, for the repeated token. The larger it is, the harder is the inverse.
    ALIKE = 1 - 2 ** -8
    #: Factors of the rows that tokens have, in the order in which they are tried, until no result is above LARGEST. A page may
    #: multiply the state by more than 1 for some rows; a repeated token does that once for each token of a chunk.
    FACTORS = (1.0, 0.5, 0.25, 0.125)
    LARGEST = 256.0
    #: The least input between 0 and 1, and the least mean log decay of a head for forms.
    LEAST = 1e-6

    def __init__(self, tables: Tables, page: _Page | None, reads: Mapping[str, Callable[..., torch.Tensor]],
                 draws: Mapping[str, Callable[..., torch.Tensor]]) -> None:
        """tables, page: those of the module. reads, draws: for inputs in callers' forms, functions by name (runtime/tables.py):
        what the page reads, and samples."""
        self.tables, self.page, self.reads, self.draws = tables, page, reads, draws

    @property
    def by_token(self) -> bool:
        """Whether a call keeps or reads a state for each token."""
        return self.tables.rows or any(n != "checkpoint_rows" for n in self.tables.by_token)

    @property
    def without_gates(self) -> bool:
        """Whether log decays are drawn as 0: walks come in parts, whose warm-ups follow from them, and a gradient reads their
        sums and operands of chunks, which are drawn apart. No bound on forgetting but 0 would be true of these."""
        return self.tables.part_cost is not None and any(len(self.tables.chunk_dims[n]) > 1 for n in self.tables.held)

    def groups(self, heads: tuple[int, int]) -> int:
        """Groups of sequences, so that all RATES are there."""
        return -(-len(self.RATES) // heads[1])

    def rate_offsets(self, heads: tuple[int, int]) -> tuple[int, ...]:
        """For each problem the index in RATES of its first head. What heads have, as A_log, is the same in all sequences. So few
        heads have two problems: a strong decay shows sums that overflow, and hides errors of what comes from states."""
        return (0, 2) if self.tables.head_inputs and self.groups(heads) > 1 else (0,)

    def lengths(self, packed: bool, heads: tuple[int, int]) -> list[int]:
        """Tokens of each sequence. If packed, a pool skips the third of each group."""
        chunk = max(self.tables.chunk, self.STEP)
        last = chunk + 3 if self.by_token else self.tables.check_chunks * chunk + chunk // 2 + 3
        return ([1, chunk, chunk // 2 - 1, 0, last] if packed else [chunk + 3] * 2) * self.groups(heads)

    def solved(self, lengths: Sequence[int], heads: tuple[int, int], given: bool, fast: bool = False,
               rate_offset: int = 0) -> tuple[dict[str, torch.Tensor], Expected]:
        """`drawn` with the first of FACTORS for which `expected` is at most LARGEST everywhere, or the last; and `expected`.

        fast: whether all heads forget fast. rate_offset: as for `drawn`."""
        for factor in self.FACTORS:
            x = self.drawn(lengths, heads, factor, fast, rate_offset)
            found = self.expected(x, lengths, heads, given)
            by_chunk = (s for by in (*found.after, *found.saved) for s in by.values())
            if all(float(y.abs().max()) <= self.LARGEST for y in (*found.outs, *found.finals, *by_chunk)):
                break
        return x, found

    def by_rounding(self, x: Mapping[str, torch.Tensor], lengths: Sequence[int], heads: tuple[int, int], given: bool,
                    want: Expected, tf32: bool) -> tuple[list[torch.Tensor], list[dict[tuple[int, int], torch.Tensor]]]:
        """By how much rounding errors of inputs change each output of a gradient, and each of its sums of chunks; 0 for other
        modules."""
        if not self.tables.backward:
            return ([torch.zeros_like(y) for y in want.outs],
                    [{at: torch.zeros_like(y) for at, y in by_chunk.items()} for by_chunk in want.saved])
        gen = torch.Generator(device="cpu").manual_seed(1)
        size = 2 ** -11 if tf32 else self.ROUNDING[self.tables.dtype]
        rows = [*(row[0] for row in self.tables.inputs if row[2]), *(n for n, *_ in self.tables.chunk_inputs if self.rounded(n))]
        near = {n: y.double() * (1 + size * torch.randn(y.shape, generator=gen, dtype=torch.float64, device="cpu"))
                if n in rows else y for n, y in x.items()}
        found = self.expected(near, lengths, heads, given)
        return ([y - of for y, of in zip(found.outs, want.outs, strict=True)],
                [{at: y - of[at] for at, y in by_chunk.items()} for by_chunk, of in zip(found.saved, want.saved, strict=True)])

    def rounded(self, name: str) -> bool:
        """Whether operands of products may be rounded tiles of this input of chunks: no vectors, and no exponents."""
        return name not in self.tables.held and len(self.tables.chunk_dims[name]) > 1

    def drawn(self, lengths: Sequence[int], heads: tuple[int, int], factor: float = 1.0, fast: bool = False,
              rate_offset: int = 0) -> dict[str, torch.Tensor]:
        """Random inputs [T, heads, ...], numbers [HV], states [N, HV, ...] and inputs of chunks [N, chunks, HV, ...] in the
        caller's forms, by name, on the CPU.

        factor: of rows that are not log decays, and of tiles of chunks that are no sums of them. fast: as for `solved`.
        rate_offset: the index in RATES of the first head."""
        tables, gen, total = self.tables, torch.Generator(device="cpu").manual_seed(0), sum(lengths)
        out: dict[str, torch.Tensor] = {}
        on_cpu: Any = {"dtype": torch.float32, "device": "cpu"}
        count = dict(zip(("H", "HV"), heads, strict=True))
        rates = self.FAST if fast else (0.0,) if self.without_gates else self.RATES
        each = max(1, len(lengths) // self.groups(heads))  # sequences of a group
        by_group = torch.tensor([[rates[(rate_offset + n // each * heads[1] + j) % len(rates)] for j in range(heads[1])]
                                 for n in range(len(lengths))], **on_cpu)  # the mean log decays of each sequence's heads
        rate, of_tokens = by_group[0], by_group.repeat_interleave(torch.tensor(lengths, device="cpu"), 0)
        forgets = rate.clamp_min(self.LEAST)  # forms may take its log
        # in the last sequence of each group a token near the first chunk's end, for as long as a chunk
        size = max(tables.chunk, self.STEP)
        repeated = [slice(t, min(t + size, sum(lengths[:n + 1]))) for n in range(each - 1, len(lengths), each)
                    for t in [sum(lengths[:n]) + size - self.STEP // 2]]
        keys = {dims[:1] for _, dims in tables.initial}  # of rows that multiply a state
        for name, of, dims, dtype in tables.inputs:
            normal = torch.randn(total, count[of], *dims, generator=gen, **on_cpu)
            page = normal / normal.norm(dim=-1, keepdim=True) if dims and (of == "H" or dims in keys) else normal
            if not dims or name in tables.decays:
                page = torch.rand(total, count[of], *dims, generator=gen, **on_cpu).clamp(self.LEAST, 1 - self.LEAST)
                if name in tables.decays:
                    means = of_tokens[:, :count[of]].view(total, count[of], *(1 for _ in dims))
                    page = -(0.5 + page / 2 if fast else 2 * page) * means
                else:
                    page[[s.start for s in repeated]] = self.ALIKE
            else:
                page = page * factor
            raw = normal.abs() if fast and name in tables.decays else normal  # raw gates, of which more forget more
            x = self.draws[name](page, raw, forgets[:count[of]]) if name in self.draws else page
            for s in repeated:
                x[s] = x[s.start:s.start + 1].clone()
            out[name] = x.to(self.DTYPES[dtype])
        for name, _, dims, dtype in tables.head_inputs:
            normal = torch.randn(heads[1], *dims, generator=gen, **on_cpu)
            page = -rate.view(-1, *(1 for _ in dims)).expand_as(normal) if name in tables.decays else normal
            x = self.draws[name](None, normal.abs() if fast else normal, forgets) if name in self.draws else page
            out[name] = x.to(self.DTYPES[dtype])
        for name, dims in tables.initial:
            x = torch.randn(len(lengths), heads[1], *dims, generator=gen, **on_cpu) / 2
            out[name] = x.to(self.DTYPES[tables.state_dtype])
        summed = sorted({of for of, _ in tables.sums.values()})
        for name, dims, dtype in tables.chunk_inputs:
            x = torch.zeros(len(lengths), -(-max(lengths) // tables.chunk), heads[1], *dims, **on_cpu)
            of, _ = tables.sums.get(name, ("", False))
            for n, (tiles, length) in enumerate(zip(x, lengths, strict=True)):
                own = torch.Generator("cpu").manual_seed(1000 * (1 + summed.index(of)) + n) if of else gen
                self.fill(name, tiles, length, own, factor, by_group[n])
            out[name] = x.to(self.DTYPES[dtype])
        return out

    def fill(self, name: str, tiles: torch.Tensor, length: int, gen: torch.Generator, factor: float, rates: torch.Tensor
             ) -> None:
        """Random tiles of the chunks of a sequence, with zeros past its end, as modules store them. Those of `held` repeat
        their last row there, and tiles of rows are running sums of log decays. Those of the same decays get generators in the
        same state: of independent sums exp of a difference could grow. What bounds how much tokens forget is not below 0: they
        forget nothing, so that each part starts from what the parts before it give. factor: of other tiles. rates: of heads."""
        for i, of_all in enumerate(tiles[:-(-length // self.tables.chunk)]):
            rows = min(length - i * self.tables.chunk, self.tables.chunk)
            tile = self.of_chunk(name, of_all, rows)
            tile.copy_(torch.randn(tile.shape, generator=gen, dtype=tile.dtype, device="cpu") / 2)
            if name == self.tables.forgets:
                tile.abs_()
            if name not in self.tables.held:
                tile.mul_(factor)
                continue
            if tile.ndim > 2:
                decays = -2 * rates.view(-1, 1, 1) * tile.abs()
                before = name in self.tables.sums and self.tables.sums[name][1]
                tile.copy_(decays.cumsum(1) - (decays if before else 0.0))
            of_all[:, rows:] = of_all[:, rows - 1:rows]

    def of_chunk(self, name: str, tiles: torch.Tensor, rows: int | None = None) -> torch.Tensor:
        """A view of tiles of chunks in the page's order of dims, without padding. rows: tokens of the chunk, None for all."""
        dims = self.tables.chunk_dims[name]
        tiles = tiles.mT if name.endswith("_vk") else tiles
        for axis, extent in zip(range(-len(dims), 0), dims, strict=True):
            most = rows if extent is None else extent
            tiles = tiles if most is None else tiles.narrow(axis, 0, most)
        return tiles

    def read(self, name: str, x: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """An input in the form in which the page reads it, in float64."""
        y = x[name].double()
        if name not in self.reads:
            return y
        of_heads = {n: x[n].double() for n, *_ in self.tables.head_inputs}
        return self.reads[name](y, **{n: z.view(*z.shape, *(1 for _ in y.shape[z.ndim + 1:])) for n, z in of_heads.items()})

    def kv_order(self, state: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
        """A caller's states in the page's order of dims."""
        return state.mT if self.tables.state == "vk" and len(dims) == 2 else state

    def expected(self, x: Mapping[str, torch.Tensor], lengths: Sequence[int], heads: tuple[int, int], given: bool) -> Expected:
        """The page's results in float64. given: whether initial states count."""
        tables = self.tables
        assert self.page is not None
        share = {"H": heads[1] // heads[0], "HV": 1}
        inputs = [self.read(n, x).repeat_interleave(share[of], 1).transpose(0, 1) for n, of, *_ in tables.inputs]
        of_heads = [x[n].double() for n, *_ in tables.head_inputs if n not in self.draws or not self.reads]
        numbers = [torch.tensor(1.0 if n is None else n, dtype=torch.float64, device="cpu") for n in tables.scalars.values()]
        initial = [self.kv_order(x[n].double(), dims) * given for n, dims in tables.initial]
        count, start, by_page = len(tables.outputs), 0, bool(tables.chunk_inputs or tables.saved)
        shapes = [(heads[1], sum(lengths), *dims) for _, dims, _ in tables.outputs]
        outs = [torch.zeros(shape, dtype=torch.float64, device="cpu") for shape in shapes]
        finals: list[list[torch.Tensor]] = [[] for _ in initial]
        after: list[dict[tuple[int, int], torch.Tensor]] = [{} for _ in initial]
        saved: list[dict[tuple[int, int], torch.Tensor]] = [{} for _ in tables.saved]
        for n, length in enumerate(lengths):
            states = [s[n] for s in initial]
            step = tables.chunk if by_page else min(self.STEP, tables.chunk)  # so that there is a state after each chunk
            for t in range(0, length, step)[::-1 if tables.backward else 1]:
                if "retrieve_parent_token" in tables.indices and t:
                    parent = parent_of(n, t)
                    states = [s[n] for s in initial] if parent < 0 else [s[n, parent] for s in after]
                rows = slice(start + t, start + min(t + step, length))
                of_chunk = [self.of_chunk(name, x[name][n, t // step], rows.stop - rows.start).double()
                            for name, *_ in tables.chunk_inputs]
                results = self.page([*(y[:, rows] for y in inputs), *of_heads, *of_chunk], states, numbers)
                states = results[count + len(saved):]
                for kept, y in zip(outs, results, strict=False):
                    kept[:, rows] = y
                for by_chunk, y in zip(saved, results[count:], strict=False):
                    by_chunk[n, t // step] = y
                whole = (t + step) // tables.chunk
                if t + step <= length and (t + step) % tables.chunk == 0:
                    for by_chunk, s in zip(after, states, strict=True):
                        by_chunk[n, whole - 1] = s
            for of_state, s, first in zip(finals, states, initial, strict=True):
                of_state.append(s.expand_as(first[n]))
            start += length
        return Expected([y.transpose(0, 1) for y in outs], [torch.stack(s) for s in finals], after, saved)


class CheckCall:
    """The arguments of a call with the sequences of a `CheckProblem`, in the module's layout, with guards, gaps and marks around
    all that kernels write."""

    #: The value of memory that no call may write.
    MARK = 7.0
    #: Guard elements before and after each tensor of the kernels.
    GUARD = 1 << 16

    def __init__(self, problem: CheckProblem) -> None:
        """problem: of the module that is called."""
        self.problem, self.tables = problem, problem.tables

    # --- memory ---
    def guarded(self, x: torch.Tensor, shape: Sequence[int], fill: float) -> torch.Tensor:
        """A tensor of this shape, like `x`, between guard elements that kernels must not touch."""
        size = math.prod(shape)
        return x.new_full((size + 2 * self.GUARD,), fill)[self.GUARD:self.GUARD + size].view(shape)

    def placed(self, x: torch.Tensor, rows: int, fill: float = math.nan) -> torch.Tensor:
        """[T, heads, ...] in the module's layout. If kernels take strides, there are gaps between heads."""
        x = x.view(rows, len(x) // rows, *x.shape[1:])
        x = x if self.tables.layout == "bthd" else x.transpose(1, 2)
        shape = (*x.shape[:2], x.shape[2] + self.tables.strided, *x.shape[3:])
        return self.guarded(x, shape, fill)[:, :, :x.shape[2]].copy_(x)

    def pool(self, x: torch.Tensor, slots: torch.Tensor, count: int) -> torch.Tensor:
        """A pool with gaps between slots, `count` in all, of which some are no sequence's."""
        size = x[0].numel()
        pool = x.new_full((count, size + 32), self.MARK)[:, :size].view(count, *x.shape[1:])
        pool[slots] = x
        return pool

    # --- where states lie ---
    def is_skipped(self, n: int) -> bool:
        """True if the pool's slot of this sequence is -1."""
        return self.tables.pool and n % 5 == 2

    def places(self, lengths: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Where states lie: the slot of each sequence's initial state, slots of tokens [N, W], and rows of sequences."""
        count, width = len(lengths), max(lengths) + 1
        rows = torch.arange(count, 0, -1, device="cpu")
        if "state_indices" not in self.tables.by_token:
            return rows, None, rows
        slots = torch.arange(count * width, 0, -1, device="cpu").view(count, width)
        accepted = "num_accepted_tokens" in self.tables.indices
        return slots[torch.arange(count, device="cpu"), [n % 3 * accepted for n in range(count)]], slots, rows

    def rows(self, lengths: Sequence[int]) -> torch.Tensor:
        """The rows of checkpoints, by sequence and chunk: one after each whole chunk, in those of calls with one for every
        chunk."""
        chunk, start = self.tables.chunk, 0
        rows = torch.full((len(lengths), max(lengths) // chunk + 1), -1, device="cpu")
        for n, length in enumerate(lengths):
            rows[n, :length // chunk] = start // chunk + torch.arange(length // chunk, device="cpu")
            start += length
        return rows

    def chunk_slots(self, lengths: Sequence[int]) -> list[tuple[int, int, int]]:
        """The chunk slots of the sequences, as (slot, sequence, chunk)."""
        chunk, starts = self.tables.chunk, [0, *torch.tensor(lengths, device="cpu").cumsum(0).tolist()]
        return [(starts[n] // chunk + n + i, n, i) for n, length in enumerate(lengths) for i in range(-(-length // chunk))]

    def integers(self, lengths: Sequence[int], once: int, device: torch.device) -> dict[str, torch.Tensor]:
        """The tensors of integers, by name. once: how many sequences differ."""
        (first, slots, rows), width = self.places(lengths), max(lengths) + 1
        left_out = torch.tensor([self.is_skipped(n) for n in range(len(lengths))], device="cpu")
        made = {"state_indices": first.where(~left_out, -1) if slots is None else slots.where(~left_out[:, None], -1),
                "num_accepted_tokens": torch.tensor([n % 3 + 1 for n in range(len(lengths))], device="cpu"),
                "intermediate_state_indices": rows,
                "retrieve_parent_token": torch.tensor([[parent_of(n % once, t) for t in range(width)]
                                                       for n in range(len(lengths))], device="cpu"),
                "checkpoint_rows": self.rows(lengths)}
        return {name: made[name].to(torch.int32).to(device) for name in self.tables.numbers}

    # --- the arguments ---
    def arguments(self, x: Mapping[str, torch.Tensor], lengths: Sequence[int], heads: tuple[int, int], device: torch.device,
                  call: tuple[bool, bool, bool]) -> tuple[dict[str, Any], torch.Tensor | None]:
        """The call's arguments, and the slots of the sequences. Rows past the last sequence are NaN. call: whether sequences are
        packed, initial states are given, and final states are wanted."""
        tables, (packed, given, wanted), dtypes = self.tables, call, self.problem.DTYPES
        rows, spare = (1, tables.chunk) if packed else (len(lengths), 0)
        copies = sum(lengths) // x[tables.inputs[0][0]].shape[0]
        arguments: dict[str, Any] = {"output_final_state": wanted} if tables.final or tables.in_place else {}
        arguments.update({n: 1.0 for n, default in tables.scalars.items() if default is None})
        for name, *_ in tables.inputs:
            y = x[name].to(device)
            spare_rows = y.new_full((spare, *y.shape[1:]), math.nan)
            arguments[name] = self.placed(torch.cat([y] * copies + [spare_rows]), rows)
        for name, *_ in tables.head_inputs:
            arguments[name] = x[name].to(device)
        for name, dims, _ in tables.chunk_inputs:
            y = x[name].to(device)
            tiles = y.new_full(((sum(lengths) + spare) // tables.chunk + len(lengths), heads[1], *dims), math.nan)
            for slot, n, i in self.chunk_slots(lengths):
                tiles[slot] = y[n % len(y), i]
            arguments[name] = tiles
        for name, (_, dims, dtype) in zip(tables.outs, tables.outputs, strict=True):
            shape = (sum(lengths) + spare, heads[1], *dims)
            arguments[name] = self.placed(torch.full(shape, self.MARK, dtype=dtypes[dtype], device=device), rows, self.MARK)
        if packed:
            arguments["cu_seqlens"] = torch.tensor([0, *lengths], device="cpu").cumsum(0).to(torch.int32).to(device)
        arguments.update(self.integers(lengths, len(lengths) // copies, device) if tables.numbers else {})
        slots = self.states(arguments, x, lengths, copies, device, given)
        self.buffers(arguments, x, lengths, (sum(lengths) + spare) // tables.chunk + 1, device, wanted)
        return arguments, slots

    def states(self, arguments: dict[str, Any], x: Mapping[str, torch.Tensor], lengths: Sequence[int], copies: int,
               device: torch.device, given: bool) -> torch.Tensor | None:
        """Add the initial states to the arguments. Returns the slots of the sequences in a pool."""
        tables = self.tables
        for name, _ in tables.initial if given else ():
            y = torch.cat([x[name].to(device)] * copies)
            arguments[name] = self.guarded(y, y.shape, self.MARK).copy_(y)
        if not tables.pool:
            return None
        slots, all_slots, _ = self.places(lengths)
        count = (slots if all_slots is None else all_slots).numel() + 2
        arguments.update({name: self.pool(arguments[name], slots, count) for name, _ in tables.initial})
        return slots

    def buffers(self, arguments: dict[str, Any], x: Mapping[str, torch.Tensor], lengths: Sequence[int], positions: int,
                device: torch.device, wanted: bool) -> None:
        """Add the memory for checkpoints and final states to the arguments. positions: of checkpoints, where callers say them."""
        tables = self.tables
        pairs = list(zip(tables.checkpoints, tables.initial, strict=True)) if tables.rows or tables.positions else []
        for (name, dims), (initial, _) in pairs:
            y = x[initial].to(device)
            lead = (positions,) if tables.positions else (len(lengths) + 2, max(lengths) + 1)
            arguments[name] = self.guarded(y, (*lead, y.shape[1], *dims), self.MARK)
        for (name, dims), (initial, _) in zip(tables.final, tables.initial, strict=True) if wanted and tables.final else ():
            y = x[initial].to(device)
            arguments[name] = (torch.full_like(arguments[initial], self.MARK) if tables.pool else
                               self.guarded(y, (len(lengths), y.shape[1], *dims), self.MARK))

    # --- what it may write ---
    @property
    def kept(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Rows of the tensors that hold a state for each token."""
        return self.tables.checkpoints if self.tables.rows else self.tables.initial if self.tables.slots else ()

    def stored_by_token(self, lengths: Sequence[int], served: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """The indices of the tiles in which the states after all tokens of the served sequences are."""
        _, slots, rows = self.places(lengths)
        n, t = torch.tensor(tokens_of(lengths, served), dtype=torch.int64, device="cpu").view(-1, 2).unbind(1)
        return (slots[n, t],) if self.tables.slots and slots is not None else (rows[n], t) if self.tables.rows else ()

    def writable(self, arguments: Mapping[str, Any]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """The arguments that kernels write to, by name: all memory of their storage, with guards and gaps, and a copy of it."""
        states = [n for n, _ in (self.tables.initial if self.tables.in_place else self.tables.final)]
        rows = [n for n, _ in self.tables.checkpoints] if self.tables.rows or self.tables.positions else []
        return {n: (whole(arguments[n]), whole(arguments[n]).clone()) for n in (*self.tables.outs, *states, *rows)
                if n in arguments}

    def beside(self, arguments: Mapping[str, Any], writable: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
               written: torch.Tensor, by_token: tuple[torch.Tensor, ...], slots: Any, lengths: Sequence[int]
               ) -> dict[str, tuple[float, float]]:
        """(inf, 0) by name of memory in which something changed that the call may not write, else (0, 0).

        writable: as `writable` gave it before the call. written: tokens of sequences. by_token, slots: the tiles of states that
        the call writes."""
        tables, found = self.tables, {}
        for name, (now, before) in writable.items():
            own = torch.zeros(now.shape, dtype=torch.bool, device=now.device).as_strided(
                arguments[name].shape, arguments[name].stride(), arguments[name].storage_offset())
            if name in tables.outs:
                own = own if tables.layout == "bthd" else own.transpose(1, 2)
                own[written.view(own.shape[:2]).to(now.device)] = True
            elif name in dict(self.kept):
                own[tuple(at.to(now.device) for at in by_token)] = True
            elif name in dict(tables.checkpoints):
                own[[row for row in self.rows(lengths).flatten().tolist() if row >= 0]] = True
            else:
                own[slots] = True
            found[f"memory beside {name}"] = math.inf if ((now != before) & ~whole(own)).any() else 0.0, 0.0
        return found


def tokens_of(lengths: Sequence[int], served: Sequence[int]) -> list[tuple[int, int]]:
    """The tokens of these sequences, as pairs (sequence, token)."""
    return [(n, t) for n in served for t in range(lengths[n])]


def whole(x: torch.Tensor) -> torch.Tensor:
    """All memory of the storage of a tensor."""
    return x.new_empty(0).set_(x.untyped_storage())


#: By the name of an output: its error, as RMSE over RMS, and the error that is accepted.
_Errors = dict[str, tuple[float, float]]


class Check:
    """Compares a module's kernels with its page in float64 on a `CheckProblem`. A build with parts runs in parts too: some have a
    warm-up, and some need summaries of all parts before them."""

    #: The largest RMSE over RMS of one head in one sequence that rounding may cause, by dtype.
    ACCEPTED = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 3e-2}
    #: The same if a GPU multiplies float32 as tf32, which drops 13 bits of each operand.
    ACCEPTED_TF32 = 3e-2
    #: Of gradients: an error may be this many times the change that rounding errors of inputs make, and at most MOST. Sums of a
    #: gradient cancel, so that its entries may be small beside their terms. So may all of a head in a short sequence: an error
    #: there is compared with this many times that change, if that is more than the gradient.
    OF_ROUNDING, MOST = 16, 0.25
    #: Instances on a GPU, by copies of the problem: enough to fill it. Fewer where each token has a state, which takes memory.
    INSTANCES = 512
    INSTANCES_BY_TOKEN = 64

    def __init__(self, tables: Tables, page: _Page | None, host: Any, function: Callable[..., Any] | None,
                 reads: Mapping[str, Callable[..., torch.Tensor]] | None = None,
                 draws: Mapping[str, Callable[..., torch.Tensor]] | None = None) -> None:
        """tables, host, page: those of the module. function: the function under test, as callers see it. reads, draws: as for
        `CheckProblem`."""
        self.tables, self.host, self.function = tables, host, function
        self.problem = CheckProblem(tables, page, reads or {}, draws or {})
        self.call = CheckCall(self.problem)
        self.done: set[tuple[torch.device, tuple[int, int]]] = set()
        self.lock = threading.RLock()

    def __call__(self, device: torch.device | str | None = None, heads: tuple[int, int] | None = None) -> _Errors:
        """Run the kernels and compare. Returns (error, accepted error) by output, as RMSE over RMS. Raises RuntimeError if an
        error is too large. heads: H and HV, if kernels are compiled for them."""
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        with self.lock:
            found = self.errors(device, heads)
            wrong = [f"{n} off by {error:.1e} ({accepted:.0e} is accepted)" for n, (error, accepted) in found.items()
                     if not error <= accepted]
            if wrong:
                self.done.discard((device, heads or self.heads()))
                raise RuntimeError(f"{self.tables.name} gives wrong results on {device}: {', '.join(wrong)}")
        return found

    def once(self, device: torch.device, heads: tuple[int, int]) -> None:
        """Do `__call__` once for these head counts on the device. GDN_CODEGEN_ADMIT=0 turns it off."""
        if os.environ.get("GDN_CODEGEN_ADMIT") == "0":
            return
        with self.lock:  # other threads wait for the result; launches within `errors` find the check done
            if (device, heads) in self.done:
                return
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(f"{self.tables.name}: call this once before a graph is captured, to check its kernels")
            self(device, heads)

    def heads(self) -> tuple[int, int]:
        """H and HV to use if the caller gives none: two value heads for each key head, or as many as one instance handles."""
        if self.tables.heads:
            h, hv = self.tables.heads.values()
            return h, hv
        both = {"H", "HV"} <= {row[1] for row in self.tables.inputs}
        return (2, 2 * max(2, self.tables.heads_per_instance)) if both else (2, 2)

    def errors(self, device: torch.device, heads: tuple[int, int] | None = None,
               calls: Sequence[tuple[bool, bool, bool]] = ((True, True, True), (False, False, True))) -> _Errors:
        """(error, accepted error) by output: the worst of `calls`. A call says whether sequences are packed, initial states are
        given, and final states are wanted."""
        heads = heads or self.heads()
        found: _Errors = {}
        hosts = [x for x in (self.host, self.host.earlier) if x is not None]
        in_parts = [x for x in hosts if x.tables.in_parts]
        parts = (1, 2) if in_parts and device.type != "cpu" else (1,)
        # the first of a pair declines the call unless all heads forget fast
        problems = [(chunks, call, (fast, rate_offset)) for chunks in parts for call in calls
                    for fast in (False, True)[:len(hosts)] for rate_offset in self.problem.rate_offsets(heads)]
        with self.lock, torch.inference_mode(False), torch.no_grad():
            self.done.add((device, heads))  # launches below call `once`
            before = [(x.poison, x.part_chunks, x.plans) for x in hosts]
            try:
                for x in hosts:
                    x.poison, x.plans = True, {}
                for chunks, call, rates in problems:
                    for x in in_parts:  # short parts, so that there are many
                        x.part_chunks = chunks
                    for n, (error, accepted) in self.compared(device, heads, *call, *rates).items():
                        known = found.get(n, (0.0, accepted))[0]
                        found[n] = (known if known > error or math.isnan(known) else error), accepted
                    self.host.plans.clear()
            except BaseException:
                self.done.discard((device, heads))
                raise
            finally:
                for x, fields in zip(hosts, before, strict=True):
                    x.poison, x.part_chunks, x.plans = fields
        return found

    def compared(self, device: torch.device, heads: tuple[int, int], packed: bool, given: bool, wanted: bool,
                 fast: bool = False, rate_offset: int = 0) -> _Errors:
        """(error, accepted error) by output of one call. fast, rate_offset: as for `CheckProblem.solved`."""
        tables, once = self.tables, self.problem.lengths(packed, heads)
        given, wanted = given or tables.pool or tables.in_place, wanted or tables.in_place
        instances = self.INSTANCES_BY_TOKEN if self.problem.by_token or tables.positions else self.INSTANCES
        lengths = once * (1 if device.type == "cpu" else 1 + instances // (len(once) * heads[1]))
        x, want = self.problem.solved(once, heads, given, fast, rate_offset)
        arguments, slots = self.call.arguments(x, lengths, heads, device, (packed, given, wanted))
        served = [n for n in range(len(lengths)) if not self.call.is_skipped(n)]
        starts = [0, *torch.tensor(lengths, device="cpu").cumsum(0).tolist()]
        written = torch.zeros(starts[-1] + packed * tables.chunk, dtype=torch.bool, device="cpu")
        for n in served:
            written[starts[n]:starts[n + 1]] = True
        writable = self.call.writable(arguments)
        assert self.function is not None
        results = self.function(**arguments)

        tf32 = tables.tf32 and device.type == "cuda"
        accepted = self.ACCEPTED_TF32 if tf32 else self.ACCEPTED[tables.dtype]
        if "retrieve_parent_token" in tables.indices:  # tokens start from states as they were stored
            accepted = max(accepted, self.ACCEPTED[tables.state_dtype])
        count = len(want.outs)
        change, change_saved = self.problem.by_rounding(x, once, heads, given, want, tf32)
        found = self.of_outputs(results[:count], want, change, (lengths, once, served), accepted)
        accepted = max(accepted, self.ACCEPTED[tables.state_dtype])
        errors = self.of_states(results[count:], arguments, want, slots, (lengths, once, served))
        saved = results[len(results) - len(want.saved):]
        found |= {n: (error, accepted) for n, error in errors.items()}
        found |= self.of_chunks(saved, want, change_saved, (lengths, once), accepted)
        own = served if slots is None else slots[served].to(device)
        return found | self.call.beside(arguments, writable, written, self.call.stored_by_token(lengths, served), own, lengths)

    def of_outputs(self, results: Sequence[torch.Tensor], want: Expected, change: Sequence[torch.Tensor],
                   rows: tuple[Sequence[int], Sequence[int], Sequence[int]], accepted: float) -> _Errors:
        """(error, accepted error) by output. change: by how much rounding of inputs changes each. rows: lengths of the call's
        sequences, of the problem's, and the numbers of those that are served."""
        (lengths, once, served), found = rows, dict[str, tuple[float, float]]()
        for (name, _, dtype), got, of_all, by_all in zip(self.tables.outputs, results, want.outs, change, strict=True):
            tokens = got if self.tables.layout == "bthd" else got.transpose(1, 2)
            each = torch.split(tokens.flatten(0, 1)[:sum(lengths)].cpu(), list(lengths))
            both = list(zip(*(torch.split(y, list(once)) for y in (of_all, by_all)), strict=True))
            error = worst([off(y + by, y, self.OF_ROUNDING * by) for y, by in both if len(y)])
            errors = [off(each[n], y, self.OF_ROUNDING * by) for n in served for y, by in [both[n % len(once)]] if len(y)]
            found[name] = worst(errors), max(accepted, self.problem.ROUNDING[dtype], min(self.MOST, self.OF_ROUNDING * error))
        return found

    def of_states(self, results: Sequence[torch.Tensor | None], arguments: Mapping[str, Any], want: Expected,
                  slots: torch.Tensor | None, rows: tuple[Sequence[int], Sequence[int], Sequence[int]]) -> dict[str, float]:
        """Errors of final states, of states by token, and of checkpoints, by name. results: those after the outputs. rows: as for
        `of_outputs`."""
        tables, (lengths, once, served), found = self.tables, rows, dict[str, float]()
        starts, kv_order = [0, *torch.tensor(lengths, device="cpu").cumsum(0).tolist()], self.problem.kv_order
        states, at_chunks = results[:len(want.finals)], results[len(want.finals):]
        names = [n for n, _ in tables.final] or [n.replace("initial", "final") for n, _ in tables.initial]
        for name, (_, dims), got, final in zip(names, tables.initial, states, want.finals, strict=True):
            if got is not None and not tables.slots:
                mine = kv_order(got.cpu() if slots is None else got.cpu()[slots], dims)
                found[name] = worst([off(mine[n][None], final[n % len(once)][None]) for n in served])
        by_token = self.call.stored_by_token(lengths, served)
        for (name, dims), after in zip(self.call.kept, want.after, strict=True) if self.call.kept else ():
            mine = kv_order(arguments[name].cpu()[by_token], dims)
            found[f"{name} by token"] = worst([off(y[None], after[n % len(once), t][None]) for y, (n, t) in
                                               zip(mine, tokens_of(lengths, served), strict=True)])
        if tables.positions:
            at_chunks = [arguments[name] for name, _ in tables.checkpoints]
        for (name, dims), got, after in zip(tables.checkpoints, at_chunks, want.after, strict=False):
            assert got is not None
            mine = kv_order(got.cpu(), dims)
            found[name] = worst([off(mine[starts[n] // tables.chunk + i][None], after[n % len(once), i][None])
                                 for n in served for i in range(lengths[n] // tables.chunk)])
        return found

    def of_chunks(self, results: Sequence[torch.Tensor], want: Expected, change: Sequence[Mapping[tuple[int, int], torch.Tensor]],
                  rows: tuple[Sequence[int], Sequence[int]], accepted: float) -> _Errors:
        """(error, accepted error) by output of chunks. change: by how much rounding of inputs changes each. rows: lengths of the
        call's sequences, and of the problem's."""
        (lengths, once), found = rows, _Errors()
        for m, (name, got, of_chunk, by_rounding) in enumerate(zip(self.tables.saved, results, want.saved, change, strict=True)):
            mine, (_, *columns) = self.problem.of_chunk(name, got), self.tables.chunk_dims[name]
            tiles: dict[tuple[int, int], list[tuple[torch.Tensor, ...]]] = {}
            for slot, n, i in self.call.chunk_slots(lengths):  # states one by one, rows of tokens and sums by sequence
                y, by = of_chunk[n % len(once), i], by_rounding[n % len(once), i]
                x = mine[slot][:, :y.shape[1]].cpu()
                if None in columns:  # a last chunk has fewer columns
                    fill = (0, self.tables.chunk - y.shape[2])
                    x, y, by = (torch.nn.functional.pad(z[..., :y.shape[2]], fill) for z in (x, y, by))
                own = m < len(self.tables.initial) and not self.tables.backward
                tiles.setdefault((n, i if own else 0), []).append((x, y, by))
            each = [[torch.cat(z, 1).transpose(0, 1) for z in zip(*x, strict=True)] for x in tiles.values()]
            error = worst([off(y + by, y, self.OF_ROUNDING * by) for _, y, by in each])
            found[name] = (worst([off(x, y, self.OF_ROUNDING * by) for x, y, by in each]),
                           max(accepted, min(self.MOST, self.OF_ROUNDING * error)))
            if name in self.tables.zeroed:  # callers add up the slots without a chunk, too
                unused = sorted({*range(len(mine))} - {slot for slot, *_ in self.call.chunk_slots(lengths)})
                found[f"memory beside chunks of {name}"] = float(mine[unused].abs().max()) if unused else 0.0, 0.0
        return found


def off(got: torch.Tensor, want: torch.Tensor, least: torch.Tensor | None = None) -> torch.Tensor:
    """RMSE over RMS of the worst head. got, want, least: [tokens, heads, ...]. An RMS is at least that of `least`."""
    got, least = got.double(), torch.zeros_like(want) if least is None else least
    error, size, other = ((y * y).transpose(0, 1).flatten(1).mean(1) for y in (got - want, want, least))
    return (error / size.maximum(other).clamp_min(1e-30)).sqrt().max()


def worst(errors: Sequence[torch.Tensor]) -> float:
    """The largest error; NaN if any is NaN."""
    return float(torch.stack(list(errors)).max()) if errors else 0.0


#: How temporary names begin: of folders in which an artefact is made, and of files that the package's cache writes.
_MAKING, _WRITING = ".making.", ".writing."
#: Seconds after which a file that is written, which takes milliseconds, is a killed process's.
_STALE = 3600.0


def _lock_of(path: Path) -> Path:
    """The lock file that goes with `path`."""
    return path.with_name(path.name + ".lock")


def _sum_of(path: Path) -> Path:
    """The path of the file with the size and digest of an artefact."""
    return path.with_name(path.name + ".sum")


def _taken(name: Path, wait: bool) -> int | None:
    """The lock file, opened and locked. None if another process holds it and this one does not wait."""
    while True:
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            if os.stat(name).st_ino == os.fstat(fd).st_ino:
                return fd
        except FileNotFoundError:  # `cache clear` removed it while we waited: another process may have made a new one
            pass
        except BlockingIOError:
            os.close(fd)
            return None
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


@contextlib.contextmanager
def _lock(path: Path, wait: bool = True) -> Iterator[bool]:
    """Hold `path`.lock against other processes and threads. A killed holder frees it. Gives whether it is held: without `wait`
    it may be another's."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = _taken(_lock_of(path), wait)
    try:
        yield fd is not None
    finally:
        if fd is not None:
            os.close(fd)


def _sum(path: Path) -> str:
    return f"{path.stat().st_size} {hashlib.sha256(path.read_bytes()).hexdigest()}"


def _whole(path: Path) -> bool:
    """True if the file exists and has the size and digest in `path`.sum."""
    try:
        return _sum_of(path).read_text(encoding="utf-8") == _sum(path)
    except (OSError, ValueError):
        return False


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """An OSError that names no file, as a full disk's, names this one."""
    try:
        yield
    except OSError as e:
        if e.filename is None and e.errno is not None:
            e.filename = str(path)
        raise


def _flush(path: Path) -> None:
    """Wait until a file is on the disk."""
    with open(path, "rb") as f:
        os.fsync(f.fileno())


def _artefact(path: Path, make: Callable[[Path], object]) -> Path:
    """`path`. If the file is missing or damaged, make(temporary path) writes it under a lock, and it is renamed into place."""
    if _whole(path):
        return path
    with _lock(path):
        if not _whole(path):
            _sweep(path.parent)
            folder = path.with_name(_MAKING + path.name)  # only the holder of the lock uses it
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            try:
                built, sums = folder / path.name, folder / "sum"
                with _naming(path):
                    make(built)
                    _flush(built)
                    sums.write_text(_sum(built), encoding="utf-8")
                    _flush(sums)
                os.replace(sums, _sum_of(path))
                os.replace(built, path)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
    return path


def _sweep(folder: Path) -> None:
    """Remove what killed processes left: folders of artefacts that no process is making any more, and half-written files."""
    for x in folder.glob(_MAKING + "*"):
        with _lock(folder / x.name.removeprefix(_MAKING), wait=False) as held:
            if held:
                shutil.rmtree(x, ignore_errors=True)
    for x in folder.glob(_WRITING + "*"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - x.stat().st_mtime > _STALE:
                x.unlink()


def compile_command(source: str | Path, library: str | Path) -> list[str]:
    """The command that builds the kernels for an Ascend A2 or A3. Raises RuntimeError if CANN or PTO-ISA is not set up."""
    toolkit = os.environ.get("ASCEND_TOOLKIT_HOME") or os.environ.get("ASCEND_HOME_PATH")
    headers = os.environ.get("PTO_LIB_PATH")
    if not toolkit or not headers:
        raise RuntimeError("NPU tensors need CANN and PTO-ISA: set ASCEND_TOOLKIT_HOME (CANN's set_env.sh does) and "
                           "PTO_LIB_PATH to a checkout of PTO-ISA")
    driver = os.environ.get("ASCEND_DRIVER_PATH", "/usr/local/Ascend/driver")
    folders = [f"{headers}/include", f"{toolkit}/include", f"{toolkit}/pkg_inc", f"{toolkit}/pkg_inc/runtime",
               f"{toolkit}/pkg_inc/profiling", f"{driver}/kernel/inc"]
    tuning = ["-cce-aicore-stack-size=0x8000", "-cce-aicore-function-stack-size=0x8000",
              "-cce-aicore-record-overflow=true", "-cce-aicore-dcci-insert-for-scalar=false"]
    return ["bisheng", "-fPIC", "-shared", "-xcce", "-DMEMORY_BASE", "-O2", "-std=gnu++17", "--cce-aicore-arch=dav-c220",
            *(word for t in tuning for word in ("-mllvm", t)), *(f"-I{f}" for f in folders), str(source), "-o", str(library)]


def _compile_for_npu(source: Path, library: Path) -> None:
    try:
        done = subprocess.run(compile_command(source, library), capture_output=True, text=True)
    except FileNotFoundError:
        raise RuntimeError("NPU tensors need bisheng, the compiler of the CANN toolkit, on PATH") from None
    if done.returncode:
        raise RuntimeError(f"bisheng failed:\n{done.stderr}")


def _mask(fill: str, shape: Sequence[int], dtype: str) -> torch.Tensor:
    """A constant tile on the CPU. fill: kind[:size], value kept, value elsewhere. Or to_middle:size of n/m,
    or from_middle:size, where m is 1 for running sums alone and n is 0 for them, 1 for sums before each token."""
    kind, kept, other = fill.split()
    kind, _, digits = kind.partition(":")
    size = int(digits or 1)
    rows, columns = (torch.arange(n, device="cpu") for n in shape)
    i, j = rows[:, None], columns[None, :]
    if kept == "of":
        own, middle = (i == j).float(), (j == i // (2 * size) * (2 * size) + size - 1).float()
        second, first = {"0/1": (own - middle, middle - own), "0/2": (-middle, middle - own), "1/2": (own, 0 * own)}[other]
        return torch.where((i // size % 2 == 1) | (kind == "from_middle"), second, first).to(_FLOATS[dtype])
    i = i % len(columns) if len(rows) > len(columns) else i  # squares one below the other
    keep = {"lower": i >= j, "strictly_lower": i > j, "eye": i == j, "diagonal_blocks": i // size == j // size,
            "pairs": (i // (2 * size) == j // (2 * size)) & (i // size > j // size)}[kind]
    return torch.where(keep, float(kept), float(other)).to(_FLOATS[dtype])


def _core_groups(device: torch.device) -> int:
    """The number of cube cores of the NPU; 4 in the simulator, and for tensors without memory."""
    if device.type != "npu":
        return 4
    npu: Any = torch.npu  # type: ignore[attr-defined]
    return getattr(npu.get_device_properties(device), "cube_core_num", 24)


#: Regions of a workspace begin at multiples of this: several of a transfer's 32 bytes.
_ALIGN = 512


class PtoLauncher:
    """Launches the kernels of one source: on an Ascend NPU, and for CPU tensors in the simulator of gdn_codegen.

    symbols: for each kernel, its C name, the kinds of its tensors for the simulator (0 read, 1 written, 2 between cores, 3 read
      and written), the kinds of the regions of the workspace that it uses, the first bytes of its masks among its constants, and
      how many of its integers are strides. The kernel gets pointers to its tensors; the workspace, if it uses any; its constants,
      if it has any; a table of the first bytes of its regions, then strides, if there are any; and cu_seqlens.
    regions: (what it has a tile for, dims, dtype) by name: "slot" and "sequence", for each value head, or "group", a core group.
    constants: (fill, shape, dtype) of masks, by name, as `_mask` takes them.
    heads: True if head counts are compiled in. Kernels then do not take them.
    """

    def __init__(self, source: str, symbols: Mapping[str, tuple[str, list[int], dict[str, int], dict[str, int], int]],
                 regions: Mapping[str, tuple[str, list[int], str]], constants: Mapping[str, tuple[str, list[int], str]],
                 heads: bool) -> None:
        self.source, self.symbols, self.regions, self.constants, self.heads = source, symbols, regions, constants, heads
        self.library = functools.lru_cache(maxsize=None)(self._load)
        self.filled = functools.lru_cache(maxsize=64)(self._filled)

    def places(self, slots: int, sequences: int, value_heads: int, device: torch.device) -> dict[str, tuple[int, int]]:
        """For each region its first byte in the workspace, and its bytes. The last entry, "", is the end.

        In the simulator regions lie apart, by as much as the largest tile has, so that it finds an access past the end of one.
        """
        counts = {"slot": slots * value_heads, "sequence": sequences * value_heads, "group": _core_groups(device)}
        tiles = {n: math.prod(dims) * _FLOATS[dtype].itemsize for n, (_, dims, dtype) in self.regions.items()}
        apart = max(tiles.values(), default=0) if device.type == "cpu" else 0
        found, at = {}, 0
        for name, (each, _, _) in self.regions.items():
            found[name] = at, counts[each] * tiles[name]
            at += -(-(counts[each] * tiles[name] + apart) // _ALIGN) * _ALIGN
        return {**found, "": (at, 0)}

    def workspace_bytes(self, slots: int, sequences: int, value_heads: int, device: torch.device) -> int:
        """The bytes of the workspace of a call."""
        return self.places(slots, sequences, value_heads, device)[""][0]

    def __call__(self, name: str, instances: int, sizes: Sequence[int], ints: Sequence[int], device: torch.device
                 ) -> Callable[[Sequence[Any], Any, Sequence[float]], None]:
        """A function that launches the kernel on its tensors, cu_seqlens and numbers. The last tensor is the workspace, if it
        uses any."""
        symbol, kinds, used, masks, strides = self.symbols[name]
        numbers = (*((*sizes[:3], sizes[5]) if self.heads else sizes), *ints[:len(ints) - strides])
        groups = min(instances, _core_groups(device))
        places = self.places(sizes[5], sizes[0], sizes[4], device)
        table = [*(places[n][0] for n in used), *ints[len(ints) - strides:]]
        fixed = [self.filled(name, device)] if masks else []
        fixed += [torch.tensor(table, dtype=torch.int64, device=device)] if table else []
        of_all = [*kinds, *([4] if used else []), *([4] if masks else []), *([0] if table else []), 0]

        def simulate(tensors: Sequence[Any], cu: Any, scalars: Sequence[float]) -> None:
            from gdn_codegen import pto_sim
            regions = [(tensors[-1][at:at + size].view(_FLOATS[self.regions[n][2]]), kind)
                       for n, kind in used.items() for at, size in [places[n]]]
            regions += [(x, 0) for x in self._masks(name, fixed[0])] if masks else []
            pto_sim.launch(self.library("cpu"), symbol, groups, [*tensors, *fixed, cu], of_all, numbers, scalars, regions)

        def launch(tensors: Sequence[Any], cu: Any, scalars: Sequence[float]) -> None:
            stream = torch.npu.current_stream()._as_parameter_  # type: ignore[attr-defined]
            failed = getattr(self.library("npu"), f"call_{symbol}")(
                ctypes.c_uint32(groups), stream, *(ctypes.c_void_p(t.data_ptr()) for t in (*tensors, *fixed, cu)),
                *(ctypes.c_int64(n) for n in numbers), *(ctypes.c_float(x) for x in scalars))
            if failed:
                raise RuntimeError(f"{symbol}: the runtime returned no address for flags between cores")

        return simulate if device.type == "cpu" else launch

    def _filled(self, name: str, device: torch.device) -> torch.Tensor:
        """The constants of a kernel: its masks, in the bytes of one tensor."""
        masks = {n: _mask(*self.constants[n]) for n in self.symbols[name][3]}
        ends = [at + masks[n].nbytes for n, at in self.symbols[name][3].items()]
        whole = torch.zeros(ends[-1], dtype=torch.uint8, device="cpu")
        for to, x in zip(self._masks(name, whole), masks.values(), strict=True):
            to.copy_(x.flatten())
        return whole.to(device)

    def _masks(self, name: str, whole: torch.Tensor) -> list[torch.Tensor]:
        """A view of each mask of a kernel in its constants."""
        found = []
        for n, at in self.symbols[name][3].items():
            _, shape, dtype = self.constants[n]
            found.append(whole[at:at + math.prod(shape) * _FLOATS[dtype].itemsize].view(_FLOATS[dtype]))
        return found

    def _load(self, kind: str) -> ctypes.CDLL:
        """The compiled kernels for "npu" or "cpu", from the cache if they are there. A file is named by a hash of its content.
        ValueError for a cache that cannot be written."""
        given = os.environ.get("GDN_CODEGEN_CACHE")
        folder = Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gdn_codegen"
        try:
            return self._compiled(kind, folder)
        except OSError as e:
            at = Path(str(e.filename)).absolute()
            if e.filename is None or not (at in folder.absolute().parents or at.is_relative_to(folder.absolute())):
                raise
            raise ValueError(f"GDN_CODEGEN_CACHE: got {folder}: {e.strerror}; accepted: a folder that can be written") from e

    def _compiled(self, kind: str, folder: Path) -> ctypes.CDLL:
        """`_load` with this cache."""
        if kind == "npu":
            seed = self.source + " ".join(compile_command("", ""))
        else:
            from gdn_codegen import pto_sim
            seed = self.source + str(pto_sim.runtime_object())
        name = f"{hashlib.sha256(seed.encode()).hexdigest()[:24]}_{kind}.so"

        def make(built: Path) -> None:
            source = built.with_name("kernel.cpp")
            source.write_text(self.source)
            if kind == "npu":
                _compile_for_npu(source, built)
            else:
                pto_sim.build(source, [symbol for symbol, *_ in self.symbols.values()], built)

        return ctypes.CDLL(str(_artefact(folder / "pto" / name, make)))


def _fits_transfers(t: Tables, name: str, x: torch.Tensor) -> bool:
    """True if transfers can read the tensor without a copy: its rows are dense, and less than 2^16 elements apart."""
    return x.stride(-1) == 1 and 0 < _steps(x.stride(), t.layout)[1] < 1 << 16


# --- this module -----------------------------------------------------------------------------------------------------
TABLES = Tables(
    name="gdn_c64_bthd_staged",
    function="chunk_gated_delta_rule",
    chunk=64,
    layout="bthd",
    dtype="float16",
    inputs=(
        ("q", "H", (128,), "float16"),
        ("k", "H", (128,), "float16"),
        ("v", "HV", (128,), "float16"),
        ("g", "HV", (), "float32"),
        ("beta", "HV", (), "float32"),
    ),
    outputs=(
        ("o", (128,), "float16"),
    ),
    kernels=(
        ("G", "chunks", 1, ("g", "(workspace)"), ()),
        ("A", "chunks", 1, ("k", "beta", "(workspace)"), ()),
        ("Tinv", "chunks", 1, ("(workspace)",), ()),
        ("U_weight_U_offset", "chunks", 1, ("k", "v", "beta", "(workspace)"), ()),
        ("S_U", "sequences", 1, ("k", "initial_state", "final_state", "(workspace)"), ()),
        ("o", "chunks", 1, ("q", "k", "o", "(workspace)"), ("scale",)),
    ),
    ints={"G": (), "A": (), "Tinv": (), "U_weight_U_offset": (), "S_U": ("has_initial_state", "has_final_state"), "o": ()},
    scalars={"scale": 0.08838834764831845},
    initial=(
        ("initial_state", (128, 128)),
    ),
    final=(
        ("final_state", (128, 128)),
    ),
    shared=(
        ("(workspace)",),
    ),
    decays=("g",),
)
_launcher = PtoLauncher(SOURCE, SYMBOLS, REGIONS, CONSTANTS, heads=bool(TABLES.heads))
HOST = Host(TABLES, _launcher)


def chunk_gated_delta_rule(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, final_state=None, out=None):
    """Token t: S <- exp(g) S; u = beta (v - S^T k); S <- S + k u^T; o = scale S^T q.

    Shapes, layout bthd: q [B, T, H, 128] float16, k [B, T, H, 128] float16, v [B, T, HV, 128] float16, g [B, T, HV] float32, beta [B, T, HV] float32.
    initial_state: [N, HV, 128, 128] float32, or what widens to it; zero where absent.
    final_state: [N, HV, 128, 128] float32, to be written to.
    cu_seqlens: int32 or int64 [N + 1], ends of sequences packed into a batch of 1; without it each row is a sequence.
    out: where to write what is returned; rows of no sequence stay as they are, and are zero in what is
        made here. Its last dim is dense. It and a final state lie in memory that the call does not read; the package looks
        at that, this module does not.
    Returns (o, final state or None). CUDA tensors run on the GPU, CPU tensors on the CPU. ValueError on bad input.
    """
    return HOST((q, k, v, g, beta), (scale,), (initial_state,), (out,), cu_seqlens, (final_state,), output_final_state)


def _page(_inputs, _states, _numbers):
    q, k, v, g, beta = _inputs
    S, = _states
    scale, = _numbers
    # G = cumsum(g)
    G = g.cumsum(-1)
    # D = exp(lower(G[:, None] - G[None, :], fill=-inf))
    G_col = G[..., :, None]
    G_row = G[..., None, :]
    G_minus_G = G_col - G_row
    lower_G_minus_G = torch.where(torch.ones_like(G_minus_G).tril(0) > 0, G_minus_G, float("-inf"))
    D = torch.exp(lower_G_minus_G)
    # A = strictly_lower(beta[:, None] * (k @ k.T) * D)
    beta_col = beta[..., :, None]
    k_kT = k @ k.mT
    beta_k_kT = beta_col * k_kT
    beta_k_kT_D = beta_k_kT * D
    A = beta_k_kT_D.tril(-1)
    # Tinv = unit_lower_inverse(A)
    Tinv = _unit_lower_inverse(A)
    # U = Tinv @ (beta[:, None] * (v - exp(G)[:, None] * (k @ S)))
    exp_G = torch.exp(G)
    exp_G_col = exp_G[..., :, None]
    k_S = k @ S
    exp_G_k_S = exp_G_col * k_S
    v_minus_exp_G_k_S = v - exp_G_k_S
    operand_of_U = beta_col * v_minus_exp_G_k_S
    U = Tinv @ operand_of_U
    # o = scale * (exp(G)[:, None] * (q @ S) + ((q @ k.T) * D) @ U)
    q_S = q @ S
    exp_G_q_S = exp_G_col * q_S
    q_kT = q @ k.mT
    q_kT_D = q_kT * D
    q_kT_D_U = q_kT_D @ U
    o_sum = exp_G_q_S + q_kT_D_U
    o = scale[..., None, None] * o_sum
    # S = exp(last(G)) * S + k.T @ (exp(last(G) - G)[:, None] * U)
    last_G = G[..., -1]
    chunk_decay = torch.exp(last_G)
    chunk_decay_S = chunk_decay[..., None, None] * S
    last_G_minus_G = last_G[..., None] - G
    decay_to_end = torch.exp(last_G_minus_G)
    decay_to_end_col = decay_to_end[..., :, None]
    U_decay_to_end = decay_to_end_col * U
    kT_U_decay_to_end = k.mT @ U_decay_to_end
    S_next = chunk_decay_S + kT_U_decay_to_end
    return o, S_next


#: Of a device, and of H and HV where kernels are compiled for them: RuntimeError if the kernels are off on a small problem.
check = Check(TABLES, _page, HOST, chunk_gated_delta_rule)
HOST.accepts_view = functools.partial(_fits_transfers, TABLES)
