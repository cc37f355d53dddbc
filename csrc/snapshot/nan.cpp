// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
#include "snapshot/nan.hpp"

#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

namespace resilient {
namespace {

constexpr std::size_t block_bytes = 4096;

// Without its sign a number's bits are positive, so that signed comparisons do, which every processor has. One answer
// for a block, and no branch in it: compilers make vectors of that.
template <typename Bits>
bool block_holds_nan(const std::byte* memory, std::size_t bytes, Bits largest) {
  constexpr Bits magnitude = std::numeric_limits<Bits>::max();
  Bits above = 0;
  for (std::size_t at = 0; at + sizeof(Bits) <= bytes; at += sizeof(Bits)) {
    Bits bits;
    std::memcpy(&bits, memory + at, sizeof bits);
    above = static_cast<Bits>(above | -static_cast<Bits>(static_cast<Bits>(bits & magnitude) > largest));
  }
  return above != 0;
}

template <typename Bits>
bool any_nan(const std::byte* memory, std::size_t bytes, std::uint64_t largest) {
  for (; bytes >= block_bytes; memory += block_bytes, bytes -= block_bytes) {
    if (block_holds_nan(memory, block_bytes, static_cast<Bits>(largest))) return true;
  }
  return block_holds_nan(memory, bytes, static_cast<Bits>(largest));
}

}  // namespace

bool holds_nan(const std::byte* memory, std::size_t bytes, unsigned item_bytes, std::uint64_t largest) {
  switch (item_bytes) {
    case 1:
      return any_nan<std::int8_t>(memory, bytes, largest);
    case 2:
      return any_nan<std::int16_t>(memory, bytes, largest);
    case 4:
      return any_nan<std::int32_t>(memory, bytes, largest);
    case 8:
      return any_nan<std::int64_t>(memory, bytes, largest);
    default:
      throw std::invalid_argument("no number has " + std::to_string(item_bytes) + " bytes");
  }
}

}  // namespace resilient
