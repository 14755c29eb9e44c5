// What is read of a chunk of a quantised weight before it is multiplied: see group_format.h.
#pragma once

#include <algorithm>

#include "group_format.h"
#include "intrinsics.h"

namespace quire {

// What values are moved by before they are multiplied: of a table, whose numbers are unpacked with 128 added, as well.
inline int moved_by(const GroupFormat& format) { return format.table ? 128 : static_cast<int>(format.offset); }

// What a group has but its scale.
enum Extra { kNothing, kZeros, kMinima };

inline Extra extra_of(const GroupFormat& format) { return format.minima ? kMinima : format.zeros ? kZeros : kNothing; }

// Scales of the groups of a chunk, or of their halves, in float32, and what else they have, if anything: minima, or minus zero
// points.
struct Factors {
  alignas(64) float scales[2 * kChunkGroups][kBlockOutputs];
  alignas(64) float extras[2 * kChunkGroups][kBlockOutputs];
};

typedef uint8_t PartBytes __attribute__((vector_size(kPartLanes)));

// Of the portable notation for the next two, GCC makes one operation for each number.

inline Part floats_of_bytes(PartBytes bytes) {
#if defined(__AVX512F__) && !defined(QUIRE_INTRINSICS)
  return (Part)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)bytes));
#elif defined(__AVX2__) && !defined(QUIRE_INTRINSICS)
  return (Part)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128((int64_t)bytes)));
#else
  typedef int8_t Signed __attribute__((vector_size(16)));
  return __builtin_convertvector(__builtin_convertvector((Signed)bytes, Ints), Part);
#endif
}

// All are finite.
inline Part floats_of_float16(const uint8_t* from) {
#if defined(__AVX512F__) && !defined(QUIRE_INTRINSICS)
  return (Part)_mm512_cvtph_ps(load<__m256i>(from));
#elif defined(__AVX2__) && !defined(QUIRE_INTRINSICS)
  return (Part)_mm256_cvtph_ps(load<__m128i>(from));
#else
  const Words half = __builtin_convertvector(load<Halves>(from), Words);
  const Part size = (Part)((half & 0x7fffu) << 13) * 0x1p112f;  // its exponent counts from another one
  return (Part)((Words)size | (half & 0x8000u) << 16);
#endif
}

inline Part floats_of_bfloat16(const uint8_t* from) {
  typedef uint16_t Upper __attribute__((vector_size(sizeof(Part) / 2)));
  typedef uint32_t Whole __attribute__((vector_size(sizeof(Part))));
  return (Part)(__builtin_convertvector(load<Upper>(from), Whole) << 16);
}

// From the scale or the minimum of an output on.
inline Part scales_at(const GroupFormat& format, const uint8_t* from) {
  if (format.scale_kind == GroupFormat::kFloat16) return floats_of_float16(from);
  return format.scale_kind == GroupFormat::kFloat32 ? load<Part>(from) : floats_of_bfloat16(from);
}

enum Subscales { kNoSubscales, kSubscales, kPackedSubscales };

// `find_factors` for formats that have these. Conditions on them in the loops would take as long as the products of one row.
template <Extra kExtra, Subscales kSub>
void find_factors_with(const GroupFormat& format, const uint8_t* chunk, int64_t groups, Factors& to) {
  const int64_t scales = format.num_scales(groups), bytes = format.scale_bytes();
  const uint8_t* minima = chunk + scales * bytes * kBlockOutputs;
  const uint8_t* zeros = minima + scales * format.minima * bytes * kBlockOutputs;
  const uint8_t* subscales = zeros + scales * format.zeros * kBlockOutputs;
  const uint8_t* subminima = subscales + groups * format.subscales * kBlockOutputs;
  const auto put = [](float* at, Part part) { std::memcpy(at, &part, sizeof(part)); };
  for (int64_t i = 0; i < scales * kBlockOutputs; i += kPartLanes) {
    put(to.scales[0] + i, scales_at(format, chunk + i * bytes));
    if constexpr (kExtra == kMinima) put(to.extras[0] + i, scales_at(format, minima + i * bytes));
    if constexpr (kExtra == kZeros) put(to.extras[0] + i, -floats_of_bytes(load<PartBytes>(zeros + i)));
  }
  const int64_t each = format.span * format.halves();
  if (kSub == kNoSubscales && each == 1) return;
  // From the last on: the first have the scales.
  for (int64_t output = 0; output < kBlockOutputs; output += kPartLanes)
    for (int64_t s = scales - 1; s >= 0; s--) {
      const Part scale = load<Part>(to.scales[s] + output);
      const Part extra = kExtra == kNothing ? Part{} : load<Part>(to.extras[s] + output);
      for (int64_t i = std::min(groups * format.halves(), (s + 1) * each) - 1; i >= s * each; i--) {
        const int64_t at = i * kBlockOutputs + output;
        Part own = scale, beside = extra;
        if constexpr (kSub == kPackedSubscales) {
          const PartBytes both = load<PartBytes>(subscales + at);
          own *= floats_of_bytes(both & 15);
          beside *= -floats_of_bytes(both >> 4);
        }
        if constexpr (kSub == kSubscales) {
          own *= floats_of_bytes(load<PartBytes>(subscales + at));
          if constexpr (kExtra == kMinima) beside *= -floats_of_bytes(load<PartBytes>(subminima + at));
        }
        put(to.scales[0] + at, own);
        if constexpr (kExtra != kNothing) put(to.extras[0] + at, beside);
      }
    }
}

// Of a chunk of so many groups. All products are exact.
inline void find_factors(const GroupFormat& format, const uint8_t* chunk, int64_t groups, Factors& to) {
  const Extra extra = extra_of(format);
  if (format.packs_subscales) return find_factors_with<kMinima, kPackedSubscales>(format, chunk, groups, to);
  if (format.subscales && extra == kMinima) return find_factors_with<kMinima, kSubscales>(format, chunk, groups, to);
  if (format.subscales) return find_factors_with<kNothing, kSubscales>(format, chunk, groups, to);
  if (extra == kMinima) return find_factors_with<kMinima, kNoSubscales>(format, chunk, groups, to);
  if (extra == kZeros) return find_factors_with<kZeros, kNoSubscales>(format, chunk, groups, to);
  find_factors_with<kNothing, kNoSubscales>(format, chunk, groups, to);
}

// The values of four inputs and of as many outputs as a part has, a byte each, which are shifted in pairs.
typedef uint16_t Pairs __attribute__((vector_size(4 * kPartLanes)));

// Those of a plane of kBits, from an output on.
template <int kBits>
inline Pairs step_of_plane(const uint8_t* plane, int step, int64_t output) {
  const uint16_t mask = ((1 << kBits) - 1) * 0x0101;
  const uint16_t shift = static_cast<uint16_t>(step / kBits * kBits);
  return load<Pairs>(plane + step % kBits * kStepBytes + output * 4) >> shift & mask;
}

// TABLES of kernels/group_formats.py, from the second on.
constexpr int16_t kTables[][16] = {
    {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113},
    {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12},
    {-28776, -20034, -15110, -11364, -8185, -5317, -2620, 0, 2290, 4631, 7082, 9724, 12682, 16190, 20804, 28776},
    {0, 1, 128, 192, 64, 96, 32, 48, 0, -1, -128, -192, -64, -96, -32, -48},
};

// The lower or the upper bytes of a table, both with 128 added: a number is 256 * upper + lower, and both have signs.
template <int kTable, bool kUpper>
struct TableBytes {
  alignas(16) uint8_t numbers[16];

  constexpr TableBytes() : numbers() {
    for (int i = 0; i < 16; i++) {
      const int moved = kTables[kTable - 1][i] + 128;
      numbers[i] = static_cast<uint8_t>(kUpper ? (moved >> 8) + 128 : moved & 255);
    }
  }
};

template <int kTable, bool kUpper>
inline Pairs looked_up(Pairs places) {
  static constexpr TableBytes<kTable, kUpper> kBytes;
  constexpr const uint8_t(&numbers)[16] = kBytes.numbers;
#if defined(__AVX512BW__) && !defined(QUIRE_INTRINSICS)
  return (Pairs)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(load<__m128i>(numbers)), (__m512i)places);
#elif defined(__AVX2__) && !defined(QUIRE_INTRINSICS)
  return (Pairs)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load<__m128i>(numbers)), (__m256i)places);
#else
  uint8_t bytes[sizeof(Pairs)];
  std::memcpy(bytes, &places, sizeof(bytes));
  for (uint8_t& byte : bytes) byte = numbers[byte];
  return load<Pairs>(bytes);
#endif
}

// Values of a plane of kLow bits and, unless it has none, of kHigh bits above them: a byte each, as of 8 bits.
template <int kLow, int kHigh, int kTable = 0, bool kUpper = false>
inline void unpack_planes(const uint8_t* values, int64_t groups, uint8_t* to) {
  constexpr int64_t kBytes = (kLow + kHigh) * kStepBytes;
  for (int64_t group = 0; group < groups; group++, values += kBytes, to += 8 * kStepBytes) {
#pragma GCC unroll 8
    for (int step = 0; step < 8; step++)
#pragma GCC unroll 2
      for (int64_t output = 0; output < kBlockOutputs; output += kPartLanes) {
        Pairs found = step_of_plane<kLow>(values, step, output);
        if constexpr (kHigh > 0) found |= step_of_plane<kHigh>(values + kLow * kStepBytes, step, output) << kLow;
        if constexpr (kTable > 0) found = looked_up<kTable, kUpper>(found);
        std::memcpy(to + step * kStepBytes + output * 4, &found, sizeof(found));
      }
  }
}

// `upper`: the upper bytes of a wide table.
inline void unpack(const GroupFormat& format, const uint8_t* values, int64_t groups, uint8_t* to, bool upper = false) {
  switch (format.bits) {
    case 2: return unpack_planes<2, 0>(values, groups, to);
    case 3: return unpack_planes<2, 1>(values, groups, to);
    case 5: return unpack_planes<4, 1>(values, groups, to);
    case 6: return unpack_planes<4, 2>(values, groups, to);
    default: break;
  }
  switch (format.table) {
    case 1: return unpack_planes<4, 0, 1>(values, groups, to);
    case 2: return unpack_planes<4, 0, 2>(values, groups, to);
    case 3: return upper ? unpack_planes<4, 0, 3, true>(values, groups, to) : unpack_planes<4, 0, 3>(values, groups, to);
    case 4: return upper ? unpack_planes<4, 0, 4, true>(values, groups, to) : unpack_planes<4, 0, 4>(values, groups, to);
    default: return unpack_planes<4, 0>(values, groups, to);
  }
}

// One byte of each word, less an integer: 2^23 more is a float with it as its last bits. Of a conversion of these vectors
// GCC makes one operation for each number.
inline Floats floats_of_words(Words words, int byte, int moved) {
  return (Floats)((words >> 8 * byte & 255u) | 0x4b000000u) - (0x1p23f + static_cast<float>(moved));
}

// Conditions inside this loop would make GCC keep its vectors in memory.
template <Extra kExtra, bool kWide>
inline void scale_values(float* to, const uint8_t* values, const uint8_t* upper, const Factors& factors, int64_t count,
                         int64_t steps, int moved) {
  for (int64_t i = 0; i < count; i++) {
    const Floats scale = load<Floats>(factors.scales[i]), extra = load<Floats>(factors.extras[i]);
    for (int64_t step = 0; step < steps; step++, values += kStepBytes, upper += kWide ? kStepBytes : 0) {
#pragma GCC unroll 4
      for (int input = 0; input < 4; input++, to += kBlockOutputs) {
        Floats value = floats_of_words(load<Words>(values), input, moved);
        if constexpr (kWide) value += floats_of_words(load<Words>(upper), input, 128) * 256.0f;
        if constexpr (kExtra == kZeros) value += extra;
        value *= scale;
        if constexpr (kExtra == kMinima) value += extra;
        store_lanes(to, value, kLanes);
      }
    }
  }
}

// The values of a chunk of so many groups: [32 * groups, 16] in float32, as the format defines them. All operations are
// rounded one by one.
inline void dequantise(float* to, const GroupFormat& format, const uint8_t* chunk, int64_t groups) {
  Factors factors;
  find_factors(format, chunk, groups, factors);
  alignas(64) uint8_t unpacked[kChunkGroups * 8 * kStepBytes], upper[sizeof(unpacked)];
  const uint8_t* values = chunk + format.values_at(groups);
  if (format.has_wide_table()) unpack(format, values, groups, upper, true);
  if (format.bits != 8) {
    unpack(format, values, groups, unpacked);
    values = unpacked;
  }
  const Extra extra = extra_of(format);
  const auto run = format.has_wide_table() ? &scale_values<kNothing, true>
                   : extra == kMinima      ? &scale_values<kMinima, false>
                   : extra == kZeros       ? &scale_values<kZeros, false>
                                           : &scale_values<kNothing, false>;
  run(to, values, upper, factors, groups * format.halves(), 8 / format.halves(), moved_by(format));
}

}  // namespace quire
