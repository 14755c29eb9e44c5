// The intrinsics of this CPU's compiler, or plain C++ in the place of Intel's.
#pragma once

#if defined(QUIRE_PLAIN_INTRINSICS)
#include "plain_intrinsics.h"
#elif defined(__aarch64__)
#include <arm_neon.h>
#else
#include <immintrin.h>
#endif
