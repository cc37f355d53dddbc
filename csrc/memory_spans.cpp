// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
#include "memory_spans.hpp"

#include <cstring>

namespace resilient {

Glance::Glance(const std::vector<std::pair<std::uint64_t, std::uint64_t>>& spans) {
  seen_.reserve(spans.size());
  for (const auto& [address, bytes] : spans) {
    seen_.push_back({reinterpret_cast<const std::byte*>(address), std::vector<std::byte>(bytes)});
  }
}

bool Glance::changed() {
  bool news = !looked_;
  looked_ = true;
  for (Seen& each : seen_) {
    if (std::memcmp(each.memory, each.held.data(), each.held.size()) == 0) continue;
    std::memcpy(each.held.data(), each.memory, each.held.size());
    news = true;
  }
  return news;
}

}  // namespace resilient
