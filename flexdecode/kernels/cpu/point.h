// The small operators between products: norms, gated activations, rotation, and the writing of keys and values. What they
// are given; knows no torch and no vectors.
#pragma once

#include "attend.h"
#include "linear.h"

namespace flex {

enum class Activation : int32_t { silu, gelu_tanh, gelu, relu, clamped_swiglu };

struct Norm {
  const float* weight;  // null: the identity
  float eps;
};

struct Gate {
  Activation kind;
  float alpha, limit;  // of clamped_swiglu
};

// One token's turn: cos and sin of its position, `half` of each.
struct Turn {
  const float *cos, *sin;
  int64_t half;  // 0: nothing turns
};

// All take rows of `type`, compute in fp32, and round once.
struct PointKernels {
  // out = x / rms(x) · weight over `dim` numbers (Zhang and Sennrich, 2019). May be done in place.
  void (*norm)(const void* x, void* out, const Norm&, int64_t dim, Float type);
  // x += factor · y
  void (*add)(void* x, const void* y, float factor, int64_t count, Float type);
  // out = act(gate) · up
  void (*gate)(const void* gate, const void* up, void* out, const Gate&, int64_t count, Float type);
  // Turns a head in place, halves split: its first 2 · half numbers.
  void (*turn)(void* x, const Turn&, Float type);
  // Stores a head's numbers in a cache, for int8 with its scale.
  void (*keep)(const void* x, Float type, void* to, Type cache, float* scale, int64_t dim);
};

}  // namespace flex
