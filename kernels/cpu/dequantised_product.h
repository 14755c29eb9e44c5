// Products of rows that are not rounded and weights that are quantised in groups.
//
// A part of the weight at a time becomes float32, exactly what `rows` gives (group_rows.cpp), and is multiplied in the order
// of a packed weight of float32 (packed_product.h). So results have the bits of the dequantised weight's, and those depend
// neither on other rows, nor on threads, nor on the instruction set.
#pragma once

#include "group_format.h"
#include "packed_product.h"

namespace quire {

// Writes the products of rows and blocks of a weight. `all` has none.
template <typename T>
void multiply_dequantised(const Products<T>& all, const void* weight, const GroupFormat& format, int64_t begin, int64_t end);

}  // namespace quire
