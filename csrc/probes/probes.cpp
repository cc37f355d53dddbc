// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
#include "probes/probes.hpp"

#include <climits>
#include <stdexcept>

#include "probes/bounded.hpp"

namespace resilient {

std::shared_ptr<Probe> make_probe(const std::string& name, const std::string& library, std::uint32_t device,
                                  const std::string& uuid) {
  if (name == "hccl") return std::make_shared<HcclProbe>(library);
  if (name == "acl") return std::make_shared<AclProbe>(library, static_cast<std::int32_t>(device));
  if (name == "nccl") return std::make_shared<NcclProbe>(library);
  if (name == "nvml") return std::make_shared<NvmlProbe>(library, device, uuid);
  throw std::invalid_argument("'" + name + "' is no probe; hccl, acl, nccl and nvml are");
}

Probes::Probes(const ProbesOptions& options) {
  if (options.device > INT_MAX) throw std::invalid_argument("device is not a device's number");
  const auto device = static_cast<std::int32_t>(options.device);
  std::vector<std::shared_ptr<Probe>> wanted;
  if (!options.hccl.empty()) wanted.push_back(hccl_ = std::make_shared<HcclProbe>(options.hccl));
  if (!options.acl.empty()) wanted.push_back(acl_ = std::make_shared<AclProbe>(options.acl, device));
  if (!options.nccl.empty()) wanted.push_back(nccl_ = std::make_shared<NcclProbe>(options.nccl));
  if (!options.nvml.empty()) {
    wanted.push_back(nvml_ = std::make_shared<NvmlProbe>(options.nvml, options.device, options.uuid));
  }
  runner_ = std::make_unique<ProbeRunner>(std::move(wanted), options.runner);
}

template <typename Kind>
std::shared_ptr<Kind> Probes::use(const std::shared_ptr<Kind>& probe, const char* name) const {
  if (owner_pid_ != ::getpid()) {
    throw std::logic_error("the probes belong to the process that made them; this is a forked child");
  }
  if (probe == nullptr) throw std::invalid_argument(std::string("the probe ") + name + " is switched off");
  return probe;
}

CommTable& Probes::comms(const std::string& library) const {
  if (library == "hccl") return use(hccl_, "hccl")->comms();
  if (library == "nccl") return use(nccl_, "nccl")->comms();
  throw std::invalid_argument("'" + library + "' has no communicators; hccl and nccl have");
}

bool Probes::remove_comm(const std::string& library, Handle comm, std::int64_t limit_ms) {
  return comms(library).remove(comm, limit_ms);
}

void Probes::let_go(CommTable& comms, Handle comm, std::int64_t limit_ms) const {
  if (comms.remove(comm, limit_ms)) return;
  throw std::runtime_error("the probe is inside a call with this communicator that does not return");
}

std::int64_t Probes::suspend_comm(Handle comm, std::int64_t limit_ms) {
  return run_bounded(limit_ms, [probe = use(hccl_, "hccl"), comm] { return probe->suspend(comm); });
}

std::int64_t Probes::resume_comm(Handle comm, std::int64_t limit_ms) {
  return run_bounded(limit_ms, [probe = use(hccl_, "hccl"), comm] { return probe->resume(comm); });
}

std::int64_t Probes::destroy_comm(Handle comm, std::int64_t limit_ms) {
  const auto probe = use(hccl_, "hccl");
  let_go(probe->comms(), comm, limit_ms);
  return run_bounded(limit_ms, [probe, comm] { return probe->destroy(comm); });
}

std::int64_t Probes::abort_comm(Handle comm, std::int64_t limit_ms) {
  const auto probe = use(nccl_, "nccl");
  let_go(probe->comms(), comm, limit_ms);
  return run_bounded(limit_ms, [probe, comm] { return probe->abort(comm); });
}

std::int64_t Probes::repair_memory(std::vector<Range> ranges, std::int64_t limit_ms) {
  return run_bounded(limit_ms,
                     [probe = use(acl_, "acl"), ranges = std::move(ranges)] { return probe->repair_memory(ranges); });
}

}  // namespace resilient
