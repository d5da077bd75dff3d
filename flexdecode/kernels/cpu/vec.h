// Vectors of floats, as wide as the instruction set allows, and loads that widen every stored type to them.
//
// Written with the compiler's vector extensions, so that one source serves AVX-512, AVX2, NEON and plain machines; only
// what they cannot say (fp16 conversion, bf16 dot products) is an intrinsic. Included once for each instruction set,
// with FLEX_ISA naming a namespace; knows no torch.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define FLEX_INLINE inline __attribute__((always_inline))

namespace flex {
namespace FLEX_ISA {

#if defined(FLEX_PORTABLE)
constexpr int W = 4;
#elif defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef uint16_t vh __attribute__((vector_size(2 * W)));
typedef int8_t vb __attribute__((vector_size(W)));

struct bf16 { uint16_t bits; };
struct fp16 { uint16_t bits; };

FLEX_INLINE vf splat(float x) { return x - vf{}; }

FLEX_INLINE float widen(float x) { return x; }
FLEX_INLINE float widen(int8_t x) { return static_cast<float>(x); }
FLEX_INLINE float widen(bf16 x) {
  uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
FLEX_INLINE float widen(fp16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16, magnitude = x.bits & 0x7fff;
  // The exponent is rebased by a multiplication, which also makes subnormals right; infinity and NaN keep theirs.
  uint32_t bits = magnitude << 13;
  float f;
  std::memcpy(&f, &bits, 4);
  f *= 0x1p112f;
  std::memcpy(&bits, &f, 4);
  if (magnitude >= 0x7c00) bits = 0x7f800000u | (magnitude << 13);
  bits |= sign;
  std::memcpy(&f, &bits, 4);
  return f;
}

FLEX_INLINE void narrow(float x, float* out) { *out = x; }
FLEX_INLINE void narrow(float x, bf16* out) {  // to nearest, ties to even; NaN stays NaN
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) { out->bits = static_cast<uint16_t>((bits >> 16) | 0x40); return; }
  out->bits = static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}
FLEX_INLINE void narrow(float x, fp16* out) {
#if defined(__ARM_FP16_FORMAT_IEEE)
  const __fp16 h = static_cast<__fp16>(x);
  std::memcpy(&out->bits, &h, 2);
#elif defined(__FLT16_MAX__)
  const _Float16 h = static_cast<_Float16>(x);
  std::memcpy(&out->bits, &h, 2);
#else
#error "this compiler has no 16-bit float type"
#endif
}

FLEX_INLINE vf load(const float* p) { vf v; std::memcpy(&v, p, sizeof v); return v; }
FLEX_INLINE void store(float* p, vf v) { std::memcpy(p, &v, sizeof v); }

// The compiler widens in halves where one instruction would do, so the wide ones are named.
FLEX_INLINE vf load(const bf16* p) {
#if defined(__AVX512F__) && !defined(FLEX_PORTABLE)
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16);
#elif defined(__AVX2__) && !defined(FLEX_PORTABLE)
  return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16);
#else
  vh h;
  std::memcpy(&h, p, sizeof h);
  return (vf)(__builtin_convertvector(h, vu) << 16);
#endif
}

FLEX_INLINE vf load(const int8_t* p) {
#if defined(__AVX512F__) && !defined(FLEX_PORTABLE)
  return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__) && !defined(FLEX_PORTABLE)
  return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  vb b;
  std::memcpy(&b, p, sizeof b);
  return __builtin_convertvector(__builtin_convertvector(b, vi), vf);
#endif
}

FLEX_INLINE vf load(const fp16* p) {
#if defined(FLEX_PORTABLE)
  vf v;
  for (int i = 0; i < W; ++i) v[i] = widen(p[i]);
  return v;
#elif defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__ARM_NEON) && defined(__aarch64__)
  return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(reinterpret_cast<const uint16_t*>(p))));
#else
  vf v;
  for (int i = 0; i < W; ++i) v[i] = widen(p[i]);
  return v;
#endif
}

// The first n < W values, zeros behind them: for a head_dim that is no multiple of W.
template <class T>
FLEX_INLINE vf load_part(const T* p, int n) {
  vf v = {};
  for (int i = 0; i < n; ++i) v[i] = widen(p[i]);
  return v;
}

FLEX_INLINE vf vmax(vf a, vf b) { return a > b ? a : b; }

// `a` in lanes whose bit is set, `b` in the others.
FLEX_INLINE vf where(uint64_t bits, vf a, vf b) {
#if defined(__AVX512F__) && !defined(FLEX_PORTABLE)
  return (vf)_mm512_mask_mov_ps((__m512)b, static_cast<__mmask16>(bits), (__m512)a);
#else
  vi lane;
  for (int i = 0; i < W; ++i) lane[i] = -static_cast<int32_t>(bits >> i & 1);
  return lane ? a : b;
#endif
}

// Reductions by halving: log W steps instead of W additions that wait for each other.
FLEX_INLINE float sum(vf v) {
#if defined(__AVX512F__) && !defined(FLEX_PORTABLE)
  return _mm512_reduce_add_ps((__m512)v);
#else
  float t[W];
  std::memcpy(t, &v, sizeof v);
  for (int step = W / 2; step > 0; step /= 2)
    for (int i = 0; i < step; ++i) t[i] += t[i + step];
  return t[0];
#endif
}

FLEX_INLINE float most(vf v) {
#if defined(__AVX512F__) && !defined(FLEX_PORTABLE)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float t[W];
  std::memcpy(t, &v, sizeof v);
  for (int step = W / 2; step > 0; step /= 2)
    for (int i = 0; i < step; ++i) t[i] = t[i] > t[i + step] ? t[i] : t[i + step];
  return t[0];
#endif
}

// exp to about 1 ulp in [-87, 88], 0 below, infinity above: 2^n · p(r), r in [-ln2/2, ln2/2], Cody and Waite's split of
// ln 2. Minus infinity gives exactly 0.
FLEX_INLINE vf vexp(vf x) {
#if defined(__AVX512F__) && !defined(FLEX_PORTABLE)
  // 2^n · 2^r by instructions that know every edge: n is taken from x / ln 2, and 2^r is its series to the sixth power.
  const __m512 y = _mm512_max_ps(_mm512_set1_ps(-1000.0f), _mm512_mul_ps((__m512)x, _mm512_set1_ps(1.44269504f)));  // NaN stays
  const __m512 whole = _mm512_roundscale_ps(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const vf r = (vf)_mm512_sub_ps(y, whole);
  vf q = splat(1.54035304e-4f);
  q = q * r + 1.33335581e-3f;
  q = q * r + 9.61812911e-3f;
  q = q * r + 5.55041087e-2f;
  q = q * r + 2.40226507e-1f;
  q = q * r + 6.93147181e-1f;
  q = q * r + 1.0f;
  return (vf)_mm512_scalef_ps((__m512)q, whole);
#else
  const vf low = splat(-87.3365447f), high = splat(88.7228317f);
  const vf inside = x < low ? low : (x > high ? high : x);
  const vf shifted = inside * 1.44269504f + 12582912.0f;  // 1.5 · 2^23: the integer part lands in the low bits
  const vf n = shifted - 12582912.0f;
  const vf r = (inside - n * 0.693359375f) + n * 2.12194440e-4f;
  vf p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const vi power = (__builtin_convertvector(n, vi) + 127) << 23;
  const vf result = p * (vf)power;
  const vf capped = x > high ? splat(std::numeric_limits<float>::infinity()) : result;
  return x < low ? vf{} : capped;
#endif
}

// tanh by exp(-2|x|), which never overflows.
FLEX_INLINE vf vtanh(vf x) {
  const vf magnitude = x < 0.0f ? -x : x;
  const vf e = vexp(magnitude * -2.0f);
  const vf t = (1.0f - e) / (1.0f + e);
  return x < 0.0f ? -t : t;
}

}  // namespace FLEX_ISA
}  // namespace flex
