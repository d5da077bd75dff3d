// bf16 dot products (AVX-512 BF16): two products an instruction, exact, added in fp32. For bf16 queries on bf16 keys.
//
// The weighted sum uses them too: two value rows interleaved are multiplied by a pair of weights, so weights are rounded
// to bf16 here (the softmax total is not). Interleaving within quarters leaves columns in an order of its own, which
// `restore_order` undoes once a piece.
#pragma once

#include "attend.h"
#include "vec.h"

#if defined(__AVX512BF16__) && !defined(FLEX_PORTABLE)
#define FLEX_DOT_BF16 1

namespace flex {
namespace FLEX_ISA {

FLEX_INLINE __m512bh load_pairs(const bf16* p, __mmask32 mask) {
  return (__m512bh)_mm512_maskz_loadu_epi16(mask, p);
}

// Scores of four rows and four keys, as scores4x4; q is bf16 here.
FLEX_INLINE void dots4x4(const bf16* q, int64_t q_stride, const bf16* const* k, int64_t dim, vf* acc, bool ahead) {
  __m512 sum[16] = {};
  for (int64_t i = 0; i < dim; i += 32) {
    const __mmask32 mask = dim - i >= 32 ? ~__mmask32{0} : (__mmask32{1} << (dim - i)) - 1;
    __m512bh key[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      key[j] = load_pairs(k[j] + i, mask);
      if (ahead) fetch_ahead(k[j] + i);
    }
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
      const __m512bh query = (__m512bh)_mm512_loadu_si512(q + r * q_stride + i);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) sum[r * 4 + j] = _mm512_dpbf16_ps(sum[r * 4 + j], query, key[j]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) acc[i] = (vf)sum[i];
}

// acc[row] += p[row][j] · v[j] for four rows over n keys; p is bf16 [4, 64] with zeros behind n; v[n] may be read.
FLEX_INLINE void weighted4_dot(float* acc, int64_t dv, const bf16* p, const bf16* const* v, int64_t n, int64_t dim, bool ahead) {
  for (int64_t i = 0; i < dim; i += 64) {
    const auto mask_of = [&](int64_t at) -> __mmask32 {
      return dim - at >= 32 ? ~__mmask32{0} : dim > at ? (__mmask32{1} << (dim - at)) - 1 : 0;
    };
    const __mmask32 first = mask_of(i), second = mask_of(i + 32);
    const bool wide = second != 0;
    __m512 sum[4][4];
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < 4; ++c)
        sum[r][c] = c < 2 || wide ? _mm512_loadu_ps(acc + r * dv + i + 16 * c) : _mm512_setzero_ps();
    for (int64_t j = 0; j < n; j += 2) {
      if (ahead) {
        fetch_ahead(v[j] + i), fetch_ahead(v[j] + i + 32);
        fetch_ahead(v[j + 1] + i), fetch_ahead(v[j + 1] + i + 32);
      }
      const __m512i a0 = _mm512_maskz_loadu_epi16(first, v[j] + i), b0 = _mm512_maskz_loadu_epi16(first, v[j + 1] + i);
      const __m512i a1 = _mm512_maskz_loadu_epi16(second, v[j] + i + 32), b1 = _mm512_maskz_loadu_epi16(second, v[j + 1] + i + 32);
      const __m512bh pairs[4] = {(__m512bh)_mm512_unpacklo_epi16(a0, b0), (__m512bh)_mm512_unpackhi_epi16(a0, b0),
                                 (__m512bh)_mm512_unpacklo_epi16(a1, b1), (__m512bh)_mm512_unpackhi_epi16(a1, b1)};
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r) {
        int32_t two;
        std::memcpy(&two, p + r * kBlock + j, 4);
        const __m512bh weights = (__m512bh)_mm512_set1_epi32(two);
#pragma GCC unroll 4
        for (int c = 0; c < 4; ++c) sum[r][c] = _mm512_dpbf16_ps(sum[r][c], pairs[c], weights);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < 4; ++c)
        if (c < 2 || wide) _mm512_storeu_ps(acc + r * dv + i + 16 * c, sum[r][c]);
  }
}

FLEX_INLINE void round_weights(vf p, bf16* out) {
  const __m256bh h = _mm512_cvtneps_pbh((__m512)p);
  std::memcpy(out, &h, sizeof h);
}

// Columns as weighted4_dot leaves them, 32 at a time: quarters 0-3, 8-11, 16-19, 24-27, then 4-7, 12-15, 20-23, 28-31.
inline void restore_order(float* acc, int64_t dv) {
  for (int64_t i = 0; i < dv; i += 32) {
    float from[32];
    std::memcpy(from, acc + i, sizeof from);
    for (int quarter = 0; quarter < 4; ++quarter) {
      std::memcpy(acc + i + 8 * quarter, from + 4 * quarter, 16);
      std::memcpy(acc + i + 8 * quarter + 4, from + 16 + 4 * quarter, 16);
    }
  }
}

inline void dot_order(float* acc, int64_t dv) {
  for (int64_t i = 0; i < dv; i += 32) {
    float from[32];
    std::memcpy(from, acc + i, sizeof from);
    for (int quarter = 0; quarter < 4; ++quarter) {
      std::memcpy(acc + i + 4 * quarter, from + 8 * quarter, 16);
      std::memcpy(acc + i + 16 + 4 * quarter, from + 8 * quarter + 4, 16);
    }
  }
}

}  // namespace FLEX_ISA
}  // namespace flex
#endif
