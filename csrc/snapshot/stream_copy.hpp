// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace resilient {

// memcpy for a target that nobody reads soon. On x86 with stores past the cache: the line need not be fetched before it
// is overwritten, which is a third of the traffic. Elsewhere memcpy, which knows its machine.
inline void stream_copy(std::uint8_t* to, const std::uint8_t* from, std::size_t bytes) {
#if defined(__x86_64__)
  constexpr std::size_t line = 64;
  const std::size_t head = -reinterpret_cast<std::uintptr_t>(to) % line;
  if (bytes >= head + line) {
    std::memcpy(to, from, head);
    to += head, from += head, bytes -= head;
    for (; bytes >= line; to += line, from += line, bytes -= line) {
      const auto* const source = reinterpret_cast<const __m128i*>(from);
      auto* const target = reinterpret_cast<__m128i*>(to);
      const __m128i first = _mm_loadu_si128(source);
      const __m128i second = _mm_loadu_si128(source + 1);
      const __m128i third = _mm_loadu_si128(source + 2);
      const __m128i fourth = _mm_loadu_si128(source + 3);
      _mm_stream_si128(target, first);
      _mm_stream_si128(target + 1, second);
      _mm_stream_si128(target + 2, third);
      _mm_stream_si128(target + 3, fourth);
    }
  }
#endif
  std::memcpy(to, from, bytes);
}

// Stores past the cache are ordered by nothing else, not even by a mutex.
inline void stream_fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace resilient
