// The only file that knows torch, with the other *_bindings.h: tensors in, raw pointers out to the kernels, threads from torch's own pool.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/cpu/Utils.h>
#include <ATen/native/CPUBlas.h>
#include <ATen/ops/empty.h>
#include <torch/custom_class.h>
#include <torch/library.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#include <algorithm>
#include <atomic>

#include "dispatch.h"
#include "linear_bindings.h"

namespace {

using at::Tensor;
using flex::AttendArgs;
using flex::Kernels;
using flex::Piece;

std::atomic<const Kernels*> chosen{nullptr};

const Kernels& kernels() {
  const Kernels* k = chosen.load();
  if (!k) chosen.store(k = flex::available().front());
  return *k;
}

// Products of bf16 matrices by torch's micro-kernels, where they have what ours have not: AMX.
const bool amx = at::cpu::init_amx();
std::atomic<bool> theirs{amx};

flex::Gemm torch_products() {
  flex::Gemm products;
  products.bf16 = [](int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb, int64_t ldc, bool add, const void* a, const void* b, float* c) {
    at::native::cpublas::brgemm(m, n, k, lda, ldb, ldc, add, static_cast<const at::BFloat16*>(a), static_cast<const at::BFloat16*>(b), c, true);
  };
  products.done = [] { at::native::cpublas::brgemm_release(true); };
  return products;
}

bool uses_torch_products() { return theirs.load(); }
void use_torch_products(bool yes) { theirs.store(yes); }

flex::Type type_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case at::kFloat: return flex::Type::fp32;
    case at::kBFloat16: return flex::Type::bf16;
    case at::kHalf: return flex::Type::fp16;
    case at::kChar: return flex::Type::int8;
    default: TORCH_CHECK(false, "attend: no kernel for ", t.scalar_type());
  }
}

// A plan as Python packs it: `tiles` [n, 12] holds numbers and offsets into the other arrays (-1: none).
std::vector<flex::Tile> tiles_of(const Tensor& tiles, const Tensor& table, const Tensor& blocks, const Tensor& bits_at, const Tensor& bits,
                                 const Tensor& q_idx) {
  TORCH_CHECK(tiles.dim() == 2 && tiles.size(1) == 12 && tiles.scalar_type() == at::kLong && tiles.is_contiguous(), "attend: tiles");
  std::vector<flex::Tile> found;
  const int64_t* t = tiles.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < tiles.size(0); ++i, t += 12) {
    flex::Tile tile{};
    tile.row = t[0], tile.count = t[1], tile.length = t[2], tile.kv_head = t[3], tile.base = t[4];
    tile.table = t[5] < 0 ? nullptr : table.const_data_ptr<int32_t>() + t[5];
    tile.block_count = t[6];
    tile.blocks = blocks.const_data_ptr<int32_t>() + t[7];
    tile.bits_at = bits_at.const_data_ptr<int32_t>() + t[7];
    tile.bits = reinterpret_cast<const uint64_t*>(bits.const_data_ptr<int64_t>()) + t[8];
    tile.bit_rows = t[9];
    tile.q_idx = q_idx.const_data_ptr<int64_t>() + t[10];
    tile.scores = t[11];
    found.push_back(tile);
  }
  return found;
}

// Score steps: `kinds` [n], `numbers` [n, 2], tables [H, ·] fp32 or none.
std::vector<flex::ScoreOp> ops_of(at::IntArrayRef kinds, at::ArrayRef<double> numbers, const c10::List<std::optional<Tensor>>& tables) {
  std::vector<flex::ScoreOp> found;
  for (size_t i = 0; i < kinds.size(); ++i) {
    const std::optional<Tensor> table = tables.get(i);
    found.push_back({static_cast<int32_t>(kinds[i]), static_cast<float>(numbers[2 * i]), static_cast<float>(numbers[2 * i + 1]),
                     table ? table->const_data_ptr<float>() : nullptr, table && table->dim() > 1 ? table->size(1) : 0});
  }
  return found;
}

void run_few(const AttendArgs& a, int64_t split) {
  const Kernels& kernel = kernels();
  int64_t most = 0;
  for (int64_t t = 0; t < a.tile_count; ++t) most = std::max(most, a.heads / a.kv_heads * a.tiles[t].count);
  const flex::Cut cut = flex::cut(a, split);
  const std::vector<Piece>& pieces = cut.pieces;
  const int64_t state = flex::state_floats(a, most), scratch = kernel.scratch_floats(a, most);
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), pieces.size());
  // Uninitialized, and from torch's allocator: a step makes no page of memory anew.
  Tensor floats = at::empty({cut.states * state + threads * scratch}, at::kFloat);
  float* states = floats.mutable_data_ptr<float>();
  at::parallel_for(0, pieces.size(), 1, [&](int64_t begin, int64_t end) {
    float* own = states + cut.states * state + std::min<int64_t>(at::get_thread_num(), threads - 1) * scratch;
    for (int64_t i = begin; i < end; ++i)
      kernel.piece(a, pieces[i], own, pieces[i].slot < 0 ? nullptr : states + pieces[i].slot * state);
  });
  if (a.pass == flex::Pass::score) return;
  at::parallel_for(0, cut.merges.size(), 8, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) flex::merge_one(kernel, a, cut.merges[i], states, state);
  });
}

// Tiles of many queries, the longest first, each to the thread that is free.
void run_many(const AttendArgs& a) {
  const Kernels& kernel = kernels();
  std::vector<std::pair<int64_t, int64_t>> items;  // (tile, kv head)
  for (int64_t t = 0; t < a.tile_count; ++t)
    for (int64_t h = 0; h < a.kv_heads; ++h)
      if (a.tiles[t].kv_head < 0 || a.tiles[t].kv_head == h) items.emplace_back(t, h);
  const auto work = [&](const std::pair<int64_t, int64_t>& item) { return a.tiles[item.first].count * a.tiles[item.first].block_count; };
  std::stable_sort(items.begin(), items.end(), [&](const auto& x, const auto& y) { return work(x) > work(y); });
  const int64_t scratch = kernel.many_scratch_floats(a), threads = std::min<int64_t>(at::get_num_threads(), items.size());
  Tensor floats = at::empty({threads * scratch}, at::kFloat);
  float* own = floats.mutable_data_ptr<float>();
  const flex::Gemm products = theirs.load() ? torch_products() : flex::Gemm{};
  std::atomic<size_t> next{0};
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t thread = begin; thread < end; ++thread)
      for (size_t i = next++; i < items.size(); i = next++)
        kernel.many(a, products, items[i].first, items[i].second, own + thread * scratch);
  });
}

// q [T, H, D]; k, v [C, S, D]; see kernels/attention.py for the rest. Shapes were checked there.
void attend(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale,
            const Tensor& tiles, const Tensor& table, const Tensor& blocks, const Tensor& bits_at, const Tensor& bits, const Tensor& q_idx,
            int64_t page, double scale, at::IntArrayRef op_kinds, at::ArrayRef<double> op_numbers,
            const c10::List<std::optional<Tensor>>& op_tables, const std::optional<Tensor>& sinks, bool many, int64_t split, bool alike, int64_t only,
            const std::optional<Tensor>& scores, Tensor& out, const std::optional<Tensor>& lse) {
  const auto held = tiles_of(tiles, table, blocks, bits_at, bits, q_idx);
  const auto ops = ops_of(op_kinds, op_numbers, op_tables);
  AttendArgs a{};
  a.q = q.const_data_ptr();
  a.q_token = q.stride(0), a.q_head = q.stride(1);
  a.q_type = type_of(q);
  a.k = k.const_data_ptr(), a.v = v.const_data_ptr();
  a.k_head = k.stride(0), a.k_slot = k.stride(1);
  a.v_head = v.stride(0), a.v_slot = v.stride(1);
  a.k_scale = k_scale ? k_scale->const_data_ptr<float>() : nullptr;
  a.v_scale = v_scale ? v_scale->const_data_ptr<float>() : nullptr;
  a.kv_type = type_of(k);
  a.slots = k.size(1);
  a.page = page;
  a.heads = q.size(1);
  a.kv_heads = k.size(0);
  a.head_dim = q.size(2);
  a.v_head_dim = v.size(2);
  a.tiles = held.data();
  a.tile_count = held.size();
  a.scale = scale;
  a.alike = alike;
  a.ops = ops.data();
  a.op_count = ops.size();
  a.sinks = sinks ? sinks->const_data_ptr<float>() : nullptr;
  a.out = out.mutable_data_ptr();
  a.lse = lse ? lse->mutable_data_ptr<float>() : nullptr;
  a.pass = static_cast<flex::Pass>(only);
  a.scores = scores ? scores->mutable_data_ptr<float>() : nullptr;
  many ? run_many(a) : run_few(a, split);
}


std::vector<std::string> isas() {
  std::vector<std::string> names;
  for (const Kernels* k : flex::available()) names.emplace_back(k->name);
  return names;
}

std::string isa() { return kernels().name; }

void use_isa(const std::string& name) {
  for (const Kernels* k : flex::available())
    if (name == k->name) return chosen.store(k);
  TORCH_CHECK(false, "this machine does not run kernels for ", name);
}

}  // namespace

namespace flex {
const char* isa_in_use() { return kernels().name; }
}  // namespace flex

#include "point_bindings.h"
#include "stack_bindings.h"

TORCH_LIBRARY(flexdecode, m) {
  m.def("attend(Tensor q, Tensor k, Tensor v, Tensor? k_scale, Tensor? v_scale, Tensor tiles, Tensor table, Tensor blocks, "
        "Tensor bits_at, Tensor bits, Tensor q_idx, int page, float scale, int[] op_kinds, float[] op_numbers, Tensor?[] op_tables, "
        "Tensor? sinks, bool many, int split, bool alike, int only, Tensor(a!)? scores, Tensor(b!) out, Tensor(c!)? lse) -> ()");
  m.def("isas() -> str[]", &isas);
  m.def("isa() -> str", &isa);
  m.def("use_isa(str name) -> ()", &use_isa);
  m.def("torch_products() -> bool", &uses_torch_products);
  m.def("use_torch_products(bool yes) -> ()", &use_torch_products);
}

TORCH_LIBRARY_IMPL(flexdecode, CPU, m) { m.impl("attend", &attend); }
