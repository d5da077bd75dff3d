// Attention's products in tiles (AMX): sixteen rows by sixteen keys, or by sixteen columns of values, an instruction. For
// bf16 queries on bf16 keys, where rows are many enough to fill a good part of a tile.
//
// Keys are the left-hand matrix as they lie in memory, so scores come out turned, keys by rows. Values are the right-hand
// one and must lie in pairs of rows: two are interleaved within quarters of a register, which leaves the columns of the
// weighted sum in the order that `restore_order` (dot_bf16.h) undoes. Weights are rounded to bf16.
#pragma once

#include "ahead.h"
#include "amx.h"
#include "attend.h"
#include "dot_bf16.h"
#include "turn.h"
#include "vec.h"

#if defined(__AMX_BF16__)
#define FLEX_DOT_TILES 1

namespace flex {
namespace FLEX_ISA {

constexpr int64_t kTileRows = 16, kTileDeep = 32;  // a tile: rows, and bf16 values of each
constexpr int64_t kTileKeys = 32;                  // that go by at once: two tiles of keys, one of values

// Registers 0 to 5 are whole tiles; 6 and 7 keys and queries where head_dim leaves some values, an even number, for the last
// product.
class Tiles : TileRegisters {
  static constexpr Shape whole = {kTileRows, 64};

 public:
  explicit Tiles(int64_t head_dim)
      : TileRegisters({whole, whole, whole, whole, whole, whole, {kTileRows, 2 * (head_dim % kTileDeep)}, {head_dim % kTileDeep / 2, 64}}) {}
};

// Queries of up to sixteen rows as right-hand tiles: [dim / 32][pair of values][row][2], zeros where there is none.
inline void lay_tiles(const bf16* const* rows, int64_t count, int64_t dim, int64_t padded, bf16* out) {
  std::memset(out, 0, kTileRows * padded * sizeof(bf16));
  for (int64_t r = 0; r < count; ++r)
    for (int64_t d = 0; d < dim; ++d) out[(d / 2 * kTileRows + r) * 2 + d % 2] = rows[r][d];
}

// Scores of `rows` rows, up to sixteen, and 32 keys: s[64·row + key]. `turned` has room for [32, 16].
FLEX_INLINE void scores16x32(const bf16* q, int64_t rows, const bf16* k, int64_t stride, int64_t dim, float* turned, float* s, Ahead& ahead) {
  const int64_t bytes = stride * sizeof(bf16);
  const bf16* second = k + kTileRows * stride;
  _tile_zero(0);
  _tile_zero(1);
  written();
  int64_t i = 0;
  for (; i + kTileDeep <= dim; i += kTileDeep) {
    _tile_loadd(4, q + kTileRows * i, 64);
    _tile_loadd(2, k + i, bytes);
    _tile_dpbf16ps(0, 2, 4);
    ahead.fetch<kSecond>(16);
    _tile_loadd(3, second + i, bytes);
    _tile_dpbf16ps(1, 3, 4);
    ahead.fetch<kSecond>(16);
  }
  if (i < dim) {
    _tile_loadd(7, q + kTileRows * i, 64);
    _tile_loadd(6, k + i, bytes);
    _tile_dpbf16ps(0, 6, 7);
    _tile_loadd(6, second + i, bytes);
    _tile_dpbf16ps(1, 6, 7);
  }
  _tile_stored(0, turned, 64);
  _tile_stored(1, turned + kTileRows * kTileRows, 64);
  written();
  for (int half = 0; half < 2; ++half) {
    const void* keys[kTileRows];
    for (int64_t j = 0; j < kTileRows; ++j) keys[j] = turned + (half * kTileRows + j) * kTileRows;
    turn16(keys, 0, rows, reinterpret_cast<int32_t*>(s) + half * kTileRows, kBlock);
  }
}

// Values of n ≤ 32 keys as right-hand tiles: [dim / 16][pair of keys][column][2]; zeros behind n, where values may be anything.
FLEX_INLINE void pair_values(const bf16* v, int64_t stride, int64_t n, int64_t dim, bf16* out, Ahead& ahead) {
  for (int64_t j = 0; j < kTileKeys; j += 2) {
    const bf16* row = v + j * stride;
    for (int64_t i = 0; i < dim; i += 32) {
      const __mmask32 mask = mask_of(dim - i);
      const __m512i a = _mm512_maskz_loadu_epi16(j < n ? mask : 0, row + i), b = _mm512_maskz_loadu_epi16(j + 1 < n ? mask : 0, row + stride + i);
      bf16* to = out + kTileKeys * i + 16 * j;
      _mm512_storeu_si512(to, _mm512_unpacklo_epi16(a, b));
      _mm512_storeu_si512(to + kTileKeys * 16, _mm512_unpackhi_epi16(a, b));
      ahead.fetch<kSecond>(2);
    }
  }
}

// acc[row] += p[row] · v for sixteen rows and the 32 keys of `pairs`; p is bf16 [16, 64].
FLEX_INLINE void weighted16(float* acc, int64_t dv, const bf16* p, const bf16* pairs, int64_t dim) {
  const int64_t bytes = dv * sizeof(float);
  written();
  _tile_loadd(4, p, kBlock * sizeof(bf16));
  for (int64_t i = 0; i < dim; i += 32) {
    float *low = acc + i, *high = low + 16;
    _tile_loadd(0, low, bytes);
    _tile_loadd(2, pairs + kTileKeys * i, 64);
    _tile_dpbf16ps(0, 4, 2);
    _tile_loadd(1, high, bytes);
    _tile_loadd(3, pairs + kTileKeys * (i + 16), 64);
    _tile_dpbf16ps(1, 4, 3);
    _tile_stored(0, low, bytes);
    _tile_stored(1, high, bytes);
  }
  written();
}

}  // namespace FLEX_ISA
}  // namespace flex
#endif
