// Activations laid out as the products read them, and results narrowed to the type in which they are wanted. Included once
// for each instruction set; knows no torch.
#pragma once

#include <algorithm>
#include <type_traits>

#include "linear.h"
#include "vec.h"

namespace flex {
namespace FLEX_ISA {

#if defined(__AVX512BF16__) && !defined(FLEX_PORTABLE)
constexpr bool PAIRS = true;  // bf16 activations are multiplied in pairs, as they are
#else
constexpr bool PAIRS = false;
#endif

#if defined(__AMX_BF16__)
constexpr bool TALL = true;  // and in tile registers, where there are enough of them
#else
constexpr bool TALL = false;
#endif

// Measured. In fp32 sixteen lanes are quicker than torch at any number of rows, and so are tile registers.
inline int64_t few_rows(Float type) {
  if (TALL && type == Float::bf16) return INT64_MAX;
  if (PAIRS && type == Float::bf16) return 192;
  return W == 16 ? INT64_MAX : W == 8 ? 32 : 16;
}

constexpr int VECTORS = TILE / W;  // of a tile's rows
// Of them, how many are computed together with M rows of activations.
constexpr int vectors_of(int m) { return VECTORS < 4 ? VECTORS : m == 1 ? 4 : 2; }
// Running sums of a result, by the registers that one of each takes: one alone would wait for itself. Where rows are to be
// alike there is one in any case.
constexpr int sums_of(int registers, bool alike) { return alike || registers > 8 ? 1 : registers > 4 ? 2 : 4; }

// Calls f with the number of rows and whether they are to be alike, both known to the compiler.
template <class F>
FLEX_INLINE void by_rows(const Prepared& in, const F& f) {
  const auto known = [&](auto rows) {
    if (in.alike) f(rows, std::true_type{});
    else f(rows, std::false_type{});
  };
  switch (in.padded) {
    case 1: return known(std::integral_constant<int, 1>{});
    case 2: return known(std::integral_constant<int, 2>{});
    case 3: return known(std::integral_constant<int, 3>{});
    case 4: return known(std::integral_constant<int, 4>{});
    case 6: return known(std::integral_constant<int, 6>{});
    default: return known(std::integral_constant<int, MOST_ROWS>{});
  }
}

// Bytes asked for ahead: far, into the second-level cache, where more can be under way; and from there in time into the first.
constexpr int64_t LEAD = 12288, SOON = 1024;

FLEX_INLINE void ask(const void* p) { __builtin_prefetch(p, 0, 3); }
FLEX_INLINE void ask_ahead(const void* p) {
  __builtin_prefetch(static_cast<const char*>(p) + LEAD, 0, 2);
  ask(static_cast<const char*>(p) + SOON);
}

FLEX_INLINE void put(float* p, vf v) { store(p, v); }
FLEX_INLINE void put(bf16* p, vf v) {
  const vu bits = (vu)v;
  const vu rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const vu nan = (bits >> 16) | 0x40u;
  const vh narrowed = __builtin_convertvector((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded, vh);
  std::memcpy(p, &narrowed, sizeof narrowed);
}
FLEX_INLINE void put(fp16* p, vf v) {
#if defined(__AVX512F__) && !defined(FLEX_PORTABLE)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__) && !defined(FLEX_PORTABLE)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < W; ++i) narrow(v[i], p + i);
#endif
}

// A tile's results, one row of activations: TILE floats to `count` numbers.
template <class T>
void put_row(float* y, T* out, const float* bias, int64_t count, const Out& how) {
  if (bias)
    for (int64_t i = 0; i < count; ++i) y[i] += bias[i];
  if (how.add) {  // what is added has been rounded, as if it had been a result of its own
    for (int64_t i = 0; i < count; ++i) {
      T rounded;
      narrow(y[i], &rounded);
      y[i] = widen(out[i]) + how.factor * widen(rounded);
    }
  }
  int64_t i = 0;
  for (; i + W <= count; i += W) put(out + i, load(y + i));
  for (; i < count; ++i) narrow(y[i], out + i);
}

inline void put_tile(float (*y)[TILE], const Out& out, int64_t tile, int64_t n) {
  const int64_t at = tile * TILE, count = std::min<int64_t>(TILE, n - at);
  const float* bias = out.bias ? out.bias + at : nullptr;
  for (int64_t m = 0; m < out.rows; ++m) {
    const int64_t offset = m * out.stride + at;
    switch (out.type) {
      case Float::fp32: put_row(y[m], static_cast<float*>(out.y) + offset, bias, count, out); break;
      case Float::bf16: put_row(y[m], static_cast<bf16*>(out.y) + offset, bias, count, out); break;
      case Float::fp16: put_row(y[m], static_cast<fp16*>(out.y) + offset, bias, count, out); break;
    }
  }
}

template <class T>
float sum_of(const T* x, int64_t count) {
  vf total = {};
  int64_t i = 0;
  for (; i + W <= count; i += W) total += load(x + i);
  if (i < count) total += load_part(x + i, static_cast<int>(count - i));
  return sum(total);
}

// Columns [0, count) of all rows to x[column][row]; columns up to `filled` and rows up to `padded` are zeros.
template <class T>
void transpose(const T* x, int64_t stride, int64_t rows, int64_t count, int64_t filled, int padded, float* out) {
  for (int64_t m = 0; m < padded; ++m) {
    const int64_t own = m < rows ? count : 0;
    for (int64_t c = 0; c < own; ++c) out[c * padded + m] = widen(x[m * stride + c]);
    for (int64_t c = own; c < filled; ++c) out[c * padded + m] = 0.0f;
  }
}

inline void transpose_pairs(const bf16* x, int64_t stride, int64_t rows, int64_t count, int64_t filled, int padded, float* out) {
  for (int64_t m = 0; m < padded; ++m) {
    const int64_t own = m < rows ? count : 0;
    int64_t p = 0;
    for (; 2 * p + 1 < own; ++p) std::memcpy(out + p * padded + m, x + m * stride + 2 * p, 4);
    for (; 2 * p < filled; ++p) {
      const uint32_t last = 2 * p < own ? x[m * stride + 2 * p].bits : 0;
      std::memcpy(out + p * padded + m, &last, 4);
    }
  }
}

// Columns [first, first + count) of all rows, filled up to `filled` of them (even), where they belong in `to`.
template <class T>
void lay_out(const Rows& in, const Prepared& to, int64_t first, int64_t count, int64_t at, int64_t filled) {
  const T* x = static_cast<const T*>(in.x) + first;
  if constexpr (PAIRS && std::is_same_v<T, bf16>)
    transpose_pairs(x, in.stride, in.count, count, filled, to.padded, to.x + at / 2 * to.padded);
  else
    transpose(x, in.stride, in.count, count, filled, to.padded, to.x + at * to.padded);
}

// What groups [first, last) of each row add up to.
template <class T>
void sum_groups(const Int4Matrix& w, const T* x, const Rows& in, const Prepared& to, int64_t first, int64_t last) {
  const int64_t group = w.k / w.groups;
  for (int64_t g = first; g < last; ++g)
    for (int m = 0; m < to.padded; ++m) to.sums[g * to.padded + m] = m < in.count ? sum_of(x + m * in.stride + g * group, group) : 0.0f;
}

template <class T>
void prepare4_as(const Int4Matrix& w, const Rows& in, const Prepared& to, int64_t first, int64_t last) {
  const int64_t group = w.k / w.groups, filled = 8 * w.words;
  for (int64_t g = first; g < last; ++g) {
    lay_out<T>(in, to, g * group, group, g * filled, filled);
  }
  if (w.offset_type != Offsets::none) sum_groups(w, static_cast<const T*>(in.x), in, to, first, last);
}

inline void prepare4(const Int4Matrix& w, const Rows& in, const Prepared& to, int64_t first, int64_t last) {
  switch (in.type) {
    case Float::fp32: return prepare4_as<float>(w, in, to, first, last);
    case Float::bf16: return prepare4_as<bf16>(w, in, to, first, last);
    case Float::fp16: return prepare4_as<fp16>(w, in, to, first, last);
  }
}

// Columns [first, last), `first` even.
inline void prepare8(const Int8Matrix& w, const Rows& in, const Prepared& to, int64_t first, int64_t last) {
  const int64_t filled = (last - first + 1) / 2 * 2;
  switch (in.type) {
    case Float::fp32: return lay_out<float>(in, to, first, last - first, first, filled);
    case Float::bf16: return lay_out<bf16>(in, to, first, last - first, first, filled);
    case Float::fp16: return lay_out<fp16>(in, to, first, last - first, first, filled);
  }
}

}  // namespace FLEX_ISA
}  // namespace flex
