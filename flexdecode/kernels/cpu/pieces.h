// How attention is cut for the threads: tiles of many queries as they are, tiles of few in pieces whose partial states are
// merged; and the kernels that compute them.
#pragma once

#include <algorithm>
#include <vector>

#include "attend.h"
#include "attend_many_gemm.h"

namespace flex {

// A run of a tile's blocks for one kv head, and where its partial state goes: -1 where the run is the whole, and the
// result is written out directly.
struct Piece {
  int64_t tile, kv_head, first_block, last_block;  // [first, last) of the tile's list
  int64_t slot;
};

// Floats of one partial state: for each row (head of the group, query) its maximum, its sum, and its weighted sum.
inline int64_t state_floats(const AttendArgs& a, int64_t rows) { return rows * (2 + (a.v_head_dim + 31) / 32 * 32); }

inline int64_t head_of(const AttendArgs& a, const Tile& tile, int64_t kv_head, int64_t row) {
  return kv_head * (a.heads / a.kv_heads) + row / tile.count;
}

struct Kernels {
  const char* name;
  // Computes one piece. `scratch` has scratch_floats() floats, `state` the piece's partial state (or null).
  void (*piece)(const AttendArgs&, const Piece&, float* scratch, float* state);
  // Merges `count` states of one tile and kv head, in order, and writes the result.
  void (*merge)(const AttendArgs&, int64_t tile, int64_t kv_head, const float* const* states, int64_t count);
  int64_t (*scratch_floats)(const AttendArgs&, int64_t rows);
  // Computes one tile of many queries for one kv head, with many_scratch_floats() floats of scratch.
  void (*many)(const AttendArgs&, const Gemm&, int64_t tile, int64_t kv_head, float* scratch);
  int64_t (*many_scratch_floats)(const AttendArgs&);
};

// The states of one tile and kv head: where they begin, and how many.
struct Merge {
  int64_t tile, kv_head, first, count;
};

struct Cut {
  std::vector<Piece> pieces;
  std::vector<Merge> merges;
  int64_t states;
};

// Where the piece ends that begins with the tile's block `at`.
inline int64_t piece_end(const Tile& tile, int64_t at, int64_t split) {
  const int64_t n = tile.block_count;
  if (split <= 0) return std::min(n, at + std::clamp<int64_t>((n + 7) / 8, 4, 16));
  const int32_t* blocks = tile.blocks;
  return std::lower_bound(blocks + at, blocks + n, (blocks[at] / split + 1) * split) - blocks;
}

// A piece for each `split` blocks of the sequence, so that a query's are the same whatever others see; with 0, pieces of an
// eighth of what the tile sees, from 4 to 16 blocks: enough for the threads to share, long enough for a merge to cost
// nothing. Either way a tile's result has the same bits in any company and on any number of threads.
inline Cut cut(const AttendArgs& a, int64_t split) {
  Cut found{};
  for (int64_t t = 0; t < a.tile_count; ++t) {
    const Tile& tile = a.tiles[t];
    const int64_t n = tile.block_count;
    const bool whole = n == 0 || piece_end(tile, 0, split) == n;
    const int64_t first = tile.kv_head < 0 ? 0 : tile.kv_head, last = tile.kv_head < 0 ? a.kv_heads : tile.kv_head + 1;
    for (int64_t h = first; h < last; ++h) {
      if (whole) {
        found.pieces.push_back({t, h, 0, n, -1});
        continue;
      }
      const int64_t from = found.states;
      for (int64_t at = 0, end; at < n; at = end) {
        end = piece_end(tile, at, split);
        found.pieces.push_back({t, h, at, end, found.states++});
      }
      found.merges.push_back({t, h, from, found.states - from});
    }
  }
  return found;
}

// Merges what `pieces` left of one tile and kv head in `states`, each of `state` floats.
inline void merge_one(const Kernels& kernels, const AttendArgs& a, const Merge& merge, const float* states, int64_t state) {
  std::vector<const float*> parts;
  for (int64_t i = 0; i < merge.count; ++i) parts.push_back(states + (merge.first + i) * state);
  kernels.merge(a, merge.tile, merge.kv_head, parts.data(), merge.count);
}

}  // namespace flex
