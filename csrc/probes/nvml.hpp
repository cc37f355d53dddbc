// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>

#include "probes/abi.hpp"
#include "probes/probe.hpp"

namespace resilient {

// Nothing: an error of the program that ran on the device, which it is told of in other ways.
std::optional<FindingKind> classify_xid(std::uint64_t xid);

class NvmlProbe final : public Probe {
 public:
  // By uuid ("GPU-...") where it is given: NVML's index knows nothing of CUDA_VISIBLE_DEVICES.
  NvmlProbe(std::string library, std::uint32_t index, std::string uuid)
      : Probe("nvml", std::move(library)), index_(index), uuid_(std::move(uuid)) {}

  void prepare(Calls& calls) override;
  void poll(Calls& calls) override;

 private:
  void resolve() override;
  bool can_see() const override;
  abi::Code find_device(Calls& calls);
  void listen(Calls& calls);
  void poll_ecc(Calls& calls);
  void poll_events(Calls& calls);
  void check(const char* function, abi::Code result, int& failures);

  const std::uint32_t index_;
  const std::string uuid_;
  abi::NvmlDevice device_ = nullptr;
  abi::NvmlEventSet events_ = nullptr;
  std::optional<unsigned long long> ecc_seen_;
  int ecc_failures_ = 0;
  int event_failures_ = 0;
  bool lost_ = false;
  abi::nvmlInit_v2* init_ = nullptr;
  abi::nvmlDeviceGetHandleByIndex_v2* by_index_ = nullptr;
  abi::nvmlDeviceGetHandleByUUID* by_uuid_ = nullptr;
  abi::nvmlDeviceGetTotalEccErrors* get_ecc_ = nullptr;
  abi::nvmlEventSetCreate* create_events_ = nullptr;
  abi::nvmlDeviceRegisterEvents* register_events_ = nullptr;
  abi::nvmlEventSetWait_v2* wait_events_ = nullptr;
};

}  // namespace resilient
