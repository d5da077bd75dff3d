// How attention is cut for the threads: tiles of many queries as they are, tiles of few in pieces whose partial states are
// merged; and the kernels that compute them.
#pragma once

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

}  // namespace flex
