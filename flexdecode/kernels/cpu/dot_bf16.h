// bf16 dot products (AVX-512 BF16): two products an instruction, exact, added in fp32. For bf16 queries on bf16 keys.
//
// The weighted sum uses them too: two value rows interleaved are multiplied by a pair of weights, so weights are rounded
// to bf16 here (the softmax total is not). Interleaving within quarters leaves columns in an order of its own, which
// `restore_order` undoes once a piece.
#pragma once

#include "ahead.h"
#include "attend.h"
#include "products.h"
#include "vec.h"

#if defined(__AVX512BF16__) && !defined(FLEX_PORTABLE)
#define FLEX_DOT_BF16 1

namespace flex {
namespace FLEX_ISA {

// Queries of four rows, laid so that a register faces `width` values of a key, 16 (two registers, a half a row) or 8 (one,
// a quarter a row): [dim / width][row][width], zeros behind dim.
inline void lay_rows(const bf16* const* rows, int64_t count, int64_t dim, int64_t padded, int64_t width, bf16* out) {
  std::memset(out, 0, 4 * padded * sizeof(bf16));
  for (int64_t r = 0; r < count; ++r)
    for (int64_t d = 0; d < dim; ++d) out[(d / width * 4 + r) * width + d % width] = rows[r][d];
}

// 32 bytes of a key in both halves; what lies behind the key's end is not looked at.
FLEX_INLINE __m512bh halves(const bf16* k) {
  return (__m512bh)_mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(k)));
}
FLEX_INLINE __m512bh halves(const bf16* k, int64_t left) {
  return (__m512bh)_mm512_broadcast_i64x4(_mm256_maskz_loadu_epi16(static_cast<__mmask16>((1 << left) - 1), k));
}

// Scores of four rows (halves of q) and eight keys: s[64·row + key]. A load of a key serves two rows in one instruction
// and four in two: loads are what this machine has fewest of.
FLEX_INLINE void dots4x8(const bf16* q, const bf16* k, int64_t stride, int64_t dim, float* s, Ahead& ahead) {
  __m512 sum[2][8] = {};
  int64_t i = 0;
  for (; i + 16 <= dim; i += 16) {
    const __m512bh first = (__m512bh)_mm512_loadu_si512(q + 4 * i), second = (__m512bh)_mm512_loadu_si512(q + 4 * i + 32);
    ahead.fetch(3);
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
      const __m512bh key = halves(k + j * stride + i);
      sum[0][j] = _mm512_dpbf16_ps(sum[0][j], first, key);
      sum[1][j] = _mm512_dpbf16_ps(sum[1][j], second, key);
    }
  }
  if (i < dim) {
    const __m512bh first = (__m512bh)_mm512_loadu_si512(q + 4 * i), second = (__m512bh)_mm512_loadu_si512(q + 4 * i + 32);
    for (int j = 0; j < 8; ++j) {
      const __m512bh key = halves(k + j * stride + i, dim - i);
      sum[0][j] = _mm512_dpbf16_ps(sum[0][j], first, key);
      sum[1][j] = _mm512_dpbf16_ps(sum[1][j], second, key);
    }
  }
#pragma GCC unroll 2
  for (int pair = 0; pair < 2; ++pair) {
    const __m512* x = sum[pair];
    const __m512 low = sum_quarters(x[0], x[1], x[2], x[3]), high = sum_quarters(x[4], x[5], x[6], x[7]);
    // Quarters 0 and 1 are the first row's, 2 and 3 the second's.
    const __m512 out = _mm512_shuffle_f32x4(low, high, 0x88) + _mm512_shuffle_f32x4(low, high, 0xdd);
    float* to = s + 2 * pair * kBlock;
    _mm_storeu_ps(to, _mm512_castps512_ps128(out));
    _mm_storeu_ps(to + kBlock, _mm512_extractf32x4_ps(out, 1));
    _mm_storeu_ps(to + 4, _mm512_extractf32x4_ps(out, 2));
    _mm_storeu_ps(to + kBlock + 4, _mm512_extractf32x4_ps(out, 3));
  }
}

FLEX_INLINE __m512bh quarters(const bf16* k) {
  return (__m512bh)_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(k)));
}
FLEX_INLINE __m512bh quarters(const bf16* k, int64_t left) {
  return (__m512bh)_mm512_broadcast_i32x4(_mm_maskz_loadu_epi16(static_cast<__mmask8>((1 << left) - 1), k));
}

// Scores of eight rows (quarters of q, the second four `next` behind) and eight keys: s[64·row + key]. As many loads
// for a product as with halves, and fewer sums across registers.
template <int lines>
FLEX_INLINE void dots8x8(const bf16* q, int64_t next, const bf16* k, int64_t stride, int64_t dim, float* s, Ahead& ahead) {
  __m512 sum[2][8] = {};
  int64_t i = 0;
  for (; i + 8 <= dim; i += 8) {
    const __m512bh first = (__m512bh)_mm512_loadu_si512(q + 4 * i), second = (__m512bh)_mm512_loadu_si512(q + next + 4 * i);
    if (lines) ahead.fetch(lines);
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
      const __m512bh key = quarters(k + j * stride + i);
      sum[0][j] = _mm512_dpbf16_ps(sum[0][j], first, key);
      sum[1][j] = _mm512_dpbf16_ps(sum[1][j], second, key);
    }
  }
  if (i < dim) {
    const __m512bh first = (__m512bh)_mm512_loadu_si512(q + 4 * i), second = (__m512bh)_mm512_loadu_si512(q + next + 4 * i);
    for (int j = 0; j < 8; ++j) {
      const __m512bh key = quarters(k + j * stride + i, dim - i);
      sum[0][j] = _mm512_dpbf16_ps(sum[0][j], first, key);
      sum[1][j] = _mm512_dpbf16_ps(sum[1][j], second, key);
    }
  }
#pragma GCC unroll 2
  for (int four = 0; four < 2; ++four) {
    const __m512* x = sum[four];
    store_quarters(sum_quarters(x[0], x[1], x[2], x[3]), s + 4 * four * kBlock);
    store_quarters(sum_quarters(x[4], x[5], x[6], x[7]), s + 4 * four * kBlock + 4);
  }
}

FLEX_INLINE __mmask32 mask_of(int64_t left) { return left >= 32 ? ~__mmask32{0} : left > 0 ? (__mmask32{1} << left) - 1 : 0; }

// Scores of one row and eight keys.
FLEX_INLINE void dots1x8(const bf16* q, const bf16* k, int64_t stride, int64_t dim, float* s, Ahead& ahead) {
  __m512 sum[8] = {};
  for (int64_t i = 0; i < dim; i += 32) {
    const __mmask32 mask = mask_of(dim - i);
    const __m512bh query = (__m512bh)_mm512_maskz_loadu_epi16(mask, q + i);
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
      sum[j] = _mm512_dpbf16_ps(sum[j], query, (__m512bh)_mm512_maskz_loadu_epi16(mask, k + j * stride + i));
      if (j % 4 == 0) ahead.fetch(4);
    }
  }
  const __m512 low = sum_quarters(sum[0], sum[1], sum[2], sum[3]), high = sum_quarters(sum[4], sum[5], sum[6], sum[7]);
  const __m512 two = _mm512_shuffle_f32x4(low, high, 0x88) + _mm512_shuffle_f32x4(low, high, 0xdd);
  const __m256 even = _mm512_castps512_ps256(two), odd = _mm512_extractf32x8_ps(two, 1);
  _mm_storeu_ps(s, _mm256_castps256_ps128(even) + _mm256_extractf32x4_ps(even, 1));
  _mm_storeu_ps(s + 4, _mm256_castps256_ps128(odd) + _mm256_extractf32x4_ps(odd, 1));
}

// acc[row] += p[row][j] · v[j] for R rows over n keys, in columns of 16 C; p is bf16 [R, 64] with zeros behind n; v[n]
// may be read. `lines` to ask for with each pair of values.
template <int R, int C, int lines>
FLEX_INLINE void weighted_dot(float* acc, int64_t dv, const bf16* p, const bf16* v, int64_t stride, int64_t n, int64_t dim, Ahead& ahead) {
  for (int64_t i = 0; i < dim; i += 16 * C) {
    __mmask32 mask[C / 2];
#pragma GCC unroll 8
    for (int c = 0; c < C / 2; ++c) mask[c] = mask_of(dim - i - 32 * c);
    __m512 sum[R][C];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) sum[r][c] = mask[c / 2] ? _mm512_loadu_ps(acc + r * dv + i + 16 * c) : _mm512_setzero_ps();
    for (int64_t j = 0; j < n; j += 2) {
      if (lines) ahead.fetch(lines);
      __m512bh pairs[C];
#pragma GCC unroll 8
      for (int c = 0; c < C; c += 2) {
        const bf16* row = v + j * stride + i + 16 * c;
        const __m512i a = _mm512_maskz_loadu_epi16(mask[c / 2], row), b = _mm512_maskz_loadu_epi16(mask[c / 2], row + stride);
        pairs[c] = (__m512bh)_mm512_unpacklo_epi16(a, b);
        pairs[c + 1] = (__m512bh)_mm512_unpackhi_epi16(a, b);
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        int32_t two;
        std::memcpy(&two, p + r * kBlock + j, 4);
        const __m512bh weights = (__m512bh)_mm512_set1_epi32(two);
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) sum[r][c] = _mm512_dpbf16_ps(sum[r][c], pairs[c], weights);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c)
        if (mask[c / 2]) _mm512_storeu_ps(acc + r * dv + i + 16 * c, sum[r][c]);
  }
}

// The same for one to four rows.
template <int lines>
FLEX_INLINE void weighted_rows(int64_t rows, float* acc, int64_t dv, const bf16* p, const bf16* v, int64_t stride, int64_t n, int64_t dim,
                               Ahead& ahead) {
  switch (rows) {
    case 1:
      if (dim > 64) weighted_dot<1, 8, lines + 1>(acc, dv, p, v, stride, n, dim, ahead);
      else weighted_dot<1, 4, lines + 1>(acc, dv, p, v, stride, n, dim, ahead);
      break;
    case 2: weighted_dot<2, 4, lines>(acc, dv, p, v, stride, n, dim, ahead); break;
    case 3: weighted_dot<3, 4, lines>(acc, dv, p, v, stride, n, dim, ahead); break;
    default: weighted_dot<4, 4, lines>(acc, dv, p, v, stride, n, dim, ahead);
  }
}

FLEX_INLINE void round_weights(vf p, bf16* out) {
  const __m256bh h = _mm512_cvtneps_pbh((__m512)p);
  std::memcpy(out, &h, sizeof h);
}

// Columns as weighted_dot leaves them, 32 at a time: quarters 0-3, 8-11, 16-19, 24-27, then 4-7, 12-15, 20-23, 28-31.
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

}  // namespace FLEX_ISA
}  // namespace flex
#endif
