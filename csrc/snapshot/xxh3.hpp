// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
//
// XXH3, 128 bits, seed 0, default secret, as published (doc/xxhash_spec.md of github.com/Cyan4973/xxHash, "XXH3"). Our
// own implementation because no header of that library may be relied on, and because the copier feeds it from inside a
// copy, block by block, while the block is in the cache. A copy that the xxhash package then reads again takes 1.51
// times as long (quartiles 1.41 to 1.66; 512 MiB, one thread, 60 rounds in turn, two cores on which others worked; a
// copy without any hash 0.87): python benchmarks/hashing.py 60
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace resilient {

using Digest = std::array<std::uint8_t, 16>;  // canonical: what xxhash's digest() gives

constexpr std::size_t xxh3_block_bytes = 1024;
constexpr std::size_t xxh3_stripe_bytes = 64;
constexpr std::size_t xxh3_short_bytes_max = 240;  // up to here the algorithm is another one, see xxh3_128

// For inputs above 240 bytes that come in pieces: blocks (whole ones, as long as something follows), then one tail
// that holds at least the last 64 bytes.
class Xxh3Stream {
 public:
  // `bytes` is a multiple of 1024, and at least one byte of input follows.
  void add_blocks(const void* data, std::size_t bytes);
  // 64 bytes or more; all that is left. The stream is used up afterwards.
  Digest finish(const void* tail, std::size_t bytes);

 private:
  static constexpr std::array<std::uint64_t, 8> start{
      0xC2B2AE3DULL,         0x9E3779B185EBCA87ULL, 0xC2B2AE3D27D4EB4FULL, 0x165667B19E3779F9ULL,
      0x85EBCA77C2B2AE63ULL, 0x85EBCA77ULL,         0x27D4EB2F165667C5ULL, 0x9E3779B1ULL};
  alignas(64) std::array<std::uint64_t, 8> lanes_ = start;
  std::uint64_t bytes_ = 0;
};

Digest xxh3_128(const void* data, std::size_t bytes);

// The name of the instructions in use ("avx2", "sse2", "neon", "portable"); `limit_instructions` takes one of them
// and returns false where the machine has it not. For tests: call it before threads use the functions above.
const char* xxh3_instructions();
bool limit_instructions(const char* name);

}  // namespace resilient
