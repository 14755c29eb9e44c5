// Which tokens of a row the filters of a draw keep, without sorting the row.
//
// Tokens are ordered by logit, the largest first, and by id among equals. Each filter keeps the first ones of this
// order, but for typical_p, which keeps the first ones of another. What is kept is copied to a list, in the order of ids.
#pragma once

#include <vector>

#include "token_weights.h"

namespace quire {

constexpr float kLowest = -std::numeric_limits<float>::max();  // what is not forbidden reaches it

// The settings that leave out tokens, in the order in which they are applied: FILTERS in workers/outputs.py.
struct Filters {
  int64_t top_k;  // 0: none
  double top_p, min_p, typical_p;
};

// Tokens in the order of their ids.
struct Tokens {
  const float* values;
  const int32_t* ids;  // null: 0, 1, ...
  int64_t count;

  int32_t id(int64_t index) const { return ids == nullptr ? static_cast<int32_t>(index) : ids[index]; }
};

// A token and its part of what is added up.
template <typename Code>
struct Ordered {
  Code code;  // the order of codes is that of tokens
  int32_t id;
  double weight;

  bool operator<(const Ordered& other) const { return code != other.code ? code < other.code : id < other.id; }
};

using Item = Ordered<uint32_t>;      // by logit
using Distance = Ordered<uint64_t>;  // by the distance of the log-weight from the mean, as the bits of a double

// The memory of one thread. It grows to what the largest row needs, and is kept.
struct TokenMemory {
  std::vector<float> row, values;
  std::vector<int32_t> ids;
  std::vector<Item> items;
  std::vector<Distance> distances;
};

inline uint32_t code_of(float value) {
  const float positive_zero = value == 0 ? 0.0f : value;
  uint32_t bits;
  std::memcpy(&bits, &positive_zero, sizeof(bits));
  return bits >> 31 ? bits : ~(bits | 0x80000000u);
}

inline float value_of(uint32_t code) {
  const uint32_t bits = code >> 31 ? code : ~code & 0x7fffffffu;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

template <typename T>
inline void grow(std::vector<T>& memory, int64_t size) {
  if (static_cast<int64_t>(memory.size()) < size) memory.resize(size);
}

// The tokens with keep(value, id), of those from `bound` on, in the memory's list. `tokens` may be that list.
template <typename Keep>
inline Tokens kept(const Tokens& tokens, float bound, TokenMemory& memory, Keep keep) {
  grow(memory.values, tokens.count);
  grow(memory.ids, tokens.count);
  float* values = memory.values.data();
  int32_t* ids = memory.ids.data();
  int64_t count = 0;
  for_blocks(tokens.values, tokens.count, &bound, [&](int64_t first, int64_t some) {
    for (int64_t i = first; i < first + some; i++) {
      const float value = tokens.values[i];
      const int32_t id = tokens.id(i);
      values[count] = value;
      ids[count] = id;
      count += value >= bound && keep(value, id);
    }
  });
  return {values, ids, count};
}

inline Tokens from(const Tokens& tokens, float bound, TokenMemory& memory) {
  return kept(tokens, bound, memory, [](float, int32_t) { return true; });
}

// Up to and with the token of this item.
inline Tokens up_to(const Tokens& tokens, const Item& last, TokenMemory& memory) {
  const float value = value_of(last.code);
  return kept(tokens, value, memory, [=](float other, int32_t id) { return other > value || id <= last.id; });
}

// The item at which the weights in the order of tokens reach `limit`, or else the last with a weight. There are such.
// Finds the leading bits of its code first, then the next ones among the items with these. `items`, in the order of
// their ids, are lost.
template <typename Code>
inline Ordered<Code> reaching(std::vector<Ordered<Code>>& items, double limit) {
  constexpr size_t kFew = 256;
  constexpr int kBins = 2048;
  double before = 0;
  for (int shift = 8 * sizeof(Code) - 11; items.size() > kFew; shift = std::max(shift - 11, 0)) {
    double bins[kBins] = {};
    for (const Ordered<Code>& item : items) bins[(item.code >> shift) % kBins] += item.weight;
    double sum = before;
    uint32_t found = 0;
    for (uint32_t bin = 0; bin < kBins && sum < limit; bin++) {
      if (bins[bin] <= 0) continue;
      found = bin;
      before = sum;
      sum += bins[bin];
    }
    size_t left = 0;
    for (const Ordered<Code>& item : items) {
      items[left] = item;
      left += (item.code >> shift) % kBins == found;
    }
    items.resize(left);
    if (shift == 0) break;
  }
  if (items.size() <= kFew) std::sort(items.begin(), items.end());
  Ordered<Code> last = items.front();  // more than a few are equal here, in the order of ids
  for (const Ordered<Code>& item : items) {
    if (item.weight > 0) last = item;
    before += item.weight;
    if (before >= limit) break;
  }
  return last;
}

// A logit that at least k tokens reach: the k-th largest of as many disjoint groups' largest.
inline float bound_of_first(const Tokens& tokens, int64_t k) {
  constexpr int64_t kGroups = 2048;
  if (k > kGroups || tokens.count < 2 * kGroups) return kLowest;
  std::vector<float> largest(tokens.values, tokens.values + kGroups);
  int64_t first = kGroups;
  for (; first + kGroups <= tokens.count; first += kGroups)
    for (int64_t i = 0; i < kGroups; i += kEight) {
      const EightFloats most = larger(load<EightFloats>(&largest[i]), load<EightFloats>(tokens.values + first + i));
      std::memcpy(&largest[i], &most, sizeof(most));
    }
  std::nth_element(largest.begin(), largest.begin() + k - 1, largest.end(), std::greater<float>());
  return std::max(largest[k - 1], kLowest);
}

inline Tokens first_k(Tokens tokens, int64_t k, TokenMemory& memory) {
  tokens = from(tokens, bound_of_first(tokens, k), memory);
  if (tokens.count <= k) return tokens;
  memory.items.resize(tokens.count);
  for (int64_t i = 0; i < tokens.count; i++) memory.items[i] = {code_of(tokens.values[i]), tokens.ids[i], 1.0};
  return up_to(tokens, reaching(memory.items, static_cast<double>(k)), memory);
}

// The first tokens of which those before each weigh less than `share` of all.
inline Tokens first_share(Tokens tokens, double share, const Softmax& softmax, TokenMemory& memory) {
  const float bounds[4] = {kLowest, softmax.logit(-12), softmax.logit(-6), softmax.logit(-3)};
  double sums[4];
  softmax.totals(tokens.values, tokens.count, bounds, sums);
  const double limit = std::max(share * sums[0], std::numeric_limits<double>::min());
  int near = 3;
  while (near > 0 && sums[near] < limit) near--;
  tokens = from(tokens, bounds[near], memory);
  memory.items.resize(tokens.count);
  for (int64_t i = 0; i < tokens.count; i += kDoubleLanes) {
    const int64_t some = std::min<int64_t>(kDoubleLanes, tokens.count - i);
    const Doubles weights = softmax.weights(load_four(tokens.values + i, some));
    for (int64_t lane = 0; lane < some; lane++)
      memory.items[i + lane] = {code_of(tokens.values[i + lane]), tokens.ids[i + lane], weights[lane]};
  }
  return up_to(tokens, reaching(memory.items, limit), memory);
}

// The tokens whose weight is at least min_p.
inline Tokens likely(const Tokens& tokens, double min_p, const Softmax& softmax, TokenMemory& memory) {
  uint32_t first = code_of(static_cast<float>(softmax.best)), last = code_of(kLowest);
  while (first < last) {  // the last code with such a weight is from `first` to `last`
    const uint32_t middle = last - (last - first) / 2;
    if (softmax.weight(value_of(middle)) >= min_p) first = middle;
    else last = middle - 1;
  }
  return from(tokens, value_of(first), memory);
}

// The tokens whose log-weight is nearest to the mean log-weight, until they weigh `share` of all; of equally near ones
// all. The mean log-weight differs from the negative entropy by the logarithm of the total, as log-weights do from
// log-probabilities.
inline Tokens typical(Tokens tokens, double share, const Softmax& softmax, TokenMemory& memory) {
  tokens = from(tokens, kLowest, memory);
  memory.distances.resize(tokens.count);
  double total = 0, sum = 0;
  for (int64_t i = 0; i < tokens.count; i += kDoubleLanes) {
    const int64_t some = std::min<int64_t>(kDoubleLanes, tokens.count - i);
    const Doubles weights = softmax.weights(load_four(tokens.values + i, some));
    for (int64_t lane = 0; lane < some; lane++) {
      memory.distances[i + lane].weight = weights[lane];
      total += weights[lane];
      sum += weights[lane] * softmax.log_weight(tokens.values[i + lane]);
    }
  }
  const double mean = sum / total;
  const auto distance_of = [&](float value) { return std::abs(softmax.log_weight(value) - mean); };
  for (int64_t i = 0; i < tokens.count; i++) {
    const double distance = distance_of(tokens.values[i]);
    std::memcpy(&memory.distances[i].code, &distance, sizeof(distance));
    memory.distances[i].id = tokens.ids[i];
  }
  const uint64_t last = reaching(memory.distances, std::max(share * total, std::numeric_limits<double>::min())).code;
  double farthest;
  std::memcpy(&farthest, &last, sizeof(farthest));
  return kept(tokens, kLowest, memory, [&](float value, int32_t) { return distance_of(value) <= farthest; });
}

// What the filters leave of some tokens.
inline Tokens filtered(Tokens tokens, const Filters& filters, const Softmax& softmax, TokenMemory& memory) {
  if (filters.top_k > 0 && filters.top_k < tokens.count) tokens = first_k(tokens, filters.top_k, memory);
  if (filters.top_p < 1) tokens = first_share(tokens, filters.top_p, softmax, memory);
  if (filters.min_p > 0) tokens = likely(tokens, filters.min_p, softmax, memory);
  if (filters.typical_p < 1) tokens = typical(tokens, filters.typical_p, softmax, memory);
  return tokens;
}

}  // namespace quire
