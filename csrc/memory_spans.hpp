// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace resilient {

// Spans of this process's memory as (address, bytes), and what they held when they were last looked at.
class Glance {
 public:
  explicit Glance(const std::vector<std::pair<std::uint64_t, std::uint64_t>>& spans);

  // Whether they hold something else now; always so the first time. Whoever asks keeps the memory alive.
  bool changed();

  struct Seen {
    const std::byte* memory;
    std::vector<std::byte> held;
  };
  const std::vector<Seen>& seen() const { return seen_; }

 private:
  std::vector<Seen> seen_;
  bool looked_ = false;
};

}  // namespace resilient
