// Pages of keys and values in the layout in which attention multiplies by them: see packed_product.h.
//
// Pages are [P * S / 16, K, 16 * D]: a part is what one head has of 16 adjacent positions. The keys of a part are a packed
// weight of 16 outputs, the positions, and D inputs; its values are one of V outputs and 16 inputs. Products take
// 4 bytes of a row at a time, a pair of bfloat16 or one float, so keys are [D / 2, 16, 2] or [D, 16], and values
// [V / 16, 8, 16, 2] or [V / 16, 16, 16]. S, D and V are multiples of 16. kernels/packed_pages.py has the same for torch.
#pragma once

#include <algorithm>

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

// The first element of the part that has a slot.
inline int64_t part_of(int64_t slot, int64_t kv_heads, int64_t kv_head, int64_t width) {
  return (slot / kPartPositions * kv_heads + kv_head) * kPartPositions * width;
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

}  // namespace quire
