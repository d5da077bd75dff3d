// Squares of words turned, rows to columns, in registers. Included once for each instruction set.
#pragma once

#include <algorithm>
#include <cstdint>

#include "vec.h"

namespace flex {
namespace FLEX_ISA {

#if defined(__AVX512F__) && !defined(FLEX_PORTABLE)
// A square of 16 words by 16 rows, words `at` to `words` of them: to[word][row]; of words that are not there, nothing.
FLEX_INLINE void turn16(const void* const* rows, int64_t at, int64_t words, int32_t* to, int64_t stride) {
  const __mmask16 mask = words - at >= 16 ? 0xffff : (1u << (words - at)) - 1;
  __m512i r[16], t[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) r[i] = _mm512_maskz_loadu_epi32(mask, static_cast<const char*>(rows[i]) + 4 * at);
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {  // quarter q of r[i + c]: word 4q + c of rows i … i + 3
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  const int64_t n = std::min<int64_t>(16, words - at);
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    const __m512i a = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x88), b = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x88);
    const __m512i d = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xdd), e = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xdd);
    if (c < n) _mm512_storeu_si512(to + (at + c) * stride, _mm512_shuffle_i32x4(a, b, 0x88));
    if (4 + c < n) _mm512_storeu_si512(to + (at + 4 + c) * stride, _mm512_shuffle_i32x4(d, e, 0x88));
    if (8 + c < n) _mm512_storeu_si512(to + (at + 8 + c) * stride, _mm512_shuffle_i32x4(a, b, 0xdd));
    if (12 + c < n) _mm512_storeu_si512(to + (at + 12 + c) * stride, _mm512_shuffle_i32x4(d, e, 0xdd));
  }
}
#endif

}  // namespace FLEX_ISA
}  // namespace flex
