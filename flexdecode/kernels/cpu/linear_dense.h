// Products of a few rows of activations with a matrix of floats, as it lies. Included once for each instruction set; knows no torch.
#pragma once

#include "linear_rows.h"

namespace flex {
namespace FLEX_ISA {

constexpr int DENSE_ROWS = W == 16 ? 4 : 2;  // rows of activations that meet rows of the matrix at a time

// Products of the numbers of one line, added to acc.
template <int R, int M, class T>
FLEX_INLINE void dense_line(const T* w, int64_t w_stride, const T* x, int64_t x_stride, vf (&acc)[R][M]) {
  for (int v = 0; v < static_cast<int>(64 / (sizeof(T) * W)); ++v)
    for (int r = 0; r < R; ++r) {
      const vf weight = load(w + r * w_stride + v * W);
      for (int m = 0; m < M; ++m) acc[r][m] += weight * load(x + m * x_stride + v * W);
    }
}
template <int R, int M, class T>
FLEX_INLINE void dense_rest(const T* w, int64_t w_stride, const T* x, int64_t x_stride, int64_t count, vf (&acc)[R][M]) {
  for (int64_t i = 0; i < count; i += W) {
    const int n = static_cast<int>(std::min<int64_t>(W, count - i));
    for (int r = 0; r < R; ++r) {
      const vf weight = load_part(w + r * w_stride + i, n);
      for (int m = 0; m < M; ++m) acc[r][m] += weight * load_part(x + m * x_stride + i, n);
    }
  }
}

#if defined(__AVX512BF16__) && !defined(FLEX_PORTABLE)
// bf16 by dot products of pairs: 32 columns a register.
template <int R, int M>
FLEX_INLINE void dense_line(const bf16* w, int64_t w_stride, const bf16* x, int64_t x_stride, vf (&acc)[R][M]) {
  __m512bh weight[R];
  for (int r = 0; r < R; ++r) weight[r] = (__m512bh)_mm512_loadu_si512(w + r * w_stride);
  for (int m = 0; m < M; ++m) {
    const __m512bh own = (__m512bh)_mm512_loadu_si512(x + m * x_stride);
    for (int r = 0; r < R; ++r) acc[r][m] = (vf)_mm512_dpbf16_ps((__m512)acc[r][m], weight[r], own);
  }
}
template <int R, int M>
FLEX_INLINE void dense_rest(const bf16* w, int64_t w_stride, const bf16* x, int64_t x_stride, int64_t count, vf (&acc)[R][M]) {
  const __mmask32 some = static_cast<__mmask32>((uint64_t{1} << count) - 1);
  for (int m = 0; m < M; ++m) {
    const __m512bh own = (__m512bh)_mm512_maskz_loadu_epi16(some, x + m * x_stride);
    for (int r = 0; r < R; ++r)
      acc[r][m] = (vf)_mm512_dpbf16_ps((__m512)acc[r][m], (__m512bh)_mm512_maskz_loadu_epi16(some, w + r * w_stride), own);
  }
}
#endif

// R rows of the matrix, side by side, against M rows of activations: y[m][r]. Each result has C sums, line by line in turns,
// since one alone would wait for itself.
template <int R, int M, int C, class T>
FLEX_INLINE void dense_block(const T* w, int64_t w_stride, const T* x, int64_t x_stride, int64_t k, float (*y)[TILE]) {
  constexpr int64_t line = 64 / sizeof(T);
  vf acc[C][R][M] = {};
  // What is asked for lies so far ahead in each row, which goes on R rows below where it ends.
  const int64_t lead = LEAD / R / static_cast<int64_t>(sizeof(T)), wrap = R * w_stride - k;
  const T* ahead = w + lead / k * R * w_stride + lead % k;
  int64_t left = R == 1 ? k : k - lead % k, i = 0;
  while (i + C * line <= k) {
    for (int c = 0; c < C; ++c, i += line) {
      for (int r = 0; r < R; ++r) ask(ahead + c * line + r * w_stride);
      dense_line<R, M>(w + i, w_stride, x + i, x_stride, acc[c]);
    }
    ahead += C * line, left -= C * line;
    if (R > 1 && left <= 0) ahead += wrap, left += k;
  }
#pragma GCC unroll 4
  for (int c = 0; c < C; ++c) {
    if (i + line > k) break;
    dense_line<R, M>(w + i, w_stride, x + i, x_stride, acc[c]);
    i += line;
  }
  if (i < k) dense_rest<R, M>(w + i, w_stride, x + i, x_stride, k - i, acc[C - 1]);
  for (int c = 1; c < C; ++c)
    for (int r = 0; r < R; ++r)
      for (int m = 0; m < M; ++m) acc[0][r][m] += acc[c][r][m];
  for (int m = 0; m < M; ++m)
    for (int r = 0; r < R; ++r) y[m][r] = sum(acc[0][r][m]);
}

// A tile against M rows of activations. One row of the matrix is one ascending stream, which memory likes best; with more
// activations four share what is loaded of them, and where all are to be alike always.
template <int M, bool alike, class T>
void dense_tile(const DenseMatrix& w, const T* x, int64_t stride, int64_t tile, float (*totals)[TILE]) {
  constexpr bool few = M <= 2 && !alike;
  constexpr int R = few ? 1 : 4, C = few ? 4 : 1;
  const int64_t at = tile * TILE, count = std::min<int64_t>(TILE, w.n - at);
  const T* from = static_cast<const T*>(w.w) + at * w.stride;
  const auto into = [&](int64_t n) { return reinterpret_cast<float(*)[TILE]>(&totals[0][n]); };
  int64_t n = 0;
  for (; n + R <= count; n += R, from += R * w.stride) dense_block<R, M, C>(from, w.stride, x, stride, w.k, into(n));
  for (; n < count; ++n, from += w.stride) dense_block<1, M, C>(from, w.stride, x, stride, w.k, into(n));
}

template <class T, bool alike>
void dense_as(const DenseMatrix& w, const Rows& in, const Out& out, int64_t first, int64_t last) {
  const T* x = static_cast<const T*>(in.x);
  const int64_t size = bytes_of(out.type);
  for (int64_t tile = first; tile < last; ++tile)
    for (int64_t row = 0; row < in.count; row += DENSE_ROWS) {
      const T* own = x + row * in.stride;
      alignas(64) float totals[DENSE_ROWS][TILE];
      Out part = out;
      part.rows = std::min<int64_t>(DENSE_ROWS, in.count - row);
      part.y = static_cast<char*>(out.y) + row * out.stride * size;
      switch (part.rows) {
        case 1: dense_tile<1, alike>(w, own, in.stride, tile, totals); break;
        case 2: dense_tile<2, alike>(w, own, in.stride, tile, totals); break;
        case 3: dense_tile<std::min(3, DENSE_ROWS), alike>(w, own, in.stride, tile, totals); break;
        default: dense_tile<DENSE_ROWS, alike>(w, own, in.stride, tile, totals);
      }
      put_tile(totals, part, tile, w.n);
    }
}

inline void dense(const DenseMatrix& w, const Rows& in, const Out& out, int64_t first, int64_t last) {
  const auto as = [&](auto type) {
    using T = decltype(type);
    in.alike ? dense_as<T, true>(w, in, out, first, last) : dense_as<T, false>(w, in, out, first, last);
  };
  switch (in.type) {
    case Float::fp32: return as(float{});
    case Float::bf16: return as(bf16{});
    case Float::fp16: return as(fp16{});
  }
}

}  // namespace FLEX_ISA
}  // namespace flex
