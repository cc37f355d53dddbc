// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
//
// The inner loop of XXH3 on long inputs: eight 64-bit lanes, one stripe of 64 bytes at a time. It is what all the time
// goes into, so there is one version for each instruction set; which one is used is found out at run time.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace resilient {

extern const std::array<std::uint8_t, 192> xxh3_secret;

struct Xxh3Lanes {
  const char* name;
  // `count` stripes; each takes eight bytes more of the secret than the one before.
  void (*add_stripes)(std::uint64_t* lanes, const std::uint8_t* data, std::size_t count, const std::uint8_t* secret);
  // `count` blocks of 16 stripes, the lanes scrambled after each.
  void (*add_blocks)(std::uint64_t* lanes, const std::uint8_t* data, std::size_t count);
};

const Xxh3Lanes& xxh3_lanes();

}  // namespace resilient
