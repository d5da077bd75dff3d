// Partial results of attention: a maximum, a total and a weighted sum a row, merged in order and written out.
#pragma once

#include <algorithm>

#include "pieces.h"
#include "vec.h"

namespace flex {
namespace FLEX_ISA {

constexpr float kNone = -std::numeric_limits<float>::infinity();

FLEX_INLINE int64_t padded(int64_t dim) { return (dim + 31) / 32 * 32; }

// Writes one row's result: sums over the total, the sink in the total; 0 and minus infinity where nothing was seen.
template <class Q>
inline void write_row(const AttendArgs& a, const Tile& tile, int64_t kv_head, int64_t row, float max, float total, const float* acc) {
  const int64_t head = head_of(a, tile, kv_head, row), token = tile.row + row % tile.count;
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
      if (from[0] == kNone && from[1] == 0.0f) continue;
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
