// Attention of few queries: every visible key and value is read once, for all heads of its group and all queries.
//
// Rows are (head of the group, query). Keys go by in blocks of 64: scores of all rows, softmax with a running maximum,
// weighted sum. The weighted sum of one block runs in steps of a few keys between the scores of the next, so that keys and
// values arrive side by side and neither falls out of the nearest cache before its turn. Rows are taken four at a time;
// with four keys beside them, sixteen running products fill sixteen vectors, which one transposed tree of additions
// sums at once. Sums are fp32.
//
// Included once for each instruction set.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "ahead.h"
#include "attend.h"
#include "dot_amx.h"
#include "dot_bf16.h"
#include "dot_int8.h"
#include "pieces.h"
#include "products.h"
#include "ring.h"
#include "scores.h"
#include "scratch.h"
#include "states.h"
#include "vec.h"

namespace flex {
namespace FLEX_ISA {

constexpr int64_t kLeadBytes = 12288;  // of keys and values asked for before they are read

constexpr int cache_of(By by) { return by == By::tiles ? kSecond : kNearest; }

// Softmax of one row over a block: scores become weights, the running maximum and total move on, and what was summed
// before is scaled down. Scores are still to be multiplied by `scale` and, where they are given, the keys' scales; `seen`
// has the keys' bits. `lines` to ask for with each vector.
template <By by>
FLEX_INLINE void softmax_row(Scratch& x, int64_t row, float scale, uint64_t seen, const float* k_scale, const float* v_scale, Ahead& ahead,
                             int64_t lines) {
  constexpr int kVectors = kBlock / W;
  vf s[kVectors];
  vf greatest = splat(kNone);
#pragma GCC unroll 16
  for (int i = 0; i < kVectors; ++i) {
    s[i] = load(x.s + row * kBlock + i * W) * scale;
    if (k_scale) s[i] *= load(k_scale + i * W);
    s[i] = where(seen >> i * W, s[i], splat(kNone));
    greatest = vmax(s[i], greatest);
  }
  const float top = std::max(x.max[row], most(greatest));
  const float base = top == kNone ? 0.0f : top;
  if (top != x.max[row]) {
    const float before = x.max[row] == kNone ? 0.0f : std::exp(x.max[row] - base);
    float* acc = x.acc + row * x.dv;
    for (int64_t i = 0; i < x.dv; i += W) store(acc + i, load(acc + i) * before);
    x.sum[row] *= before;
    x.max[row] = top;
  }
  vf total = {};
#pragma GCC unroll 16
  for (int i = 0; i < kVectors; ++i) {
    ahead.fetch<cache_of(by)>(lines);
    s[i] = vexp(s[i] - base);
    total += s[i];
    // Where nothing is seen, a value's scale may be anything.
    if (v_scale) s[i] = where(seen >> i * W, s[i] * load(v_scale + i * W), vf{});
  }
  x.sum[row] += sum(total);
#if FLEX_DOT_BF16
  if constexpr (halves(by)) {
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) round_weights(s[i], x.p16 + row * kBlock + i * W);
    return;
  }
#endif
#if FLEX_DOT_INT8
  if constexpr (by == By::int8) {
    x.unit[row] = round_weights8(s, x.p8 + row * kBlock);
    return;
  }
#endif
#pragma GCC unroll 16
  for (int i = 0; i < kVectors; ++i) store(x.p + row * kBlock + i * W, s[i]);
}

// Scores of all rows and a step's keys, the first of them number `first` of its block.
template <class T, By by>
FLEX_INLINE void score_keys(const AttendArgs& a, int64_t rows, Scratch& x, const Rows<T>& k, int64_t keys, int64_t first, Ahead& ahead) {
#if FLEX_DOT_TILES
  if constexpr (by == By::tiles) {
    for (int64_t r = 0; r < rows; r += kTileRows)
      scores16x32(x.q16 + r * x.d, std::min(rows - r, kTileRows), k.at, k.stride, a.head_dim, x.turned, x.s + r * kBlock + first, ahead);
    return;
  }
#endif
#if FLEX_DOT_BF16
  if constexpr (by == By::bf16) {
    if (rows == 1 && !x.fours) {
      for (int64_t j = 0; j < keys; j += 8) dots1x8(x.q16, k.from(j), k.stride, a.head_dim, x.s + first + j, ahead);
      return;
    }
    for (int64_t j = 0; j < keys; j += 8)
      for (int64_t r = 0; r < x.rows4; r += x.paired(r) ? 2 * kRows : kRows) {
        const bf16* q = x.q16 + r * x.d;
        float* s = x.s + r * kBlock + first + j;
        if (!x.paired(r)) dots4x8(q, k.from(j), k.stride, a.head_dim, s, ahead);
        else if (r) dots8x8<0>(q, kRows * x.d, k.from(j), k.stride, a.head_dim, s, ahead);
        else dots8x8<2>(q, kRows * x.d, k.from(j), k.stride, a.head_dim, s, ahead);
      }
    return;
  }
#endif
#if FLEX_DOT_INT8
  if constexpr (by == By::int8) {
    for (int64_t j = 0; j < keys; j += 8)
      for (int64_t r = 0; r < x.rows4; r += kRows) scores4x8(x.queries8(r), k.from(j), k.stride, a.head_dim, x.s + r * kBlock + first + j, ahead);
    return;
  }
#endif
  for (int64_t j = 0; j < keys; j += kKeys) {
    for (int64_t r = 0; r < x.rows4; r += kRows) {
      float out[kRows * kKeys];
      ahead.fetch(8);
      scores4x4(x.q + r * x.d, x.d, k.from(j), k.stride, a.head_dim, out);
      for (int row = 0; row < kRows; ++row) std::memcpy(x.s + (r + row) * kBlock + first + j, out + row * kKeys, kKeys * sizeof(float));
    }
  }
}

// Adds the values of n keys, weighted, to `rows` rows of sums; p is [rows4, 64].
template <class T, By by>
FLEX_INLINE void add_values(int64_t rows, int64_t rows4, float* acc, int64_t dv, const Weight<by>* p, const Rows<T>& v, int64_t n, int64_t dim,
                            bf16* pairs, Ahead& ahead) {
#if FLEX_DOT_TILES
  if constexpr (by == By::tiles) {
    pair_values(v.at, v.stride, n, dim, pairs, ahead);
    for (int64_t r = 0; r < rows; r += kTileRows) weighted16(acc + r * dv, dv, p + r * kBlock, pairs, dim);
    return;
  }
#endif
  for (int64_t r = 0; r < rows4; r += kRows, acc += kRows * dv, p += kRows * kBlock) {
#if FLEX_DOT_BF16
    if constexpr (by == By::bf16) {
      const int64_t count = std::min<int64_t>(rows - r, kRows);
      // Asked for evenly, a little less than is read.
      if (rows4 == kRows) weighted_rows<3>(count, acc, dv, p, v.at, v.stride, n, dim, ahead);
      else if (r < 2 * kRows) weighted_rows<2>(count, acc, dv, p, v.at, v.stride, n, dim, ahead);
      else weighted_rows<0>(count, acc, dv, p, v.at, v.stride, n, dim, ahead);
      continue;
    }
#endif
    if constexpr (!halves(by)) weighted4(acc, dv, p, v.at, v.stride, n, dim, ahead);
  }
}

// The same row by row, with zeros in place of the values that a row does not see: those may be anything, and 0 · NaN is NaN.
template <class T, By by>
__attribute__((noinline)) void add_seen(const Tile& tile, int64_t rows, Scratch& x, const uint64_t* bits, const Rows<T>& v, int64_t n, int64_t first,
                                        int64_t dim, Ahead& ahead) {
  const int64_t rows4 = by == By::tiles ? 16 : kRows;
  std::vector<T> seen(kStepMost * dim);
  std::vector<Weight<by>> p(rows4 * kBlock);
  std::vector<float> acc(rows4 * x.dv);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t j = 0; j < n; ++j) {
      T* to = seen.data() + j * dim;
      if (bits[row % tile.bit_rows] >> (first + j) & 1) std::memcpy(to, v.from(j), dim * sizeof(T));
      else std::fill(to, to + dim, T{});
    }
    std::copy_n(weights<by>(x) + row * kBlock + first, n, p.data());
    std::copy_n(x.acc + row * x.dv, x.dv, acc.data());
    add_values<T, by>(1, rows4, acc.data(), x.dv, p.data(), {seen.data(), dim}, n, dim, x.pairs, ahead);
    std::copy_n(acc.data(), x.dv, x.acc + row * x.dv);
  }
}

// Adds the weighted values of the keys [first, first + keys) of a block to all rows. A row gives what it does not see the
// weight 0.
template <class T, By by>
FLEX_INLINE void sum_values(const AttendArgs& a, const Tile& tile, int64_t rows, Scratch& x, const Block& b, const Rows<T>& v,
                            int64_t keys, int64_t first, Ahead& ahead) {
  const int64_t n = std::min(b.n - first, keys), dim = a.v_head_dim;
  if (n <= 0) return;
#if FLEX_DOT_INT8
  if constexpr (by == By::int8) {
    if (first == 0) std::memset(x.sums, 0, rows * x.dv8 * sizeof(int32_t));
    for (int64_t r = 0; r < rows; r += kRows) {
      int32_t* sums = x.sums + r * x.dv8;
      const uint8_t* p = x.p8 + r * kBlock + first;
      weighted_rows8(std::min<int64_t>(rows - r, kRows), sums, x.dv8, p, v.at, v.stride, keys, dim, ahead);
    }
    if (first + keys >= b.n)
      for (int64_t row = 0; row < rows; ++row) add_sums8(x.acc + row * x.dv, x.sums + row * x.dv8, x.dv, x.unit[row]);
    return;
  }
#endif
  if constexpr (!std::is_same_v<T, int8_t>)
    if (b.bits && !finite(v.at, v.stride, n, dim)) return add_seen<T, by>(tile, rows, x, b.bits, v, n, first, dim, ahead);
  add_values<T, by>(rows, x.rows4, x.acc, x.dv, weights<by>(x) + first, v, n, dim, x.pairs, ahead);
}

// Scores of a block become weights, or are kept for the next pass. `to_ask` lines are asked for meanwhile.
template <class T, By by>
FLEX_INLINE void weigh(const AttendArgs& a, const Tile& tile, int64_t kv_head, int64_t rows, Scratch& x, const Block& b, int64_t i,
                       int64_t to_ask, Ahead& ahead) {
  const uint64_t all = b.n < kBlock ? (uint64_t{1} << b.n) - 1 : ~uint64_t{0};
  const int64_t parts = rows * (kBlock / W), lines = (to_ask + parts - 1) / parts;
  const float scale = halves(by) ? a.scale : 1.0f;  // queries that were not widened were not scaled either
  const auto seen_by = [&](int64_t row) { return b.bits ? all & b.bits[row % tile.bit_rows] : all; };
  const bool plain = a.pass == Pass::all && !a.op_count;
  for (int64_t row = 0; row < rows; ++row) {
    float* s = x.s + row * kBlock;
    float* kept = a.pass == Pass::all ? nullptr : kept_scores(a, tile, kv_head, row, i);
    if (a.pass == Pass::weigh) {
      std::memcpy(s, kept, b.n * sizeof(float));
    } else {
      if (plain) {
        softmax_row<by>(x, row, scale, seen_by(row), a.k_scale ? b.k_scale : nullptr, a.v_scale ? b.v_scale : nullptr, ahead, lines);
        continue;
      }
      for (int64_t j = 0; j < kBlock; j += W) {
        vf x4 = load(s + j) * scale;
        if (a.k_scale) x4 *= load(b.k_scale + j);
        store(s + j, x4);
      }
      for (int64_t op = 0; op < a.op_count; ++op) apply(a.ops[op], s, head_of(a, tile, kv_head, row), tile.q_idx[row % tile.count], b.start);
      if (kept) {
        std::memcpy(kept, s, b.n * sizeof(float));
        ahead.fetch(lines * (kBlock / W));
        continue;
      }
    }
    softmax_row<by>(x, row, 1.0f, seen_by(row), nullptr, a.v_scale ? b.v_scale : nullptr, ahead, lines);
  }
}

template <class T, By by>
void blocks(const AttendArgs& a, const Piece& piece, Scratch& x) {
  const Tile& tile = a.tiles[piece.tile];
  const int64_t rows = a.heads / a.kv_heads * tile.count, count = piece.last_block - piece.first_block;
  if (count == 0) return;  // nothing is seen
  Ring<T> ring(a, tile, piece.kv_head, by == By::tiles ? kStepMost : step_of(a.head_dim * sizeof(T)));
  const int64_t keys = ring.step, steps = kBlock / keys;
  Block held[3];
  Block *last = held, *now = held + 1, *next = held + 2;
  Ahead ahead = ring.ahead();
  const int64_t lead = std::max<int64_t>(kLeadBytes / (ring.bytes() / 2 * keys), 1);  // runs
  ring.find(piece.first_block, 0, *now, ahead);
  for (int64_t n = 0; n <= count; ++n) {
    ring.find(piece.first_block + n + 1, n + 1, *next, ahead);
    ahead.allow(2 * steps * (n + 2));
    for (int64_t step = 0; step < steps; ++step) {
      // Many rows, or a pass that reads half of the lines, would otherwise run too far ahead.
      if (rows > kRows || a.pass != Pass::all) ahead.allow(std::min(2 * (steps * n + step + 1 + lead), 2 * steps * (n + 2)));
      ahead.until<cache_of(by)>(2 * (steps * n + step + 1));
      const int64_t first = step * keys;
      if (n < count && a.pass != Pass::weigh && first < now->n)
        score_keys<T, by>(a, rows, x, ring.keys(*now, n, step, x.spare), keys, first, ahead);
      if (a.pass != Pass::score && first < last->n)
        sum_values<T, by>(a, tile, rows, x, *last, ring.values(*last, n - 1, step, x.spare), keys, first, ahead);
    }
    if (n < count) {
      const int64_t to_ask = std::max<int64_t>(ahead.left(2 * steps * (n + 1)) + kLeadBytes / 64, 0);
      weigh<T, by>(a, tile, piece.kv_head, rows, x, *now, piece.first_block + n, to_ask, ahead);
    }
    Block* free = last;
    last = now, now = next, next = free;
  }
}

inline void all_blocks(const AttendArgs& a, const Piece& p, By by, Scratch& x) {
#if FLEX_DOT_TILES
  if (by == By::tiles) {
    const Tiles tiles(a.head_dim);
    return blocks<bf16, By::tiles>(a, p, x);
  }
#endif
#if FLEX_DOT_BF16
  if (by == By::bf16) return blocks<bf16, By::bf16>(a, p, x);
#endif
#if FLEX_DOT_INT8
  if (by == By::int8) return blocks<int8_t, By::int8>(a, p, x);
#endif
  switch (a.kv_type) {
    case Type::bf16: return blocks<bf16, By::fp32>(a, p, x);
    case Type::fp16: return blocks<fp16, By::fp32>(a, p, x);
    case Type::int8: return blocks<int8_t, By::fp32>(a, p, x);
    default: return blocks<float, By::fp32>(a, p, x);
  }
}

inline void piece(const AttendArgs& a, const Piece& p, float* scratch, float* state) {
  const Tile& tile = a.tiles[p.tile];
  const int64_t rows = a.heads / a.kv_heads * tile.count;
  Scratch x(a, rows, scratch);
  const By by = by_of(a, rows);
  if (halves(by)) {
#if FLEX_DOT_BF16
    std::memset(x.q16, 0, x.rows4 * x.d * sizeof(bf16));
    copy_queries(a, tile, p.kv_head, rows, by, x);
#endif
  } else {
    switch (a.q_type) {
      case Type::bf16: widen_queries<bf16>(a, tile, p.kv_head, x); break;
      case Type::fp16: widen_queries<fp16>(a, tile, p.kv_head, x); break;
      default: widen_queries<float>(a, tile, p.kv_head, x);
    }
  }
#if FLEX_DOT_INT8
  if (by == By::int8)
    for (int64_t r = 0; r < x.rows4; r += kRows)
      lay_queries8(x.q + r * x.d, x.d, std::min<int64_t>(rows - r, kRows), a.head_dim, x.d, x.queries8(r));
#endif
  std::fill(x.s, x.s + x.rows4 * kBlock, 0.0f);
  std::fill(x.acc, x.acc + x.rows4 * x.dv, 0.0f);
  std::fill(x.max, x.max + x.rows4, kNone);
  std::fill(x.sum, x.sum + x.rows4, 0.0f);
  std::fill(x.p, x.p + x.rows4 * kBlock, 0.0f);
  all_blocks(a, p, by, x);
#if FLEX_DOT_BF16
  if (halves(by))
    for (int64_t row = 0; row < rows; ++row) restore_order(x.acc + row * x.dv, x.dv);
#endif
#if FLEX_DOT_INT8
  if (by == By::int8)
    for (int64_t row = 0; row < rows; ++row) turn_order8(x.acc + row * x.dv, x.dv);
#endif
  if (a.pass == Pass::score) return;
  const int64_t width = padded(a.v_head_dim);
  for (int64_t row = 0; row < rows; ++row) {
    if (!state) {
      write(a, tile, p.kv_head, row, x.max[row], x.sum[row], x.acc + row * x.dv);
      continue;
    }
    float* to = state + row * (2 + width);
    to[0] = x.max[row];
    to[1] = x.sum[row];
    std::memcpy(to + 2, x.acc + row * x.dv, width * sizeof(float));
  }
}

}  // namespace FLEX_ISA
}  // namespace flex
