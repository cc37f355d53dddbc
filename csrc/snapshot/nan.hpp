// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

namespace resilient {

// Whether one of the numbers in memory is a NaN: one whose bits, the sign left out, are above `largest`, which is
// infinity in all formats but F8_E4M3, which has none. Numbers have 1, 2, 4 or 8 bytes and need not be aligned; what is
// behind the last whole one is not looked at. Throws std::invalid_argument for another size.
bool holds_nan(const std::byte* memory, std::size_t bytes, unsigned item_bytes, std::uint64_t largest);

}  // namespace resilient
