// Stacks of layers as torch sees them: objects that keep the tensors they point into, and one call a step. Part of
// bindings.cpp, after what it uses from there.
#pragma once

#include <mutex>
#include <optional>

#include "stack_run.h"

namespace {

using flex::Block;
using flex::Held;
using flex::Part;

// A product's weight: parts of kinds "int4" (codes, scales, offsets), "int8" (codes, scales) and "dense" (w), one below the
// other, with n and k of each.
struct MatrixObject : torch::CustomClassHolder {
  flex::Matrix matrix{};
  std::vector<Tensor> kept;

  void add(const std::string& kind, const Tensor& first, const std::optional<Tensor>& second, const std::optional<Tensor>& third, int64_t n,
           int64_t k) {
    Part part{};
    part.n = n, part.row = matrix.n;
    if (kind == "int4") {
      part.kind = Part::int4;
      part.q4 = int4_of(first, *second, third, n, k);
    } else if (kind == "int8") {
      part.kind = Part::int8;
      part.q8 = int8_of(first, *second, n);
    } else {
      part.kind = Part::dense;
      TORCH_CHECK(first.stride(1) == 1, "a matrix whose rows are scattered");
      part.floats = {first.const_data_ptr(), n, k, first.stride(0)};
    }
    for (const auto& t : {std::optional<Tensor>(first), second, third})
      if (t) kept.push_back(*t);
    matrix.parts.push_back(part);
    matrix.n += n, matrix.k = k;
  }

  void bias(const Tensor& bias) {
    kept.push_back(bias);
    matrix.bias = bias.const_data_ptr<float>();
  }
};

using MatrixPtr = c10::intrusive_ptr<MatrixObject>;
using Tensors = c10::List<Tensor>;

struct StackObject : torch::CustomClassHolder {
  std::vector<Block> blocks;
  std::vector<Held> held;
  std::vector<Tensor> kept, kept_kv;
  std::vector<MatrixPtr> matrices;
  std::vector<int64_t> spent;  // empty: nobody asks
  flex::Norm last_norm{};
  Tensor scratch;
  std::mutex busy;

  const float* pointer(const std::optional<Tensor>& t) {
    if (!t) return nullptr;
    kept.push_back(*t);
    return t->const_data_ptr<float>();
  }

  Block& add(const std::optional<Tensor>& pre, const std::optional<Tensor>& post, double eps, double multiplier) {
    Block b{};
    b.pre = {pointer(pre), static_cast<float>(eps)};
    b.post = {pointer(post), static_cast<float>(eps)};
    b.multiplier = static_cast<float>(multiplier);
    held.push_back({});
    blocks.push_back(b);
    return blocks.back();
  }

  void attention(const std::optional<Tensor>& pre, const std::optional<Tensor>& post, double eps, double multiplier, const MatrixPtr& qkv,
                 const MatrixPtr& out, const std::optional<Tensor>& q_norm, const std::optional<Tensor>& k_norm, bool norm_all, int64_t heads,
                 int64_t kv_heads, int64_t head_dim, int64_t rope, int64_t group, double scale, const std::vector<int64_t>& op_kinds,
                 const std::vector<double>& op_numbers, const c10::List<std::optional<Tensor>>& op_tables, const std::optional<Tensor>& sinks) {
    Block& b = add(pre, post, eps, multiplier);
    b.is_attention = true;
    const float e = static_cast<float>(eps);
    b.attention = {qkv->matrix, out->matrix, {pointer(q_norm), e}, {pointer(k_norm), e}, norm_all, heads, kv_heads, head_dim, rope, group,
                   static_cast<float>(scale), ops_of(op_kinds, op_numbers, op_tables), pointer(sinks)};
    for (size_t i = 0; i < op_tables.size(); ++i)
      if (op_tables.get(i)) kept.push_back(*op_tables.get(i));
    matrices.push_back(qkv), matrices.push_back(out);
  }

  void mlp(const std::optional<Tensor>& pre, const std::optional<Tensor>& post, double eps, double multiplier, const MatrixPtr& gate_up,
           const MatrixPtr& down, int64_t activation, double alpha, double limit) {
    Block& b = add(pre, post, eps, multiplier);
    b.mlp = {gate_up->matrix, down->matrix, {static_cast<flex::Activation>(activation), static_cast<float>(alpha), static_cast<float>(limit)}};
    matrices.push_back(gate_up), matrices.push_back(down);
  }

  // Where keys and values of attention block `i` lie.
  void hold(int64_t i, const Tensor& k, const Tensor& v, const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale, int64_t page) {
    held[i] = held_of(k, v, k_scale, v_scale, page);
    for (const auto& t : {std::optional<Tensor>(k), std::optional<Tensor>(v), k_scale, v_scale})
      if (t) kept_kv.push_back(*t);
  }

  void forget() { kept_kv.clear(); }

  // The norm of what comes out of the last block.
  void finish(const Tensor& weight, double eps) { last_norm = {pointer(weight), static_cast<float>(eps)}; }

  // Runs blocks [first, last) on x, in place. `groups`: seven tensors each, slots and the arrays of a plan; `ropes`: cos and sin each.
  void run(const Tensor& x, int64_t first, int64_t last, const std::vector<Tensor>& groups, const std::vector<Tensor>& ropes, int64_t split,
           bool alike) {
    const std::lock_guard<std::mutex> lock(busy);
    std::vector<flex::Group> shared;
    for (size_t i = 0; i + 7 <= groups.size(); i += 7)
      shared.push_back({groups[i].const_data_ptr<int64_t>(),
                        tiles_of(groups[i + 1], groups[i + 2], groups[i + 3], groups[i + 4], groups[i + 5], groups[i + 6])});
    std::vector<flex::Rope> turns;
    for (size_t i = 0; i + 2 <= ropes.size(); i += 2)
      turns.push_back({ropes[i].const_data_ptr<float>(), ropes[i + 1].const_data_ptr<float>(), ropes[i].size(-1)});
    TORCH_CHECK(x.is_contiguous() && first >= 0 && last <= static_cast<int64_t>(blocks.size()), "stack: x or blocks");
    const flex::StackCall call{blocks.data() + first, held.data() + first, last - first, shared, turns, static_cast<char*>(x.mutable_data_ptr()),
                               x.size(0), x.size(1), float_of(x.scalar_type()), split, alike,
                               last == static_cast<int64_t>(blocks.size()) ? last_norm : flex::Norm{}, spent.empty() ? nullptr : spent.data()};
    const int64_t threads = at::in_parallel_region() ? 1 : at::get_num_threads();
    flex::StackRun work(call, flex::linear_kernels(), kernels(), threads);
    // Kept from step to step: memory that was touched before.
    if (!scratch.defined() || scratch.numel() < work.bytes() + 64) scratch = at::empty({work.bytes() + 64}, at::kByte);
    char* own = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(scratch.mutable_data_ptr()) + 63) / 64 * 64);
    std::optional<flex::Team> team;
#pragma omp parallel num_threads(static_cast<int>(threads)) if (threads > 1)
    {
#pragma omp single
      team.emplace(team_size());
      work.work(*team, rank(), own);
    }
  }

  static int64_t team_size() {
#ifdef _OPENMP
    return omp_get_num_threads();
#else
    return 1;
#endif
  }
  static int64_t rank() {
#ifdef _OPENMP
    return omp_get_thread_num();
#else
    return 0;
#endif
  }

  void profile(bool on) { spent.assign(on ? static_cast<size_t>(flex::Phase::count) : 0, 0); }
  std::vector<int64_t> times() { return spent; }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(flexdecode, m) {
  m.class_<MatrixObject>("Matrix").def(torch::init<>()).def("add", &MatrixObject::add).def("bias", &MatrixObject::bias);
  m.class_<StackObject>("Stack")
      .def(torch::init<>())
      .def("attention", &StackObject::attention)
      .def("mlp", &StackObject::mlp)
      .def("finish", &StackObject::finish)
      .def("hold", &StackObject::hold)
      .def("forget", &StackObject::forget)
      .def("run", &StackObject::run)
      .def("profile", &StackObject::profile)
      .def("times", &StackObject::times);
}
