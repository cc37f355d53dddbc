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

// Copies all spans or throws std::system_error; what was copied before the failure stays.
void read_process_memory(pid_t pid, const std::vector<Span>& spans);
void allow_readers();
void die_with_parent(int signal_number);
void adopt_orphans();

}  // namespace resilient
