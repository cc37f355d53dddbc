// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "probes/comm_probe.hpp"

namespace resilient {

class NcclProbe final : public CommProbe {
 public:
  explicit NcclProbe(std::string library);

  // Also frees the communicator: whoever made it must not destroy it again.
  abi::Code abort(CommTable::Handle comm) { return need(abort_, "ncclCommAbort")(as_comm(comm)); }

 private:
  void resolve() override;
  // A non-blocking communicator at work.
  bool is_pending(abi::Code code) const override { return code == abi::nccl_in_progress; }
  FindingKind classify(abi::Code) const override { return FindingKind::hcce; }

  abi::ncclCommAbort* abort_ = nullptr;
};

}  // namespace resilient
