// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
#include "snapshot/xxh3.hpp"

#include <bit>
#include <cassert>
#include <cstring>

#include "snapshot/xxh3_lanes.hpp"

namespace resilient {
namespace {

static_assert(std::endian::native == std::endian::little, "loads below are little endian");

constexpr std::uint64_t prime32_1 = 0x9E3779B1U;
constexpr std::uint64_t prime32_2 = 0x85EBCA77U;
constexpr std::uint64_t prime32_3 = 0xC2B2AE3DU;
constexpr std::uint64_t prime64_1 = 0x9E3779B185EBCA87ULL;
constexpr std::uint64_t prime64_2 = 0xC2B2AE3D27D4EB4FULL;
constexpr std::uint64_t prime64_3 = 0x165667B19E3779F9ULL;
constexpr std::uint64_t prime64_4 = 0x85EBCA77C2B2AE63ULL;
constexpr std::uint64_t prime64_5 = 0x27D4EB2F165667C5ULL;
constexpr std::uint64_t prime_mx1 = 0x165667919E3779F9ULL;
constexpr std::uint64_t prime_mx2 = 0x9FB21C651E98DF25ULL;

using Wide = unsigned __int128;

struct Hash128 {
  std::uint64_t low;
  std::uint64_t high;
};

const std::uint8_t* bytes_of(const void* data) { return static_cast<const std::uint8_t*>(data); }

std::uint32_t read32(const std::uint8_t* at) {
  std::uint32_t value = 0;
  std::memcpy(&value, at, sizeof(value));
  return value;
}

std::uint64_t read64(const std::uint8_t* at) {
  std::uint64_t value = 0;
  std::memcpy(&value, at, sizeof(value));
  return value;
}

std::uint64_t secret64(std::size_t at) { return read64(xxh3_secret.data() + at); }
std::uint64_t secret32(std::size_t at) { return read32(xxh3_secret.data() + at); }

std::uint64_t fold(std::uint64_t left, std::uint64_t right) {
  const Wide product = static_cast<Wide>(left) * right;
  return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
}

std::uint64_t avalanche(std::uint64_t hash) {
  hash ^= hash >> 37;
  hash *= prime_mx1;
  return hash ^ (hash >> 32);
}

std::uint64_t avalanche64(std::uint64_t hash) {  // XXH64's
  hash ^= hash >> 33;
  hash *= prime64_2;
  hash ^= hash >> 29;
  hash *= prime64_3;
  return hash ^ (hash >> 32);
}

Hash128 hash_1_to_3(const std::uint8_t* data, std::size_t bytes) {
  const std::uint32_t combined = (std::uint32_t{data[0]} << 16) | (std::uint32_t{data[bytes >> 1]} << 24) |
                                 std::uint32_t{data[bytes - 1]} | (static_cast<std::uint32_t>(bytes) << 8);
  const std::uint32_t swapped = std::rotl(__builtin_bswap32(combined), 13);
  return {avalanche64(combined ^ (secret32(0) ^ secret32(4))), avalanche64(swapped ^ (secret32(8) ^ secret32(12)))};
}

Hash128 hash_4_to_8(const std::uint8_t* data, std::size_t bytes) {
  const std::uint64_t input = read32(data) + (std::uint64_t{read32(data + bytes - 4)} << 32);
  const std::uint64_t keyed = input ^ (secret64(16) ^ secret64(24));
  const Wide product = static_cast<Wide>(keyed) * (prime64_1 + (bytes << 2));
  std::uint64_t low = static_cast<std::uint64_t>(product);
  std::uint64_t high = static_cast<std::uint64_t>(product >> 64);
  high += low << 1;
  low ^= high >> 3;
  low ^= low >> 35;
  low *= prime_mx2;
  low ^= low >> 28;
  return {low, avalanche(high)};
}

Hash128 hash_9_to_16(const std::uint8_t* data, std::size_t bytes) {
  const std::uint64_t flip_low = secret64(32) ^ secret64(40);
  const std::uint64_t flip_high = secret64(48) ^ secret64(56);
  const std::uint64_t first = read64(data);
  const std::uint64_t last = read64(data + bytes - 8);
  const Wide mixed = static_cast<Wide>(first ^ last ^ flip_low) * prime64_1;
  std::uint64_t low = static_cast<std::uint64_t>(mixed) + (std::uint64_t{bytes - 1} << 54);
  std::uint64_t high = static_cast<std::uint64_t>(mixed >> 64);
  const std::uint64_t keyed = last ^ flip_high;
  high += keyed + (keyed & 0xFFFFFFFFU) * (prime32_2 - 1);
  low ^= __builtin_bswap64(high);
  const Wide product = static_cast<Wide>(low) * prime64_2;
  return {avalanche(static_cast<std::uint64_t>(product)),
          avalanche(static_cast<std::uint64_t>(product >> 64) + high * prime64_2)};
}

std::uint64_t mix16(const std::uint8_t* data, std::size_t secret) {
  return fold(read64(data) ^ secret64(secret), read64(data + 8) ^ secret64(secret + 8));
}

void mix32(Hash128& sums, const std::uint8_t* first, const std::uint8_t* second, std::size_t secret) {
  sums.low += mix16(first, secret);
  sums.low ^= read64(second) + read64(second + 8);
  sums.high += mix16(second, secret + 16);
  sums.high ^= read64(first) + read64(first + 8);
}

Hash128 finish_medium(const Hash128& sums, std::size_t bytes) {
  const std::uint64_t low = sums.low + sums.high;
  const std::uint64_t high = sums.low * prime64_1 + sums.high * prime64_4 + bytes * prime64_2;
  return {avalanche(low), std::uint64_t{0} - avalanche(high)};
}

Hash128 hash_17_to_128(const std::uint8_t* data, std::size_t bytes) {
  Hash128 sums{bytes * prime64_1, 0};
  for (std::size_t left = (bytes - 1) / 32 + 1; left-- > 0;) {
    mix32(sums, data + 16 * left, data + bytes - 16 * (left + 1), 32 * left);
  }
  return finish_medium(sums, bytes);
}

Hash128 hash_129_to_240(const std::uint8_t* data, std::size_t bytes) {
  constexpr std::size_t start_offset = 3;  // of the secret, from the fifth round on
  constexpr std::size_t last_offset = 17;
  constexpr std::size_t secret_bytes_min = 136;
  Hash128 sums{bytes * prime64_1, 0};
  const std::size_t rounds = bytes / 32;
  for (std::size_t round = 0; round < rounds; ++round) {
    if (round == 4) sums = {avalanche(sums.low), avalanche(sums.high)};
    const std::size_t secret = round < 4 ? 32 * round : start_offset + 32 * (round - 4);
    mix32(sums, data + 32 * round, data + 32 * round + 16, secret);
  }
  if (rounds == 4) sums = {avalanche(sums.low), avalanche(sums.high)};
  mix32(sums, data + bytes - 16, data + bytes - 32, secret_bytes_min - last_offset - 16);
  return finish_medium(sums, bytes);
}

Hash128 hash_short(const std::uint8_t* data, std::size_t bytes) {
  assert(bytes <= xxh3_short_bytes_max);
  if (bytes > 128) return hash_129_to_240(data, bytes);
  if (bytes > 16) return hash_17_to_128(data, bytes);
  if (bytes > 8) return hash_9_to_16(data, bytes);
  if (bytes > 3) return hash_4_to_8(data, bytes);
  if (bytes > 0) return hash_1_to_3(data, bytes);
  return {avalanche64(secret64(64) ^ secret64(72)), avalanche64(secret64(80) ^ secret64(88))};
}

std::uint64_t merge(const std::array<std::uint64_t, 8>& lanes, std::size_t secret, std::uint64_t start) {
  std::uint64_t sum = start;
  for (std::size_t pair = 0; pair < 4; ++pair) {
    sum += fold(lanes[2 * pair] ^ secret64(secret + 16 * pair), lanes[2 * pair + 1] ^ secret64(secret + 16 * pair + 8));
  }
  return avalanche(sum);
}

Digest canonical(const Hash128& hash) {
  Digest digest{};
  const std::uint64_t high = __builtin_bswap64(hash.high);
  const std::uint64_t low = __builtin_bswap64(hash.low);
  std::memcpy(digest.data(), &high, sizeof(high));
  std::memcpy(digest.data() + sizeof(high), &low, sizeof(low));
  return digest;
}

}  // namespace

void Xxh3Stream::add_blocks(const void* data, std::size_t bytes) {
  assert(bytes % xxh3_block_bytes == 0);
  xxh3_lanes().add_blocks(lanes_.data(), bytes_of(data), bytes / xxh3_block_bytes);
  bytes_ += bytes;
}

Digest Xxh3Stream::finish(const void* tail, std::size_t bytes) {
  assert(bytes >= xxh3_stripe_bytes);
  const Xxh3Lanes& implementation = xxh3_lanes();
  // The block that ends the input is not scrambled, even if it is a whole one.
  const std::size_t whole = (bytes - 1) / xxh3_block_bytes;
  implementation.add_blocks(lanes_.data(), bytes_of(tail), whole);
  const std::uint8_t* const rest = bytes_of(tail) + whole * xxh3_block_bytes;
  const std::size_t rest_bytes = bytes - whole * xxh3_block_bytes;
  implementation.add_stripes(lanes_.data(), rest, (rest_bytes - 1) / xxh3_stripe_bytes, xxh3_secret.data());
  implementation.add_stripes(lanes_.data(), bytes_of(tail) + bytes - xxh3_stripe_bytes, 1,
                             xxh3_secret.data() + xxh3_secret.size() - xxh3_stripe_bytes - 7);
  bytes_ += bytes;
  assert(bytes_ > xxh3_short_bytes_max);
  return canonical({merge(lanes_, 11, bytes_ * prime64_1),
                    merge(lanes_, xxh3_secret.size() - xxh3_stripe_bytes - 11, ~(bytes_ * prime64_2))});
}

Digest xxh3_128(const void* data, std::size_t bytes) {
  if (bytes <= xxh3_short_bytes_max) return canonical(hash_short(bytes_of(data), bytes));
  return Xxh3Stream().finish(data, bytes);
}

}  // namespace resilient
