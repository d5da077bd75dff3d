// Softmax of one row over the keys of a pass: scores become weights, in the type that products compute in.
//
// The running maximum may lag behind the true one by kSlack, so that a weight is at most e^8, which neither sums nor 16
// bits mind: only a score that rises above it makes a row look for its maximum and scale down what it summed before. Totals
// stay vectors until the end. Included once for each instruction set.
#pragma once

#include "tiles_pack.h"
#include "vec.h"

namespace flex {
namespace FLEX_ISA {
namespace tiled {

constexpr float kNothing = -std::numeric_limits<float>::infinity();
constexpr float kSlack = 8.0f;

// `power` takes an exponent times kUnit: it raises 2 where scaling by a power of two is one instruction, and e elsewhere.
#if defined(__AVX512F__) && !defined(FLEX_PORTABLE)
constexpr float kUnit = 1.44269504f;

// 2^x by 2^n · p(x − n), n the integer below: p to 3e-6 where weights are rounded to 16 bits, to 1e-7 for fp32. NaN stays,
// −inf gives 0.
template <class E>
FLEX_INLINE vf power(vf x) {
  const vf r = (vf)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  vf p;
  if constexpr (sizeof(E) == 2) {
    p = splat(0.0135341678f);
    p = p * r + 0.0520114601f;
    p = p * r + 0.241442755f;
    p = p * r + 0.693003833f;
    p = p * r + 1.00000262f;
  } else {
    p = splat(0.000217022549f);
    p = p * r + 0.00124396873f;
    p = p * r + 0.00967884064f;
    p = p * r + 0.0554833412f;
    p = p * r + 0.24022983f;
    p = p * r + 0.693147004f;
    p = p * r + 1.0f;
  }
  return (vf)_mm512_scalef_ps((__m512)p, (__m512)x);
}
#else
constexpr float kUnit = 1.0f;

template <class E>
FLEX_INLINE vf power(vf x) { return vexp(x); }
#endif

FLEX_INLINE bool any_above(vf v, float limit) {
#if defined(__AVX512F__) && !defined(FLEX_PORTABLE)
  return _mm512_cmp_ps_mask((__m512)v, _mm512_set1_ps(limit), _CMP_GT_OQ) != 0;
#elif defined(__AVX2__) && !defined(FLEX_PORTABLE)
  return _mm256_movemask_ps(_mm256_cmp_ps((__m256)v, _mm256_set1_ps(limit), _CMP_GT_OQ)) != 0;
#else
  for (int i = 0; i < W; ++i)
    if (v[i] > limit) return true;
  return false;
#endif
}

// Scores of the keys whose bits are set, minus infinity for the others, whatever they hold.
FLEX_INLINE vf select(vf s, uint64_t bits) {
#if defined(__AVX512F__) && !defined(FLEX_PORTABLE)
  return (vf)_mm512_mask_mov_ps(_mm512_set1_ps(kNothing), static_cast<__mmask16>(bits), (__m512)s);
#else
  vi lane;
  for (int i = 0; i < W; ++i) lane[i] = 1 << i;
  return ((vi{} + static_cast<int32_t>(bits & ((1u << W) - 1))) & lane) != 0 ? s : splat(0.0f) + kNothing;
#endif
}

// What a row carries from pass to pass: its maximum (of scores before `scale`), W partial totals, and its weighted sum.
struct RowState {
  float* max;
  float* total;
  float* acc;
  int64_t dv;
};

inline void raise(const RowState& x, float top, float scale) {
  const float before = *x.max == kNothing ? 0.0f : std::exp((*x.max - top) * scale);
  for (int64_t i = 0; i < x.dv; i += W) store(x.acc + i, load(x.acc + i) * before);
  store(x.total, load(x.total) * before);
  *x.max = top;
}

// `keys` scores at s, which count times `scale`, become weights at p, which may be the same memory; `v_scale` (int8) is
// the values', or null.
template <class E, int64_t keys, bool masked>
FLEX_INLINE void weigh(const float* s, E* p, float scale, uint64_t seen, const float* v_scale, const RowState& x) {
  constexpr int n = keys / W;
  vf score[n];
  vf greatest = splat(kNothing);
#pragma GCC unroll 8
  for (int i = 0; i < n; ++i) {
    score[i] = load(s + i * W);
    if (masked) score[i] = select(score[i], seen >> (i * W));
    greatest = vmax(score[i], greatest);
  }
  if (any_above(greatest, *x.max + kSlack / scale)) raise(x, most(greatest), scale);
  const float base = *x.max == kNothing ? 0.0f : *x.max, unit = scale * kUnit;
  vf total = load(x.total);
#pragma GCC unroll 8
  for (int i = 0; i < n; ++i) {
    vf weight = power<E>(score[i] * unit - base * unit);
    total += weight;
    if (v_scale) weight *= load(v_scale + i * W);
    round_to(p + i * W, weight);
  }
  store(x.total, total);
}

}  // namespace tiled
}  // namespace FLEX_ISA
}  // namespace flex
