// Memory for what is read whole in every step: weights, in pages of 2 MB where the system has them. A step touches each 4 KB
// page of a small one once, and finding it takes as long as reading a tenth of it.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <cstdlib>
#include <memory>
#include <mutex>

namespace {

using at::Tensor;

// A run of memory that many tensors share; it is given back with the last of them.
struct Chunk {
  static constexpr int64_t PAGE = int64_t{2} << 20, SIZE = int64_t{16} << 20, LEAST = int64_t{1} << 16;
  char* data;
  int64_t size, used = 0;

  explicit Chunk(int64_t bytes) : size((std::max(bytes, SIZE) + PAGE - 1) / PAGE * PAGE) {
#if defined(MADV_HUGEPAGE)
    // Mapped, not allocated: an allocator would keep what is given back, in pieces.
    whole = mmap(nullptr, size + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(whole != MAP_FAILED, "there is no memory for ", size, " bytes of weights");
    data = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(whole) + PAGE - 1) / PAGE * PAGE);
    madvise(data, size, MADV_HUGEPAGE);  // a wish: where it is not heard, pages are small
#else
    data = static_cast<char*>(std::aligned_alloc(PAGE, size));
    TORCH_CHECK(data, "there is no memory for ", size, " bytes of weights");
#endif
  }
#if defined(MADV_HUGEPAGE)
  ~Chunk() { munmap(whole, size + PAGE); }
  void* whole;
#else
  ~Chunk() { std::free(data); }
#endif
  Chunk(const Chunk&) = delete;
};

// An uninitialized tensor in such memory. What is larger than a chunk gets one of its own; what is smaller than LEAST lies
// elsewhere, since a norm that outlives its layer would keep a whole chunk.
Tensor held_empty(at::IntArrayRef sizes, at::ScalarType type) {
  static std::mutex busy;
  static std::weak_ptr<Chunk> last;
  int64_t bytes = c10::elementSize(type);
  for (const int64_t size : sizes) bytes *= size;
  if (bytes < Chunk::LEAST) return at::empty(sizes, at::TensorOptions().dtype(type));
  const int64_t room = (bytes + 63) / 64 * 64;
  const std::lock_guard<std::mutex> lock(busy);
  std::shared_ptr<Chunk> chunk = last.lock();
  if (!chunk || chunk->used + room > chunk->size) {
    chunk = std::make_shared<Chunk>(room);
    if (room < Chunk::SIZE) last = chunk;
  }
  char* at = chunk->data + chunk->used;
  chunk->used += room;
  return at::from_blob(at, sizes, [chunk](void*) {}, at::TensorOptions().dtype(type));
}

// Copies of tensors one below the other, contiguous, in such memory.
Tensor held(at::TensorList parts, at::ScalarType type) {
  std::vector<int64_t> sizes = parts[0].sizes().vec();
  for (size_t i = 1; i < parts.size(); ++i) sizes[0] += parts[i].size(0);
  const Tensor whole = held_empty(sizes, type);
  if (parts.size() == 1) return whole.copy_(parts[0]);
  int64_t at = 0;
  for (const Tensor& part : parts) {
    whole.narrow(0, at, part.size(0)).copy_(part);
    at += part.size(0);
  }
  return whole;
}

}  // namespace
