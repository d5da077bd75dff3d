// Products of a few rows of activations with an int8 matrix (its layout: linear.h), and its codes turned to floats.
//
// Codes are exact in fp32 and so are their products with bf16; sums are fp32, and the row's scale comes last. Included once
// for each instruction set; knows no torch.
#pragma once

#include "linear_rows.h"

namespace flex {
namespace FLEX_ISA {

// V vectors of one tile, from `first` on. C sums for each result, added at the end: one alone would wait for itself.
template <int M, int V, int C>
FLEX_INLINE void tile_int8(const Int8Matrix& w, int64_t tile, int first, const float* x, float (*totals)[TILE]) {
  const int8_t* codes = w.codes + tile * w.k * TILE + first * W;
  vf acc[C][V][M] = {};
  int64_t k = 0;
  for (; k + 4 <= w.k; k += 4, codes += 4 * TILE, x += 4 * M) {
    ask_ahead(codes);
    ask_ahead(codes + 64);
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c)
      for (int v = 0; v < V; ++v) {
        const vf code = load(codes + c * TILE + v * W);
        for (int m = 0; m < M; ++m) acc[c % C][v][m] += code * x[c * M + m];
      }
  }
  for (; k < w.k; ++k, codes += TILE, x += M)
    for (int v = 0; v < V; ++v) {
      const vf code = load(codes + v * W);
      for (int m = 0; m < M; ++m) acc[0][v][m] += code * x[m];
    }
  for (int v = 0; v < V; ++v)
    for (int m = 0; m < M; ++m) {
      vf sum = acc[0][v][m];
      for (int c = 1; c < C; ++c) sum += acc[c][v][m];
      store(totals[m] + (first + v) * W, sum * load(w.scales + tile * TILE + (first + v) * W));
    }
}

#if defined(__AVX512BF16__) && !defined(FLEX_PORTABLE)
// Two columns of sixteen rows as pairs of bf16: a float that holds 8 bits is a bf16 with zeros behind it.
FLEX_INLINE __m512bh pairs_of(const int8_t* even, const int8_t* odd) {
  return (__m512bh)_mm512_mask_mov_epi16(_mm512_srli_epi32((__m512i)load(even), 16), 0xaaaaaaaa, (__m512i)load(odd));
}

// A tile by bf16 dot products, two columns at a time.
template <int M, int C>
FLEX_INLINE void tile_int8_pairs(const Int8Matrix& w, int64_t tile, const uint32_t* x, float (*totals)[TILE]) {
  const int8_t* codes = w.codes + tile * w.k * TILE;
  __m512 acc[C][2][M] = {};
  int64_t k = 0;
  for (; k + 8 <= w.k; k += 8, codes += 8 * TILE, x += 4 * M) {
#pragma GCC unroll 4
    for (int s = 0; s < 4; ++s) {
      const int8_t* even = codes + 2 * s * TILE;
      ask_ahead(even);
      const __m512bh a = pairs_of(even, even + TILE), b = pairs_of(even + 16, even + TILE + 16);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const __m512bh pair = (__m512bh)_mm512_set1_epi32(static_cast<int>(x[s * M + m]));
        acc[s % C][0][m] = _mm512_dpbf16_ps(acc[s % C][0][m], a, pair);
        acc[s % C][1][m] = _mm512_dpbf16_ps(acc[s % C][1][m], b, pair);
      }
    }
  }
  for (; k < w.k; k += 2, codes += 2 * TILE, x += M) {
    static constexpr int8_t nothing[TILE] = {};
    const int8_t* odd = k + 1 < w.k ? codes + TILE : nothing;
    const __m512bh a = pairs_of(codes, odd), b = pairs_of(codes + 16, odd + 16);
    for (int m = 0; m < M; ++m) {
      const __m512bh pair = (__m512bh)_mm512_set1_epi32(static_cast<int>(x[m]));
      acc[0][0][m] = _mm512_dpbf16_ps(acc[0][0][m], a, pair);
      acc[0][1][m] = _mm512_dpbf16_ps(acc[0][1][m], b, pair);
    }
  }
  for (int v = 0; v < 2; ++v)
    for (int m = 0; m < M; ++m) {
      vf sum = (vf)acc[0][v][m];
      for (int c = 1; c < C; ++c) sum += (vf)acc[c][v][m];
      store(totals[m] + v * W, sum * load(w.scales + tile * TILE + v * W));
    }
}
#endif

template <int M, bool alike>
void int8_rows(const Int8Matrix& w, const Prepared& in, bool pairs, const Out& out, int64_t first, int64_t last) {
  constexpr int V = vectors_of(M);
  for (int64_t tile = first; tile < last; ++tile) {
    alignas(64) float totals[M][TILE];
#if defined(__AVX512BF16__) && !defined(FLEX_PORTABLE)
    if (pairs) tile_int8_pairs<M, sums_of(2 * M, alike)>(w, tile, reinterpret_cast<const uint32_t*>(in.x), totals);
    else
#endif
      for (int v = 0; v < VECTORS; v += V) tile_int8<M, V, sums_of(M * V + 1, alike)>(w, tile, v, in.x, totals);
    put_tile(totals, out, tile, w.n);
  }
}

inline void int8(const Int8Matrix& w, const Prepared& in, Float type, const Out& out, int64_t first, int64_t last) {
  by_rows(in, [&](auto rows, auto alike) { int8_rows<rows(), alike()>(w, in, PAIRS && type == Float::bf16, out, first, last); });
}

template <class T>
void dequantize8_as(const Int8Matrix& w, int64_t first, int64_t last, T* out, int64_t stride) {
  for (int64_t tile = first; tile < last; ++tile, out += TILE) {
    const int8_t* codes = w.codes + tile * w.k * TILE;
    for (int64_t k = 0; k < w.k; ++k, codes += TILE) {
      ask_ahead(codes);
      for (int v = 0; v < VECTORS; ++v) put(out + k * stride + v * W, load(codes + v * W));
    }
  }
}

inline void dequantize8(const Int8Matrix& w, int64_t first, int64_t last, void* out, int64_t stride, Float type) {
  switch (type) {
    case Float::fp32: return dequantize8_as(w, first, last, static_cast<float*>(out), stride);
    case Float::bf16: return dequantize8_as(w, first, last, static_cast<bf16*>(out), stride);
    case Float::fp16: return dequantize8_as(w, first, last, static_cast<fp16*>(out), stride);
  }
}

}  // namespace FLEX_ISA
}  // namespace flex
