// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
//
// What errors of an Ascend device mean for a recovery: by number where a library is asked, by words where torch_npu or
// MindSpore has made a text of them. The one table; frameworks/torch_npu/errors.py reads exceptions by it.
#pragma once

#include <algorithm>
#include <array>
#include <optional>

#include "probes/abi.hpp"
#include "probes/finding.hpp"

namespace resilient {

struct AscendError {
  abi::Code code;
  FindingKind kind;
  const char* meaning;
  std::array<const char*, 3> words;  // torch_npu's, then MindSpore's; nullptr: no more
};

// Where a text has words of several rows, the first one counts.
constexpr std::array acl_errors{
    AscendError{
        abi::acl_memory_error, FindingKind::uce, "uncorrectable device memory error", {"UCE ERROR", "UCEError"}},
    AscendError{abi::acl_hbm_multi_bit_ecc,
                FindingKind::uce,
                "multi-bit ECC error of the device memory",
                {"HBM MULTI BIT ECC"}},
    AscendError{abi::acl_suspect_memory, FindingKind::uce, "device memory under suspicion", {"SUSPECT MEM ERROR"}},
    AscendError{
        abi::acl_link_error, FindingKind::link, "link error of the device", {"HCCS LINK ERROR", "UB LINK ERROR"}},
    AscendError{abi::acl_suspect_remote,
                FindingKind::hcce,
                "a remote device is under suspicion",
                {"SUSPECT REMOTE ERROR", "SuspectRemoteError"}},
    AscendError{abi::acl_comm_retry_failed,
                FindingKind::hcce,
                "a collective failed after its retries",
                {"HCCL OP RETRY FAILED", "HCCEError"}},
    AscendError{abi::acl_task_abort,
                FindingKind::stopped,
                "tasks of the device were aborted",
                {"FORCE STOP", "ForceStopError"}},
};

// Of HcclResult, what a call or a communicator fails with though the program has asked for nothing wrong.
constexpr std::array hccl_errors{
    AscendError{4, FindingKind::hcce, "internal error", {}},
    AscendError{7, FindingKind::hcce, "resource not available", {}},
    AscendError{9, FindingKind::hcce, "time-out", {}},
    AscendError{11, FindingKind::hcce, "TCP connect failed", {}},
    AscendError{12, FindingKind::hcce, "RoCE connect failed", {}},
    AscendError{13, FindingKind::hcce, "TCP transfer failed", {}},
    AscendError{14, FindingKind::hcce, "RoCE transfer failed", {}},
    AscendError{15, FindingKind::hcce, "the runtime failed", {}},
    AscendError{16, FindingKind::hcce, "the driver failed", {}},
    AscendError{19, FindingKind::hcce, "network failed", {}},
    AscendError{21, FindingKind::hcce, "a remote rank failed", {}},
    AscendError{abi::hccl_suspending, FindingKind::stopped, "suspended", {}},
    AscendError{abi::hccl_retry_failed, FindingKind::hcce, "a collective failed after its retries", {}},
};

template <std::size_t size>
constexpr const AscendError* find_error(const std::array<AscendError, size>& errors, abi::Code code) {
  const auto at =
      std::find_if(errors.begin(), errors.end(), [=](const AscendError& each) { return each.code == code; });
  return at == errors.end() ? nullptr : &*at;
}

// Nothing: not a fault of the device, but wrong arguments and the like, which are the program's business.
constexpr std::optional<FindingKind> classify_acl(abi::Code code) {
  if (const AscendError* const found = find_error(acl_errors, code)) return found->kind;
  if (code >= abi::acl_device_error_first && code <= abi::acl_device_error_last) return FindingKind::device;
  return std::nullopt;
}

constexpr std::optional<FindingKind> classify_hccl(abi::Code code) {
  const AscendError* const found = find_error(hccl_errors, code);
  return found == nullptr ? std::nullopt : std::optional(found->kind);
}

}  // namespace resilient
