// Integer matrices into the layout of linear.h and, row by row, out of it. Knows no torch.
#pragma once

#include <algorithm>
#include <cstring>

#include "linear.h"

namespace flex {

// Eight nibbles, in order from the lowest, to the even ones in the low half and the odd ones in the high half.
inline uint32_t part_even_odd(uint32_t nibbles) {
  const auto gather = [](uint32_t x) {
    x &= 0x0f0f0f0fu;
    x = (x | x >> 4) & 0x00ff00ffu;
    return (x | x >> 8) & 0xffffu;
  };
  return gather(nibbles) | gather(nibbles >> 4) << 16;
}

// One tile of int4, two columns a byte, low nibble first, to words of 8 columns; the last word is filled up.
inline void pack_tile4(const uint8_t* codes, int64_t row_bytes, int64_t rows, uint32_t* out) {
  constexpr int64_t LINE = 16;  // words of a row that lie in one cache line
  const int64_t words = (row_bytes + 3) / 4;
  for (int64_t from = 0; from < words; from += LINE)
    for (int64_t r = 0; r < TILE; ++r)
      for (int64_t j = from; j < std::min(words, from + LINE); ++j) {
        uint32_t nibbles = 0;
        if (r < rows) std::memcpy(&nibbles, codes + r * row_bytes + 4 * j, std::min<int64_t>(4, row_bytes - 4 * j));
        out[j * TILE + r] = part_even_odd(nibbles);
      }
}

inline void pack_tile8(const int8_t* codes, int64_t k, int64_t rows, int8_t* out) {
  constexpr int64_t LINE = 64;
  for (int64_t from = 0; from < k; from += LINE)
    for (int64_t r = 0; r < TILE; ++r)
      for (int64_t j = from; j < std::min(k, from + LINE); ++j) out[j * TILE + r] = r < rows ? codes[r * k + j] : 0;
}

// The code less 8 of column `c` of a word.
inline int code_of(uint32_t word, int64_t c) { return static_cast<int>(word >> (4 * (c / 2 + 4 * (c % 2))) & 15u) - 8; }

}  // namespace flex
