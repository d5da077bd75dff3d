// Keys and values of a pass, gathered from their slots and laid out as the right-hand matrices of two products.
//
// E is the type that products compute in. Keys become columns, K [words, keys] of 32-bit words: one fp32, or a pair of
// 16-bit neighbours. Values stay rows, in fp32 as they are, in 16 bits two rows interleaved. Keys beyond the sequence are
// never read; their values are zeros. Included once for each instruction set.
#pragma once

#include <algorithm>
#include <type_traits>

#include "attend.h"
#include "turn.h"
#include "vec.h"

namespace flex {
namespace FLEX_ISA {
namespace tiled {

constexpr int64_t kWide = 2 * kBlock;  // keys of a pass over two blocks that all rows see

template <class E>
constexpr int64_t kPair = 4 / static_cast<int64_t>(sizeof(E));  // elements of a word

// Where the first n of `keys` (64 or 128) lie; the rest are behind the end of the sequence.
struct Slots {
  int64_t n = 0, keys = 0;
  int64_t at[kWide];

  // One more block: positions [start, start + count).
  void add(const AttendArgs& a, const Tile& tile, int64_t start, int64_t count) {
    int64_t* to = at + n;
    for (int64_t j = 0; j < count;) {
      int64_t slot = tile.base + start + j, run = count - j;
      if (tile.table) {
        const int64_t page = (start + j) / a.page, inside = start + j - page * a.page;
        run = std::min(run, a.page - inside);
        slot = tile.table[page] * a.page + inside;
      }
      for (const int64_t stop = j + run; j < stop; ++j, ++slot) to[j] = slot;
    }
    n += count;
    keys += kBlock;
  }
};

FLEX_INLINE vu bits_of(vf v) { return (vu)v; }

// Rounds W floats. bf16 to nearest, ties to even; NaN stays NaN.
FLEX_INLINE void round_to(float* to, vf v) { store(to, v); }
FLEX_INLINE void round_to(bf16* to, vf v) {
#if defined(__AVX512BF16__) && !defined(FLEX_PORTABLE)
  const __m256bh h = _mm512_cvtneps_pbh((__m512)v);
#else
  const vu bits = bits_of(v), rounded = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
  const vh h = __builtin_convertvector(v == v ? rounded : vu{} + 0x7fc0u, vh);
#endif
  std::memcpy(to, &h, sizeof h);
}
FLEX_INLINE void round_to(fp16* to, vf v) {
#if defined(__AVX512F__) && !defined(FLEX_PORTABLE)
  const __m256i h = _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  std::memcpy(to, &h, sizeof h);
#elif defined(__AVX2__) && !defined(FLEX_PORTABLE)
  const __m128i h = _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  std::memcpy(to, &h, sizeof h);
#else
  for (int i = 0; i < W; ++i) narrow(v[i], to + i);
#endif
}

// A row of `dim` as E, zeros up to `padded`. Only exact conversions are asked for: widening, and codes to bf16.
template <class T, class E>
FLEX_INLINE void convert(const T* from, int64_t dim, int64_t padded, E* to) {
  if constexpr (sizeof(T) == sizeof(E)) {
    std::memcpy(to, from, dim * sizeof(E));
  } else {
    int64_t i = 0;
    for (; i + W <= dim; i += W) round_to(to + i, load(from + i));
    for (; i < dim; ++i) narrow(widen(from[i]), to + i);
  }
  if (padded > dim) std::memset(static_cast<void*>(to + dim), 0, (padded - dim) * sizeof(E));
}

// The rows of a pass as E: where they lie, if they can be read so, or copied to `own` [keys, padded].
template <class T, class E>
inline void rows_of(const T* from, int64_t stride, const Slots& slots, int64_t dim, int64_t padded, E* own, const E* nothing,
                    const E** rows) {
  constexpr bool same = sizeof(T) == sizeof(E);
  for (int64_t j = 0; j < slots.n; ++j) {
    const T* row = from + slots.at[j] * stride;
    if (same && dim % kPair<E> == 0) {
      rows[j] = reinterpret_cast<const E*>(row);
    } else {
      convert(row, dim, padded, own + j * padded);
      rows[j] = own + j * padded;
    }
  }
  for (int64_t j = slots.n; j < slots.keys; ++j) rows[j] = nothing;
}

// Keys as columns: to[word][key].
inline void turn(const void* const* rows, int64_t keys, int64_t words, void* out) {
  int32_t* to = static_cast<int32_t*>(out);
#if defined(__AVX512F__) && !defined(FLEX_PORTABLE)
  for (int64_t j = 0; j < keys; j += 16)
    for (int64_t at = 0; at < words; at += 16) turn16(rows + j, at, words, to + j, keys);
#else
  for (int64_t j = 0; j < keys; ++j)
    for (int64_t at = 0; at < words; ++at) std::memcpy(to + at * keys + j, static_cast<const char*>(rows[j]) + 4 * at, 4);
#endif
}

// Two rows of 16-bit values interleaved: to[2c] = a[c], to[2c + 1] = b[c]; zeros up to `padded`.
FLEX_INLINE void interleave(const uint16_t* a, const uint16_t* b, int64_t dim, int64_t padded, uint16_t* to) {
  int64_t c = 0;
#if defined(__AVX512BW__) && !defined(FLEX_PORTABLE)
  const __m512i low = _mm512_add_epi16(_mm512_set1_epi32(0x200000), _mm512_srli_epi16(_mm512_set_epi16(
      31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17, 16, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), 1));
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  for (; c + 32 <= dim; c += 32) {
    const __m512i x = _mm512_loadu_si512(a + c), y = _mm512_loadu_si512(b + c);
    _mm512_storeu_si512(to + 2 * c, _mm512_permutex2var_epi16(x, low, y));
    _mm512_storeu_si512(to + 2 * c + 32, _mm512_permutex2var_epi16(x, high, y));
  }
#endif
  for (; c < dim; ++c) to[2 * c] = a[c], to[2 * c + 1] = b[c];
  if (padded > dim) std::memset(to + 2 * dim, 0, 2 * (padded - dim) * sizeof(uint16_t));
}

// Whether a row holds only numbers: no exponent is all ones.
FLEX_INLINE bool finite(const float* p, int64_t n) {
  uint32_t most = 0;
  for (int64_t i = 0; i < n; ++i) {
    uint32_t bits;
    std::memcpy(&bits, p + i, 4);
    most = std::max(most, bits & 0x7fffffffu);
  }
  return most < 0x7f800000u;
}
template <class E>
FLEX_INLINE bool finite(const E* p, int64_t n) {
  constexpr uint16_t limit = std::is_same_v<E, fp16> ? 0x7c00 : 0x7f80;
  uint16_t most = 0;
  for (int64_t i = 0; i < n; ++i) most = std::max<uint16_t>(most, p[i].bits & 0x7fff);
  return most < limit;
}

// Values as they are multiplied: [keys, padded] or, in 16 bits, [keys / 2, padded, 2].
template <class E>
inline void lay_values(const E* const* rows, int64_t keys, int64_t dim, int64_t padded, E* to) {
  if constexpr (sizeof(E) == 4) {
    for (int64_t j = 0; j < keys; ++j) {
      std::memcpy(to + j * padded, rows[j], dim * 4);
      if (padded > dim) std::memset(to + j * padded + dim, 0, (padded - dim) * 4);
    }
  } else {
    for (int64_t j = 0; j < keys; j += 2)
      interleave(&rows[j]->bits, &rows[j + 1]->bits, dim, padded, &to[j * padded].bits);
  }
}

}  // namespace tiled
}  // namespace FLEX_ISA
}  // namespace flex
