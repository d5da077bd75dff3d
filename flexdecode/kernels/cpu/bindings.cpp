// The only file that knows torch: tensors in, raw pointers out to the kernels, threads from torch's own pool.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <atomic>
#include <map>

#include "dispatch.h"

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

flex::Type type_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case at::kFloat: return flex::Type::fp32;
    case at::kBFloat16: return flex::Type::bf16;
    case at::kHalf: return flex::Type::fp16;
    case at::kChar: return flex::Type::int8;
    default: TORCH_CHECK(false, "attend: no kernel for ", t.scalar_type());
  }
}

// tiles [n, 6]: row, count, start, stop, offset into `table`, offset into `bits` (-1: all visible).
std::vector<flex::Tile> tiles_of(const Tensor& tiles, const Tensor& table, const Tensor& bits) {
  TORCH_CHECK(tiles.dim() == 2 && tiles.size(1) == 6 && tiles.scalar_type() == at::kLong && tiles.is_contiguous(), "attend: tiles");
  TORCH_CHECK(table.scalar_type() == at::kInt && bits.scalar_type() == at::kLong, "attend: table int32, bits int64");
  std::vector<flex::Tile> found;
  const int64_t* t = tiles.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < tiles.size(0); ++i, t += 6) {
    const auto* words = t[5] < 0 ? nullptr : reinterpret_cast<const uint64_t*>(bits.const_data_ptr<int64_t>()) + t[5];
    found.push_back({t[0], t[1], t[2], t[3], table.const_data_ptr<int32_t>() + t[4], words});
  }
  return found;
}

int64_t block_count(const flex::Tile& t) {
  return t.stop > t.start ? (t.stop + flex::kBlock - 1) / flex::kBlock - t.start / flex::kBlock : 0;
}

// All (tile, kv head) pairs laid end to end, block by block, and cut into one run a thread: each reads as many bytes as
// the next, and at most threads - 1 pairs are cut. With `split` > 0 every pair is cut at multiples of that many blocks
// instead, so that a result does not depend on what else is in the call or on the threads.
struct Work {
  std::vector<Piece> pieces;
  std::vector<int64_t> begin;     // of each thread's pieces, in the balanced case
  int64_t slots = 0;
};

Work divide(const AttendArgs& a, int64_t threads, int64_t split) {
  Work work;
  int64_t total = 0;
  for (int64_t t = 0; t < a.tile_count; ++t) total += block_count(a.tiles[t]) * a.kv_heads;
  const int64_t share = std::max<int64_t>(1, (total + threads - 1) / threads);
  int64_t done = 0;
  work.begin.push_back(0);
  for (int64_t t = 0; t < a.tile_count; ++t) {
    const int64_t n = block_count(a.tiles[t]);
    for (int64_t h = 0; h < a.kv_heads; ++h) {
      int64_t at = 0;
      do {
        int64_t stop = split > 0 ? std::min(n, at + split) : std::min(n, at + share - done % share);
        work.pieces.push_back({t, h, at, stop, stop - at == n ? -1 : work.slots++});
        done += stop - at;
        at = stop;
        if (split <= 0 && done % share == 0 && stop > 0) work.begin.push_back(work.pieces.size());
      } while (at < n);
    }
  }
  if (work.begin.back() != static_cast<int64_t>(work.pieces.size())) work.begin.push_back(work.pieces.size());
  return work;
}

void run(const AttendArgs& a, int64_t split) {
  const Kernels& kernel = kernels();
  const int64_t threads = at::get_num_threads();
  int64_t most = 0;
  for (int64_t t = 0; t < a.tile_count; ++t) most = std::max(most, a.heads / a.kv_heads * a.tiles[t].count);
  const Work work = divide(a, threads, split);
  const int64_t state = flex::state_floats(a, most), scratch = kernel.scratch_floats(a, most);
  const int64_t runs = split > 0 ? work.pieces.size() : work.begin.size() - 1;
  // Uninitialized, and from torch's allocator: a step makes no page of memory anew.
  Tensor floats = at::empty({work.slots * state + std::min(runs, threads) * scratch}, at::kFloat);
  float* states = floats.mutable_data_ptr<float>();
  const auto piece = [&](const Piece& p, float* own) {
    kernel.piece(a, p, own, p.slot < 0 ? nullptr : states + p.slot * state);
  };
  at::parallel_for(0, runs, 1, [&](int64_t begin, int64_t end) {
    float* own = states + work.slots * state + std::min<int64_t>(at::get_thread_num(), std::min(runs, threads) - 1) * scratch;
    for (int64_t i = begin; i < end; ++i) {
      if (split > 0) {
        piece(work.pieces[i], own);
      } else {
        for (int64_t p = work.begin[i]; p < work.begin[i + 1]; ++p) piece(work.pieces[p], own);
      }
    }
  });
  std::vector<const float*> parts;
  for (size_t i = 0; i < work.pieces.size(); ++i) {
    const Piece& p = work.pieces[i];
    if (p.slot < 0) continue;
    parts.push_back(states + p.slot * state);
    const bool last = i + 1 == work.pieces.size() || work.pieces[i + 1].tile != p.tile || work.pieces[i + 1].kv_head != p.kv_head;
    if (!last) continue;
    kernel.merge(a, p.tile, p.kv_head, parts.data(), parts.size());
    parts.clear();
  }
}

// q [T, H, D]; k, v [C, S, D]; see kernels/ops.py for the rest. Shapes were checked there.
void attend_few(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale,
                const Tensor& tiles, const Tensor& table, const Tensor& bits, int64_t page, double scale, double softcap,
                const std::optional<Tensor>& sinks, int64_t split, Tensor& out, const std::optional<Tensor>& lse) {
  const auto held = tiles_of(tiles, table, bits);
  AttendArgs a{};
  a.q = q.const_data_ptr();
  a.q_token = q.stride(0);
  a.q_head = q.stride(1);
  a.q_type = type_of(q);
  a.k = k.const_data_ptr();
  a.v = v.const_data_ptr();
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
  a.softcap = softcap;
  a.sinks = sinks ? sinks->const_data_ptr<float>() : nullptr;
  a.out = out.mutable_data_ptr();
  a.lse = lse ? lse->mutable_data_ptr<float>() : nullptr;
  run(a, split);
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

TORCH_LIBRARY(flexdecode, m) {
  m.def("attend_few(Tensor q, Tensor k, Tensor v, Tensor? k_scale, Tensor? v_scale, Tensor tiles, Tensor table, Tensor bits, "
        "int page, float scale, float softcap, Tensor? sinks, int split, Tensor(a!) out, Tensor(b!)? lse) -> ()");
  m.def("isas() -> str[]", &isas);
  m.def("isa() -> str", &isa);
  m.def("use_isa(str name) -> ()", &use_isa);
}

TORCH_LIBRARY_IMPL(flexdecode, CPU, m) { m.impl("attend_few", &attend_few); }
