// The small operators between products (point.h), for one instruction set.
#pragma once

#include "linear_rows.h"
#include "point.h"

namespace flex {
namespace FLEX_ISA {

// Calls f with a pointer's type.
template <class F>
FLEX_INLINE void by_type(Float type, const F& f) {
  switch (type) {
    case Float::fp32: return f(float{});
    case Float::bf16: return f(bf16{});
    case Float::fp16: return f(fp16{});
  }
}

// out[i] = f(i, v...) for `count` numbers, W at a time and then one by one through the same vectors.
template <class T, class F>
FLEX_INLINE void map(int64_t count, T* out, const F& f) {
  int64_t i = 0;
  for (; i + W <= count; i += W) put(out + i, f([&](const T* x) { return load(x + i); }, [&](const float* x) { return load(x + i); }));
  if (i == count) return;
  const int n = static_cast<int>(count - i);
  const vf v = f([&](const T* x) { return load_part(x + i, n); }, [&](const float* x) { return load_part(x + i, n); });
  for (int lane = 0; lane < n; ++lane) narrow(v[lane], out + i + lane);
}

inline void norm(const void* x_, void* out, const Norm& norm, int64_t dim, Float type) {
  by_type(type, [&](auto t) {
    using T = decltype(t);
    const T* x = static_cast<const T*>(x_);
    vf squares[4] = {};
    int64_t i = 0;
    for (; i + 4 * W <= dim; i += 4 * W)
      for (int c = 0; c < 4; ++c) {
        const vf v = load(x + i + c * W);
        squares[c] += v * v;
      }
    for (; i < dim; i += W) {
      const vf v = load_part(x + i, static_cast<int>(std::min<int64_t>(W, dim - i)));
      squares[0] += v * v;
    }
    const float mean = sum((squares[0] + squares[1]) + (squares[2] + squares[3])) / static_cast<float>(dim);
    const float factor = 1.0f / std::sqrt(mean + norm.eps);
    map(dim, static_cast<T*>(out), [&](auto own, auto weights) { return own(x) * factor * weights(norm.weight); });
  });
}

inline void add(void* x_, const void* y_, float factor, int64_t count, Float type) {
  by_type(type, [&](auto t) {
    using T = decltype(t);
    T* x = static_cast<T*>(x_);
    const T* y = static_cast<const T*>(y_);
    map(count, x, [&](auto own, auto) { return own(x) + own(y) * factor; });
  });
}

FLEX_INLINE vf activate(vf x, const Gate& gate) {
  switch (gate.kind) {
    case Activation::silu: return x / (1.0f + vexp(-x));
    case Activation::gelu_tanh: return 0.5f * x * (1.0f + vtanh(0.7978845608f * (x + 0.044715f * x * x * x)));
    case Activation::relu: return vmax(x, vf{});
    case Activation::clamped_swiglu: return x / (1.0f + vexp(x * -gate.alpha));
    case Activation::gelu: break;
  }
  for (int lane = 0; lane < W; ++lane) x[lane] = 0.5f * x[lane] * (1.0f + std::erf(x[lane] * 0.7071067812f));
  return x;
}

FLEX_INLINE vf vmin(vf a, vf b) { return a < b ? a : b; }

inline void gate(const void* gate_, const void* up_, void* out, const Gate& how, int64_t count, Float type) {
  by_type(type, [&](auto t) {
    using T = decltype(t);
    const T *gates = static_cast<const T*>(gate_), *ups = static_cast<const T*>(up_);
    map(count, static_cast<T*>(out), [&](auto own, auto) {
      vf g = own(gates), u = own(ups);
      if (how.kind == Activation::clamped_swiglu) {
        g = vmin(g, splat(how.limit));
        u = vmax(vmin(u, splat(how.limit)), splat(-how.limit)) + 1.0f;
      }
      return activate(g, how) * u;
    });
  });
}

inline void turn(void* x, const Turn& by, Float type) {
  by_type(type, [&](auto t) {
    using T = decltype(t);
    T *a = static_cast<T*>(x), *b = a + by.half;
    int64_t i = 0;
    for (; i + W <= by.half; i += W) {
      const vf c = load(by.cos + i), s = load(by.sin + i), u = load(a + i), v = load(b + i);
      put(a + i, u * c - v * s);
      put(b + i, v * c + u * s);
    }
    for (; i < by.half; ++i) {
      const float u = widen(a[i]), v = widen(b[i]);
      narrow(u * by.cos[i] - v * by.sin[i], a + i);
      narrow(v * by.cos[i] + u * by.sin[i], b + i);
    }
  });
}

template <class T, class U>
void convert(const T* x, U* to, int64_t dim) {
  if constexpr (std::is_same_v<T, U>) {
    std::memcpy(to, x, dim * sizeof(T));
  } else {
    int64_t i = 0;
    for (; i + W <= dim; i += W) put(to + i, load(x + i));
    for (; i < dim; ++i) narrow(widen(x[i]), to + i);
  }
}

// Symmetric, the largest magnitude at 127; halves to the even code.
template <class T>
void to_int8(const T* x, int8_t* to, float* scale, int64_t dim) {
  float largest = 0;
  for (int64_t i = 0; i < dim; ++i) largest = std::max(largest, std::fabs(widen(x[i])));
  *scale = largest / 127.0f;
  const float divisor = std::max(*scale, std::numeric_limits<float>::min());  // a row of zeros has the scale 0
  for (int64_t i = 0; i < dim; ++i) to[i] = static_cast<int8_t>(std::nearbyint(widen(x[i]) / divisor));
}

inline void keep(const void* x_, Float type, void* to, Type cache, float* scale, int64_t dim) {
  by_type(type, [&](auto t) {
    using T = decltype(t);
    const T* x = static_cast<const T*>(x_);
    switch (cache) {
      case Type::fp32: return convert(x, static_cast<float*>(to), dim);
      case Type::bf16: return convert(x, static_cast<bf16*>(to), dim);
      case Type::fp16: return convert(x, static_cast<fp16*>(to), dim);
      case Type::int8: return to_int8(x, static_cast<int8_t*>(to), scale, dim);
    }
  });
}

}  // namespace FLEX_ISA
}  // namespace flex
