// Denormals as zero, as instructions for products of bfloat16 have them.
#pragma once

#include <cstdint>
#include <type_traits>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace quire {

// While it exists, all instructions of this thread take denormals for zero, as operands and as results. What depends on it
// has to be in functions that are not inlined, since compilers do not know that it matters.
class DenormalsAsZero {
 public:
  DenormalsAsZero() : before_(get()) { set(before_ | kZero); }
  ~DenormalsAsZero() { set(before_); }
  DenormalsAsZero(const DenormalsAsZero&) = delete;
  DenormalsAsZero& operator=(const DenormalsAsZero&) = delete;

 private:
#if defined(__x86_64__)
  static constexpr uint64_t kZero = 0x8040;  // of MXCSR: flush to zero, and denormals are zero
  static uint64_t get() { return _mm_getcsr(); }
  static void set(uint64_t mode) { _mm_setcsr(static_cast<unsigned>(mode)); }
#else
  static constexpr uint64_t kZero = 1 << 24;  // of FPCR: flush to zero, operands too
  static uint64_t get() {
    uint64_t mode;
    asm volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
  }
  static void set(uint64_t mode) { asm volatile("msr fpcr, %0" : : "r"(mode)); }
#endif

  uint64_t before_;
};

struct DenormalsAsTheyAre {
  ~DenormalsAsTheyAre() {}  // otherwise it would be an unused variable
};

// How everything that is computed of elements of a type takes them: of bfloat16 as the instructions for its products do,
// whether a CPU has these or not.
template <typename T>
using DenormalsOf = std::conditional_t<std::is_same_v<T, float>, DenormalsAsTheyAre, DenormalsAsZero>;

}  // namespace quire
