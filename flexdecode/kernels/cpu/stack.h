// Layers run one after the other on few tokens, as one piece of work for a team of threads: what they are. Knows no torch.
//
// A block is half a layer: attention or a gated feed-forward, with the norms before and behind it, added to the residual.
#pragma once

#include <vector>

#include "heads.h"
#include "pieces.h"

namespace flex {

// A product's weight: parts one below the other, each of its own kind.
struct Part {
  enum Kind { int4, int8, dense } kind;
  Int4Matrix q4;
  Int8Matrix q8;
  DenseMatrix floats;
  int64_t n, row;  // its outputs, and the first of them in the whole

  int64_t tiles() const { return (n + TILE - 1) / TILE; }
  // Floats of its activations, laid out, for each of the padded rows.
  int64_t columns() const { return kind == int4 ? 8 * q4.words * q4.groups : kind == int8 ? (q8.k + 1) / 2 * 2 : 0; }
  int64_t sums() const { return kind == int4 ? q4.groups : 0; }
};

struct Matrix {
  std::vector<Part> parts;
  const float* bias;  // or null
  int64_t n, k;

  int64_t floats() const {
    int64_t most = 0;
    for (const Part& p : parts) most += p.columns() + p.sums();
    return most;
  }
};

struct AttentionBlock {
  Matrix qkv, out;
  Norm q_norm, k_norm;
  bool norm_all;  // over all heads at once, not over each
  int64_t heads, kv_heads, head_dim, rope, group;  // rope -1: none
  float scale;
  std::vector<ScoreOp> ops;
  const float* sinks;
};

struct MlpBlock {
  Matrix gate_up, down;
  Gate gate;
};

struct Block {
  Norm pre, post;
  float multiplier;
  bool is_attention;
  AttentionBlock attention;
  MlpBlock mlp;
};

// What blocks with the same mask share in a step: where the new tokens go and what they see.
struct Group {
  const int64_t* slots;  // [tokens]
  std::vector<Tile> tiles;
};

// Kinds of work whose time is told apart.
enum class Phase { norm, qkv, rope, attention, merge, out, gate_up, down, count };

}  // namespace flex
