// Products with integer weights as torch ops: tensors in, raw pointers out to the kernels, threads from torch's own pool.
// Part of bindings.cpp: torch's headers take longer to compile than all that is written here.
//
// A tile is computed by one thread, always alike, so results have the same bits on any number of threads.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "held.h"
#include "linear_dispatch.h"
#include "linear_pack.h"

namespace {

using at::Tensor;
using flex::COLUMNS;
using flex::Float;
using flex::Int4Matrix;
using flex::Int8Matrix;
using flex::LinearKernels;
using flex::MOST_ROWS;
using flex::Out;
using flex::Prepared;
using flex::Rows;
using flex::TILE;

// Rows of activations laid out at a time, in tile registers as many as about half of a second-level cache holds.
constexpr int64_t BLOCK = 256, TALL_BYTES = int64_t{1} << 20;
constexpr int64_t SLAB = 512;           // rows of a matrix turned to floats at a time
constexpr int64_t THREAD_BYTES = 16384;  // what is worth waking a thread for
constexpr int64_t PREPARE_ELEMENTS = 16384;  // the same, of activations laid out

Float float_of(at::ScalarType type) {
  switch (type) {
    case at::kFloat: return Float::fp32;
    case at::kBFloat16: return Float::bf16;
    case at::kHalf: return Float::fp16;
    default: TORCH_CHECK(false, "no product with integer weights for ", type);
  }
}

int64_t grain(int64_t bytes) { return std::max<int64_t>(1, THREAD_BYTES / std::max<int64_t>(1, bytes)); }

Int4Matrix int4_of(const Tensor& codes, const Tensor& scales, const std::optional<Tensor>& offsets, int64_t n, int64_t k) {
  Int4Matrix w{};
  w.codes = reinterpret_cast<const uint32_t*>(codes.const_data_ptr<int32_t>());
  w.scales = scales.const_data_ptr();
  w.half_scales = scales.scalar_type() == at::kHalf;
  w.offsets = offsets ? offsets->const_data_ptr() : nullptr;
  w.offset_type = !offsets ? flex::Offsets::none : offsets->scalar_type() == at::kChar ? flex::Offsets::int8 : flex::Offsets::fp32;
  w.n = n, w.k = k;
  w.groups = scales.size(1);
  w.words = codes.size(1) / w.groups;
  return w;
}

Int8Matrix int8_of(const Tensor& codes, const Tensor& scales, int64_t n) {
  return {codes.const_data_ptr<int8_t>(), scales.const_data_ptr<float>(), n, codes.size(1)};
}

Rows rows_of(const Tensor& x, int64_t first, int64_t count, bool alike) {
  const char* data = static_cast<const char*>(x.const_data_ptr()) + first * x.stride(0) * x.element_size();
  return {data, x.stride(0), float_of(x.scalar_type()), count, alike};
}

Out out_of(const Tensor& y, const std::optional<Tensor>& bias, int64_t first, int64_t count) {
  char* data = static_cast<char*>(y.mutable_data_ptr()) + first * y.stride(0) * y.element_size();
  return {data, y.stride(0), float_of(y.scalar_type()), count, bias ? bias->const_data_ptr<float>() : nullptr, false, 0.0f};
}

// Where a product's results go: of x's type, or of the one that was asked for.
Tensor results(const Tensor& x, int64_t n, std::optional<at::ScalarType> type) {
  return at::empty({x.size(0), n}, x.options().dtype(type.value_or(x.scalar_type())));
}

// The end of a product that torch computed in x's type.
Tensor finished(const Tensor& y, const std::optional<Tensor>& bias, std::optional<at::ScalarType> type) {
  if (bias) y.add_(*bias);
  return type ? y.to(*type) : y;
}

// Rows in passes of about equal size, at most `most`: `prepare(rows, prepared)` lays out each pass, `run(prepared, out, first,
// last)` computes tiles. A tile meets all passes of a block while it is in a cache.
template <class Prepare, class Run>
void in_passes(const Tensor& x, const Tensor& y, const std::optional<Tensor>& bias, bool alike, int64_t most, int64_t columns, int64_t groups, int64_t tiles, int64_t tile_bytes,
               const Prepare& prepare, const Run& run) {
  const int64_t rows = x.size(0), width = columns + groups;
  const int64_t fit = most > MOST_ROWS ? std::max<int64_t>(2, std::min(BLOCK, TALL_BYTES / (2 * columns)) / most) * most : BLOCK;
  const Tensor scratch = at::empty({(std::min(rows, fit) + most - 1) / most * flex::padded_rows(std::min(rows, most), most) * width}, at::kFloat);
  for (int64_t from = 0; from < rows; from += fit) {
    const int64_t block = std::min(fit, rows - from), passes = (block + most - 1) / most;
    float* floats = scratch.mutable_data_ptr<float>();
    std::vector<Prepared> prepared;
    std::vector<Out> outs;
    for (int64_t pass = 0; pass < passes; ++pass) {
      const int64_t first = from + block * pass / passes, count = from + block * (pass + 1) / passes - first;
      const int padded = flex::padded_rows(count, most);
      prepared.push_back({floats, floats + columns * padded, padded, alike});
      floats += padded * width;
      prepare(rows_of(x, first, count, alike), prepared.back());
      outs.push_back(out_of(y, bias, first, count));
    }
    at::parallel_for(0, tiles, grain(tile_bytes), [&](int64_t first, int64_t last) {
      if (passes == 1) return run(prepared[0], outs[0], first, last);
      for (int64_t tile = first; tile < last; ++tile)
        for (int64_t pass = 0; pass < passes; ++pass) run(prepared[pass], outs[pass], tile, tile + 1);
    });
  }
}

// Many rows: `dequantize(first tile, last tile, out, stride)` writes a slab of the matrix transposed, `finish(y's slab, product)`
// puts the product in its place.
template <class Dequantize, class Finish>
void by_slabs(const Tensor& x, const Tensor& y, int64_t n, const Dequantize& dequantize, const Finish& finish) {
  const Tensor slab = at::empty({x.size(1), std::min(SLAB, (n + TILE - 1) / TILE * TILE)}, x.options());
  for (int64_t from = 0; from < n; from += SLAB) {
    const int64_t count = std::min(SLAB, n - from), tiles = (count + TILE - 1) / TILE;
    at::parallel_for(0, tiles, 1, [&](int64_t first, int64_t last) {
      char* out = static_cast<char*>(slab.mutable_data_ptr()) + first * TILE * slab.element_size();
      dequantize(from / TILE + first, from / TILE + last, out, slab.stride(0));
    });
    finish(from, y.narrow(1, from, count), slab.narrow(1, 0, count));
  }
}

// Activations as the kernels take them.
Tensor activations(const Tensor& x, int64_t k) {
  TORCH_CHECK(x.dim() == 2 && x.size(1) == k, "activations of width ", x.size(-1), " meet a matrix of width ", k);
  return x.stride(1) == 1 ? x : x.contiguous();
}

Tensor linear_int4(const Tensor& x_, const Tensor& codes, const Tensor& scales, const std::optional<Tensor>& offsets,
                   const std::optional<Tensor>& bias, int64_t n, int64_t k, std::optional<at::ScalarType> out_type, bool alike) {
  const Tensor x = activations(x_, k);
  const Int4Matrix w = int4_of(codes, scales, offsets, n, k);
  const LinearKernels& kernel = flex::linear_kernels();
  const Float type = float_of(x.scalar_type());
  const int64_t tiles = codes.size(0), tile_bytes = codes.size(1) * TILE * 4;
  if (alike || x.size(0) <= kernel.few_rows(type)) {
    const Tensor y = results(x, n, out_type);
    const auto prepare = [&](const Rows& rows, const Prepared& to) {
      const int64_t elements = w.k / w.groups * rows.count;
      at::parallel_for(0, w.groups, std::max<int64_t>(1, PREPARE_ELEMENTS / elements),
                       [&](int64_t first, int64_t last) { kernel.prepare4(w, rows, to, first, last); });
    };
    const auto run = [&](const Prepared& in, const Out& out, int64_t first, int64_t last) { kernel.int4(w, in, type, out, first, last); };
    const int64_t most = kernel.pass4(w, rows_of(x, 0, x.size(0), alike));
    in_passes(x, y, bias, alike, most, 8 * w.words * w.groups, w.groups, tiles, tile_bytes, prepare, run);
    return y;
  }
  const Tensor y = results(x, n, std::nullopt);
  const Tensor wide = type == Float::fp16 ? x.to(at::kFloat) : x;
  const Float as = type == Float::fp16 ? Float::fp32 : type;
  const auto dequantize = [&](int64_t first, int64_t last, void* out, int64_t stride) { kernel.dequantize4(w, first, last, out, stride, as); };
  by_slabs(wide, y, n, dequantize, [&](int64_t, Tensor to, const Tensor& slab) {
    if (type == Float::fp16) to.copy_(at::mm(wide, slab));
    else at::mm_out(to, wide, slab);
  });
  return finished(y, bias, out_type);
}

Tensor linear_int8(const Tensor& x_, const Tensor& codes, const Tensor& scales, const std::optional<Tensor>& bias, int64_t n,
                   std::optional<at::ScalarType> out_type, bool alike) {
  const Tensor x = activations(x_, codes.size(1));
  const Int8Matrix w = int8_of(codes, scales, n);
  const LinearKernels& kernel = flex::linear_kernels();
  const Float type = float_of(x.scalar_type());
  if (alike || x.size(0) <= kernel.few_rows(type)) {
    const Tensor y = results(x, n, out_type);
    const auto prepare = [&](const Rows& rows, const Prepared& to) {
      at::parallel_for(0, (w.k + COLUMNS - 1) / COLUMNS, std::max<int64_t>(1, PREPARE_ELEMENTS / COLUMNS / rows.count),
                       [&](int64_t first, int64_t last) { kernel.prepare8(w, rows, to, first * COLUMNS, std::min(last * COLUMNS, w.k)); });
    };
    const auto run = [&](const Prepared& in, const Out& out, int64_t first, int64_t last) { kernel.int8(w, in, type, out, first, last); };
    const int64_t most = kernel.pass8(w, rows_of(x, 0, x.size(0), alike));
    in_passes(x, y, bias, alike, most, (w.k + 1) / 2 * 2, 0, codes.size(0), w.k * TILE, prepare, run);
    return y;
  }
  const Tensor y = results(x, n, std::nullopt);
  const Tensor wide = type == Float::fp16 ? x.to(at::kFloat) : x;
  const Float as = type == Float::fp16 ? Float::fp32 : type;
  const Tensor flat = scales.flatten();
  const auto dequantize = [&](int64_t first, int64_t last, void* out, int64_t stride) { kernel.dequantize8(w, first, last, out, stride, as); };
  by_slabs(wide, y, n, dequantize, [&](int64_t from, Tensor to, const Tensor& slab) {
    to.copy_(at::mm(wide, slab).to(at::kFloat).mul_(flat.narrow(0, from, to.size(1))));
  });
  return finished(y, bias, out_type);
}

// x @ w.T for few rows, w [N, K] of x's type with rows in one piece.
Tensor linear_dense(const Tensor& x_, const Tensor& w, const std::optional<Tensor>& bias, std::optional<at::ScalarType> out_type,
                    bool alike) {
  const Tensor x = activations(x_, w.size(1));
  TORCH_CHECK(w.stride(1) == 1 && w.scalar_type() == x.scalar_type(), "activations of ", x.scalar_type(), " meet a matrix of ", w.scalar_type());
  const int64_t n = w.size(0), k = w.size(1), tiles = (n + TILE - 1) / TILE;
  const Tensor y = results(x, n, out_type);
  const flex::DenseMatrix matrix{w.const_data_ptr(), n, k, w.stride(0)};
  const Rows rows = rows_of(x, 0, x.size(0), alike);
  const Out out = out_of(y, bias, 0, x.size(0));
  const LinearKernels& kernel = flex::linear_kernels();
  at::parallel_for(0, tiles, grain(TILE * k * w.element_size()), [&](int64_t first, int64_t last) { kernel.dense(matrix, rows, out, first, last); });
  return y;
}

// codes uint8 [N, K / 2] to int32 [tiles, words, TILE].
Tensor pack_int4(const Tensor& codes_) {
  const Tensor codes = codes_.contiguous();
  const int64_t n = codes.size(0), bytes = codes.size(1), words = (bytes + 3) / 4, tiles = (n + TILE - 1) / TILE;
  const Tensor packed = held_empty({tiles, words, TILE}, at::kInt);
  const uint8_t* from = codes.const_data_ptr<uint8_t>();
  uint32_t* to = reinterpret_cast<uint32_t*>(packed.mutable_data_ptr<int32_t>());
  at::parallel_for(0, tiles, grain(bytes * TILE), [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t)
      flex::pack_tile4(from + t * TILE * bytes, bytes, std::min<int64_t>(TILE, n - t * TILE), to + t * words * TILE);
  });
  return packed;
}

// codes int8 [N, K] to [tiles, K, TILE].
Tensor pack_int8(const Tensor& codes_) {
  const Tensor codes = codes_.contiguous();
  const int64_t n = codes.size(0), k = codes.size(1), tiles = (n + TILE - 1) / TILE;
  const Tensor packed = held_empty({tiles, k, TILE}, at::kChar);
  const int8_t* from = codes.const_data_ptr<int8_t>();
  int8_t* to = packed.mutable_data_ptr<int8_t>();
  at::parallel_for(0, tiles, grain(k * TILE), [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t)
      flex::pack_tile8(from + t * TILE * k, k, std::min<int64_t>(TILE, n - t * TILE), to + t * k * TILE);
  });
  return packed;
}

// The codes of some rows, int8 [rows, K], int4's less 8.
Tensor unpack_rows(const Tensor& codes, const Tensor& rows_, int64_t k) {
  const Tensor rows = rows_.contiguous();
  const Tensor out = at::empty({rows.size(0), k}, at::kChar);
  const int64_t* ids = rows.const_data_ptr<int64_t>();
  int8_t* to = out.mutable_data_ptr<int8_t>();
  const int64_t tile = codes.size(1) * TILE;
  at::parallel_for(0, rows.size(0), grain(k), [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t at = ids[i] / TILE * tile + ids[i] % TILE;
      if (codes.scalar_type() == at::kChar) {
        const int8_t* from = codes.const_data_ptr<int8_t>() + at;
        for (int64_t c = 0; c < k; ++c) to[i * k + c] = from[c * TILE];
      } else {
        const uint32_t* from = reinterpret_cast<const uint32_t*>(codes.const_data_ptr<int32_t>()) + at;
        for (int64_t c = 0; c < k; ++c) to[i * k + c] = static_cast<int8_t>(flex::code_of(from[c / 8 * TILE], c % 8));
      }
    }
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(flexdecode, m) {
  m.def("linear_int4(Tensor x, Tensor codes, Tensor scales, Tensor? offsets, Tensor? bias, int n, int k, ScalarType? out, bool alike) -> Tensor");
  m.def("linear_int8(Tensor x, Tensor codes, Tensor scales, Tensor? bias, int n, ScalarType? out, bool alike) -> Tensor");
  m.def("linear_dense(Tensor x, Tensor w, Tensor? bias, ScalarType? out, bool alike) -> Tensor");
  m.def("pack_int4(Tensor codes) -> Tensor");
  m.def("pack_int8(Tensor codes) -> Tensor");
  m.def("held(Tensor[] parts, ScalarType dtype) -> Tensor");
  m.def("unpack_rows(Tensor codes, Tensor rows, int k) -> Tensor");
}

TORCH_LIBRARY_IMPL(flexdecode, CPU, m) {
  m.impl("linear_int4", &linear_int4);
  m.impl("linear_int8", &linear_int8);
  m.impl("linear_dense", &linear_dense);
  m.impl("pack_int4", &pack_int4);
  m.impl("pack_int8", &pack_int8);
  m.impl("held", &held);
  m.impl("unpack_rows", &unpack_rows);
}
