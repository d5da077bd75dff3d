// The small operators between products as torch ops. Part of bindings.cpp, after what it uses from there.
#pragma once

#include "heads.h"

namespace {

const flex::PointKernels& point() { return *flex::linear_kernels().point; }

constexpr int64_t POINT_ELEMENTS = 8192;  // what is worth waking a thread for

flex::Held held_of(const Tensor& k, const Tensor& v, const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale, int64_t page) {
  return {k.mutable_data_ptr(), v.mutable_data_ptr(), k.stride(0), k.stride(1), v.stride(0), v.stride(1), k.size(1), page, v.size(2),
          k_scale ? k_scale->mutable_data_ptr<float>() : nullptr, v_scale ? v_scale->mutable_data_ptr<float>() : nullptr, type_of(k)};
}

Tensor rms_norm(const Tensor& x_, const Tensor& weight, double eps) {
  const Tensor x = x_.contiguous();
  const int64_t dim = x.size(-1), rows = x.numel() / std::max<int64_t>(1, dim), bytes = dim * x.element_size();
  TORCH_CHECK(weight.numel() == dim && weight.scalar_type() == at::kFloat && weight.is_contiguous(), "rms_norm: weight");
  const Tensor out = at::empty(x.sizes(), x.options());
  const char* from = static_cast<const char*>(x.const_data_ptr());
  char* to = static_cast<char*>(out.mutable_data_ptr());
  const flex::Norm norm{weight.const_data_ptr<float>(), static_cast<float>(eps)};
  const Float type = float_of(x.scalar_type());
  at::parallel_for(0, rows, std::max<int64_t>(1, POINT_ELEMENTS / std::max<int64_t>(1, dim)), [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) point().norm(from + r * bytes, to + r * bytes, norm, dim, type);
  });
  return out;
}

// [T, 2 I], gate and up beside each other, to [T, I].
Tensor gated(const Tensor& both_, int64_t activation, double alpha, double limit) {
  const Tensor both = both_.contiguous();
  const int64_t rows = both.size(0), inner = both.size(1) / 2, bytes = inner * both.element_size();
  const Tensor out = at::empty({rows, inner}, both.options());
  const char* from = static_cast<const char*>(both.const_data_ptr());
  char* to = static_cast<char*>(out.mutable_data_ptr());
  const flex::Gate gate{static_cast<flex::Activation>(activation), static_cast<float>(alpha), static_cast<float>(limit)};
  const Float type = float_of(both.scalar_type());
  at::parallel_for(0, rows, std::max<int64_t>(1, POINT_ELEMENTS / std::max<int64_t>(1, inner)), [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) point().gate(from + 2 * r * bytes, from + (2 * r + 1) * bytes, to + r * bytes, gate, inner, type);
  });
  return out;
}

// heads.h, for qkv [T, heads + 2 kv_heads, head_dim].
void finish_heads(const Tensor& qkv, int64_t heads, int64_t kv_heads, const std::optional<Tensor>& q_norm, const std::optional<Tensor>& k_norm,
                  bool norm_all, double eps, const std::optional<Tensor>& cos, const std::optional<Tensor>& sin, const Tensor& k, const Tensor& v,
                  const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale, const Tensor& slots) {
  TORCH_CHECK(qkv.is_contiguous() && qkv.size(1) == heads + 2 * kv_heads && slots.numel() == qkv.size(0), "finish_heads: qkv");
  const auto norm = [&](const std::optional<Tensor>& w) { return flex::Norm{w ? w->const_data_ptr<float>() : nullptr, static_cast<float>(eps)}; };
  const flex::Held held = held_of(k, v, k_scale, v_scale, 0);
  const flex::Rope rope = cos ? flex::Rope{cos->const_data_ptr<float>(), sin->const_data_ptr<float>(), cos->size(-1)} : flex::Rope{};
  const flex::Heads h{static_cast<char*>(qkv.mutable_data_ptr()), float_of(qkv.scalar_type()), qkv.size(0), heads, kv_heads, qkv.size(2),
                      norm(q_norm), norm(k_norm), norm_all, cos ? &rope : nullptr, &held, slots.const_data_ptr<int64_t>()};
  if (h.norms_whole())
    at::parallel_for(0, 2 * h.tokens, 8, [&](int64_t first, int64_t last) { flex::norm_whole(point(), h, first, last); });
  const int64_t grain = std::max<int64_t>(1, POINT_ELEMENTS / h.head_dim);
  at::parallel_for(0, h.tokens * h.each(), grain, [&](int64_t first, int64_t last) { flex::finish_heads(point(), h, first, last); });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(flexdecode, m) {
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("gated(Tensor both, int activation, float alpha, float limit) -> Tensor");
  m.def("finish_heads(Tensor(a!) qkv, int heads, int kv_heads, Tensor? q_norm, Tensor? k_norm, bool norm_all, float eps, Tensor? cos, "
        "Tensor? sin, Tensor(b!) k, Tensor(c!) v, Tensor(d!)? k_scale, Tensor(e!)? v_scale, Tensor slots) -> ()");
}

TORCH_LIBRARY_IMPL(flexdecode, CPU, m) {
  m.impl("rms_norm", &rms_norm);
  m.impl("gated", &gated);
  m.impl("finish_heads", &finish_heads);
}
