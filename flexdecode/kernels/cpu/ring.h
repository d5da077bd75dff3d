// Where the keys and values of one tile lie, block by block, in the order in which they are read.
#pragma once

#include <algorithm>

#include "ahead.h"
#include "attend.h"
#include "vec.h"

namespace flex {
namespace FLEX_ISA {

constexpr int64_t kStep = 16;  // keys whose values are summed between the scores of others

// Rows of keys and values in the order in which they are read: 16 keys of a block, then 16 values of the block before.
// Four blocks fit: what is being read, what comes next, and the values that come after it.
constexpr int64_t kRing = 8 * kBlock;

template <class T>
struct Ring {
  const T* rows[kRing + 1];
  // Step `step` of block number `n` of the piece: its keys, and the values of the block before it.
  const T** keys(int64_t n, int64_t step) { return rows + (n & 3) * 2 * kBlock + step * 2 * kStep; }
  const T** values(int64_t n, int64_t step) { return keys(n + 1, step) + kStep; }
};

// A block: its scales, and who sees its keys.
struct Block {
  float k_scale[kBlock] = {}, v_scale[kBlock] = {};
  int64_t start = 0, n = 0;        // n 0: nothing
  const uint64_t* bits = nullptr;  // of its rows, null where all see all
};

// Finds block `i` of a tile, the `number`th of its piece. Past its end the last key is repeated: it is read, and masked.
template <class T>
void find(const AttendArgs& a, const Tile& tile, int64_t kv_head, int64_t i, int64_t number, Ring<T>& ring, Block& b, Ahead& ahead) {
  b.n = 0;
  if (i >= tile.block_count) return;
  b.start = tile.blocks[i] * kBlock;
  b.n = std::min(tile.length - b.start, kBlock);
  b.bits = tile.bits_at[i] < 0 ? nullptr : tile.bits + tile.bits_at[i] * tile.bit_rows;
  const T* keys = static_cast<const T*>(a.k) + kv_head * a.k_head;
  const T* values = static_cast<const T*>(a.v) + kv_head * a.v_head;
  const auto slot_of = [&](int64_t position) {
    return tile.table ? tile.table[position / a.page] * a.page + position % a.page : tile.base + position;
  };
  const float* k_scale = a.k_scale ? a.k_scale + kv_head * a.slots : nullptr;
  const float* v_scale = a.k_scale ? a.v_scale + kv_head * a.slots : nullptr;
  if (b.n == kBlock && (!tile.table || a.page % kBlock == 0)) {  // one run of slots, the common case
    const int64_t slot = slot_of(b.start);
    const T *k = keys + slot * a.k_slot, *v = values + slot * a.v_slot;
    for (int64_t step = 0; step < kBlock / kStep; ++step) {
      const T **k_rows = ring.keys(number, step), **v_rows = ring.values(number, step);
      ahead.fetch(4);
#pragma GCC unroll 16
      for (int64_t j = 0; j < kStep; ++j, k += a.k_slot, v += a.v_slot) k_rows[j] = k, v_rows[j] = v;
    }
    if (k_scale) {
      std::memcpy(b.k_scale, k_scale + slot, kBlock * sizeof(float));
      std::memcpy(b.v_scale, v_scale + slot, kBlock * sizeof(float));
    }
    return;
  }
  for (int64_t j = 0; j < kBlock; ++j) {
    const int64_t slot = slot_of(b.start + std::min(j, b.n - 1));
    ring.keys(number, j / kStep)[j % kStep] = keys + slot * a.k_slot;
    ring.values(number, j / kStep)[j % kStep] = values + slot * a.v_slot;
    if (k_scale) b.k_scale[j] = k_scale[slot], b.v_scale[j] = v_scale[slot];
  }
}

}  // namespace FLEX_ISA
}  // namespace flex
