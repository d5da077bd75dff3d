// Products of a few rows of activations with an int4 matrix (its layout: linear.h), and the matrix turned back to floats.
//
// Codes less 8 are exact in bf16, products of two bf16 are exact in fp32, and sums are fp32. Once a group its sum is scaled,
// with the group's offset times the sum of its activations. Included once for each instruction set; knows no torch.
#pragma once

#include "linear_rows.h"

namespace flex {
namespace FLEX_ISA {

constexpr int64_t LEAD_GROUPS = 8;  // groups whose scales are asked for ahead

// Four bits of each lane, from bit 4 · `place` on, less 8.
FLEX_INLINE vf code_at(vu words, int place) {
#if defined(__AVX512F__) && !defined(FLEX_PORTABLE)
  const __m512 values = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
  return (vf)_mm512_permutexvar_ps((__m512i)(words >> (4 * place)), values);
#else
  return __builtin_convertvector((vi)((words >> (4 * place)) & 15u), vf) - 8.0f;
#endif
}

FLEX_INLINE vu load_words(const uint32_t* p) { vu v; std::memcpy(&v, p, sizeof v); return v; }

// A group's scales and offsets at lanes [W · v, W · v + W) of a tile.
FLEX_INLINE vf scale_at(const Int4Matrix& w, int64_t group, int v) {
  const int64_t at = group * TILE + v * W;
  return w.half_scales ? load(static_cast<const fp16*>(w.scales) + at) : load(static_cast<const float*>(w.scales) + at);
}
FLEX_INLINE vf offset_at(const Int4Matrix& w, int64_t group, int v) {
  const int64_t at = group * TILE + v * W;
  return w.offset_type == Offsets::int8 ? load(static_cast<const int8_t*>(w.offsets) + at) : load(static_cast<const float*>(w.offsets) + at);
}

FLEX_INLINE void ask_group(const Int4Matrix& w, int64_t group) {
  const int64_t at = (group + LEAD_GROUPS) * TILE;
  const char* scales = static_cast<const char*>(w.scales) + (w.half_scales ? 2 : 4) * at;
  ask(scales);
  if (!w.half_scales) ask(scales + 64);
  if (w.offset_type == Offsets::none) return;
  const char* offsets = static_cast<const char*>(w.offsets) + (w.offset_type == Offsets::int8 ? 1 : 4) * at;
  ask(offsets);
  if (w.offset_type == Offsets::fp32) ask(offsets + 64);
}

// total += scale · (sum + offset · sum of activations), for V vectors from `first` on and M rows.
template <int M, int V>
FLEX_INLINE void add_group(const Int4Matrix& w, int64_t group, int first, const float* sums, const vf (&acc)[V][M], float (*totals)[TILE]) {
  for (int v = 0; v < V; ++v) {
    const vf scale = scale_at(w, group, first + v);
    const vf offset = w.offset_type == Offsets::none ? vf{} : offset_at(w, group, first + v);
    for (int m = 0; m < M; ++m) {
      float* total = totals[m] + (first + v) * W;
      const vf sum = w.offset_type == Offsets::none ? acc[v][m] : acc[v][m] + offset * sums[m];
      store(total, load(total) + scale * sum);
    }
  }
}

// V vectors of one tile, from `first` on, by fp32 products. C sums for each result, added at the end: one alone would wait for
// itself.
template <int M, int V, int C>
FLEX_INLINE void tile_floats(const Int4Matrix& w, int64_t tile, int first, const Prepared& in, float (*totals)[TILE]) {
  const uint32_t* codes = w.codes + tile * w.groups * w.words * TILE + first * W;
  const float* x = in.x;
  for (int64_t g = 0; g < w.groups; ++g) {
    vf acc[C][V][M] = {};
    ask_group(w, tile * w.groups + g);
    for (int64_t j = 0; j < w.words; ++j, codes += TILE, x += 8 * M) {
      vu words[V];
      for (int v = 0; v < V; ++v) words[v] = load_words(codes + v * W);
      ask_ahead(codes);
      ask_ahead(codes + 16);
#pragma GCC unroll 8
      for (int c = 0; c < 8; ++c)
        for (int v = 0; v < V; ++v) {
          const vf code = code_at(words[v], c / 2 + 4 * (c % 2));
          for (int m = 0; m < M; ++m) acc[c % C][v][m] += code * x[c * M + m];
        }
    }
    for (int c = 1; c < C; ++c)
      for (int v = 0; v < V; ++v)
        for (int m = 0; m < M; ++m) acc[0][v][m] += acc[c][v][m];
    add_group<M, V>(w, tile * w.groups + g, first, in.sums + g * M, acc[0], totals);
  }
}

#if defined(__AVX512BF16__) && !defined(FLEX_PORTABLE)
// Codes less 8 in bf16. The permutation looks at five bits of an index, of which the table ignores the fifth: it belongs to
// another column.
alignas(64) constexpr uint16_t CODES[32] = {
    0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
    0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};

// A tile by bf16 dot products: two columns of sixteen rows at a time.
template <int M, int C>
FLEX_INLINE void tile_pairs(const Int4Matrix& w, int64_t tile, const Prepared& in, float (*totals)[TILE]) {
  const __m512i table = _mm512_load_si512(CODES);
  const uint32_t* codes = w.codes + tile * w.groups * w.words * TILE;
  const uint32_t* x = reinterpret_cast<const uint32_t*>(in.x);
  for (int64_t g = 0; g < w.groups; ++g) {
    __m512 acc[C][2][M] = {};
    ask_group(w, tile * w.groups + g);
#pragma GCC unroll 4
    for (int64_t j = 0; j < w.words; ++j, codes += TILE, x += 4 * M) {
      const __m512i low = _mm512_loadu_si512(codes), high = _mm512_loadu_si512(codes + 16);
      ask_ahead(codes);
      ask_ahead(codes + 16);
#pragma GCC unroll 4
      for (int s = 0; s < 4; ++s) {
        const __m512bh a = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(low, 4 * s), table);
        const __m512bh b = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(high, 4 * s), table);
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
          const __m512bh pair = (__m512bh)_mm512_set1_epi32(static_cast<int>(x[s * M + m]));
          acc[s % C][0][m] = _mm512_dpbf16_ps(acc[s % C][0][m], a, pair);
          acc[s % C][1][m] = _mm512_dpbf16_ps(acc[s % C][1][m], b, pair);
        }
      }
    }
    vf sums[2][M];
    for (int v = 0; v < 2; ++v)
      for (int m = 0; m < M; ++m) {
        sums[v][m] = (vf)acc[0][v][m];
        for (int c = 1; c < C; ++c) sums[v][m] += (vf)acc[c][v][m];
      }
    add_group<M, 2>(w, tile * w.groups + g, 0, in.sums + g * M, sums, totals);
  }
}
#endif

template <int M, bool alike>
void int4_rows(const Int4Matrix& w, const Prepared& in, bool pairs, const Out& out, int64_t first, int64_t last) {
  constexpr int V = vectors_of(M);
  for (int64_t tile = first; tile < last; ++tile) {
    alignas(64) float totals[M][TILE] = {};
#if defined(__AVX512BF16__) && !defined(FLEX_PORTABLE)
    if (pairs) tile_pairs<M, sums_of(2 * M, alike)>(w, tile, in, totals);
    else
#endif
      for (int v = 0; v < VECTORS; v += V) tile_floats<M, V, sums_of(M * V + 1, alike)>(w, tile, v, in, totals);
    put_tile(totals, out, tile, w.n);
  }
}

inline void int4(const Int4Matrix& w, const Prepared& in, Float type, const Out& out, int64_t first, int64_t last) {
  by_rows(in, [&](auto rows, auto alike) { int4_rows<rows(), alike()>(w, in, PAIRS && type == Float::bf16, out, first, last); });
}

template <class T>
void dequantize4_as(const Int4Matrix& w, int64_t first, int64_t last, T* out, int64_t stride) {
  const int64_t group = w.k / w.groups;
  for (int64_t tile = first; tile < last; ++tile, out += TILE) {
    const uint32_t* codes = w.codes + tile * w.groups * w.words * TILE;
    for (int64_t g = 0; g < w.groups; ++g) {
      vf scale[VECTORS], offset[VECTORS] = {};
      for (int v = 0; v < VECTORS; ++v) {
        scale[v] = scale_at(w, tile * w.groups + g, v);
        if (w.offset_type != Offsets::none) offset[v] = offset_at(w, tile * w.groups + g, v);
      }
      T* row = out + g * group * stride;
      for (int64_t j = 0; j < w.words; ++j, codes += TILE) {
        ask_ahead(codes);
        ask_ahead(codes + 16);
        const int64_t columns = std::min<int64_t>(8, group - 8 * j);
        for (int64_t c = 0; c < columns; ++c, row += stride)
          for (int v = 0; v < VECTORS; ++v)
            put(row + v * W, (code_at(load_words(codes + v * W), static_cast<int>(c / 2 + 4 * (c % 2))) + offset[v]) * scale[v]);
      }
    }
  }
}

inline void dequantize4(const Int4Matrix& w, int64_t first, int64_t last, void* out, int64_t stride, Float type) {
  switch (type) {
    case Float::fp32: return dequantize4_as(w, first, last, static_cast<float*>(out), stride);
    case Float::bf16: return dequantize4_as(w, first, last, static_cast<bf16*>(out), stride);
    case Float::fp16: return dequantize4_as(w, first, last, static_cast<fp16*>(out), stride);
  }
}

}  // namespace FLEX_ISA
}  // namespace flex
