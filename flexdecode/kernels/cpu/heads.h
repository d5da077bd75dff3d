// What happens to q, k and v between their product and attention: norms of q and k, rotation, and the writing of keys and
// values where the cache has room for them. Knows no torch and no threads: callers divide the work.
#pragma once

#include "point.h"

namespace flex {

// Where a layer's keys and values lie, as an attention call takes them.
struct Held {
  void *k, *v;
  int64_t k_head, k_slot, v_head, v_slot, slots, page, v_head_dim;
  float *k_scale, *v_scale;
  Type type;
};

struct Rope {
  const float *cos, *sin;  // [tokens, half]
  int64_t half;
};

struct Heads {
  char* qkv;  // [tokens, heads + 2 kv_heads, head_dim]; q and k are changed in place
  Float type;
  int64_t tokens, heads, kv_heads, head_dim;
  Norm q_norm, k_norm;
  bool norm_all;     // over all heads at once, not over each
  const Rope* rope;  // or null
  const Held* held;
  const int64_t* slots;  // [tokens], where k and v go

  int64_t element() const { return bytes_of(type); }
  int64_t each() const { return heads + 2 * kv_heads; }
  bool norms_whole() const { return q_norm.weight && norm_all; }
};

// Norms over all heads: items [first, last) of q and k of each token. To be done before the rest.
inline void norm_whole(const PointKernels& kernels, const Heads& h, int64_t first, int64_t last) {
  const int64_t head = h.head_dim * h.element();
  for (int64_t i = first; i < last; ++i) {
    char* x = h.qkv + (i / 2 * h.each() + i % 2 * h.heads) * head;
    kernels.norm(x, x, i % 2 ? h.k_norm : h.q_norm, (i % 2 ? h.kv_heads : h.heads) * h.head_dim, h.type);
  }
}

// Items [first, last) of tokens × each(): a head of q, k or v.
inline void finish_heads(const PointKernels& kernels, const Heads& h, int64_t first, int64_t last) {
  const Held& to = *h.held;
  const int64_t head = h.head_dim * h.element(), size = to.type == Type::fp32 ? 4 : to.type == Type::int8 ? 1 : 2;
  const auto store = [&](const char* x, void* data, float* scales, int64_t by_head, int64_t by_slot, int64_t kv, int64_t slot) {
    char* at = static_cast<char*>(data) + (kv * by_head + slot * by_slot) * size;
    kernels.keep(x, h.type, at, to.type, scales ? scales + kv * to.slots + slot : nullptr, h.head_dim);
  };
  for (int64_t i = first; i < last; ++i) {
    const int64_t token = i / h.each(), kv = i % h.each() - h.heads;
    char* x = h.qkv + i * head;
    if (kv < h.kv_heads) {
      const Norm& norm = kv < 0 ? h.q_norm : h.k_norm;
      if (norm.weight && !h.norm_all) kernels.norm(x, x, norm, h.head_dim, h.type);
      if (h.rope) kernels.turn(x, {h.rope->cos + token * h.rope->half, h.rope->sin + token * h.rope->half, h.rope->half}, h.type);
    }
    if (kv < 0) continue;
    if (kv < h.kv_heads) store(x, to.k, to.k_scale, to.k_head, to.k_slot, kv, h.slots[token]);
    else store(x, to.v, to.v_scale, to.v_head, to.v_slot, kv - h.kv_heads, h.slots[token]);
  }
}

}  // namespace flex
