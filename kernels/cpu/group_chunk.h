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

// Scales of the groups of a chunk, or of their halves, in float32, and what else they have: minima, or minus zero points.
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

// From the scale of an output on.
inline Part scales_at(const GroupFormat& format, const uint8_t* from) {
  if (format.scale_kind == GroupFormat::kFloat16) return floats_of_float16(from);
  return format.scale_kind == GroupFormat::kFloat32 ? load<Part>(from) : floats_of_bfloat16(from);
}

// Of a chunk of so many groups, for the outputs of a vector from one on. All products are exact.
inline void find_factors_of_part(const GroupFormat& format, const uint8_t* chunk, int64_t groups, int64_t output, Factors& to) {
  const int64_t scales = format.num_scales(groups), halves = format.halves(), each = format.scale_bytes() * kBlockOutputs;
  const uint8_t* minima = chunk + scales * each;
  const uint8_t* zeros = minima + scales * format.minima * 2 * kBlockOutputs;
  const uint8_t* subscales = zeros + scales * format.zeros * kBlockOutputs;
  const uint8_t* subminima = subscales + groups * format.subscales * kBlockOutputs;
  const auto bytes = [&](const uint8_t* all, int64_t i) { return load<PartBytes>(all + i * kBlockOutputs + output); };
  for (int64_t s = 0; s < scales; s++) {
    const int64_t begin = s * format.span * halves, end = std::min(groups, (s + 1) * format.span) * halves;
    const Part scale = scales_at(format, chunk + s * each + output * format.scale_bytes());
    Part extra{};
    if (format.minima) extra = floats_of_float16(minima + (s * kBlockOutputs + output) * 2);
    if (format.zeros) extra = -floats_of_bytes(bytes(zeros, s));
    for (int64_t i = begin; i < end; i++) {
      Part own = scale, beside = extra;
      if (format.packs_subscales) {
        const PartBytes both = bytes(subscales, i);
        own *= floats_of_bytes(both & 15);
        beside *= -floats_of_bytes(both >> 4);
      } else if (format.subscales) {
        own *= floats_of_bytes(bytes(subscales, i));
        if (format.minima) beside *= -floats_of_bytes(bytes(subminima, i));
      }
      std::memcpy(to.scales[i] + output, &own, sizeof(own));
      std::memcpy(to.extras[i] + output, &beside, sizeof(beside));
    }
  }
}

inline void find_factors(const GroupFormat& format, const uint8_t* chunk, int64_t groups, Factors& to) {
  for (int64_t output = 0; output < kBlockOutputs; output += kPartLanes)
    find_factors_of_part(format, chunk, groups, output, to);
}

// 64 bytes that are shifted in pairs.
typedef uint16_t Pairs __attribute__((vector_size(64)));

// The values of four inputs in a plane of kBits.
template <int kBits>
inline Pairs step_of_plane(const uint8_t* plane, int step) {
  const uint16_t mask = ((1 << kBits) - 1) * 0x0101;
  const uint16_t shift = static_cast<uint16_t>(step / kBits * kBits);
  return load<Pairs>(plane + step % kBits * kStepBytes) >> shift & mask;
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
  const __m256i table = _mm256_broadcastsi128_si256(load<__m128i>(numbers));
  __m256i parts[2];
  std::memcpy(parts, &places, sizeof(places));
  for (__m256i& part : parts) part = _mm256_shuffle_epi8(table, part);
  return load<Pairs>(parts);
#else
  uint8_t bytes[64];
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
    for (int step = 0; step < 8; step++) {
      Pairs found = step_of_plane<kLow>(values, step);
      if constexpr (kHigh > 0) found |= step_of_plane<kHigh>(values + kLow * kStepBytes, step) << kLow;
      if constexpr (kTable > 0) found = looked_up<kTable, kUpper>(found);
      std::memcpy(to + step * kStepBytes, &found, sizeof(found));
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
