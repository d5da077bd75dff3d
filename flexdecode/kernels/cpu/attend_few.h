// Attention of few queries: every visible key and value is read once, for all heads of its group and all queries.
//
// Rows are (head of the group, query). Keys go by in blocks of 64: scores of all rows, softmax with a running maximum,
// weighted sum. The weighted sum of one block runs in steps of 16 keys between the scores of the next, so that keys and
// values arrive side by side and neither falls out of the nearest cache before its turn. Rows are taken four at a time;
// with four keys beside them, sixteen running products fill sixteen vectors, which one transposed tree of additions
// sums at once. Sums are fp32.
//
// Included once for each instruction set.
#pragma once

#include <algorithm>

#include "attend.h"
#include "dot_bf16.h"
#include "products.h"
#include "vec.h"

namespace flex {
namespace FLEX_ISA {

constexpr int kStep = 16;  // keys whose values are summed between the scores of others
constexpr float kNone = -std::numeric_limits<float>::infinity();

FLEX_INLINE int64_t padded(int64_t dim) { return (dim + 31) / 32 * 32; }

// Scratch of a thread: the group's queries widened [rows4, padded(head_dim)] (or as they are, bf16), scores and weights
// of a block [rows4, 64] each (weights in bf16 for dot products), sums [rows4, padded(v_head_dim)], maximum and total.
struct Scratch {
  float *q, *s, *p, *acc, *max, *sum;
  bf16 *q16, *p16;
  int64_t rows4, d, dv;
  Scratch(const AttendArgs& a, int64_t rows, float* at)
      : rows4((rows + kRows - 1) / kRows * kRows), d(padded(a.head_dim)), dv(padded(a.v_head_dim)) {
    q = at;
    s = q + rows4 * d;
    p = s + rows4 * kBlock;
    acc = p + rows4 * kBlock;
    max = acc + rows4 * dv;
    sum = max + rows4;
    p16 = reinterpret_cast<bf16*>(p);
    q16 = reinterpret_cast<bf16*>(q);
  }
  static int64_t floats(const AttendArgs& a, int64_t rows) {
    const int64_t rows4 = (rows + kRows - 1) / kRows * kRows;
    return rows4 * (padded(a.head_dim) + 2 * kBlock + padded(a.v_head_dim) + 2);
  }
};

inline int64_t scratch_floats(const AttendArgs& a, int64_t rows) { return Scratch::floats(a, rows); }

// For dot products: the queries as they are, in rows of whole vectors.
inline void copy_queries(const AttendArgs& a, const Tile& tile, int64_t kv_head, Scratch& x) {
  const int64_t group = a.heads / a.kv_heads;
  std::memset(x.q16, 0, x.rows4 * x.d * sizeof(bf16));
  for (int64_t g = 0; g < group; ++g)
    for (int64_t i = 0; i < tile.count; ++i)
      std::memcpy(x.q16 + (g * tile.count + i) * x.d,
                  static_cast<const bf16*>(a.q) + (tile.row + i) * a.q_token + (kv_head * group + g) * a.q_head,
                  a.head_dim * sizeof(bf16));
}

template <class Q>
inline void widen_queries(const AttendArgs& a, const Tile& tile, int64_t kv_head, Scratch& x) {
  const int64_t group = a.heads / a.kv_heads;
  std::fill(x.q, x.q + x.rows4 * x.d, 0.0f);
  for (int64_t g = 0; g < group; ++g) {
    for (int64_t i = 0; i < tile.count; ++i) {
      const Q* from = static_cast<const Q*>(a.q) + (tile.row + i) * a.q_token + (kv_head * group + g) * a.q_head;
      float* to = x.q + (g * tile.count + i) * x.d;
      for (int64_t d = 0; d < a.head_dim; ++d) to[d] = widen(from[d]) * a.scale;
    }
  }
}

// Softmax of one row over a block: scores become weights, the running maximum and total move on, and what was summed
// before is scaled down. `seen` has the keys' bits, `n` of them; `k_scale` and `v_scale` are the keys' (int8) or null.
template <bool dot>
inline void softmax_row(const AttendArgs& a, Scratch& x, int64_t row, uint64_t seen, int64_t n, const float* k_scale,
                        const float* v_scale) {
  float* s = x.s + row * kBlock;
  if (dot)  // queries that were left as they are
    for (int64_t j = 0; j < kBlock; j += W) store(s + j, load(s + j) * a.scale);
  if (k_scale)
    for (int64_t j = 0; j < kBlock; j += W) store(s + j, load(s + j) * load(k_scale + j));
  if (a.softcap > 0)
    for (int64_t j = 0; j < kBlock; j += W) store(s + j, vtanh(load(s + j) / a.softcap) * a.softcap);
  if (n < kBlock) seen &= (uint64_t{1} << n) - 1;
  if (~seen)
    for (int64_t j = 0; j < kBlock; ++j)
      if (!((seen >> j) & 1)) s[j] = kNone;
  vf greatest = splat(x.max[row]);
  for (int64_t j = 0; j < kBlock; j += W) greatest = vmax(load(s + j), greatest);
  const float top = most(greatest);
  const float base = top == kNone ? 0.0f : top;
  if (top != x.max[row]) {
    const float before = x.max[row] == kNone ? 0.0f : std::exp(x.max[row] - base);
    float* acc = x.acc + row * x.dv;
    for (int64_t i = 0; i < x.dv; i += W) store(acc + i, load(acc + i) * before);
    x.sum[row] *= before;
    x.max[row] = top;
  }
  vf total = {};
  for (int64_t j = 0; j < kBlock; j += W) {
    vf p = vexp(load(s + j) - base);
    total += p;
#if FLEX_DOT_BF16
    if constexpr (dot) {
      round_weights(p, x.p16 + row * kBlock + j);
      continue;
    }
#endif
    if (v_scale) p *= load(v_scale + j);
    store(x.p + row * kBlock + j, p);
  }
  x.sum[row] += sum(total);
}

// A block whose weights are ready and whose values are still to be summed.
template <class T>
struct Pending {
  const T* v[kBlock + 1];
  int64_t n = 0;             // keys; 0: nothing
  int64_t block = 0;         // for its bits
  uint64_t shift = 0, all = 0;
  bool partial = false;      // some row does not see some key
};

template <class T, bool dot>
void sum_values(const AttendArgs& a, const Tile& tile, int64_t rows, int64_t block_count, Scratch& x, const Pending<T>& b,
                int64_t first) {
  const int64_t n = std::min<int64_t>(b.n - first, kStep);
  if (n <= 0) return;
  if (!b.partial) {
    for (int64_t r = 0; r < x.rows4; r += kRows) {
#if FLEX_DOT_BF16
      if constexpr (dot) weighted4_dot(x.acc + r * x.dv, x.dv, x.p16 + r * kBlock + first, b.v + first, n, a.v_head_dim, r == 0);
      else
#endif
        weighted4(x.acc + r * x.dv, x.dv, x.p + r * kBlock + first, b.v + first, n, a.v_head_dim, r == 0);
    }
    return;
  }
  for (int64_t row = 0; row < rows; ++row) {
    float* acc = x.acc + row * x.dv;
    const uint64_t seen = tile.bits[row % tile.count * block_count + b.block] >> b.shift & b.all;
    float p[kStep];
#if FLEX_DOT_BF16
    if constexpr (dot) {
      for (int64_t j = 0; j < n; ++j) p[j] = widen(x.p16[row * kBlock + first + j]);
      restore_order(acc, x.dv);
    } else
#endif
      std::memcpy(p, x.p + row * kBlock + first, n * sizeof(float));
    weighted1(acc, p, seen >> first, b.v + first, n, a.v_head_dim);
#if FLEX_DOT_BF16
    if constexpr (dot) dot_order(acc, x.dv);
#endif
  }
}

template <class T, bool dot>
void blocks(const AttendArgs& a, const Piece& piece, Scratch& x) {
  const Tile& tile = a.tiles[piece.tile];
  const int64_t rows = a.heads / a.kv_heads * tile.count;
  const int64_t first_page = tile.start / a.page, block_count = (tile.stop + kBlock - 1) / kBlock - tile.start / kBlock;
  const T* keys = static_cast<const T*>(a.k) + piece.kv_head * a.slots * a.head_dim;
  const T* values = static_cast<const T*>(a.v) + piece.kv_head * a.slots * a.v_head_dim;
  const float* k_scales = a.k_scale ? a.k_scale + piece.kv_head * a.slots : nullptr;
  const float* v_scales = a.v_scale ? a.v_scale + piece.kv_head * a.slots : nullptr;
  const T* k[kBlock];
  float k_scale[kBlock] = {}, v_scale[kBlock] = {};
  Pending<T> pending;
  for (int64_t b = piece.first_block; b < piece.last_block; ++b) {
    const int64_t start = (tile.start / kBlock + b) * kBlock;
    const int64_t from = std::max(tile.start, start), n = std::min(tile.stop, start + kBlock) - from;
    Pending<T> next;
    next.n = n;
    next.block = b;
    next.shift = from - start;
    next.all = n < kBlock ? (uint64_t{1} << n) - 1 : ~uint64_t{0};
    int64_t page = from / a.page, inside = from - page * a.page;
    for (int64_t j = 0; j < n; ++page, inside = 0) {
      const int64_t run = std::min(n - j, a.page - inside);
      int64_t slot = tile.table[page - first_page] * a.page + inside;
      for (const int64_t stop = j + run; j < stop; ++j, ++slot) {
        k[j] = keys + slot * a.head_dim;
        next.v[j] = values + slot * a.v_head_dim;
        if (k_scales) k_scale[j] = k_scales[slot], v_scale[j] = v_scales[slot];
      }
    }
    for (int64_t j = n; j < (n + kKeys - 1) / kKeys * kKeys; ++j) k[j] = k[n - 1];  // masked, but read
    next.v[n] = next.v[n - 1];
    for (int64_t step = 0; step < kBlock; step += kStep) {
      for (int64_t j = step; j < std::min(n, step + kStep); j += kKeys) {
        if (!dot)
          for (int i = 0; i < kKeys; ++i) fetch_row_ahead(k[j + i], a.head_dim);
        for (int64_t r = 0; r < x.rows4; r += kRows) {
          float out[kRows * kKeys];
#if FLEX_DOT_BF16
          if constexpr (dot) {
            vf acc[16];
            dots4x4(x.q16 + r * x.d, x.d, k + j, a.head_dim, acc, r == 0);
            sums16(acc, out);
          } else
#endif
            scores4x4(x.q + r * x.d, x.d, k + j, a.head_dim, out);
          for (int i = 0; i < kRows; ++i) std::memcpy(x.s + (r + i) * kBlock + j, out + i * kKeys, kKeys * sizeof(float));
        }
      }
      sum_values<T, dot>(a, tile, rows, block_count, x, pending, step);
    }
    for (int64_t row = 0; row < rows; ++row) {
      uint64_t seen = next.all;
      if (tile.bits) seen &= tile.bits[row % tile.count * block_count + b] >> next.shift;
      next.partial |= seen != next.all;
      softmax_row<dot>(a, x, row, seen, n, k_scales ? k_scale : nullptr, v_scales ? v_scale : nullptr);
    }
    pending = next;
  }
  for (int64_t step = 0; step < kBlock; step += kStep) sum_values<T, dot>(a, tile, rows, block_count, x, pending, step);
}

// Writes one row's result: sums over the total, the sink in the total; 0 and minus infinity where nothing was seen.
template <class Q>
inline void write_row(const AttendArgs& a, const Tile& tile, int64_t kv_head, int64_t row, float max, float total, const float* acc) {
  const int64_t head = kv_head * (a.heads / a.kv_heads) + row / tile.count, token = tile.row + row % tile.count;
  float lse = total > 0 || total != total ? max + std::log(total) : kNone;
  float share = total > 0 || total != total ? 1.0f / total : 0.0f;
  if (a.sinks) {
    const float sink = a.sinks[head], top = std::max(sink, lse);
    const float joined = top == kNone ? kNone : top + std::log(std::exp(sink - top) + std::exp(lse - top));
    share = lse == kNone ? 0.0f : share * std::exp(lse - joined);
    lse = joined;
  }
  Q* out = static_cast<Q*>(a.out) + (token * a.heads + head) * a.v_head_dim;
  for (int64_t d = 0; d < a.v_head_dim; ++d) narrow(share == 0.0f ? 0.0f : acc[d] * share, out + d);
  if (a.lse) a.lse[token * a.heads + head] = lse;
}

inline void write(const AttendArgs& a, const Tile& tile, int64_t kv_head, int64_t row, float max, float total, const float* acc) {
  switch (a.q_type) {
    case Type::bf16: return write_row<bf16>(a, tile, kv_head, row, max, total, acc);
    case Type::fp16: return write_row<fp16>(a, tile, kv_head, row, max, total, acc);
    default: return write_row<float>(a, tile, kv_head, row, max, total, acc);
  }
}

inline void piece(const AttendArgs& a, const Piece& p, float* scratch, float* state) {
  const Tile& tile = a.tiles[p.tile];
  const int64_t rows = a.heads / a.kv_heads * tile.count;
  Scratch x(a, rows, scratch);
#if FLEX_DOT_BF16
  const bool dot = a.q_type == Type::bf16 && a.kv_type == Type::bf16;
#else
  constexpr bool dot = false;
#endif
  if (dot) {
    copy_queries(a, tile, p.kv_head, x);
  } else {
    switch (a.q_type) {
      case Type::bf16: widen_queries<bf16>(a, tile, p.kv_head, x); break;
      case Type::fp16: widen_queries<fp16>(a, tile, p.kv_head, x); break;
      default: widen_queries<float>(a, tile, p.kv_head, x);
    }
  }
  std::fill(x.s, x.s + x.rows4 * kBlock, 0.0f);
  std::fill(x.acc, x.acc + x.rows4 * x.dv, 0.0f);
  std::fill(x.max, x.max + x.rows4, kNone);
  std::fill(x.sum, x.sum + x.rows4, 0.0f);
  std::fill(x.p, x.p + x.rows4 * kBlock, 0.0f);
#if FLEX_DOT_BF16
  if (dot) {
    blocks<bf16, true>(a, p, x);
    for (int64_t row = 0; row < rows; ++row) restore_order(x.acc + row * x.dv, x.dv);
  } else
#endif
    switch (a.kv_type) {
      case Type::bf16: blocks<bf16, false>(a, p, x); break;
      case Type::fp16: blocks<fp16, false>(a, p, x); break;
      case Type::int8: blocks<int8_t, false>(a, p, x); break;
      default: blocks<float, false>(a, p, x);
    }
  for (int64_t row = 0; row < rows; ++row) {
    if (!state) {
      write(a, tile, p.kv_head, row, x.max[row], x.sum[row], x.acc + row * x.dv);
      continue;
    }
    float* to = state + row * (2 + x.dv);
    to[0] = x.max[row];
    to[1] = x.sum[row];
    std::memcpy(to + 2, x.acc + row * x.dv, x.dv * sizeof(float));
  }
}

// States merge by (maximum, total, sum): associative, and a state that saw nothing changes nothing.
inline void merge(const AttendArgs& a, int64_t tile, int64_t kv_head, const float* const* states, int64_t count) {
  const int64_t rows = a.heads / a.kv_heads * a.tiles[tile].count, dv = padded(a.v_head_dim);
  float* acc = new float[dv];
  for (int64_t row = 0; row < rows; ++row) {
    float max = kNone, total = 0;
    for (int64_t i = 0; i < count; ++i) {
      const float m = states[i][row * (2 + dv)];
      max = m > max || m != m ? m : max;
    }
    std::fill(acc, acc + dv, 0.0f);
    for (int64_t i = 0; i < count; ++i) {
      const float* from = states[i] + row * (2 + dv);
      if (from[0] == kNone) continue;
      const float factor = std::exp(from[0] - max);
      total += from[1] * factor;
      for (int64_t d = 0; d < dv; ++d) acc[d] += from[2 + d] * factor;
    }
    write(a, a.tiles[tile], kv_head, row, max, total, acc);
  }
  delete[] acc;
}

}  // namespace FLEX_ISA
}  // namespace flex
