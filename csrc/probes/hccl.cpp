// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
#include "probes/hccl.hpp"

#include "probes/ascend_errors.hpp"

namespace resilient {

HcclProbe::HcclProbe(std::string library)
    : CommProbe("hccl", std::move(library), {"HcclGetCommAsyncError", "HcclGetErrorString", "HcclResult", 1'000'000}) {}

void HcclProbe::resolve() {
  CommProbe::resolve();
  suspend_ = library_.find<abi::HcclCommSuspend>("HcclCommSuspend");
  resume_ = library_.find<abi::HcclCommResume>("HcclCommResume");
  destroy_ = library_.find<abi::HcclCommDestroy>("HcclCommDestroy");
}

// A communicator that reports an error has failed, whatever that is called.
FindingKind HcclProbe::classify(abi::Code code) const { return classify_hccl(code).value_or(FindingKind::hcce); }

}  // namespace resilient
