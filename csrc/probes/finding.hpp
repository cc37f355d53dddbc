// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace resilient {

enum class FindingKind { uce, hcce, link, device, stopped, disabled, notice };

constexpr const char* name_of(FindingKind kind) {
  switch (kind) {
    case FindingKind::uce:
      return "UCE";
    case FindingKind::hcce:
      return "HCCE";
    case FindingKind::link:
      return "LINK";
    case FindingKind::device:
      return "DEVICE";
    case FindingKind::stopped:
      return "STOPPED";
    case FindingKind::disabled:
      return "DISABLED";
    case FindingKind::notice:
      break;
  }
  return "NOTICE";
}

using Range = std::pair<std::uint64_t, std::uint64_t>;  // address, bytes

struct Finding {
  FindingKind kind;
  std::string probe;
  std::int64_t code;  // the library's own number; 0 where there is none
  std::string text;
  std::vector<Range> ranges = {};
  std::uint64_t comm = 0;  // the communicator that failed, or 0
  std::uint64_t time_ns = 0;
};

}  // namespace resilient
