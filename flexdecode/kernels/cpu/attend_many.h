// Attention of many queries: of a run of one sequence's queries, over the blocks of keys that they see.
//
// Rows are (head of the group, query), so that all heads of a group share the keys. Up to kPassRows of them go over the
// keys together; blocks that all rows see are taken two at a time, others one at a time with a bit for each row and key.
// Keys and values of such a pass are packed once, and then, for each chunk of rows: scores by one matrix product, softmax
// with a running maximum, weighted sum by another product. Products are in 16 bits where the machine has them for the type
// of queries and keys (int8 keys beside bf16 queries too: codes are exact in bf16, scales go into scores and weights);
// everything else is widened to fp32. Sums are fp32.
//
// A value that is masked may be anything, and 0 · NaN is NaN: rows of values that are not all numbers are left out of the
// product and added, weight by weight, for those who see them.
//
// Included once for each instruction set.
#pragma once

#include <algorithm>

#include "attend.h"
#include "attend_many_gemm.h"
#include "scores.h"
#include "tiles_gemm.h"
#include "tiles_pack.h"
#include "tiles_softmax.h"
#include "vec.h"

namespace flex {
namespace FLEX_ISA {
namespace tiled {

constexpr int64_t kPassRows = 512;   // their sums stay in the second nearest cache
constexpr int64_t kChunkRows = 128;  // their scores nearly fill the nearest

FLEX_INLINE int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Rows in chunks: whole heads, as many as fit, so that the rows that see nothing of a block lie together.
struct Chunks {
  int64_t step, pad, count;  // rows of a chunk, the same in memory, chunks of a pass
  Chunks(int64_t rows, int64_t queries) {
    step = queries < kChunkRows ? kChunkRows / queries * queries : kChunkRows;
    step = std::min(step, rows);
    pad = up(step, kRound);
    count = std::min(std::max<int64_t>(kPassRows / pad, 1), (rows + step - 1) / step);
  }
};

// Scratch of a thread, in E, the type of the products, or fp32.
template <class E>
struct Work {
  E *q;               // [chunks · pad, d]
  E *k, *v;           // of a pass, packed
  E *own;             // keys or values of a pass that had to be converted [kWide, max(d, dv)]
  E *nothing;         // [max(d, dv)] zeros
  float *s;           // scores of a chunk [pad, keys]; the weights, in E, in the same rows
  float *acc, *max, *total;  // [chunks · pad, dv], [chunks · pad], [chunks · pad, W]
  float *spoiled;     // rows of values that are no numbers [64, dv]
  float *k_scale, *v_scale;  // [kWide]
  int64_t d, dv, floats;

  Work(const AttendArgs& a, const Chunks& c, float* scratch) : d(up(a.head_dim, kPair<E>)), dv(up(a.v_head_dim, 16)) {
    const int64_t rows = c.count * c.pad, wide = std::max(d, dv);
    const uintptr_t start = reinterpret_cast<uintptr_t>(scratch);
    float* const first = reinterpret_cast<float*>((start + 63) / 64 * 64);
    float* at = first;
    const auto take = [&](auto*& p, int64_t n) {
      p = reinterpret_cast<std::remove_reference_t<decltype(p)>>(at);
      at += up(n * sizeof(*p), 64) / 4;
    };
    take(q, rows * d);
    take(k, kWide * d);
    take(v, kWide * dv);
    take(own, kWide * wide);
    take(nothing, wide);
    take(s, c.pad * kWide);
    take(acc, rows * dv);
    take(max, rows);
    take(total, rows * W);
    take(spoiled, kBlock * dv);
    take(k_scale, kWide);
    take(v_scale, kWide);
    floats = at - first + 16;
  }
  Work(const Work&) = delete;
};

// One pass's keys.
struct Sheet {
  Slots slots;
  int64_t first;                   // of the tile's blocks
  const uint64_t* bits = nullptr;  // of its rows; null: all see all that there is
  uint64_t spoiled = 0;            // keys whose values are no numbers, left out of the packed ones
};

template <class E>
struct Task {
  const AttendArgs& a;
  const Tile& tile;
  const Gemm& products;
  const int64_t kv_head, group, rows;
  const Chunks chunks;
  Work<E> x;
  const bool plain;   // scores are used as the product leaves them, times the scale
  const float scale;  // what softmax multiplies them by

  Task(const AttendArgs& a, const Gemm& products, int64_t tile, int64_t kv_head, float* scratch)
      : a(a), tile(a.tiles[tile]), products(products), kv_head(kv_head), group(a.heads / a.kv_heads),
        rows(group * this->tile.count), chunks(rows, this->tile.count), x(a, chunks, scratch),
        plain(a.pass == Pass::all && !a.op_count && !a.k_scale && a.scale > 1e-30f), scale(plain ? a.scale : 1.0f) {}

  int64_t head(int64_t row) const { return kv_head * group + row / tile.count; }
  int64_t token(int64_t row) const { return tile.row + row % tile.count; }

  // C [m, n] (+)= left [m, k] · right, packed.
  void multiply(int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb, int64_t ldc, bool add, const E* left, const E* right,
                float* c) const {
    const Gemm::Product given = std::is_same_v<E, bf16> ? products.bf16 : products.fp16;
    constexpr int64_t pair = kPair<E>;
    using Word = std::conditional_t<pair == 1, float, int32_t>;
    if (pair == 2 && given) return given(m, n, k, lda, ldb, ldc, add, left, right, c);
    if constexpr (pair == 1 || (kPairs && std::is_same_v<E, bf16>))
      gemm(m, n, k / pair, lda / pair, ldb, ldc, add, reinterpret_cast<const Word*>(left), reinterpret_cast<const Word*>(right), c);
  }

  template <class Q>
  void gather_queries(int64_t first, int64_t count) {
    for (int64_t at = 0, chunk = 0; at < count; at += chunks.step, ++chunk) {
      E* to = x.q + chunk * chunks.pad * x.d;
      const int64_t n = std::min(chunks.step, count - at);
      for (int64_t r = first + at; r < first + at + n; ++r, to += x.d)
        convert(static_cast<const Q*>(a.q) + token(r) * a.q_token + head(r) * a.q_head, a.head_dim, x.d, to);
      std::memset(static_cast<void*>(to), 0, (chunks.pad - n) * x.d * sizeof(E));
    }
  }

  // The keys and values of a pass, stored as T, as products take them.
  template <class T>
  void pack(Sheet& sheet) {
    const E* found[kWide];
    const Slots& slots = sheet.slots;
    const T* keys = static_cast<const T*>(a.k) + kv_head * a.k_head;
    const T* values = static_cast<const T*>(a.v) + kv_head * a.v_head;
    if (a.pass != Pass::weigh) {
      rows_of(keys, a.k_slot, slots, a.head_dim, x.d, x.own, x.nothing, found);
      turn(reinterpret_cast<const void* const*>(found), slots.keys, x.d / kPair<E>, x.k);
    }
    if (a.k_scale) {
      for (int64_t j = 0; j < slots.n; ++j) {
        x.k_scale[j] = a.k_scale[kv_head * a.slots + slots.at[j]];
        x.v_scale[j] = a.v_scale[kv_head * a.slots + slots.at[j]];
      }
      std::fill(x.v_scale + slots.n, x.v_scale + slots.keys, 0.0f);
    }
    if (a.pass == Pass::score) return;
    rows_of(values, a.v_slot, slots, a.v_head_dim, x.dv, x.own, x.nothing, found);
    if (sheet.bits) set_aside(sheet, found);
    lay_values(found, slots.keys, a.v_head_dim, x.dv, x.v);
  }

  // Takes the rows that hold more than numbers out of `found`, widened and, where there are scales, scaled.
  void set_aside(Sheet& sheet, const E** found) {
    for (int64_t j = 0; j < sheet.slots.n; ++j) {
      if (finite(found[j], a.v_head_dim) && (!a.v_scale || finite(x.v_scale + j, 1))) continue;
      sheet.spoiled |= uint64_t{1} << j;
      const float factor = a.v_scale ? x.v_scale[j] : 1.0f;
      for (int64_t i = 0; i < a.v_head_dim; ++i) x.spoiled[j * x.dv + i] = widen(found[j][i]) * factor;
      if (a.v_scale) x.v_scale[j] = 1.0f;
      found[j] = x.nothing;
    }
  }

  // Scores that need more than one factor, in place, and kept or fetched where attention goes in two passes.
  void finish_scores(float* s, int64_t row, const Sheet& sheet) const {
    for (int64_t j = 0; j < sheet.slots.keys; j += kBlock, s += kBlock) {
      const int64_t block = sheet.first + j / kBlock;
      float* kept = a.pass == Pass::all ? nullptr : kept_scores(a, tile, kv_head, row, block);
      if (a.pass == Pass::weigh) {
        std::memcpy(s, kept, sheet.slots.n * sizeof(float));
        continue;
      }
      for (int64_t i = 0; i < kBlock; i += W) store(s + i, load(s + i) * (a.k_scale ? a.scale * load(x.k_scale + j + i) : splat(a.scale)));
      for (int64_t op = 0; op < a.op_count; ++op)
        apply(a.ops[op], s, head(row), tile.q_idx[row % tile.count], tile.blocks[block] * kBlock);
      if (kept) std::memcpy(kept, s, sheet.slots.n * sizeof(float));
    }
  }

  // One chunk of rows, from `first` on (`at` in scratch), over one pass's keys. Rows at its ends that see none are left out.
  template <int64_t keys, bool masked>
  void attend(const Sheet& sheet, int64_t first, int64_t n, int64_t at) {
    uint64_t seen[kChunkRows];
    int64_t low = 0, high = n;
    if (masked) {
      const uint64_t all = sheet.slots.n < kBlock ? (uint64_t{1} << sheet.slots.n) - 1 : ~uint64_t{0};
      int64_t bit = sheet.bits ? first % tile.bit_rows : 0;
      for (int64_t r = 0; r < n; ++r) {
        seen[r] = sheet.bits ? all & sheet.bits[bit] : all;
        if (++bit == tile.bit_rows) bit = 0;
      }
      if (a.pass != Pass::score) {
        while (low < n && !seen[low]) ++low;
        while (high > low && !seen[high - 1]) --high;
      }
      if (low == high) return;
      low = low / kRound * kRound;
    }
    const int64_t count = up(high - low, kRound);
    high = std::min(low + count, n);
    float* s = x.s;
    E* p = reinterpret_cast<E*>(s);
    constexpr int64_t p_row = keys * kPair<E>;
    if (a.pass != Pass::weigh) multiply(count, keys, x.d, x.d, keys, keys, false, x.q + (at + low) * x.d, x.k, s);
    for (int64_t r = low; r < high; ++r, s += keys) {
      if (!plain) finish_scores(s, first + r, sheet);
      if (a.pass == Pass::score) continue;
      const RowState row{x.max + at + r, x.total + (at + r) * W, x.acc + (at + r) * x.dv, x.dv};
      weigh<E, keys, masked>(s, p + (r - low) * p_row, scale, masked ? seen[r] : 0, a.v_scale ? x.v_scale : nullptr, row);
    }
    if (a.pass == Pass::score) return;
    std::memset(static_cast<void*>(p + (high - low) * p_row), 0, (count - (high - low)) * keys * sizeof(float));
    multiply(count, x.dv, keys, p_row, x.dv, x.dv, true, p, x.v, x.acc + (at + low) * x.dv);
    if (masked && sheet.spoiled)
      for (int64_t r = low; r < high; ++r) add_spoiled(sheet.spoiled & seen[r], p + (r - low) * p_row, x.acc + (at + r) * x.dv);
  }

  void add_spoiled(uint64_t keys, const E* p, float* acc) const {
    for (; keys; keys &= keys - 1) {
      const int64_t j = __builtin_ctzll(keys);
      for (int64_t i = 0; i < a.v_head_dim; ++i) acc[i] += widen(p[j]) * x.spoiled[j * x.dv + i];
    }
  }

  template <int64_t keys, bool masked>
  void over(const Sheet& sheet, int64_t first, int64_t count) {
    for (int64_t at = 0, chunk = 0; at < count; at += chunks.step, ++chunk)
      attend<keys, masked>(sheet, first + at, std::min(chunks.step, count - at), chunk * chunks.pad);
  }

  int64_t keys_of(int64_t block) const { return std::min(tile.length - tile.blocks[block] * kBlock, kBlock); }
  bool whole(int64_t block) const { return tile.bits_at[block] < 0 && keys_of(block) == kBlock; }

  // All blocks for the rows [first, first + count), whose keys and values are of type T.
  template <class T>
  void pass(int64_t first, int64_t count) {
    for (int64_t i = 0; i < tile.block_count;) {
      const bool two = a.pass == Pass::all && whole(i) && i + 1 < tile.block_count && whole(i + 1), masked = !whole(i);
      Sheet sheet;
      sheet.first = i;
      if (tile.bits_at[i] >= 0) sheet.bits = tile.bits + tile.bits_at[i] * tile.bit_rows;
      for (const int64_t stop = i + (two ? 2 : 1); i < stop; ++i) sheet.slots.add(a, tile, tile.blocks[i] * kBlock, keys_of(i));
      pack<T>(sheet);
      if (two) over<kWide, false>(sheet, first, count);
      else if (masked) over<kBlock, true>(sheet, first, count);
      else over<kBlock, false>(sheet, first, count);
    }
  }

  // Writes one row: sums over the total, the sink in the total; 0 and minus infinity where nothing was seen.
  template <class Q>
  void write(int64_t row, float max, float total, const float* acc) const {
    float lse = total > 0 || total != total ? max * scale + std::log(total) : kNothing;
    float share = total > 0 || total != total ? 1.0f / total : 0.0f;
    if (a.sinks) {
      const float sink = a.sinks[head(row)], top = std::max(sink, lse);
      const float joined = top == kNothing ? kNothing : top + std::log(std::exp(sink - top) + std::exp(lse - top));
      share = lse == kNothing ? 0.0f : share * std::exp(lse - joined);
      lse = joined;
    }
    Q* out = static_cast<Q*>(a.out) + (token(row) * a.heads + head(row)) * a.v_head_dim;
    int64_t i = 0;
    if (share == 0.0f) std::memset(static_cast<void*>(out), 0, a.v_head_dim * sizeof(Q)), i = a.v_head_dim;
    for (; i + W <= a.v_head_dim; i += W) round_to(out + i, load(acc + i) * share);
    for (; i < a.v_head_dim; ++i) narrow(acc[i] * share, out + i);
    if (a.lse) a.lse[token(row) * a.heads + head(row)] = lse;
  }

  template <class Q>
  void run() {
    std::memset(static_cast<void*>(x.nothing), 0, std::max(x.d, x.dv) * sizeof(E));
    const int64_t most = chunks.count * chunks.step;
    for (int64_t first = 0; first < rows; first += most) {
      const int64_t count = std::min(most, rows - first), held = chunks.count * chunks.pad;
      gather_queries<Q>(first, count);
      std::fill(x.acc, x.acc + held * x.dv, 0.0f);
      std::fill(x.max, x.max + held, kNothing);
      std::fill(x.total, x.total + held * W, 0.0f);
      if constexpr (std::is_same_v<E, float>) {
        switch (a.kv_type) {
          case Type::bf16: pass<bf16>(first, count); break;
          case Type::fp16: pass<fp16>(first, count); break;
          case Type::int8: pass<int8_t>(first, count); break;
          default: pass<float>(first, count);
        }
      } else if (std::is_same_v<E, bf16> && a.kv_type == Type::int8) {
        pass<int8_t>(first, count);
      } else {
        pass<E>(first, count);
      }
      if (a.pass == Pass::score) continue;
      for (int64_t r = 0; r < count; ++r) {
        const int64_t at = r / chunks.step * chunks.pad + r % chunks.step;
        write<Q>(first + r, x.max[at], sum(load(x.total + at * W)), x.acc + at * x.dv);
      }
    }
  }
};

}  // namespace tiled

// Floats of scratch, enough for any tile.
inline int64_t many_scratch_floats(const AttendArgs& a) {
  using namespace tiled;
  return Work<float>(a, Chunks(kPassRows, kChunkRows), nullptr).floats;
}

// One tile and kv head: writes out and lse of its rows. `scratch` has many_scratch_floats().
inline void many(const AttendArgs& a, const Gemm& products, int64_t tile, int64_t kv_head, float* scratch) {
  using namespace tiled;
  const bool half = a.q_type == Type::fp16 && a.kv_type == Type::fp16 && products.fp16;
  const bool brain = a.q_type == Type::bf16 && (a.kv_type == Type::bf16 || a.kv_type == Type::int8) && (kPairs || products.bf16);
  if (brain) Task<bf16>(a, products, tile, kv_head, scratch).template run<bf16>();
  else if (half) Task<fp16>(a, products, tile, kv_head, scratch).template run<fp16>();
  else if (a.q_type == Type::bf16) Task<float>(a, products, tile, kv_head, scratch).template run<bf16>();
  else if (a.q_type == Type::fp16) Task<float>(a, products, tile, kv_head, scratch).template run<fp16>();
  else Task<float>(a, products, tile, kv_head, scratch).template run<float>();
  if (products.done) products.done();
}

}  // namespace FLEX_ISA
}  // namespace flex
