// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
//
// What the native code makes of bytes, for a machine that has no Python: it is built for another processor and run by
// an emulator (tests/pure/test_other_processors.py), and Python says whether the answers are right.
//
//     numbers hash INSTRUCTIONS SIZE...     digests of the first SIZE bytes of stdin; exit code 3 without INSTRUCTIONS
//     numbers nan ITEM_BYTES LARGEST SIZE   for each SIZE bytes of stdin: 1 if a NaN is among its numbers, else 0
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "snapshot/nan.hpp"
#include "snapshot/xxh3.hpp"

namespace {

std::vector<std::byte> all_of_stdin() {
  std::vector<std::byte> data;
  std::byte block[1 << 16];
  while (const std::size_t count = std::fread(block, 1, sizeof block, stdin))
    data.insert(data.end(), block, block + count);
  return data;
}

std::uint64_t number(const char* text) { return std::strtoull(text, nullptr, 0); }

}  // namespace

int main(int count, char** words) {
  const std::string what = count > 3 ? words[1] : "";
  const std::vector<std::byte> data = all_of_stdin();
  if (what == "hash") {
    if (!resilient::limit_instructions(words[2])) return 3;
    for (int at = 3; at < count; ++at) {
      const std::uint64_t bytes = number(words[at]);
      if (bytes > data.size()) return 2;
      for (const std::uint8_t each : resilient::xxh3_128(data.data(), bytes)) std::printf("%02x", each);
      std::puts("");
    }
    return 0;
  }
  if (what == "nan" && count == 5) {
    const std::uint64_t bytes = number(words[4]);
    for (std::size_t at = 0; at + bytes <= data.size(); at += bytes) {
      std::putchar('0' + resilient::holds_nan(data.data() + at, bytes, number(words[2]), number(words[3])));
    }
    return 0;
  }
  return 2;
}
