// Products of bf16 activations with an integer matrix in tiles (AMX): sixteen rows of activations by sixteen of the matrix and
// 32 columns an instruction. Included once for each instruction set; knows no torch.
//
// Activations are the left-hand matrix, codes turned to bf16 the right-hand one: 32 columns of a tile's 32 rows at a time, by
// pairs of columns, which is how they leave the registers. While one such block is multiplied the next one is turned.
// Sums of a row depend on that row alone, and are the same however many rows there are.
#pragma once

#include "amx.h"
#include "linear_int4.h"
#include "linear_int8.h"

namespace flex {
namespace FLEX_ISA {

#if defined(__AMX_BF16__)
constexpr int64_t LEAST_TALL = 3;  // rows of activations, measured; fewer are served as quickly without

constexpr int64_t kStep = 32;                         // columns that are multiplied at once
constexpr int64_t kTall = TALL_BLOCK;                 // rows of a tile register
constexpr int64_t kHalf = kTall * kTall;              // pairs of such a block that belong to sixteen rows of the matrix
constexpr int64_t kStepWords = kStep / 8 * TILE;      // words of int4 in it
constexpr int64_t kStepBytes = kStep * TILE;          // of int8

// Sums in registers 0 to 3, [block of activations][half of the tile]; or, with one block, [turn][half], so that a group's
// sums need not wait for the last one's. Activations in 4 and 5, codes in 6 and 7. The last block has `last` rows.
class ProductTiles : TileRegisters {
  static constexpr Shape whole = {kTall, 64};
  static Shape first(int blocks, int64_t last) { return {blocks == 1 ? last : kTall, 64}; }

 public:
  ProductTiles(int blocks, int64_t last)
      : TileRegisters({first(blocks, last), first(blocks, last), {last, 64}, {last, 64}, first(blocks, last), {last, 64}, whole, whole}) {}
};

// 32 columns of int4 as pairs of bf16: [half][pair of columns][row].
FLEX_INLINE void lay_step(const uint32_t* codes, uint32_t* pairs) {
  const __m512i table = _mm512_load_si512(CODES);
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j, codes += TILE) {
    const __m512i low = _mm512_loadu_si512(codes), high = _mm512_loadu_si512(codes + 16);
    ask_ahead(codes);
    ask_ahead(codes + 16);
#pragma GCC unroll 4
    for (int s = 0; s < 4; ++s) {
      uint32_t* to = pairs + (4 * j + s) * kTall;
      _mm512_store_si512(to, _mm512_permutexvar_epi16(_mm512_srli_epi16(low, 4 * s), table));
      _mm512_store_si512(to + kHalf, _mm512_permutexvar_epi16(_mm512_srli_epi16(high, 4 * s), table));
    }
  }
}

// The same of int8.
FLEX_INLINE void lay_step(const int8_t* codes, uint32_t* pairs) {
#pragma GCC unroll 16
  for (int p = 0; p < kTall; ++p, codes += 2 * TILE) {
    ask_ahead(codes);
    _mm512_store_si512(pairs + p * kTall, (__m512i)pairs_of(codes, codes + TILE));
    _mm512_store_si512(pairs + kHalf + p * kTall, (__m512i)pairs_of(codes + 16, codes + TILE + 16));
  }
}

// Adds the products of 32 columns; x is [block][16][32].
template <int B, int turn>
FLEX_INLINE void multiply(const bf16* x, const uint32_t* pairs) {
  _tile_loadd(6, pairs, 64);
  _tile_loadd(7, pairs + kHalf, 64);
  _tile_loadd(4, x, 64);
  if constexpr (B == 1 && turn == 1) {
    _tile_dpbf16ps(2, 4, 6);
    _tile_dpbf16ps(3, 4, 7);
  } else {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
  }
  if constexpr (B == 2) {
    _tile_loadd(5, x + kTall * kStep, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

template <int B, int turn>
FLEX_INLINE void clear() {
  if constexpr (B == 2 || turn == 0) {
    _tile_zero(0);
    _tile_zero(1);
  }
  if constexpr (B == 2 || turn == 1) {
    _tile_zero(2);
    _tile_zero(3);
  }
}

// The sums, to [row][row of the matrix].
template <int B, int turn>
FLEX_INLINE void keep_sums(float (*sums)[TILE]) {
  constexpr int64_t bytes = TILE * sizeof(float);
  if constexpr (B == 1 && turn == 1) {
    _tile_stored(2, sums[0], bytes);
    _tile_stored(3, sums[0] + kTall, bytes);
  } else {
    _tile_stored(0, sums[0], bytes);
    _tile_stored(1, sums[0] + kTall, bytes);
  }
  if constexpr (B == 2) {
    _tile_stored(2, sums[kTall], bytes);
    _tile_stored(3, sums[kTall] + kTall, bytes);
  }
  written();
}

// Codes of several tiles, turned one block of 32 columns ahead.
template <class T>
struct Turned {
  const T *codes, *last;  // of the next block, and of the last
  int64_t size;
  alignas(64) uint32_t pairs[2][2 * kHalf];
  int side = 0;

  Turned(const T* first, const T* end, int64_t block) : codes(first), last(end - block), size(block) { lay_step(first, pairs[0]); }
  // The block that is next.
  FLEX_INLINE const uint32_t* next() {
    const uint32_t* now = pairs[side];
    side ^= 1;
    if (codes != last) lay_step(codes += size, pairs[side]);
    written();
    return now;
  }
};

// The sums of G groups to the totals of `rows` rows, one after the other.
template <int G, int R>
FLEX_INLINE void add_sums(const Int4Matrix& w, int64_t tile, int64_t group, const Prepared& in, int64_t rows, const float (*sums)[R][TILE], float (*totals)[TILE]) {
  const bool offsets = w.offset_type != Offsets::none;
  for (int v = 0; v < 2; ++v) {
    vf scale[G], offset[G];
    for (int g = 0; g < G; ++g) {
      scale[g] = scale_at(w, tile * w.groups + group + g, v);
      if (offsets) offset[g] = offset_at(w, tile * w.groups + group + g, v);
    }
    const float* of_x = in.sums + group * in.padded;
    const auto add = [&](auto with_offsets) {
      for (int64_t m = 0; m < rows; ++m) {
        vf total = load(totals[m] + v * W);
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) {
          vf sum = load(sums[g][m] + v * W);
          if constexpr (with_offsets()) sum += offset[g] * of_x[g * in.padded + m];
          total += scale[g] * sum;
        }
        store(totals[m] + v * W, total);
      }
    };
    offsets ? add(std::true_type{}) : add(std::false_type{});
  }
}

template <int B>
void int4_tiles(const Int4Matrix& w, const Prepared& in, const Out& out, int64_t first, int64_t last) {
  constexpr int64_t kept = 4;  // groups whose sums are added to the totals in one go
  const int64_t rows = out.rows, steps = 8 * w.words / kStep, tile_words = w.groups * w.words * TILE;
  const ProductTiles tiles(B, rows - (B - 1) * kTall);
  Turned<uint32_t> turned(w.codes + first * tile_words, w.codes + last * tile_words, kStepWords);
  alignas(64) float sums[kept][B * kTall][TILE], totals[B * kTall][TILE];
  for (int64_t tile = first; tile < last; ++tile) {
    std::memset(totals, 0, sizeof totals);
    const bf16* x = reinterpret_cast<const bf16*>(in.x);
    const auto group = [&](int64_t g, auto turn) {
      ask_group(w, tile * w.groups + g);
      clear<B, turn()>();
      for (int64_t i = 0; i < steps; ++i, x += B * kTall * kStep) multiply<B, turn()>(x, turned.next());
      if (g && g % kept == 0) add_sums<kept>(w, tile, g - kept, in, rows, sums, totals);
      keep_sums<B, turn()>(sums[g % kept]);
    };
    int64_t g = 0;
    for (; g + 1 < w.groups; g += 2) group(g, std::integral_constant<int, 0>{}), group(g + 1, std::integral_constant<int, 1>{});
    if (g < w.groups) group(g, std::integral_constant<int, 0>{});
    for (g = (w.groups - 1) / kept * kept; g < w.groups; ++g) add_sums<1>(w, tile, g, in, rows, sums + g % kept, totals);
    put_tile(totals, out, tile, w.n);
  }
}

template <int B>
void int8_tiles(const Int8Matrix& w, const Prepared& in, const Out& out, int64_t first, int64_t last) {
  const int64_t rows = out.rows, steps = w.k / kStep, tile_bytes = w.k * TILE;
  const ProductTiles tiles(B, rows - (B - 1) * kTall);
  Turned<int8_t> turned(w.codes + first * tile_bytes, w.codes + last * tile_bytes, kStepBytes);
  alignas(64) float totals[B * kTall][TILE];
  for (int64_t tile = first; tile < last; ++tile) {
    const bf16* x = reinterpret_cast<const bf16*>(in.x);
    clear<B, 0>();
    for (int64_t i = 0; i < steps; ++i, x += B * kTall * kStep) multiply<B, 0>(x, turned.next());
    keep_sums<B, 0>(totals);
    const vf s0 = load(w.scales + tile * TILE), s1 = load(w.scales + tile * TILE + W);
    for (int64_t m = 0; m < rows; ++m) {
      store(totals[m], load(totals[m]) * s0);
      store(totals[m] + W, load(totals[m] + W) * s1);
    }
    put_tile(totals, out, tile, w.n);
  }
}

// Columns [first, first + count) of all rows, whole blocks of 32, as the tiles want them: [block of columns][row][32].
inline void lay_rows(const Rows& in, const Prepared& to, int64_t first, int64_t count) {
  const bf16* x = static_cast<const bf16*>(in.x);
  bf16* out = reinterpret_cast<bf16*>(to.x);
  for (int64_t at = first; at < first + count; at += kStep)
    for (int64_t m = 0; m < in.count; ++m) std::memcpy(out + at * to.padded + m * kStep, x + m * in.stride + at, kStep * sizeof(bf16));
}

// Whether groups of `columns` are whole blocks.
inline bool tall(const Rows& in, int64_t columns) {
  return in.type == Float::bf16 && columns % kStep == 0 && (in.alike || in.count >= LEAST_TALL);
}
inline int64_t pass4(const Int4Matrix& w, const Rows& in) { return tall(in, w.k / w.groups) ? TALL_ROWS : MOST_ROWS; }
inline int64_t pass8(const Int8Matrix& w, const Rows& in) { return tall(in, w.k) ? TALL_ROWS : MOST_ROWS; }

inline void lay_out4(const Int4Matrix& w, const Rows& in, const Prepared& to, int64_t first, int64_t last) {
  if (to.padded <= MOST_ROWS) return prepare4(w, in, to, first, last);
  const int64_t group = w.k / w.groups;
  lay_rows(in, to, first * group, (last - first) * group);
  if (w.offset_type != Offsets::none) sum_groups(w, static_cast<const bf16*>(in.x), in, to, first, last);
}
inline void lay_out8(const Int8Matrix& w, const Rows& in, const Prepared& to, int64_t first, int64_t last) {
  if (to.padded <= MOST_ROWS) return prepare8(w, in, to, first, last);
  lay_rows(in, to, first, last - first);
}

inline void product4(const Int4Matrix& w, const Prepared& in, Float type, const Out& out, int64_t first, int64_t last) {
  if (in.padded <= MOST_ROWS) return int4(w, in, type, out, first, last);
  if (in.padded == kTall) return int4_tiles<1>(w, in, out, first, last);
  int4_tiles<2>(w, in, out, first, last);
}
inline void product8(const Int8Matrix& w, const Prepared& in, Float type, const Out& out, int64_t first, int64_t last) {
  if (in.padded <= MOST_ROWS) return int8(w, in, type, out, first, last);
  if (in.padded == kTall) return int8_tiles<1>(w, in, out, first, last);
  int8_tiles<2>(w, in, out, first, last);
}
#else
inline int64_t pass4(const Int4Matrix&, const Rows&) { return MOST_ROWS; }
inline int64_t pass8(const Int8Matrix&, const Rows&) { return MOST_ROWS; }
constexpr auto lay_out4 = prepare4;
constexpr auto lay_out8 = prepare8;
constexpr auto product4 = int4;
constexpr auto product8 = int8;
#endif

}  // namespace FLEX_ISA
}  // namespace flex
