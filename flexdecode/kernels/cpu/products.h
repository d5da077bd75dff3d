// Products of four rows with a few keys, and sums of values weighted by four rows: what attention multiplies.
//
// Four rows by four keys keep sixteen vectors of running products in registers; one transposed tree of additions sums
// them all. Included once for each instruction set.
#pragma once

#include <algorithm>

#include "ahead.h"
#include "attend.h"
#include "vec.h"

namespace flex {
namespace FLEX_ISA {

constexpr int kRows = 4, kKeys = 4;

// Sums of 16 vectors at once: lane-wise results out[i] = sum(v[i]).
FLEX_INLINE void sums16(const vf* v, float* out) {
#if defined(__AVX512F__) && !defined(FLEX_PORTABLE)
  const auto add = [](__m512 a, __m512 b) { return _mm512_add_ps(a, b); };
  __m512 t[8], u[4], w[2];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {  // pairs (2i, 2i+1): neighbours of 32 bits meet
    const __m512 a = (__m512)v[2 * i], b = (__m512)v[2 * i + 1];
    t[i] = add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512d a = _mm512_castps_pd(t[2 * i]), b = _mm512_castps_pd(t[2 * i + 1]);
    u[i] = add(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {  // each 128-bit quarter of u[i] holds partial sums of v[4i .. 4i+3]
    const __m512 a = u[2 * i], b = u[2 * i + 1];
    w[i] = add(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  }
  const __m512 low = _mm512_shuffle_f32x4(w[0], w[1], 0x88), high = _mm512_shuffle_f32x4(w[0], w[1], 0xdd);
  _mm512_storeu_ps(out, add(low, high));
#else
  for (int i = 0; i < 16; ++i) out[i] = sum(v[i]);
#endif
}

#if defined(__AVX512F__) && !defined(FLEX_PORTABLE)
// Sums within quarters of four vectors: lane 4·row + key.
FLEX_INLINE __m512 sum_quarters(__m512 a, __m512 b, __m512 c, __m512 d) {
  const __m512 ab = _mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b), cd = _mm512_unpacklo_ps(c, d) + _mm512_unpackhi_ps(c, d);
  const __m512d x = _mm512_castps_pd(ab), y = _mm512_castps_pd(cd);
  return _mm512_castpd_ps(_mm512_unpacklo_pd(x, y)) + _mm512_castpd_ps(_mm512_unpackhi_pd(x, y));
}

// Lane 4·row + key of four rows and four keys, to s[64·row + key].
FLEX_INLINE void store_quarters(__m512 x, float* s) {
  _mm_storeu_ps(s, _mm512_castps512_ps128(x));
  _mm_storeu_ps(s + kBlock, _mm512_extractf32x4_ps(x, 1));
  _mm_storeu_ps(s + 2 * kBlock, _mm512_extractf32x4_ps(x, 2));
  _mm_storeu_ps(s + 3 * kBlock, _mm512_extractf32x4_ps(x, 3));
}
#endif

// Scores of four rows and four keys: out[4·row + key] = q[row] · k[key].
template <class T>
FLEX_INLINE void scores4x4(const float* q, int64_t d_padded, const T* k, int64_t stride, int64_t dim, float* out) {
  vf acc[kRows * kKeys] = {};
  int64_t i = 0;
  for (; i + W <= dim; i += W) {
    vf key[kKeys];
    for (int j = 0; j < kKeys; ++j) key[j] = load(k + j * stride + i);
    for (int r = 0; r < kRows; ++r) {
      const vf query = load(q + r * d_padded + i);
      for (int j = 0; j < kKeys; ++j) acc[r * kKeys + j] += query * key[j];
    }
  }
  if (i < dim) {
    for (int j = 0; j < kKeys; ++j) {
      const vf key = load_part(k + j * stride + i, static_cast<int>(dim - i));
      for (int r = 0; r < kRows; ++r) acc[r * kKeys + j] += load_part(q + r * d_padded + i, static_cast<int>(dim - i)) * key;
    }
  }
  sums16(acc, out);
}

// acc[row] += p[row][j] · v[j] for four rows over n keys, in columns of four vectors.
template <class T>
FLEX_INLINE void weighted4(float* acc, int64_t dv, const float* p, const T* v, int64_t stride, int64_t n, int64_t dim, Ahead& ahead) {
  constexpr int kColumns = 4;
  int64_t i = 0;
  for (; i + kColumns * W <= dim; i += kColumns * W) {
    vf sum[kRows][kColumns];
    for (int r = 0; r < kRows; ++r)
      for (int c = 0; c < kColumns; ++c) sum[r][c] = load(acc + r * dv + i + c * W);
    for (int64_t j = 0; j < n; ++j) {
      const T* row = v + j * stride + i;
      ahead.fetch(2);
      vf value[kColumns];
      for (int c = 0; c < kColumns; ++c) value[c] = load(row + c * W);
      for (int r = 0; r < kRows; ++r) {
        const vf weight = splat(p[r * kBlock + j]);
        for (int c = 0; c < kColumns; ++c) sum[r][c] += weight * value[c];
      }
    }
    for (int r = 0; r < kRows; ++r)
      for (int c = 0; c < kColumns; ++c) store(acc + r * dv + i + c * W, sum[r][c]);
  }
  for (; i < dim; i += W) {
    const int part = static_cast<int>(std::min<int64_t>(W, dim - i));
    vf sum[kRows];
    for (int r = 0; r < kRows; ++r) sum[r] = load(acc + r * dv + i);
    for (int64_t j = 0; j < n; ++j) {
      const vf value = part == W ? load(v + j * stride + i) : load_part(v + j * stride + i, part);
      for (int r = 0; r < kRows; ++r) sum[r] += splat(p[r * kBlock + j]) * value;
    }
    for (int r = 0; r < kRows; ++r) store(acc + r * dv + i, sum[r]);
  }
}

// Whether n rows of values are all numbers, and none of them infinite.
template <class T>
FLEX_INLINE bool finite(const T* v, int64_t stride, int64_t n, int64_t dim) {
  vf zeros = {};
  for (int64_t j = 0; j < n; ++j) {
    int64_t i = 0;
    for (; i + W <= dim; i += W) zeros += load(v + j * stride + i) * 0.0f;
    if (i < dim) zeros += load_part(v + j * stride + i, static_cast<int>(dim - i)) * 0.0f;
  }
  return sum(zeros) == 0.0f;
}

}  // namespace FLEX_ISA
}  // namespace flex
