// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
#include "snapshot/memory.hpp"

#include <atomic>
#include <cerrno>
#include <system_error>

#include <sys/mman.h>
#include <unistd.h>

namespace resilient {
namespace {

constexpr int advice_populate_write = 23;  // MADV_POPULATE_WRITE, which older headers do not name

}  // namespace

void touch_pages(std::byte* memory, std::size_t bytes) {
  const auto page_bytes = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  for (std::size_t at = 0; at < bytes; at += page_bytes) {
    // A store that changes nothing, not even what another process stores there at the same time.
    std::atomic_ref(reinterpret_cast<unsigned char&>(memory[at])).fetch_or(0, std::memory_order_relaxed);
  }
}

void populate(std::byte* memory, std::size_t bytes) {
  if (bytes == 0) return;
  int result = 0;
  do {
    result = ::madvise(memory, bytes, advice_populate_write);
  } while (result != 0 && errno == EINTR);
  if (result == 0) return;
  if (errno != EINVAL && errno != ENOSYS) {
    throw std::system_error(errno, std::generic_category(), "madvise(MADV_POPULATE_WRITE)");
  }
  touch_pages(memory, bytes);
}

}  // namespace resilient
