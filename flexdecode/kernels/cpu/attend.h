// What an attention call is, in raw pointers: the one structure that bindings fill and every instruction set's kernel
// reads. Knows no torch and no vectors.
//
// Keys and values of one layer lie in slots: [kv_heads, slots, dim], with any strides. A tile is a run of one sequence's
// queries and the blocks of 64 keys that they see; a key's slot is found through a table of pages. Strides are in
// elements.
#pragma once

#include <cstdint>

namespace flex {

enum class Type : int32_t { fp32, bf16, fp16, int8 };

constexpr int64_t kBlock = 64;  // keys of a block; block b holds positions [64·b, 64·b + 64), cut to the sequence

struct Tile {
  int64_t row;               // the first of its rows in q and out
  int64_t count;             // how many
  int64_t length;            // keys of the sequence
  int64_t kv_head;           // the one that it is for, or -1: all
  int64_t base;              // without a table: the slot of position 0
  const int32_t* table;      // page numbers by logical page, or null
  int64_t block_count;
  const int32_t* blocks;     // ascending
  const int32_t* bits_at;    // for each block a row of `bits`, or -1: all rows see all its keys
  const uint64_t* bits;      // [·, bit_rows]
  int64_t bit_rows;          // count, or group · count in the order (head of the group, query)
  const int64_t* q_idx;      // [count] positions
  int64_t scores;            // where its scores are kept between passes, [heads, count, 64 · block_count]
};

// A step of score modification, applied in order to the scaled product.
struct ScoreOp {
  enum Kind : int32_t {
    softcap,      // a · tanh(s / a)
    scale,        // s · a
    alibi,        // s − table[head] · (q − k)
    relative,     // s + table[head · n + clamp(q − k − a, 0, n − 1)]
    log_scale,    // s · (1 + a · log(1 + floor((q + 1) / b)))
  };
  int32_t kind;
  float a, b;
  const float* table;
  int64_t n;
};

// Attention whole, or in two passes between which somebody else changes the scores.
enum class Pass : int32_t { all, score, weigh };

struct AttendArgs {
  const void* q;        // [tokens, heads, head_dim]
  int64_t q_token, q_head;
  Type q_type;
  const void *k, *v;
  int64_t k_head, k_slot, v_head, v_slot;
  const float *k_scale, *v_scale;  // [kv_heads, slots], for int8
  int64_t slots;        // of a row of scales
  Type kv_type;
  int64_t page;
  int64_t heads, kv_heads, head_dim, v_head_dim;
  const Tile* tiles;
  int64_t tile_count;
  float scale;
  bool alike;           // few queries: a row's bits are to be the same whatever rows stand beside it
  const ScoreOp* ops;
  int64_t op_count;
  const float* sinks;   // [heads], or null
  void* out;            // [tokens, heads, v_head_dim], of q's type, contiguous
  float* lse;           // [tokens, heads], or null
  Pass pass;
  float* scores;        // of all tiles, where the pass is not `all`
};

inline float* kept_scores(const AttendArgs& a, const Tile& tile, int64_t kv_head, int64_t row, int64_t i) {
  const int64_t group = a.heads / a.kv_heads, head = tile.kv_head < 0 ? kv_head : 0;
  return a.scores + tile.scores + ((head * group * tile.count + row) * tile.block_count + i) * kBlock;
}

}  // namespace flex
