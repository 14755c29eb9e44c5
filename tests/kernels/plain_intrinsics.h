// Plain C++ in place of the intrinsics for AVX-512, AVX512-BF16 and AMX that the kernels use, with the same names and
// the same bits, so that tests can run each instruction set on any x86 CPU with FMA. What each does is as in Intel's
// Software Developer's Manual; what would raise an exception there ends the process.
#pragma once

#include <xmmintrin.h>

#include <cstdint>
#include <cstring>

typedef float __m512 __attribute__((vector_size(64), aligned(64)));
typedef long long __m512i __attribute__((vector_size(64), aligned(64)));
typedef short __m512bh __attribute__((vector_size(64), aligned(64)));

namespace quire::plain {

typedef int32_t Ints __attribute__((vector_size(64)));
typedef int8_t Bytes __attribute__((vector_size(64)));
typedef uint8_t UnsignedBytes __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));

constexpr int kLanes = 16;

template <typename V>
inline V load(const void* from) {
  V value;
  std::memcpy(&value, from, sizeof(V));
  return value;
}

// a * b + c, rounded once.
inline __m512 fused(__m512 a, __m512 b, __m512 c) {
  for (int lane = 0; lane < kLanes; lane++) c[lane] = __builtin_fmaf(a[lane], b[lane], c[lane]);
  return c;
}

// The first and the second of each pair of bfloat16.
inline __m512 low(Words pairs) { return (__m512)(pairs << 16); }
inline __m512 high(Words pairs) { return (__m512)(pairs & 0xffff0000u); }

// Products of bfloat16 round to nearest, and denormals are zero as operands and as results, whatever MXCSR says. What is
// computed meanwhile has to be in a function that is not inlined, since compilers do not know that MXCSR matters.
class Flushing {
 public:
  Flushing() : before_(_mm_getcsr()) { _mm_setcsr(0x9fc0); }
  ~Flushing() { _mm_setcsr(before_); }

 private:
  unsigned before_;
};

__attribute__((noinline)) inline void add_dot_products(__m512& sums, const Words& a, const Words& b) {
  sums = fused(high(a), high(b), sums);
  sums = fused(low(a), low(b), sums);
}

// The nearest bfloat16, with denormals as zero.
inline uint16_t nearest(uint32_t bits) {
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40);  // NaN
  if ((bits & 0x7f800000u) == 0) bits &= 0x80000000u;
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

// The tiles of a thread.
constexpr int kTiles = 8, kRows = 16, kRowBytes = 64;
struct Tiles {
  bool configured;
  uint16_t row_bytes[kTiles];
  uint8_t rows[kTiles];
  alignas(64) uint8_t data[kTiles][kRows][kRowBytes];
};
inline thread_local Tiles tiles;

inline void check(bool allowed) {
  if (!allowed) __builtin_trap();
}

inline void check_configured(int tile) { check(tiles.configured && tiles.rows[tile] > 0); }

__attribute__((noinline)) inline void multiply_tile_row(__m512& sums, const uint8_t* row, const uint8_t (*weights)[kRowBytes],
                                                        int pairs) {
  __m512 even{}, odd{};
  for (int k = 0; k < pairs; k++) {
    const Words both = load<uint32_t>(row + 4 * k) - Words{}, of_weights = load<Words>(weights[k]);
    even = fused(low(both), low(of_weights), even);
    odd = fused(high(both), high(of_weights), odd);
  }
  sums += even + odd;
}

}  // namespace quire::plain

inline __m512 _mm512_setzero_ps() { return __m512{}; }
inline __m512i _mm512_set1_epi32(int x) { return (__m512i)(static_cast<uint32_t>(x) - quire::plain::Words{}); }
inline __m512 _mm512_loadu_ps(const void* from) { return quire::plain::load<__m512>(from); }
inline __m512i _mm512_loadu_si512(const void* from) { return quire::plain::load<__m512i>(from); }
inline __m512 _mm512_castsi512_ps(__m512i bits) { return (__m512)bits; }
inline __m512 _mm512_set1_ps(float x) { return (__m512)_mm512_set1_epi32(quire::plain::load<int>(&x)); }
inline __m512i _mm512_and_si512(__m512i a, __m512i b) { return a & b; }
inline __m512i _mm512_slli_epi32(__m512i words, unsigned count) { return (__m512i)((quire::plain::Words)words << count); }
inline __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) { return quire::plain::fused(a, b, c); }

__attribute__((noinline)) inline __m512i _mm512_dpbusd_epi32(__m512i sums, __m512i a, __m512i b) {
  const auto left = (quire::plain::UnsignedBytes)a;
  const auto right = (quire::plain::Bytes)b;
  auto found = (quire::plain::Ints)sums;
  for (int byte = 0; byte < 64; byte++) found[byte / 4] += left[byte] * right[byte];
  return (__m512i)found;
}

inline __m512 _mm512_dpbf16_ps(__m512 sums, __m512bh a, __m512bh b) {
  const quire::plain::Flushing flushing;
  quire::plain::add_dot_products(sums, (quire::plain::Words)a, (quire::plain::Words)b);
  return sums;
}

inline __m512bh _mm512_cvtne2ps_pbh(__m512 second, __m512 first) {
  __m512bh both{};
  for (int lane = 0; lane < quire::plain::kLanes; lane++) {
    both[lane] = static_cast<short>(quire::plain::nearest(((quire::plain::Words)first)[lane]));
    both[lane + quire::plain::kLanes] = static_cast<short>(quire::plain::nearest(((quire::plain::Words)second)[lane]));
  }
  return both;
}

inline void _tile_loadconfig(const void* config) {
  using namespace quire::plain;
  const uint8_t* bytes = static_cast<const uint8_t*>(config);
  check(bytes[0] == 1);  // the palette; what is neither row_bytes nor rows is reserved
  for (int i = 1; i < 64; i++) check(bytes[i] == 0 || (i >= 16 && i < 32) || (i >= 48 && i < 56));
  tiles = {};
  tiles.configured = true;
  for (int tile = 0; tile < kTiles; tile++) {
    std::memcpy(&tiles.row_bytes[tile], bytes + 16 + 2 * tile, sizeof(uint16_t));
    tiles.rows[tile] = bytes[48 + tile];
    check(tiles.row_bytes[tile] <= kRowBytes && tiles.rows[tile] <= kRows);
    check((tiles.row_bytes[tile] == 0) == (tiles.rows[tile] == 0));
  }
}

inline void _tile_release() { quire::plain::tiles = {}; }

inline void _tile_zero(int tile) {
  using namespace quire::plain;
  check_configured(tile);
  std::memset(tiles.data[tile], 0, sizeof(tiles.data[tile]));
}

inline void _tile_loadd(int tile, const void* from, int64_t stride) {
  using namespace quire::plain;
  _tile_zero(tile);
  for (int row = 0; row < tiles.rows[tile]; row++)
    std::memcpy(tiles.data[tile][row], static_cast<const uint8_t*>(from) + row * stride, tiles.row_bytes[tile]);
}

inline void _tile_stored(int tile, void* to, int64_t stride) {
  using namespace quire::plain;
  check_configured(tile);
  for (int row = 0; row < tiles.rows[tile]; row++)
    std::memcpy(static_cast<uint8_t*>(to) + row * stride, tiles.data[tile][row], tiles.row_bytes[tile]);
}

inline void _tile_dpbf16ps(int sums, int a, int b) {
  using namespace quire::plain;
  for (int tile : {sums, a, b}) check_configured(tile);
  check(sums != a && sums != b && a != b && tiles.row_bytes[a] % 4 == 0 && tiles.row_bytes[sums] % 4 == 0);
  check(tiles.rows[sums] == tiles.rows[a] && tiles.row_bytes[sums] == tiles.row_bytes[b]);
  check(tiles.row_bytes[a] == 4 * tiles.rows[b]);
  const Flushing flushing;
  for (int row = 0; row < tiles.rows[sums]; row++) {
    __m512 before = load<__m512>(tiles.data[sums][row]);
    multiply_tile_row(before, tiles.data[a][row], tiles.data[b], tiles.rows[b]);
    std::memcpy(tiles.data[sums][row], &before, tiles.row_bytes[sums]);
  }
}
