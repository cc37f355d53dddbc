// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
#include "probes/nccl.hpp"

namespace resilient {

NcclProbe::NcclProbe(std::string library)
    : CommProbe("nccl", std::move(library), {"ncclCommGetAsyncError", "ncclGetErrorString", "ncclResult_t", 1'000}) {}

void NcclProbe::resolve() {
  CommProbe::resolve();
  abort_ = library_.find<abi::ncclCommAbort>("ncclCommAbort");
}

}  // namespace resilient
