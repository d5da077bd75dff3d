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

// Pieces of at most `split` blocks; with 0, an eighth of the sequence, from 4 to 16 blocks: enough pieces for the threads
// to share, long enough for a merge to cost nothing. What a sequence is cut into depends on its own length alone, so its
// result has the same bits in any company and on any number of threads.
int64_t piece_blocks(int64_t blocks, int64_t split) {
  return split > 0 ? split : std::clamp<int64_t>((blocks + 7) / 8, 4, 16);
}

std::vector<Piece> divide(const AttendArgs& a, int64_t split, int64_t& states) {
  std::vector<Piece> pieces;
  for (int64_t t = 0; t < a.tile_count; ++t) {
    const int64_t n = block_count(a.tiles[t]), size = piece_blocks(n, split);
    for (int64_t h = 0; h < a.kv_heads; ++h) {
      int64_t at = 0;
      do {
        const int64_t stop = std::min(n, at + size);
        pieces.push_back({t, h, at, stop, stop - at == n ? -1 : states++});
        at = stop;
      } while (at < n);
    }
  }
  return pieces;
}

void run(const AttendArgs& a, int64_t split) {
  const Kernels& kernel = kernels();
  int64_t most = 0, count = 0;
  for (int64_t t = 0; t < a.tile_count; ++t) most = std::max(most, a.heads / a.kv_heads * a.tiles[t].count);
  const std::vector<Piece> pieces = divide(a, split, count);
  const int64_t state = flex::state_floats(a, most), scratch = kernel.scratch_floats(a, most);
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), pieces.size());
  // Uninitialized, and from torch's allocator: a step makes no page of memory anew.
  Tensor floats = at::empty({count * state + threads * scratch}, at::kFloat);
  float* states = floats.mutable_data_ptr<float>();
  at::parallel_for(0, pieces.size(), 1, [&](int64_t begin, int64_t end) {
    float* own = states + count * state + std::min<int64_t>(at::get_thread_num(), threads - 1) * scratch;
    for (int64_t i = begin; i < end; ++i)
      kernel.piece(a, pieces[i], own, pieces[i].slot < 0 ? nullptr : states + pieces[i].slot * state);
  });
  std::vector<const float*> parts;
  for (size_t i = 0; i < pieces.size(); ++i) {
    const Piece& p = pieces[i];
    if (p.slot < 0) continue;
    parts.push_back(states + p.slot * state);
    const bool last = i + 1 == pieces.size() || pieces[i + 1].tile != p.tile || pieces[i + 1].kv_head != p.kv_head;
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
