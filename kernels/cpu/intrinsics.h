// The intrinsics of this CPU's compiler, or what tests have in the place of Intel's.
#pragma once

#if defined(QUIRE_INTRINSICS)
#include QUIRE_INTRINSICS
#elif defined(__aarch64__)
#include <arm_neon.h>
#else
#include <immintrin.h>
#endif
