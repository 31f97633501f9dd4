// What the CPU multiplies in tiles of bfloat16 (AMX): 16 rows of 32 numbers by as many
// rows of 16, two of which take turns, into 16 by 16 sums.
#pragma once
#include <cstdint>

// A virtual machine may show AMX and hide what rounds to bfloat16.
#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__AVX512BF16__)
#define SPECINFER_TILES
#endif

#ifdef SPECINFER_TILES
#include <immintrin.h>

namespace tiles {

constexpr int kSide = 16, kDepth = 32;

// Of the thread that multiplies: all tiles are whole.
inline void configure() {
  struct {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  for (int i = 0; i < 8; ++i) config.bytes[i] = 64, config.rows[i] = kSide;
  _tile_loadconfig(&config);
}

}  // namespace tiles
#endif
