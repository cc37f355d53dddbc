// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
//
// The four probes as one thing, and what a recovery asks of the same libraries.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <unistd.h>

#include "probes/acl.hpp"
#include "probes/hccl.hpp"
#include "probes/nccl.hpp"
#include "probes/nvml.hpp"
#include "probes/runner.hpp"

namespace resilient {

struct ProbesOptions {
  // File names for dlopen; empty: this probe is not wanted.
  std::string hccl;
  std::string acl;
  std::string nccl;
  std::string nvml;
  std::uint32_t device = 0;
  std::string uuid;
  RunnerOptions runner;
};

// By its name: hccl, acl, nccl or nvml; std::invalid_argument if it is another.
std::shared_ptr<Probe> make_probe(const std::string& name, const std::string& library, std::uint32_t device,
                                  const std::string& uuid);

class Probes {
 public:
  using Handle = CommTable::Handle;

  explicit Probes(const ProbesOptions& options);

  ProbeRunner& runner() { return *runner_; }
  void add_comm(const std::string& library, Handle comm) { comms(library).add(comm); }
  bool remove_comm(const std::string& library, Handle comm, std::int64_t limit_ms);

  // All of them return the library's code, and throw ETIMEDOUT when the call takes longer than limit_ms.
  std::int64_t suspend_comm(Handle comm, std::int64_t limit_ms);
  std::int64_t resume_comm(Handle comm, std::int64_t limit_ms);
  std::int64_t destroy_comm(Handle comm, std::int64_t limit_ms);
  std::int64_t abort_comm(Handle comm, std::int64_t limit_ms);
  std::int64_t repair_memory(std::vector<Range> ranges, std::int64_t limit_ms);

 private:
  CommTable& comms(const std::string& library) const;
  void let_go(CommTable& comms, Handle comm, std::int64_t limit_ms) const;
  // The probe if it is there and this is its process.
  template <typename Kind>
  std::shared_ptr<Kind> use(const std::shared_ptr<Kind>& probe, const char* name) const;

  const pid_t owner_pid_ = ::getpid();
  // Shared with calls that never came back.
  std::shared_ptr<HcclProbe> hccl_;
  std::shared_ptr<AclProbe> acl_;
  std::shared_ptr<NcclProbe> nccl_;
  std::shared_ptr<NvmlProbe> nvml_;
  std::unique_ptr<ProbeRunner> runner_;
};

}  // namespace resilient
