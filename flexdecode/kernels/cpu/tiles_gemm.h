// C [m, n] (+)= A [m, k] · B [k, n] in fp32: products of our own, of fp32 or, where one instruction does it, of bf16.
//
// A and B are counted in words of 32 bits: one fp32, or two neighbours along k in bf16, so that B lies in pairs of rows. A
// block of C stays in registers while k goes by. m is a multiple of kRound and n of 16. Included once for each instruction
// set.
#pragma once

#include "vec.h"

namespace flex {
namespace FLEX_ISA {
namespace tiled {

constexpr int64_t kRound = 16;  // rows that products come in

#if (defined(__AVX512F__) || defined(__aarch64__)) && !defined(FLEX_PORTABLE)
constexpr int kSums = 16;  // vectors of C in registers, of 32
#else
constexpr int kSums = 8;  // of 16
#endif
constexpr int kTileVectors = kSums / 4;

FLEX_INLINE vf multiply_add(vf sum, float a, vf b) { return sum + a * b; }

#if defined(__AVX512BF16__) && !defined(FLEX_PORTABLE)
constexpr bool kPairs = true;  // whether pairs of bf16 are words too
FLEX_INLINE vf multiply_add(vf sum, int32_t a, vf b) {
  return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(a), (__m512bh)b);
}
#else
constexpr bool kPairs = false;
#endif

template <int rows, int vectors, class Word>
FLEX_INLINE void gemm_tile(int64_t k, int64_t lda, int64_t ldb, int64_t ldc, bool add, const Word* a, const Word* b, float* c) {
  vf sum[rows][vectors] = {};
  if (add)
    for (int r = 0; r < rows; ++r)
      for (int v = 0; v < vectors; ++v) sum[r][v] = load(c + r * ldc + v * W);
  for (int64_t i = 0; i < k; ++i, b += ldb) {
    vf right[vectors];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) std::memcpy(&right[v], b + v * W, sizeof(vf));
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
      Word left;
      std::memcpy(&left, a + r * lda + i, sizeof left);  // it may be a pair of bf16
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) sum[r][v] = multiply_add(sum[r][v], left, right[v]);
    }
  }
  for (int r = 0; r < rows; ++r)
    for (int v = 0; v < vectors; ++v) store(c + r * ldc + v * W, sum[r][v]);
}

// Columns outside, so that a panel of B stays in the nearest cache while all rows pass over it.
template <int vectors, class Word>
FLEX_INLINE void gemm_panel(int64_t m, int64_t k, int64_t lda, int64_t ldb, int64_t ldc, bool add, const Word* a, const Word* b, float* c) {
  constexpr int rows = vectors == 3 ? 4 : kSums / vectors;
  for (int64_t i = 0; i < m; i += rows) gemm_tile<rows, vectors>(k, lda, ldb, ldc, add, a + i * lda, b, c + i * ldc);
}

template <class Word>
inline void gemm(int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb, int64_t ldc, bool add, const Word* a, const Word* b, float* c) {
  int64_t j = 0;
  for (; j + kTileVectors * W <= n; j += kTileVectors * W) gemm_panel<kTileVectors>(m, k, lda, ldb, ldc, add, a, b + j, c + j);
  const int64_t left = (n - j) / W;
  if (kTileVectors > 2 && left == 3) gemm_panel<3>(m, k, lda, ldb, ldc, add, a, b + j, c + j);
  if (kTileVectors > 2 && left == 2) gemm_panel<2>(m, k, lda, ldb, ldc, add, a, b + j, c + j);
  if (left == 1) gemm_panel<1>(m, k, lda, ldb, ldc, add, a, b + j, c + j);
}

}  // namespace tiled
}  // namespace FLEX_ISA
}  // namespace flex
