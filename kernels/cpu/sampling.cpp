// Chooses tokens of rows of logits, with all settings: see workers/numpy_choice.py, which defines the
// results. A row is computed by one thread, so its results do not depend on the others.

#include <functional>
#include <utility>

#include "philox.h"
#include "threads.h"
#include "token_filters.h"

namespace quire {

// How one row's tokens are chosen: RowArguments in sampling.py. All ids are those of the vocabulary, but in `history`
// and `path`, where others are ignored.
struct RowArguments {
  const float* logits;         // [V], neither NaN nor +inf
  const uint32_t* mask;        // [V / 32 rounded up] bits, or null
  const int64_t* history;      // [history_len]
  const int64_t* path;         // [path_len], the tokens after the history
  const int64_t* biased;       // [biases]
  const double* bias;          // [biases]
  const int64_t* draft_ids;    // [draft_len] ascending, or null: all tokens
  const double* draft;         // [draft_len] the distribution of the drafts
  const int64_t* drafted;      // [drafts]
  const uint64_t* keys;        // [draws], or null: the tokens are given
  int64_t* tokens;             // [draws]
  double* logprobs;            // [draws], or null
  int64_t history_len, path_len, prompt_len, biases, draft_len, drafts, draws;
  uint64_t keep_key, residual_key;
  double temperature, repetition, frequency, presence;
  Filters filters;
  int64_t candidates;  // result: how many tokens can be drawn; 0: none
};

namespace {

// Less than the least noise, which is that of the largest uniform number.
constexpr double kLeastNoise = -2.82;
// More than the largest, which is that of 2^-32.
constexpr double kMostNoise = 22.19;
// Far more than the relative error of what is compared with uniform numbers.
constexpr double kSlack = 1e-9;

struct Memory : TokenMemory {
  std::vector<uint32_t> occurs;  // [V]: 0, or 1 + 2 * how often a token occurs after the prompt
  std::vector<int32_t> distinct;
  std::vector<double> probabilities, residual;
  std::vector<int32_t> residual_ids;
};

double gumbel(float uniform) { return -std::log(-std::log1p(-std::max(static_cast<double>(uniform), 0x1p-32))); }

// Stores a logit, rounded. What is finite stays so, and what is forbidden too.
void store(float& logit, double value) {
  const double most = std::numeric_limits<float>::max();
  if (logit != kHidden) logit = static_cast<float>(std::clamp(value, -most, most));
}

void mask(float* out, const float* logits, const uint32_t* bits, int64_t vocab) {
  constexpr Words kBit = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  for_lanes(vocab, [&](int64_t first, int count) {
    const Words word = Words{} + (bits[first / 32] >> first % 32);
    const Words allowed = 0u - (word >> kBit & 1u);  // all bits or none
    const Words values = (Words)load_lanes(logits + first, count);
    store_lanes(out + first, (Floats)((values & allowed) | ((Words)splat(kHidden) & ~allowed)), count);
  });
}

void count_history(const RowArguments& a, int64_t vocab, Memory& memory) {
  grow(memory.occurs, vocab);
  memory.distinct.clear();
  for (int64_t i = 0; i < a.history_len + a.path_len; i++) {
    const int64_t token = i < a.history_len ? a.history[i] : a.path[i - a.history_len];
    if (token < 0 || token >= vocab) continue;
    uint32_t& occurs = memory.occurs[token];
    if (occurs == 0) memory.distinct.push_back(static_cast<int32_t>(token));
    occurs = (occurs | 1) + (i >= a.prompt_len ? 2 : 0);
  }
}

void penalise(float* row, const RowArguments& a, Memory& memory) {
  for (const int32_t token : memory.distinct) {
    const double recent = std::exchange(memory.occurs[token], 0) / 2;
    if (a.repetition != 1) store(row[token], row[token] > 0 ? row[token] / a.repetition : row[token] * a.repetition);
    if (recent > 0) store(row[token], row[token] - (recent * a.frequency + a.presence));
  }
}

// The logits after mask, bias and penalties.
Tokens adjusted(const RowArguments& a, int64_t vocab, Memory& memory) {
  const bool penalties = a.repetition != 1 || a.frequency != 0 || a.presence != 0;
  if (a.mask == nullptr && a.biases == 0 && !penalties) return {a.logits, nullptr, vocab};
  grow(memory.row, vocab);
  float* row = memory.row.data();
  if (a.mask != nullptr) mask(row, a.logits, a.mask, vocab);
  else std::copy(a.logits, a.logits + vocab, row);
  for (int64_t i = 0; i < a.biases; i++) {
    store(row[a.biased[i]], row[a.biased[i]] + a.bias[i]);
    if (a.bias[i] == kHidden) row[a.biased[i]] = kHidden;
  }
  if (penalties) {
    count_history(a, vocab, memory);
    penalise(row, a, memory);
  }
  return {row, nullptr, vocab};
}

float largest(const Tokens& tokens) {
  EightFloats most[4];
  for (EightFloats& some : most) some = EightFloats{} + kHidden;
  int64_t i = 0;
  for (; i + 4 * kEight <= tokens.count; i += 4 * kEight)
    for (int n = 0; n < 4; n++) most[n] = larger(load<EightFloats>(tokens.values + i + n * kEight), most[n]);
  float found = largest_of(larger(larger(most[0], most[1]), larger(most[2], most[3])));
  for (; i < tokens.count; i++) found = std::max(found, tokens.values[i]);
  return found;
}

// The tokens that can be drawn. Without a temperature that is the first of the most likely ones.
Tokens drawable(const RowArguments& a, Tokens tokens, const Softmax& softmax, Memory& memory) {
  if (a.temperature <= 0) {
    tokens = from(tokens, static_cast<float>(softmax.best), memory);
    tokens.count = 1;
    return tokens;
  }
  if (a.mask != nullptr) tokens = from(tokens, kLowest, memory);  // often few
  return filtered(tokens, a.filters, softmax, memory);
}

// The draw is the token with the largest log-weight + noise, the first of equals.
struct Race {
  double score = -std::numeric_limits<double>::infinity();
  int32_t winner = 0;
  // Tokens whose uniform number is larger than this times their weight have a smaller score: the noise of u is at least
  // n where u <= 1 - exp(-exp(-n)), which is at most exp(-n).
  double reach = std::numeric_limits<double>::infinity();

  void enter(double log_weight, float uniform, int32_t id) {
    const double own = log_weight + gumbel(uniform);
    if (own <= score) return;
    score = own;
    winner = id;
    reach = std::exp(-own) * (1 + kSlack);
  }
};

// A draw by weight. Exact scores are needed only of tokens that may win: few, once a likely token has been met.
// `most`: the largest log-weight of the tokens.
int32_t draw(const Tokens& tokens, const Softmax& softmax, double most, uint64_t key) {
  Race race;
  race.reach = std::exp(-kLeastNoise - most);
  float floor = std::max(softmax.logit(most + kLeastNoise - kMostNoise), kLowest);
  float values[2 * kBlockTokens];
  int32_t ids[2 * kBlockTokens];
  int64_t waiting = 0;
  const auto run = [&](int64_t count) {
    float uniforms[kPhiloxBlock] = {};
    uniform_block(uniforms, ids, count, key);
    for (int64_t i = 0; i < count; i += kDoubleLanes) {
      const float* four = uniforms + i;
      // No weight is above 1.
      if (std::min(std::min(four[0], four[1]), std::min(four[2], four[3])) > race.reach) continue;
      const Doubles weights = softmax.weights(load_four(values + i, count - i));
      for (int64_t at = i; at < std::min(i + kDoubleLanes, count); at++)
        if (uniforms[at] <= weights[at - i] * race.reach)
          race.enter(softmax.log_weight(values[at]), uniforms[at], ids[at]);
    }
    floor = std::max(floor, softmax.logit(race.score - kMostNoise));
    waiting -= count;
    std::copy(values + count, values + count + waiting, values);
    std::copy(ids + count, ids + count + waiting, ids);
  };
  for_blocks(tokens.values, tokens.count, &floor, [&](int64_t first, int64_t some) {
    for (int64_t i = first; i < first + some; i++) {
      values[waiting] = tokens.values[i];
      ids[waiting] = tokens.id(i);
      waiting += tokens.values[i] >= floor;
    }
    if (waiting >= kPhiloxBlock) run(kPhiloxBlock);
  });
  run(waiting);
  return race.winner;
}

// -1: not among them.
int64_t index_of(const Tokens& tokens, int64_t id) {
  if (tokens.ids == nullptr) return id;
  const int32_t* end = tokens.ids + tokens.count;
  const int32_t* found = std::lower_bound(tokens.ids, end, id);
  return found != end && *found == id ? found - tokens.ids : -1;
}

// The distribution that is left of a row when drafts were refused: tokens in the order of ids, and their probabilities.
struct Residual {
  Memory& memory;
  int64_t count;

  void fill(const Tokens& tokens, const Softmax& softmax, double total) {
    count = tokens.count;
    grow(memory.probabilities, count + kDoubleLanes);
    grow(memory.residual, count + kDoubleLanes);
    grow(memory.ids, count);
    grow(memory.residual_ids, count);
    for (int64_t i = 0; i < count; i += kDoubleLanes) {
      const Doubles found = softmax.weights(load_four(tokens.values + i, count - i)) / total;
      std::memcpy(&memory.probabilities[i], &found, sizeof(found));
    }
    for (int64_t i = 0; i < count; i++) memory.ids[i] = tokens.id(i);
  }

  // max(0, p - q), normalised, in p's place; false, and p as it was, if that is 0 everywhere.
  bool subtract(const RowArguments& a) {
    int64_t left = 0, next = 0;
    double sum = 0;
    for (int64_t i = 0; i < count; i++) {
      const int32_t id = memory.ids[i];
      double q = 0;
      if (a.draft_ids == nullptr) {
        q = a.draft[id];
      } else {
        while (next < a.draft_len && a.draft_ids[next] < id) next++;
        if (next < a.draft_len && a.draft_ids[next] == id) q = a.draft[next];
      }
      const double more = memory.probabilities[i] - q;
      memory.residual[left] = more;
      memory.residual_ids[left] = id;
      sum += more > 0 ? more : 0;
      left += more > 0;
    }
    if (left == 0) return false;
    std::swap(memory.probabilities, memory.residual);
    std::swap(memory.ids, memory.residual_ids);
    count = left;
    for (int64_t i = 0; i < count; i++) memory.probabilities[i] /= sum;
    return true;
  }

  double of(int64_t id) const {
    const int64_t index = index_of({nullptr, memory.ids.data(), count}, id);
    return index < 0 ? 0 : memory.probabilities[index];
  }

  int32_t most_likely() const {
    const auto begin = memory.probabilities.begin();
    return memory.ids[std::max_element(begin, begin + count) - begin];
  }

  int32_t draw(uint64_t key) const {
    Race race;
    for (int64_t first = 0; first < count; first += kPhiloxBlock) {
      const int64_t some = std::min(kPhiloxBlock, count - first);
      float uniforms[kPhiloxBlock];
      uniform_block(uniforms, &memory.ids[first], some, key);
      for (int64_t i = 0; i < some; i++) {
        const double probability = memory.probabilities[first + i];
        if (uniforms[i] <= probability * race.reach)
          race.enter(std::log(probability), uniforms[i], memory.ids[first + i]);
      }
    }
    return race.winner;
  }
};

double draft_of(const RowArguments& a, int64_t id) {
  if (a.draft_ids == nullptr) return a.draft[id];
  const int64_t* end = a.draft_ids + a.draft_len;
  const int64_t* found = std::lower_bound(a.draft_ids, end, id);
  return found != end && *found == id ? a.draft[found - a.draft_ids] : 0;
}

// See `choose_with_draft` in workers/numpy_choice.py.
int32_t choose_with_draft(const RowArguments& a, const Tokens& tokens, const Softmax& softmax, double total,
                          Memory& memory) {
  Residual residual{memory, 0};
  for (int64_t i = 0; i < a.drafts; i++) {
    const int64_t token = a.drafted[i], index = i == 0 ? index_of(tokens, token) : -1;
    const double first = index < 0 ? 0 : softmax.weight(tokens.values[index]) / total;
    float uniform;
    uniform_block(&uniform, &i, 1, a.keep_key);
    if (uniform * draft_of(a, token) < (i == 0 ? first : residual.of(token))) return static_cast<int32_t>(token);
    if (i == 0) residual.fill(tokens, softmax, total);
    if (!residual.subtract(a)) return residual.most_likely();
  }
  return residual.draw(a.residual_key);
}

void choose(RowArguments& a, int64_t vocab, Memory& memory) {
  Tokens tokens = adjusted(a, vocab, memory);
  const Softmax softmax{largest(tokens), a.temperature > 0 ? a.temperature : 1};
  a.candidates = 0;
  if (softmax.best == kHidden) return;
  tokens = drawable(a, tokens, softmax, memory);
  a.candidates = tokens.count;
  // 0, unless the most likely token has been left out.
  const double most = tokens.count < vocab ? softmax.log_weight(largest(tokens)) : 0;
  const double total = a.logprobs != nullptr || a.drafts > 0 ? softmax.total(tokens.values, tokens.count) : 0;
  for (int64_t i = 0; i < a.draws; i++) {
    if (a.keys != nullptr) a.tokens[i] = draw(tokens, softmax, most, a.keys[i]);
    if (a.logprobs == nullptr) continue;
    const int64_t index = index_of(tokens, a.tokens[i]);
    a.logprobs[i] = index < 0 ? kHidden : softmax.log_weight(tokens.values[index]) - std::log(total);
  }
  if (a.drafts > 0) a.tokens[0] = choose_with_draft(a, tokens, softmax, total, memory);
}

// The log-probabilities of some tokens of a row; NaN, if it has NaN or +infinity, or nothing but -infinity.
void find_log_probabilities(float* out, const float* logits, int64_t vocab, const int64_t* ids, int64_t count) {
  constexpr float kMost = std::numeric_limits<float>::max();
  int32_t bad = 0;
  for (int64_t i = 0; i < vocab; i++) bad |= !(logits[i] <= kMost);
  const Softmax softmax{largest({logits, nullptr, vocab}), 1};
  if (bad || softmax.best == kHidden) {
    std::fill_n(out, count, std::numeric_limits<float>::quiet_NaN());
    return;
  }
  const double total = std::log(softmax.total(logits, vocab));
  for (int64_t i = 0; i < count; i++) out[i] = static_cast<float>(softmax.log_weight(logits[ids[i]]) - total);
}

}  // namespace
}  // namespace quire

// Of rows [count, vocab] and ids [count, each]; all ids are of the vocabulary.
extern "C" void quire_log_probabilities(float* out, const float* logits, const int64_t* ids, int64_t count, int64_t vocab,
                                        int64_t each, int64_t threads) {
  using namespace quire;
  run_together(threads_for(count * vocab * 4, threads), [&](const Worker& worker) {
    worker.for_each(count, [&](int64_t row) {
      find_log_probabilities(out + row * each, logits + row * vocab, vocab, ids + row * each, each);
    });
  });
}

// `threads` at most.
extern "C" void quire_choose_tokens(quire::RowArguments* rows, int64_t count, int64_t vocab, int64_t threads) {
  using namespace quire;
  run_together(threads_for(count * vocab * 4, threads), [&](const Worker& worker) {
    thread_local Memory memory;
    worker.for_each(count, [&](int64_t row) { choose(rows[row], vocab, memory); });
  });
}
