// Runs kernels on fixed inputs and prints a hash of each result, for comparison between builds: see test_neon.py.

#include <cstdio>
#include <string_view>
#include <vector>

#include "attention.h"
#include "gated_activation.h"
#include "linear.h"
#include "packed_product.h"
#include "rms_norm.h"

namespace quire {
namespace {

uint64_t state = 1;

// In (-2, 2), with few enough bits for bfloat16 too.
float next_number() {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return static_cast<float>(static_cast<int8_t>(state >> 56)) / 64;
}

void set(float& to, float x) { to = x; }
void set(Bf16& to, float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  to.bits = static_cast<uint16_t>(bits >> 16);
}

template <typename T>
std::vector<T> numbers(int64_t count) {
  std::vector<T> found(count);
  for (T& x : found) set(x, next_number());
  return found;
}

template <typename T>
void print(const char* name, const std::vector<T>& found) {
  uint64_t hash = 14695981039346656037u;
  const unsigned char* bytes = reinterpret_cast<const unsigned char*>(found.data());
  for (size_t i = 0; i < found.size() * sizeof(T); i++) hash = (hash ^ bytes[i]) * 1099511628211u;
  std::printf("%s of %d bytes: %016llx\n", name, static_cast<int>(sizeof(T)), static_cast<unsigned long long>(hash));
}

template <typename T>
void print_attention() {
  // A decode, a prefill of 40 tokens, and another decode.
  constexpr int64_t kWidth = 80, kHeads = 4, kKvHeads = 2, kPageSize = 16, kPages = 48, kTokens = 42;
  const std::vector<int32_t> contexts{700, 540, 20}, starts{0, 1, 41, 42};
  std::vector<int32_t> tables(3 * kPages);
  for (size_t i = 0; i < tables.size(); i++) tables[i] = static_cast<int32_t>(i * 7 % tables.size());
  const auto query = numbers<T>(kTokens * kHeads * kWidth);
  const auto keys = numbers<T>(3 * kPages * kPageSize * kKvHeads * kWidth), values = numbers<T>(keys.size());
  const auto slopes = numbers<float>(kHeads);
  for (const char* name : {"attention", "capped attention", "attention with slopes", "attention with a window"}) {
    std::vector<T> out(query.size());
    AttentionArguments a{};
    a.out = out.data(), a.query = query.data(), a.keys = keys.data(), a.values = values.data();
    a.tables = tables.data(), a.starts = starts.data(), a.contexts = contexts.data();
    a.items = 3, a.table_stride = kPages, a.query_stride = kHeads * kWidth, a.head_stride = kWidth;
    a.heads = kHeads, a.kv_heads = kKvHeads, a.width = a.value_width = kWidth, a.page_size = kPageSize;
    a.scale = 0.11;
    if (name == std::string_view("capped attention")) a.softcap = 5;
    if (name == std::string_view("attention with slopes")) a.slopes = slopes.data();
    if (name == std::string_view("attention with a window")) a.window = 100;
    AttentionWork work;
    run_together(2, [&](const Worker& worker) { paged_attention<T>(a, work, worker); });
    print(name, out);
  }
}

template <typename T>
void print_all() {
  constexpr int64_t kRows = 37, kInputs = 160, kOutputs = 100;
  const auto x = numbers<T>(kRows * kInputs), bias = numbers<T>(kOutputs), norm = numbers<T>(kInputs);
  const auto weight = numbers<T>(blocks_of(kOutputs) * block_size_of<T>(kInputs));
  std::vector<float> scratch(kRows * kInputs);
  std::vector<T> product(kRows * kOutputs), normed(kRows * kInputs), gated(kRows * kInputs / 2);
  auto residual = numbers<T>(kRows * kInputs);
  run_together(3, [&](const Worker& worker) {
    linear<T>({product.data(), x.data(), weight.data(), bias.data(), scratch.data(), kRows, kInputs, kOutputs, kInputs,
               kOutputs},
              worker);
    add_rms_norm<T>({normed.data(), x.data(), residual.data(), norm.data(), kRows, kInputs, kInputs, kInputs, kInputs, 0, 1e-6},
                    worker);
    gated_activation<T>({gated.data(), x.data(), kRows, kInputs / 2, kInputs, 0}, worker);
  });
  print("product", product);
  print("norm", normed);
  print("sum", residual);
  print("gate", gated);
  print_attention<T>();
}

}  // namespace
}  // namespace quire

int main() {
  quire::print_all<quire::Bf16>();
  quire::print_all<float>();
}
