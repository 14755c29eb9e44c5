// The configuration of AMX's tiles, and memory that their instructions access.
#pragma once

#include <cstdint>

#include "intrinsics.h"

namespace quire {

// What LDTILECFG reads.
struct TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// GCC's intrinsics do not tell the compiler all the memory that they read. What was written before this is there for them.
inline void finish_memory_accesses() { asm volatile("" : : : "memory"); }

inline void configure_tiles(const TileConfig& config) {
  asm volatile("" : : "r"(&config) : "memory");
  _tile_loadconfig(&config);
}

}  // namespace quire
