// Tile registers (AMX) for as long as a kernel needs them. Included once for each instruction set; knows no torch.
#pragma once

#include <cstdint>

#include "vec.h"

#if defined(__AMX_BF16__)

namespace flex {
namespace FLEX_ISA {

// Compilers do not know that a tile reads and writes memory.
FLEX_INLINE void written() { asm volatile("" ::: "memory"); }

// The eight registers' shapes, this thread's until they go out of scope.
class TileRegisters {
 public:
  struct Shape {
    int64_t rows, bytes;  // at most 16, and 64 of each row; one that has none of either is not used
  };

  explicit TileRegisters(const Shape (&of)[8]) {
    alignas(64) uint8_t shapes[64] = {1};  // palette 1; bytes of a row from 16 on, 2 bytes each; rows from 48 on
    for (int tile = 0; tile < 8; ++tile)
      if (of[tile].rows && of[tile].bytes) shapes[16 + 2 * tile] = of[tile].bytes, shapes[48 + tile] = of[tile].rows;
    asm volatile("" ::"r"(shapes) : "memory");  // all of it is read, of which the intrinsic tells the first eight bytes
    _tile_loadconfig(shapes);
  }
  ~TileRegisters() { _tile_release(); }
  TileRegisters(const TileRegisters&) = delete;
};

}  // namespace FLEX_ISA
}  // namespace flex
#endif
