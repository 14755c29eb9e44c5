// Intel's intrinsics, or plain C++ in their place.
#pragma once

#if defined(QUIRE_PLAIN_INTRINSICS)
#include "plain_intrinsics.h"
#else
#include <immintrin.h>
#endif
