// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "probes/comm_probe.hpp"

namespace resilient {

class HcclProbe final : public CommProbe {
 public:
  explicit HcclProbe(std::string library);

  // The library's own result codes. std::runtime_error where it has no such function.
  abi::Code suspend(CommTable::Handle comm) { return need(suspend_, "HcclCommSuspend")(as_comm(comm)); }
  abi::Code resume(CommTable::Handle comm) { return need(resume_, "HcclCommResume")(as_comm(comm)); }
  abi::Code destroy(CommTable::Handle comm) { return need(destroy_, "HcclCommDestroy")(as_comm(comm)); }

 private:
  void resolve() override;
  bool is_pending(abi::Code code) const override { return code == abi::hccl_again; }
  FindingKind classify(abi::Code code) const override;

  abi::HcclCommSuspend* suspend_ = nullptr;
  abi::HcclCommResume* resume_ = nullptr;
  abi::HcclCommDestroy* destroy_ = nullptr;
};

}  // namespace resilient
