// What an attention call is, in raw pointers: the one structure that bindings fill and every instruction set's kernel
// reads. Knows no torch and no vectors.
//
// Keys and values of one layer lie in slots: [kv_heads, slots, dim]. A tile is one sequence's queries; its keys are
// positions [start, stop), found through a table of pages. Strides are in elements.
#pragma once

#include <cstdint>

namespace flex {

enum class Type : int32_t { fp32, bf16, fp16, int8 };

struct Tile {
  int64_t row;          // the first of its rows in q and out
  int64_t count;        // how many
  int64_t start, stop;  // keys that any of them sees
  const int32_t* table; // page numbers, from the page that holds position `start` on
  const uint64_t* bits; // [count, blocks]: key i of block b visible to a row; null where all are
};

constexpr int64_t kBlock = 64;  // keys of a block; block b holds positions [64·b, 64·b + 64), cut to [start, stop)

struct AttendArgs {
  const void* q;        // [tokens, heads, head_dim]
  int64_t q_token, q_head;
  Type q_type;
  const void *k, *v;
  const float *k_scale, *v_scale;  // [kv_heads, slots], for int8
  Type kv_type;
  int64_t slots, page;
  int64_t heads, kv_heads, head_dim, v_head_dim;
  const Tile* tiles;
  int64_t tile_count;
  float scale, softcap; // softcap 0: none
  const float* sinks;   // [heads], or null
  void* out;            // [tokens, heads, v_head_dim], of q's type, contiguous
  float* lse;           // [tokens, heads], or null
};

// A run of blocks of one tile and kv head, and where its partial state goes: -1 where the run is the whole, and the
// result is written out directly.
struct Piece {
  int64_t tile, kv_head, first_block, last_block;  // blocks [first, last)
  int64_t slot;
};

// Floats of one partial state: for each row (head of the group, query) its maximum, its sum, and its weighted sum.
inline int64_t state_floats(const AttendArgs& a, int64_t rows) { return rows * (2 + (a.v_head_dim + 31) / 32 * 32); }

struct Kernels {
  const char* name;
  // Computes one piece. `scratch` has scratch_floats() floats, `state` the piece's partial state (or null).
  void (*piece)(const AttendArgs&, const Piece&, float* scratch, float* state);
  // Merges `count` states of one tile and kv head, in order, and writes the result.
  void (*merge)(const AttendArgs&, int64_t tile, int64_t kv_head, const float* const* states, int64_t count);
  int64_t (*scratch_floats)(const AttendArgs&, int64_t rows);
};

}  // namespace flex
