// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
//
// The three futex calls we need, with our own definitions: libc wraps none of them, and the headers of the
// build machine may be older than the kernel that runs us (futex_waitv came with Linux 5.16).
#pragma once

#include <cerrno>
#include <climits>
#include <cstdint>
#include <ctime>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace resilient::futex {

constexpr long syscall_waitv = 449;         // the same number on every architecture
constexpr std::uint32_t waitv_size_32 = 2;  // FUTEX_32; without the private flag: words are shared by processes
constexpr unsigned waitv_entries_max = 128;

// Layout of the kernel's struct futex_waitv.
struct WaitEntry {
  std::uint64_t expected = 0;
  std::uint64_t address = 0;
  std::uint32_t flags = waitv_size_32;
  std::uint32_t reserved = 0;
};
static_assert(sizeof(WaitEntry) == 24);

// Sleeps while *word == expected. Returns 0 or the errno (EAGAIN, EINTR, ETIMEDOUT): callers look again anyway.
inline int wait(const std::uint32_t* word, std::uint32_t expected, std::int64_t timeout_ns) {
  if (timeout_ns < 0) timeout_ns = 0;
  timespec timeout{};
  timeout.tv_sec = static_cast<time_t>(timeout_ns / 1'000'000'000);
  timeout.tv_nsec = static_cast<long>(timeout_ns % 1'000'000'000);
  const long result = ::syscall(SYS_futex, word, FUTEX_WAIT, expected, &timeout, nullptr, 0);
  return result == 0 ? 0 : errno;
}

inline void wake_all(const std::uint32_t* word) {
  (void)::syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Sleeps until one of the words is woken or no longer has its expected value. No time-out: one entry of every
// caller is a control word.
inline int wait_any(const WaitEntry* entries, unsigned count) {
  const long result = ::syscall(syscall_waitv, entries, count, 0, nullptr, CLOCK_MONOTONIC);
  return result >= 0 ? 0 : errno;
}

// EINVAL (no entries) proves that the call exists; ENOSYS, or a sandbox's EPERM, that it cannot be used.
inline bool wait_any_supported() {
  const long result = ::syscall(syscall_waitv, nullptr, 0, 0, nullptr, CLOCK_MONOTONIC);
  return result < 0 && errno == EINVAL;
}

}  // namespace resilient::futex
