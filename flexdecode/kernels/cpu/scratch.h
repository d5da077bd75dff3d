// What a thread keeps while it attends with few queries, and the queries as its products take them.
#pragma once

#include <algorithm>
#include <type_traits>

#include "attend.h"
#include "dot_amx.h"
#include "dot_bf16.h"
#include "dot_int8.h"
#include "pieces.h"
#include "products.h"
#include "ring.h"
#include "states.h"
#include "vec.h"

namespace flex {
namespace FLEX_ISA {

// What products are made of.
enum class By { fp32, bf16, tiles, int8 };

// Whether weights are rounded to bf16, queries stay unscaled, and columns of sums lie in an order that `restore_order` undoes.
constexpr bool halves(By by) { return by == By::bf16 || by == By::tiles; }

// What the products of so many rows are made of. Who gives more digits than keys have gets fp32. Where rows are to be alike,
// their number decides nothing.
inline By by_of(const AttendArgs& a, int64_t rows) {
#if FLEX_DOT_TILES
  const bool pays = a.alike || rows > kRows;  // measured (docs/log.md)
  if (a.q_type == Type::bf16 && a.kv_type == Type::bf16 && pays && a.head_dim % 2 == 0) return By::tiles;
#endif
#if FLEX_DOT_BF16
  if (a.q_type == Type::bf16 && a.kv_type == Type::bf16) return By::bf16;
#endif
#if FLEX_DOT_INT8
  if (a.q_type == Type::bf16 && a.kv_type == Type::int8) return By::int8;
#endif
  return By::fp32;
}

// What weights are held as.
template <By by>
using Weight = std::conditional_t<halves(by), bf16, float>;

// Scratch of a thread: the group's queries widened [rows4, padded(head_dim)] (or as they are, bf16), scores and weights
// of a block [rows4, 64] each (weights in bf16 for dot products), sums [rows4, dv], maximum and total.
// For products of int8: queries, weights and sums in integers, and their scales. For products in tiles: values of a step in
// pairs and its scores turned.
struct Scratch {
  float *q, *s, *p, *acc, *max, *sum;
  bf16 *q16, *p16;
  int8_t* q8;       // [rows4, d]
  uint8_t* p8;      // [rows4, 64]
  void* spare;      // rows of a step that lie apart, brought together
  int32_t* sums;    // [rows4, dv8]
  float *q8_scale, *q8_offset, *unit;  // [rows4]
  bf16* pairs;      // [kStepMost, dv]
  float* turned;    // [kStepMost, 16]
  int64_t rows4, d, dv, dv8;  // rows as products take them: a multiple of four, in tiles of sixteen
  bool fours;                 // always four rows together, neither one nor eight
  // Whether the four rows from `row` on, a multiple of four, are taken together with four others.
  bool paired(int64_t row) const { return !fours && row / (2 * kRows) * (2 * kRows) + kRows < rows4; }
  Scratch(const AttendArgs& a, int64_t rows, float* at)
      : rows4(rounded(a, rows)), d(padded(a.head_dim)), dv8((a.v_head_dim + 63) / 64 * 64), fours(a.alike) {
    dv = a.kv_type == Type::int8 ? dv8 : padded(a.v_head_dim);
    q = at;
    s = q + rows4 * d;
    p = s + rows4 * kBlock;
    acc = p + rows4 * kBlock;
    max = acc + rows4 * dv;
    sum = max + rows4;
    p16 = reinterpret_cast<bf16*>(p);
    q16 = reinterpret_cast<bf16*>(q);
    q8_scale = sum + rows4;
    q8_offset = q8_scale + rows4;
    unit = q8_offset + rows4;
    sums = reinterpret_cast<int32_t*>(unit + rows4);
    p8 = reinterpret_cast<uint8_t*>(sums + rows4 * dv8);
    q8 = reinterpret_cast<int8_t*>(p8 + rows4 * kBlock);
    pairs = reinterpret_cast<bf16*>(q8 + rows4 * d);
    turned = reinterpret_cast<float*>(pairs + kStepMost * dv);
    spare = turned + kStepMost * 16;
  }
  static int64_t rounded(const AttendArgs& a, int64_t rows) {
    const int64_t step = by_of(a, rows) == By::tiles ? 16 : kRows;
    return (rows + step - 1) / step * step;
  }
#if FLEX_DOT_INT8
  Queries8 queries8(int64_t row) const { return {q8 + row * d, q8_scale + row, q8_offset + row}; }
#endif
  static int64_t floats(const AttendArgs& a, int64_t rows) {
    const int64_t rows4 = rounded(a, rows);
    const int64_t integers = 3 + (a.v_head_dim + 63) / 64 * 64 + kBlock / 4 + padded(a.head_dim) / 4;
    const int64_t spare = kStepMost * (std::max(a.head_dim, a.v_head_dim) + (a.v_head_dim + 63) / 64 * 32 + 16);
    return rows4 * (padded(a.head_dim) + 2 * kBlock + (a.v_head_dim + 63) / 64 * 64 + 2 + integers) + spare;
  }
};

template <By by>
FLEX_INLINE const Weight<by>* weights(const Scratch& x) {
  if constexpr (halves(by)) return x.p16;
  else return x.p;
}

inline int64_t scratch_floats(const AttendArgs& a, int64_t rows) { return Scratch::floats(a, rows); }

#if FLEX_DOT_BF16
// For dot products: a single row as it is, else four rows in halves, or in quarters where eight are taken together. For
// tiles: sixteen rows as one.
inline void copy_queries(const AttendArgs& a, const Tile& tile, int64_t kv_head, int64_t rows, By by, Scratch& x) {
  const auto at = [&](int64_t row) {
    return static_cast<const bf16*>(a.q) + (tile.row + row % tile.count) * a.q_token + head_of(a, tile, kv_head, row) * a.q_head;
  };
#if FLEX_DOT_TILES
  if (by == By::tiles) {
    for (int64_t r = 0; r < rows; r += kTileRows) {
      const bf16* tile_rows[kTileRows];
      const int64_t count = std::min<int64_t>(rows - r, kTileRows);
      for (int64_t i = 0; i < count; ++i) tile_rows[i] = at(r + i);
      lay_tiles(tile_rows, count, a.head_dim, x.d, x.q16 + r * x.d);
    }
    return;
  }
#endif
  if (rows == 1 && !x.fours) {
    std::memcpy(x.q16, at(0), a.head_dim * sizeof(bf16));
    return;
  }
  for (int64_t r = 0; r < rows; r += kRows) {
    const bf16* four[kRows];
    const int64_t count = std::min<int64_t>(rows - r, kRows);
    for (int64_t i = 0; i < count; ++i) four[i] = at(r + i);
    lay_rows(four, count, a.head_dim, x.d, x.paired(r) ? 8 : 16, x.q16 + r * x.d);
  }
}
#endif

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

}  // namespace FLEX_ISA
}  // namespace flex
