// Where the keys and values of one tile lie, block by block, in the order in which they are read.
#pragma once

#include <algorithm>

#include "ahead.h"
#include "attend.h"
#include "vec.h"

namespace flex {
namespace FLEX_ISA {

constexpr int64_t kStepMost = 32, kStepLeast = 8;  // keys whose values are summed between the scores of others
constexpr int64_t kStepBytes = 4096;               // which is to be no more than this: twice two steps stay in the nearest cache

// Keys of a step where products take any number of them.
FLEX_INLINE int64_t step_of(int64_t key_bytes) { return 16 * key_bytes > kStepBytes ? kStepLeast : 16; }

// Rows of keys or values, `stride` elements apart.
template <class T>
struct Rows {
  const T* at;
  int64_t stride;
  const T* from(int64_t row) const { return at + row * stride; }
};

// A block: its scales, and who sees its keys.
struct Block {
  const float *k_scale = nullptr, *v_scale = nullptr;
  int64_t start = 0, n = 0;        // n 0: nothing
  const uint64_t* bits = nullptr;  // of its rows, null where all see all
  float copied[2][kBlock];         // scales that lie apart
};

// Runs of keys and values in the order in which they are read: a step's keys of a block, then as many values of the block
// before. Four blocks fit: what is being read, what comes next, and the values that come after it.
template <class T>
class Ring {
 public:
  const int64_t step;  // keys

  Ring(const AttendArgs& a, const Tile& tile, int64_t kv_head, int64_t keys)
      : step(keys), a_(a), tile_(tile),
        k_(static_cast<const T*>(a.k) + kv_head * a.k_head), v_(static_cast<const T*>(a.v) + kv_head * a.v_head),
        k_scale_(a.k_scale ? a.k_scale + kv_head * a.slots : nullptr), v_scale_(a.k_scale ? a.v_scale + kv_head * a.slots : nullptr) {}

  // Bytes of a key and a value.
  int64_t bytes() const { return (a_.head_dim + a_.v_head_dim) * sizeof(T); }

  Ahead ahead() const {
    const int64_t size = sizeof(T);
    const Ahead::Kind keys{a_.pass == Pass::weigh ? 0 : a_.head_dim * size, a_.k_slot * size};
    const Ahead::Kind values{a_.pass == Pass::score ? 0 : a_.v_head_dim * size, a_.v_slot * size};
    return Ahead(runs_, 8 * (kBlock / step), step, keys, values);
  }

  // Finds block `i` of the tile, the `number`th of its piece.
  void find(int64_t i, int64_t number, Block& b, Ahead& ahead) {
    b.n = 0;
    const int64_t steps = kBlock / step;
    if (i >= tile_.block_count) {
      for (int64_t s = 0; s < steps; ++s) *key_run(number, s) = *value_run(number, s) = nullptr;
      return;
    }
    b.start = tile_.blocks[i] * kBlock;
    b.n = std::min(tile_.length - b.start, kBlock);
    b.bits = tile_.bits_at[i] < 0 ? nullptr : tile_.bits + tile_.bits_at[i] * tile_.bit_rows;
    if (b.n == kBlock && (!tile_.table || a_.page % kBlock == 0)) {  // one run of slots, the common case
      const int64_t slot = slot_of(b.start);
      for (int64_t s = 0; s < steps; ++s) {
        *key_run(number, s) = k_ + (slot + s * step) * a_.k_slot;
        *value_run(number, s) = v_ + (slot + s * step) * a_.v_slot;
      }
      ahead.fetch(8);
      if (!k_scale_) return;
      b.k_scale = k_scale_ + slot;
      b.v_scale = v_scale_ + slot;
      for (int64_t j = 0; j < kBlock; j += 16) __builtin_prefetch(b.k_scale + j), __builtin_prefetch(b.v_scale + j);
      return;
    }
    for (int64_t s = 0; s < steps; ++s) {
      const int64_t first = b.start + s * step;
      const bool apart = (s + 1) * step > b.n || (tile_.table && first % a_.page + step > a_.page);
      *key_run(number, s) = apart ? nullptr : k_ + slot_of(first) * a_.k_slot;
      *value_run(number, s) = apart ? nullptr : v_ + slot_of(first) * a_.v_slot;
    }
    if (!k_scale_) return;
    for (int64_t j = 0; j < kBlock; ++j) {
      const int64_t slot = slot_of(b.start + std::min(j, b.n - 1));
      b.copied[0][j] = k_scale_[slot];
      b.copied[1][j] = v_scale_[slot];
    }
    b.k_scale = b.copied[0];
    b.v_scale = b.copied[1];
  }

  // Keys and values of a step of block `b`, number `n` of its piece; where they lie apart, copied to `spare`. Past the
  // block's end the last key is repeated: it is read, and masked.
  Rows<T> keys(const Block& b, int64_t n, int64_t s, void* spare) {
    if (const void* run = *key_run(n, s)) return {static_cast<const T*>(run), a_.k_slot};
    return gather(b, s, k_, a_.k_slot, a_.head_dim, static_cast<T*>(spare));
  }
  Rows<T> values(const Block& b, int64_t n, int64_t s, void* spare) {
    if (const void* run = *value_run(n, s)) return {static_cast<const T*>(run), a_.v_slot};
    return gather(b, s, v_, a_.v_slot, a_.v_head_dim, static_cast<T*>(spare));
  }

 private:
  const void** key_run(int64_t n, int64_t s) { return runs_ + 2 * (kBlock / step) * (n & 3) + 2 * s; }
  const void** value_run(int64_t n, int64_t s) { return key_run(n + 1, s) + 1; }
  int64_t slot_of(int64_t position) const {
    return tile_.table ? tile_.table[position / a_.page] * a_.page + position % a_.page : tile_.base + position;
  }

  __attribute__((noinline)) Rows<T> gather(const Block& b, int64_t s, const T* from, int64_t slot_stride, int64_t dim, T* out) const {
    for (int64_t j = 0; j < step; ++j)
      std::memcpy(out + j * dim, from + slot_of(b.start + std::min(s * step + j, b.n - 1)) * slot_stride, dim * sizeof(T));
    return {out, dim};
  }

  const AttendArgs& a_;
  const Tile& tile_;
  const T *k_, *v_;
  const float *k_scale_, *v_scale_;
  const void* runs_[8 * (kBlock / kStepLeast)] = {};
};

}  // namespace FLEX_ISA
}  // namespace flex
