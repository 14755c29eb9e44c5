// The experts of a token, chosen by the logits of a router: kernels/experts.py has the formula.
//
// Scores are weighted in double precision, and every sum has one order: bits are the same on every CPU.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "gates.h"
#include "token_weights.h"

namespace quire {

// Plain data, filled by kernels/cpu/routing.py: the fields must agree.
struct RoutingRule {
  const float* correction;  // [E], or null
  int64_t experts, choices, normalised, sigmoid, groups, best_groups;
  double scale, eps;
};

// The numbers of the k largest of n values, the best first; of equal ones the lower number. None is NaN, or all are.
inline void choose_best(const float* values, int64_t n, int64_t k, int64_t* chosen) {
  int64_t count = 0;
  for (int64_t i = 0; i < n; i++) {
    if (count == k && !(values[i] > values[chosen[k - 1]])) continue;
    int64_t place = count < k ? count++ : k - 1;
    for (; place > 0 && values[i] > values[chosen[place - 1]]; place--) chosen[place] = chosen[place - 1];
    chosen[place] = i;
  }
}

// exp(x) / sum(exp(x)), each rounded once; NaN if one is NaN, or the largest is infinite. weights: scratch, filled up to fours.
inline void softmax(float* values, int64_t n, double* weights) {
  float best = -std::numeric_limits<float>::infinity();
  bool defined = true;
  for (int64_t i = 0; i < n; i++) {
    best = std::max(best, values[i]);
    defined &= values[i] == values[i];
  }
  if (!defined || !std::isfinite(best)) {
    std::fill_n(values, n, std::numeric_limits<float>::quiet_NaN());
    return;
  }
  const Softmax by_weight(best, 1.0);
  Doubles sum{};
  for (int64_t i = 0; i < n; i += kDoubleLanes) {
    const Doubles some = by_weight.weights(load_four(values + i, n - i));
    std::memcpy(weights + i, &some, sizeof(some));
    sum += some;
  }
  const double total = sum_of(sum);
  for (int64_t i = 0; i < n; i++) values[i] = static_cast<float>(weights[i] / total);
}

// Chooses the experts of tokens. Has memory for one token at a time.
class Router {
 public:
  explicit Router(const RoutingRule& rule)
      : rule_(rule), scores_(rule.experts), chosen_by_(rule.experts), weights_(rule.experts + kDoubleLanes),
        groups_(rule.groups), worth_(rule.groups), logits_(rule.choices) {}

  // Writes the experts [k] of a token and their weights [k]. given: experts that are chosen whatever their scores; null, or
  // -1 at first: none are. False if there is no such expert.
  template <typename T>
  bool route(const T* logits, const int64_t* given, int64_t* ids, float* weights) {
    const auto logit = [&](int64_t expert) { return load_lanes<Part>(logits + expert, 1)[0]; };
    for (int64_t expert = 0; expert < rule_.experts; expert++) scores_[expert] = logit(expert);
    score();
    if (given != nullptr && *given < 0) given = nullptr;
    if (given == nullptr) choose(ids);
    for (int64_t choice = 0; choice < rule_.choices; choice++) {
      if (given != nullptr) ids[choice] = given[choice];
      if (ids[choice] < 0 || ids[choice] >= rule_.experts) return false;
      weights[choice] = scores_[ids[choice]];
      logits_[choice] = logit(ids[choice]);
    }
    if (rule_.normalised) normalise(weights);
    for (int64_t choice = 0; choice < rule_.choices; choice++) weights[choice] *= static_cast<float>(rule_.scale);
    return true;
  }

 private:
  void score() {
    if (!rule_.sigmoid) return softmax(scores_.data(), rule_.experts, weights_.data());
    const bool defined = std::all_of(scores_.begin(), scores_.end(), [](float x) { return x == x; });
    for_parts(rule_.experts, [&](int64_t i, int count) {
      const Part all = defined ? Sigmoid::of(load_lanes<Part>(&scores_[i], count))
                               : splat<Part>(std::numeric_limits<float>::quiet_NaN());
      store_lanes(&scores_[i], all, count);
    });
  }

  void choose(int64_t* ids) {
    for (int64_t i = 0; i < rule_.experts; i++)
      chosen_by_[i] = scores_[i] + (rule_.correction == nullptr ? 0.0f : rule_.correction[i]);
    if (rule_.groups > 1) leave_out_groups();
    choose_best(chosen_by_.data(), rule_.experts, rule_.choices, ids);
  }

  // A group is as good as its two best experts if scores are sigmoids, else as its best one.
  void leave_out_groups() {
    const int64_t size = rule_.experts / rule_.groups, counted = rule_.sigmoid ? std::min<int64_t>(2, size) : 1;
    for (int64_t group = 0; group < rule_.groups; group++) {
      const float* own = &chosen_by_[group * size];
      int64_t best[2];
      choose_best(own, size, counted, best);
      worth_[group] = counted == 2 ? own[best[0]] + own[best[1]] : own[best[0]];
    }
    choose_best(worth_.data(), rule_.groups, rule_.best_groups, groups_.data());
    for (int64_t group = 0; group < rule_.groups; group++)
      if (std::find(groups_.begin(), groups_.begin() + rule_.best_groups, group) == groups_.begin() + rule_.best_groups)
        std::fill_n(&chosen_by_[group * size], size, -std::numeric_limits<float>::infinity());
  }

  // The scores of experts that the router would never choose may all be rounded to 0.
  void normalise(float* weights) {
    float total = 0.0f;
    for (int64_t choice = 0; choice < rule_.choices; choice++) total += weights[choice];
    total += static_cast<float>(rule_.eps);
    if (total != 0.0f) {
      for (int64_t choice = 0; choice < rule_.choices; choice++) weights[choice] /= total;
      return;
    }
    softmax(logits_.data(), rule_.choices, weights_.data());
    std::copy_n(logits_.data(), rule_.choices, weights);
  }

  const RoutingRule& rule_;
  std::vector<float> scores_, chosen_by_;
  std::vector<double> weights_;
  std::vector<int64_t> groups_;
  std::vector<float> worth_, logits_;
};

}  // namespace quire
