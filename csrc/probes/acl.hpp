// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "probes/abi.hpp"
#include "probes/probe.hpp"

namespace resilient {

class AclProbe final : public Probe {
 public:
  AclProbe(std::string library, std::int32_t device) : Probe("acl", std::move(library)), device_(device) {}

  void poll(Calls& calls) override;
  void forget() override;

  // The library's own result code. std::runtime_error where it has no such function.
  abi::Code repair_memory(const std::vector<Range>& ranges);

 private:
  void resolve() override;
  bool can_see() const override { return peek_ != nullptr || get_ranges_ != nullptr; }
  std::vector<Range> read_ranges(Calls& calls, abi::Code& code);
  std::string describe(Calls& calls, abi::Code code, std::vector<Range>& ranges);

  const std::int32_t device_;
  abi::Code published_code_ = abi::acl_success;
  std::vector<Range> published_ranges_;
  int failures_ = 0;
  abi::aclrtPeekAtLastError* peek_ = nullptr;
  abi::aclrtGetMemUceInfo* get_ranges_ = nullptr;
  abi::aclrtMemUceRepair* repair_memory_ = nullptr;
  abi::aclrtGetErrorVerbose* get_verbose_ = nullptr;
};

}  // namespace resilient
