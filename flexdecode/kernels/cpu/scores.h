// Score modifications that kernels know, over the scores of one row and one block. Included once for each instruction set.
#pragma once

#include <algorithm>

#include "attend.h"
#include "vec.h"

namespace flex {
namespace FLEX_ISA {

// Applies one step to 64 scores of the query at `q` against keys from `start` on.
inline void apply(const ScoreOp& op, float* s, int64_t head, int64_t q, int64_t start) {
  switch (op.kind) {
    case ScoreOp::softcap:
      for (int64_t j = 0; j < kBlock; j += W) store(s + j, vtanh(load(s + j) / op.a) * op.a);
      return;
    case ScoreOp::scale:
      for (int64_t j = 0; j < kBlock; j += W) store(s + j, load(s + j) * op.a);
      return;
    case ScoreOp::alibi: {
      const float slope = op.table[head];
      for (int64_t j = 0; j < kBlock; ++j) s[j] -= slope * static_cast<float>(q - start - j);
      return;
    }
    case ScoreOp::relative: {
      const float* bias = op.table + head * op.n;
      const int64_t distance = q - start - static_cast<int64_t>(op.a);
      for (int64_t j = 0; j < kBlock; ++j) s[j] += bias[std::clamp<int64_t>(distance - j, 0, op.n - 1)];
      return;
    }
    case ScoreOp::log_scale: {
      const float factor = 1.0f + op.a * std::log(1.0f + std::floor(static_cast<float>(q + 1) / op.b));
      for (int64_t j = 0; j < kBlock; j += W) store(s + j, load(s + j) * factor);
      return;
    }
  }
}

}  // namespace FLEX_ISA
}  // namespace flex
