// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
#include "probes/hccl.hpp"

namespace resilient {

HcclProbe::HcclProbe(std::string library)
    : CommProbe("hccl", std::move(library), {"HcclGetCommAsyncError", "HcclGetErrorString", "HcclResult", 1'000'000}) {}

void HcclProbe::resolve() {
  CommProbe::resolve();
  suspend_ = library_.find<abi::HcclCommSuspend>("HcclCommSuspend");
  resume_ = library_.find<abi::HcclCommResume>("HcclCommResume");
  destroy_ = library_.find<abi::HcclCommDestroy>("HcclCommDestroy");
}

// "Suspending" is what a recovery of ours did to it.
FindingKind HcclProbe::classify(abi::Code code) const {
  return code == abi::hccl_suspending ? FindingKind::stopped : FindingKind::hcce;
}

}  // namespace resilient
