// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
//
// How a finding reaches the agent although the rank's Python may be stuck with the GIL held: as a bit in the rank's
// record, set by the probe's own thread. Eight bits a probe; the text stays in the rank.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "probes/finding.hpp"

namespace resilient {

constexpr std::array<const char*, 4> alarm_probes = {"hccl", "acl", "nccl", "nvml"};
constexpr std::array<FindingKind, 5> alarm_kinds = {FindingKind::uce, FindingKind::hcce, FindingKind::link,
                                                    FindingKind::device, FindingKind::disabled};
constexpr unsigned bits_per_probe = 8;

// 0 for what nobody has to act on. Memory that lost data in an unknown place can't be mended: only a new process, with
// new memory, helps, as if the device had failed.
inline std::uint32_t alarm_bit(const Finding& finding) {
  const bool lost_somewhere = finding.kind == FindingKind::uce && finding.ranges.empty();
  const FindingKind kind = lost_somewhere ? FindingKind::device : finding.kind;
  for (unsigned probe = 0; probe < alarm_probes.size(); ++probe) {
    if (finding.probe != alarm_probes[probe]) continue;
    for (unsigned bit = 0; bit < alarm_kinds.size(); ++bit) {
      if (kind == alarm_kinds[bit]) return std::uint32_t{1} << (probe * bits_per_probe + bit);
    }
  }
  return 0;
}

inline std::vector<std::pair<std::string, std::string>> read_alarms(std::uint32_t bits) {
  std::vector<std::pair<std::string, std::string>> alarms;
  if (bits == 0) return alarms;
  for (unsigned probe = 0; probe < alarm_probes.size(); ++probe) {
    for (unsigned bit = 0; bit < alarm_kinds.size(); ++bit) {
      if ((bits >> (probe * bits_per_probe + bit) & 1) == 0) continue;
      alarms.emplace_back(alarm_probes[probe], name_of(alarm_kinds[bit]));
    }
  }
  return alarms;
}

}  // namespace resilient
