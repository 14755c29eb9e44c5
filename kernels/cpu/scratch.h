// Scratch memory for intermediate results.
#pragma once

#include <cstdint>
#include <memory>
#include <new>

namespace quire {

// Memory that grows to what was needed most.
class Scratch {
 public:
  // Its content is lost. False if there is not so much memory.
  bool reserve(int64_t bytes) {
    if (bytes <= bytes_) return true;
    bytes_ = 0;
    memory_.reset();
    memory_.reset(new (std::nothrow) char[bytes]);
    if (memory_ != nullptr) bytes_ = bytes;
    return memory_ != nullptr;
  }

  uintptr_t begin() const { return reinterpret_cast<uintptr_t>(memory_.get()); }

 private:
  std::unique_ptr<char[]> memory_;
  int64_t bytes_ = 0;
};

// Arrays one after the other in memory, each from a line of the cache on. With `begin` 0 it only computes their size.
class Arrays {
 public:
  explicit Arrays(uintptr_t begin) : begin_(begin), at_(begin) {}

  template <typename T>
  void take(T*& array, int64_t count) {
    at_ = (at_ + kLine - 1) / kLine * kLine;
    array = reinterpret_cast<T*>(at_);
    at_ += count * sizeof(T);
  }

  int64_t bytes() const { return at_ - begin_ + kLine; }  // with room to align the first

 private:
  static constexpr uintptr_t kLine = 64;
  uintptr_t begin_, at_;
};

}  // namespace quire
