// Pages of keys and values in the layout in which attention multiplies by them: see packed_product.h.
//
// Pages are [P * S / 16, K, 16 * D]: a part is what one head has of 16 adjacent positions. The keys of a part are a packed
// weight of 16 outputs, the positions, and D inputs; its values are one of V outputs and 16 inputs. Products take
// 4 bytes of a row at a time, a pair of bfloat16 or one float, so keys are [D / 2, 16, 2] or [D, 16], and values
// [V / 16, 8, 16, 2] or [V / 16, 16, 16]. S, D and V are multiples of 16. kernels/packed_pages.py has the same for torch.
//
// In pages of 8 bits the elements of a position are codes from -127 to 127 and a scale. 4 bytes are four codes, so those of
// keys are [D / 4, 16, 4], and of values [V / 16, 4, 16, 4]. Behind them a part has the scales [16] of its positions, in
// float32: it takes 16 * (D + 4) bytes.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "vectors.h"

namespace quire {

constexpr int64_t kPartPositions = 16;

// The elements of a position or an output that are next to each other.
template <typename T>
constexpr int64_t kAdjacent = sizeof(float) / sizeof(T);

// Whether all slots are in pages; negative ones are of padding tokens.
inline bool slots_exist(const int64_t* slots, int64_t tokens, int64_t num_slots) {
  return std::all_of(slots, slots + tokens, [&](int64_t slot) { return slot < num_slots; });
}

// The number of the part of a head that has a slot.
inline int64_t part_of(int64_t slot, int64_t kv_heads, int64_t kv_head) {
  return slot / kPartPositions * kv_heads + kv_head;
}

// The bytes of a part in pages of 8 bits.
constexpr int64_t quantised_part_bytes(int64_t width) {
  return kPartPositions * (width + static_cast<int64_t>(sizeof(float)));
}

template <typename T>
inline void write_key(T* part, int64_t slot, const T* key, int64_t width) {
  char* to = reinterpret_cast<char*>(part) + slot % kPartPositions * sizeof(float);
  for (int64_t d = 0; d < width; d += kAdjacent<T>) std::memcpy(to + d * kPartPositions * sizeof(T), key + d, sizeof(float));
}

template <typename T>
inline void write_value(T* part, int64_t slot, const T* value, int64_t width) {
  const int64_t position = slot % kPartPositions;
  T* to = part + position / kAdjacent<T> * kAdjacent<T> * kLanes + position % kAdjacent<T>;
  for (int64_t first = 0; first < width; first += kLanes, to += kPartPositions * kLanes)
    for (int64_t lane = 0; lane < kLanes; lane++) to[lane * kAdjacent<T>] = value[first + lane];
}

typedef int8_t Codes __attribute__((vector_size(kPartLanes)));

// Turns elements into codes of at most 127, rounded to nearest, and returns the scale of all of them: 0 if the largest is
// below 1e-30, and NaN if one is not finite, which shows in what attends to it.
template <typename T>
inline float quantise(int8_t* codes, const T* from, int64_t width) {
  PartInts sizes{};
  for_parts(width, [&](int64_t d, int count) {
    sizes = larger((PartInts)load_lanes<Part>(from + d, count) & 0x7fffffff, sizes);
  });
  const float largest = load<float>(&(const int32_t&)reduce(sizes, larger<PartInts>));
  const bool is_finite = std::isfinite(largest);
  const float factor = is_finite && largest >= 1e-30f ? 127.0f / largest : 0.0f;
  for_parts(width, [&](int64_t d, int count) {
    const Part scaled = is_finite ? load_lanes<Part>(from + d, count) * factor : Part{};
    const Part shifted = scaled + 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    const Codes rounded = __builtin_convertvector((PartInts)shifted, Codes);
    std::memcpy(codes + d, &rounded, count);
  });
  return !is_finite ? std::nanf("") : factor > 0.0f ? largest / 127.0f : 0.0f;
}

// Where a head has a slot, for keys and values of type T.
template <typename T>
struct SlotOfHead {
  int64_t slot, part;
  bool is_quantised;  // whether pages have 8 bits
  bool is_wide;       // whether T is float, and pages without 8 bits are bfloat16

  void write_key(void* pages, const T* key, int64_t width) const {
    write(pages, key, width, [&](auto* to, const auto* elements) { quire::write_key(to, slot, elements, width); });
  }

  void write_value(void* pages, const T* value, int64_t width) const {
    write(pages, value, width, [&](auto* to, const auto* elements) { quire::write_value(to, slot, elements, width); });
  }

 private:
  // Calls write(part, elements) with the elements of the pages' type.
  template <typename Write>
  void write(void* pages, const T* from, int64_t width, Write write) const {
    const int64_t at = part * kPartPositions * width;
    if (is_quantised) {
      int8_t codes[kMaxHeadWidth];
      write(quantised(pages, codes, from, width), codes);
    } else if (is_wide) {
      Bf16 narrow[kMaxHeadWidth];
      for_parts(width, [&](int64_t d, int count) { store_lanes(narrow + d, load_lanes<Part>(from + d, count), count); });
      write(static_cast<Bf16*>(pages) + at, narrow);
    } else {
      write(static_cast<T*>(pages) + at, from);
    }
  }

  // Computes codes, writes their scale, and returns the part.
  int8_t* quantised(void* pages, int8_t* codes, const T* from, int64_t width) const {
    int8_t* to = static_cast<int8_t*>(pages) + part * quantised_part_bytes(width);
    const float scale = quantise(codes, from, width);
    std::memcpy(to + kPartPositions * width + slot % kPartPositions * sizeof(float), &scale, sizeof(float));
    return to;
  }
};

// The codes of a part as elements, which all of them are exactly. The part behind it, which is of the next head, is loaded
// into the cache: most tasks go on with it.
template <typename T>
inline void decode_part(T* to, const int8_t* codes, int64_t width) {
  for (int64_t i = 0; i < kPartPositions * width; i += 4 * kLanes, codes += 4 * kLanes) {
    __builtin_prefetch(codes + quantised_part_bytes(width));
    const Ints words = load<Ints>(codes);
    const Ints wholes[] = {words << 24 >> 24, words << 16 >> 24, words << 8 >> 24, words >> 24};
    Floats values[4];
    for (int n = 0; n < 4; n++) values[n] = __builtin_convertvector(wholes[n], Floats);
    if constexpr (std::is_same_v<T, float>) {
      std::memcpy(to + i, values, sizeof(values));
    } else {
      // In bfloat16 the lower half of each is 0.
      const Words pairs[] = {(Words)values[0] >> 16 | (Words)values[1], (Words)values[2] >> 16 | (Words)values[3]};
      std::memcpy(to + i, pairs, sizeof(pairs));
    }
  }
}

// Copies the values of a part; those of the positions that are not from `begin` to `end` become zeros.
template <typename T>
inline void copy_values(T* to, const T* part, int64_t begin, int64_t end, int64_t width) {
  constexpr int64_t kRows = kPartPositions / kAdjacent<T>, kRowSize = kAdjacent<T> * kLanes;
  uint32_t masks[kRows] = {};
  for (int64_t position = std::max<int64_t>(begin, 0); position < std::min(end, kPartPositions); position++)
    masks[position / kAdjacent<T>] |= kAdjacent<T> == 1 ? ~0u : 0xffffu << (position % kAdjacent<T> * 16);
  for (int64_t row = 0; row < kRows * width / kLanes; row++) {
    const Words visible = load<Words>(part + row * kRowSize) & masks[row % kRows];
    std::memcpy(to + row * kRowSize, &visible, sizeof(visible));
  }
}

// The first `width` elements of the keys of a part, as values; those of the positions that are not from `begin` to `end`
// become zeros.
template <typename T>
inline void values_of_keys(T* to, const T* keys, int64_t begin, int64_t end, int64_t width) {
  constexpr int64_t kNear = kAdjacent<T>;
  begin = std::max<int64_t>(begin, 0);
  end = std::min(end, kPartPositions);
  for (int64_t first = 0; first < width; first += kLanes, to += kPartPositions * kLanes) {
    T square[kLanes][kPartPositions] = {};  // [element, position]
    for (int64_t lane = 0; lane < kLanes; lane++) {
      const T* from = keys + (first + lane) / kNear * kNear * kPartPositions + (first + lane) % kNear;
      for (int64_t position = begin; position < end; position++) square[lane][position] = from[position * kNear];
    }
    for (int64_t position = 0; position < kPartPositions; position += kNear)
      for (int64_t lane = 0; lane < kLanes; lane++)
        std::memcpy(to + position * kLanes + lane * kNear, &square[lane][position], kNear * sizeof(T));
  }
}

}  // namespace quire
