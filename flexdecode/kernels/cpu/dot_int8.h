// int8 dot products (AVX-512 VNNI): four products an instruction, exact in 32-bit integers. For int8 keys and values.
//
// Queries become integers of 8 bits, a scale a row, and weights 8 bits a block, relative to the block's largest: beside
// what keys and values lost when they became 8 bits, this costs little (docs/log.md has figures). Keys are read as code +
// 128, since one side of the instruction is unsigned; the 128 times the query's sum is taken off again.
#pragma once

#include "ahead.h"
#include "attend.h"
#include "products.h"
#include "vec.h"

#if defined(__AVX512VNNI__) && !defined(FLEX_PORTABLE)
#define FLEX_DOT_INT8 1

namespace flex {
namespace FLEX_ISA {

// Four rows of queries as [dim / 16][row][16], zeros behind dim; for each row its scale, and what the 128 of the keys adds.
struct Queries8 {
  int8_t* codes;
  float *scale, *offset;
};

inline void lay_queries8(const float* q, int64_t stride, int64_t count, int64_t dim, int64_t padded, const Queries8& out) {
  constexpr float endless = std::numeric_limits<float>::infinity();
  std::memset(out.codes, 0, 4 * padded);
  for (int64_t r = 0; r < 4; ++r) out.scale[r] = out.offset[r] = 0;
  for (int64_t r = 0; r < count; ++r, q += stride) {
    float most = 0, total = 0;
    for (int64_t d = 0; d < dim; ++d) most = std::max(most, std::fabs(q[d])), total += q[d] * 0.0f;
    if (total != 0.0f) {  // one of them is no number
      out.scale[r] = std::numeric_limits<float>::quiet_NaN();
      continue;
    }
    const float step = most / 127.0f;
    out.scale[r] = step;
    int64_t sum = 0;
    for (int64_t d = 0; d < dim && step > 0 && most < endless; ++d) {
      const int64_t whole = std::lrint(q[d] / step);
      out.codes[d / 16 * 64 + r * 16 + d % 16] = static_cast<int8_t>(whole);
      sum += whole;
    }
    out.offset[r] = -128.0f * static_cast<float>(sum);
  }
}

// Sum and products of unsigned and signed bytes. Written out, since the compiler copies sums around its own name for it.
FLEX_INLINE __m512i dot8(__m512i sum, __m512i a, __m512i b) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
  return sum;
}

FLEX_INLINE __m512i keys8(const int8_t* k) {
  return _mm512_xor_si512(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(k))), _mm512_set1_epi8(-128));
}
FLEX_INLINE __m512i keys8(const int8_t* k, int64_t left) {
  const __m128i part = _mm_maskz_loadu_epi8(static_cast<__mmask16>((1 << left) - 1), k);
  return _mm512_xor_si512(_mm512_broadcast_i32x4(part), _mm512_set1_epi8(-128));
}

// Scores of four rows and eight keys, the keys' scales left out: s[64 · row + key].
FLEX_INLINE void scores4x8(const Queries8& q, const int8_t* k, int64_t stride, int64_t dim, float* s, Ahead& ahead) {
  __m512i sum[8] = {};
  int64_t i = 0;
  for (; i + 16 <= dim; i += 16) {
    const __m512i query = _mm512_loadu_si512(q.codes + 4 * i);
    ahead.fetch(2);
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) sum[j] = dot8(sum[j], keys8(k + j * stride + i), query);
  }
  if (i < dim) {
    const __m512i query = _mm512_loadu_si512(q.codes + 4 * i);
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) sum[j] = dot8(sum[j], keys8(k + j * stride + i, dim - i), query);
  }
  const __m512i to_rows = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
  const __m512 scales = _mm512_permutexvar_ps(to_rows, _mm512_castps128_ps512(_mm_loadu_ps(q.scale)));
  const __m512 offsets = _mm512_permutexvar_ps(to_rows, _mm512_castps128_ps512(_mm_loadu_ps(q.offset)));
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    __m512 x[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) x[j] = _mm512_cvtepi32_ps(sum[4 * half + j]);
    const __m512 out = (sum_quarters(x[0], x[1], x[2], x[3]) + offsets) * scales;
    store_quarters(out, s + 4 * half);
  }
}

// Weights of a block, 64 of them, as 8 bits: returns what one unit is worth. A weight that is no number makes it one, too.
FLEX_INLINE float round_weights8(const vf* p, uint8_t* out) {
  const float all = sum((p[0] + p[1]) + (p[2] + p[3])), top = most(vmax(vmax(p[0], p[1]), vmax(p[2], p[3])));
  if (!(all < std::numeric_limits<float>::infinity())) {
    std::memset(out, 1, kBlock);
    return std::numeric_limits<float>::quiet_NaN();
  }
  const float up = top > 0 ? 255.0f / top : 0.0f;
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 16 * i), _mm512_cvtusepi32_epi8(_mm512_cvtps_epu32((__m512)(p[i] * up))));
  return top / 255.0f;
}

FLEX_INLINE __mmask64 mask8_of(int64_t left) { return left >= 64 ? ~__mmask64{0} : left > 0 ? (__mmask64{1} << left) - 1 : 0; }

// sum[row] += weight · value for R rows over some keys, a multiple of four, in integers; columns stand as `turn_order8` says.
// Weights [R, 64] are 0 for keys that are none.
template <int R>
FLEX_INLINE void weighted_int8(int32_t* sums, int64_t dv, const uint8_t* p, const int8_t* v, int64_t stride, int64_t keys, int64_t dim,
                               Ahead& ahead) {
  for (int64_t i = 0; i < dim; i += 64) {
    const __mmask64 mask = mask8_of(dim - i);
    __m512i sum[R][4];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < 4; ++c) sum[r][c] = _mm512_loadu_si512(sums + r * dv + i + 16 * c);
    for (int64_t j = 0; j < keys; j += 4) {
      ahead.fetch(4);
      __m512i row[4], two[4], four[4];
#pragma GCC unroll 4
      for (int n = 0; n < 4; ++n) row[n] = _mm512_maskz_loadu_epi8(mask, v + (j + n) * stride + i);
      two[0] = _mm512_unpacklo_epi8(row[0], row[1]), two[1] = _mm512_unpackhi_epi8(row[0], row[1]);
      two[2] = _mm512_unpacklo_epi8(row[2], row[3]), two[3] = _mm512_unpackhi_epi8(row[2], row[3]);
      four[0] = _mm512_unpacklo_epi16(two[0], two[2]), four[1] = _mm512_unpackhi_epi16(two[0], two[2]);
      four[2] = _mm512_unpacklo_epi16(two[1], two[3]), four[3] = _mm512_unpackhi_epi16(two[1], two[3]);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        int32_t bytes;
        std::memcpy(&bytes, p + r * kBlock + j, 4);
        const __m512i weights = _mm512_set1_epi32(bytes);
#pragma GCC unroll 4
        for (int c = 0; c < 4; ++c) sum[r][c] = dot8(sum[r][c], weights, four[c]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < 4; ++c) _mm512_storeu_si512(sums + r * dv + i + 16 * c, sum[r][c]);
  }
}

// The same for one to four rows.
FLEX_INLINE void weighted_rows8(int64_t rows, int32_t* sums, int64_t dv, const uint8_t* p, const int8_t* v, int64_t stride, int64_t keys,
                                int64_t dim, Ahead& ahead) {
  switch (rows) {
    case 1: weighted_int8<1>(sums, dv, p, v, stride, keys, dim, ahead); break;
    case 2: weighted_int8<2>(sums, dv, p, v, stride, keys, dim, ahead); break;
    case 3: weighted_int8<3>(sums, dv, p, v, stride, keys, dim, ahead); break;
    default: weighted_int8<4>(sums, dv, p, v, stride, keys, dim, ahead);
  }
}

// acc += unit · sums of one row, both in the order of weighted_int8.
FLEX_INLINE void add_sums8(float* acc, const int32_t* sums, int64_t dv, float unit) {
  for (int64_t i = 0; i < dv; i += 16) store(acc + i, load(acc + i) + (vf)_mm512_cvtepi32_ps(_mm512_loadu_si512(sums + i)) * unit);
}

// Columns as weighted_int8 leaves them, 64 at a time: group m of lane l holds 16·l + 4·m; turning twice restores them.
inline void turn_order8(float* acc, int64_t dv) {
  for (int64_t i = 0; i < dv; i += 64) {
    float from[64];
    std::memcpy(from, acc + i, sizeof from);
    for (int lane = 0; lane < 4; ++lane)
      for (int m = 0; m < 4; ++m) std::memcpy(acc + i + 16 * lane + 4 * m, from + 16 * m + 4 * lane, 16);
  }
}

}  // namespace FLEX_ISA
}  // namespace flex
#endif
