// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
#include "snapshot/xxh3_lanes.hpp"

#include <atomic>
#include <cstring>

#include "snapshot/xxh3.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace resilient {

const std::array<std::uint8_t, 192> xxh3_secret{
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4,
    0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e,
    0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43,
    0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb,
    0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3, 0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19,
    0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7,
    0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78,
    0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b, 0x16,
    0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
    0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};

namespace {

constexpr std::size_t stripes_per_block = xxh3_block_bytes / xxh3_stripe_bytes;
constexpr std::size_t scramble_offset = xxh3_secret.size() - xxh3_stripe_bytes;
constexpr std::uint32_t prime32_1 = 0x9E3779B1U;

std::uint64_t read64(const std::uint8_t* at) {
  std::uint64_t value = 0;
  std::memcpy(&value, at, sizeof(value));
  return value;
}

// Plain C++, unrolled so that the lanes stay in registers.
void stripes_portable(std::uint64_t* lanes, const std::uint8_t* data, std::size_t count, const std::uint8_t* secret) {
  std::uint64_t sums[8];
  std::memcpy(sums, lanes, sizeof(sums));
  for (; count > 0; --count, data += xxh3_stripe_bytes, secret += 8) {
#pragma GCC unroll 8
    for (std::size_t lane = 0; lane < 8; ++lane) {
      const std::uint64_t value = read64(data + 8 * lane);
      const std::uint64_t keyed = value ^ read64(secret + 8 * lane);
      sums[lane ^ 1] += value;
      sums[lane] += (keyed & 0xFFFFFFFFU) * (keyed >> 32);
    }
  }
  std::memcpy(lanes, sums, sizeof(sums));
}

void blocks_portable(std::uint64_t* lanes, const std::uint8_t* data, std::size_t count) {
  for (; count > 0; --count, data += xxh3_block_bytes) {
    stripes_portable(lanes, data, stripes_per_block, xxh3_secret.data());
#pragma GCC unroll 8
    for (std::size_t lane = 0; lane < 8; ++lane) {
      lanes[lane] ^= lanes[lane] >> 47;
      lanes[lane] ^= read64(xxh3_secret.data() + scramble_offset + 8 * lane);
      lanes[lane] *= prime32_1;
    }
  }
}

constexpr Xxh3Lanes portable{"portable", stripes_portable, blocks_portable};

#if defined(__x86_64__)

#define RESILIENT_TARGET
#define RESILIENT_NAME(function) function##_sse2
#define RESILIENT_VECTOR __m128i
#define RESILIENT_BITS(operation) _mm_##operation##_si128
#define RESILIENT_WORDS(operation) _mm_##operation
#define RESILIENT_CROSSED(value) _mm_shuffle_epi32(value, _MM_SHUFFLE(1, 0, 3, 2))
#include "snapshot/xxh3_lanes.inc"

#define RESILIENT_TARGET [[gnu::target("avx2")]]
#define RESILIENT_NAME(function) function##_avx2
#define RESILIENT_VECTOR __m256i
#define RESILIENT_BITS(operation) _mm256_##operation##_si256
#define RESILIENT_WORDS(operation) _mm256_##operation
#define RESILIENT_CROSSED(value) _mm256_shuffle_epi32(value, _MM_SHUFFLE(1, 0, 3, 2))
#include "snapshot/xxh3_lanes.inc"

constexpr Xxh3Lanes sse2{"sse2", stripes_sse2, blocks_sse2};
constexpr Xxh3Lanes avx2{"avx2", stripes_avx2, blocks_avx2};

const Xxh3Lanes* find(const char* name) {
  const bool any = name == nullptr;
  const auto wanted = [&](const Xxh3Lanes& each) { return any || std::strcmp(name, each.name) == 0; };
  if (wanted(avx2) && __builtin_cpu_supports("avx2")) return &avx2;
  if (wanted(sse2)) return &sse2;
  return wanted(portable) ? &portable : nullptr;
}

#elif defined(__aarch64__)

// Every one of these processors has NEON. Its shifts take their count as a constant: hence macros.
#define RESILIENT_TARGET
#define RESILIENT_NAME(function) function##_neon
#define RESILIENT_VECTOR uint64x2_t
#define RESILIENT_BITS(operation) neon_##operation
#define RESILIENT_WORDS(operation) neon_##operation
#define RESILIENT_CROSSED(value) vextq_u64(value, value, 1)
#define neon_xor(one, other) veorq_u64(one, other)
#define neon_add_epi64(one, other) vaddq_u64(one, other)
#define neon_mul_epu32(one, other) vmull_u32(vmovn_u64(one), vmovn_u64(other))
#define neon_srli_epi64(value, bits) vshrq_n_u64(value, bits)
#define neon_slli_epi64(value, bits) vshlq_n_u64(value, bits)
#define neon_set1_epi32(value) vreinterpretq_u64_u32(vdupq_n_u32(value))
#include "snapshot/xxh3_lanes.inc"

constexpr Xxh3Lanes neon{"neon", stripes_neon, blocks_neon};

const Xxh3Lanes* find(const char* name) {
  if (name == nullptr || std::strcmp(name, neon.name) == 0) return &neon;
  return std::strcmp(name, portable.name) == 0 ? &portable : nullptr;
}

#else

const Xxh3Lanes* find(const char* name) {
  return name == nullptr || std::strcmp(name, portable.name) == 0 ? &portable : nullptr;
}

#endif

std::atomic<const Xxh3Lanes*> chosen{nullptr};

}  // namespace

const Xxh3Lanes& xxh3_lanes() {
  const Xxh3Lanes* lanes = chosen.load(std::memory_order_relaxed);
  if (lanes == nullptr) {
    lanes = find(nullptr);
    chosen.store(lanes, std::memory_order_relaxed);
  }
  return *lanes;
}

const char* xxh3_instructions() { return xxh3_lanes().name; }

bool limit_instructions(const char* name) {
  const Xxh3Lanes* const lanes = find(name);
  if (lanes == nullptr) return false;
  chosen.store(lanes, std::memory_order_relaxed);
  return true;
}

}  // namespace resilient
