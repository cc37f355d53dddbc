// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
#include "probes/nvml.hpp"

namespace resilient {
namespace {

constexpr int failures_max = 3;
constexpr int events_per_poll_max = 64;
constexpr std::uint64_t xid_max = 100'000;

}  // namespace

std::optional<FindingKind> classify_xid(std::uint64_t xid) {
  switch (xid) {
    case 13:  // a kernel's exception
    case 31:  // a kernel's page fault
    case 43:  // a stopped channel
    case 45:  // cleaning up after one of these
    case 68:
    case 109:
      return std::nullopt;
    case 48:  // double-bit error
    case 64:  // rows could not be remapped
    case 94:  // contained,
    case 95:  // or not
      return FindingKind::uce;
    case 74:  // NVLink
      return FindingKind::link;
    case 46:   // the device stopped working,
    case 62:   // or its controller did
    case 79:   // it fell off the bus
    case 119:  // its system processor does not answer
    case 120:
    case 140:  // an error of its memory that it could not recover from
    case 143:
      return FindingKind::device;
    default:  // nobody is killed over a number that we don't know
      return FindingKind::notice;
  }
}

void NvmlProbe::resolve() {
  init_ = library_.find<abi::nvmlInit_v2>("nvmlInit_v2");
  by_index_ = library_.find<abi::nvmlDeviceGetHandleByIndex_v2>("nvmlDeviceGetHandleByIndex_v2");
  by_uuid_ = library_.find<abi::nvmlDeviceGetHandleByUUID>("nvmlDeviceGetHandleByUUID");
  get_ecc_ = library_.find<abi::nvmlDeviceGetTotalEccErrors>("nvmlDeviceGetTotalEccErrors");
  create_events_ = library_.find<abi::nvmlEventSetCreate>("nvmlEventSetCreate");
  register_events_ = library_.find<abi::nvmlDeviceRegisterEvents>("nvmlDeviceRegisterEvents");
  wait_events_ = library_.find<abi::nvmlEventSetWait_v2>("nvmlEventSetWait_v2");
}

bool NvmlProbe::can_see() const {
  const bool finds = init_ != nullptr && (uuid_.empty() ? by_index_ != nullptr : by_uuid_ != nullptr);
  const bool hears = create_events_ != nullptr && register_events_ != nullptr && wait_events_ != nullptr;
  return finds && (get_ecc_ != nullptr || hears);
}

abi::Code NvmlProbe::find_device(Calls& calls) {
  if (uuid_.empty()) {
    return calls.call("nvmlDeviceGetHandleByIndex_v2", [this] { return by_index_(index_, &device_); });
  }
  return calls.call("nvmlDeviceGetHandleByUUID", [this] { return by_uuid_(uuid_.c_str(), &device_); });
}

void NvmlProbe::prepare(Calls& calls) {
  const abi::Code started = calls.call("nvmlInit_v2", [this] { return init_(); });
  if (started != abi::nvml_success) throw Absent("nvmlInit_v2 failed with " + std::to_string(started));
  const abi::Code found = find_device(calls);
  if (found != abi::nvml_success || device_ == nullptr) {
    throw Distrust("NVML does not know the device, answer " + std::to_string(found));
  }
  listen(calls);
}

void NvmlProbe::listen(Calls& calls) {
  if (create_events_ == nullptr || register_events_ == nullptr || wait_events_ == nullptr) return;
  abi::NvmlEventSet events = nullptr;
  abi::Code result = calls.call("nvmlEventSetCreate", [&] { return create_events_(&events); });
  if (result == abi::nvml_success && events != nullptr) {
    result = calls.call("nvmlDeviceRegisterEvents",
                        [&] { return register_events_(device_, abi::nvml_event_xid_critical, events); });
    if (result == abi::nvml_success) events_ = events;
  }
  if (events_ == nullptr) calls.lack("XID events (NVML answers " + std::to_string(result) + ")");
}

void NvmlProbe::poll(Calls& calls) {
  if (get_ecc_ != nullptr) poll_ecc(calls);
  if (events_ != nullptr) poll_events(calls);
}

void NvmlProbe::check(const char* function, abi::Code result, int& failures) {
  if (result == abi::nvml_success) {
    failures = 0;
  } else if (++failures >= failures_max) {
    throw Distrust(std::string(function) + " failed " + std::to_string(failures) + " times in a row, last with " +
                   std::to_string(result));
  }
}

void NvmlProbe::poll_ecc(Calls& calls) {
  unsigned long long count = 0;
  const abi::Code result = calls.call("nvmlDeviceGetTotalEccErrors", [&] {
    return get_ecc_(device_, abi::nvml_uncorrected, abi::nvml_volatile, &count);
  });
  if (result == abi::nvml_not_supported) {
    calls.lack("nvmlDeviceGetTotalEccErrors (not supported by this device)");
    get_ecc_ = nullptr;
    return;
  }
  if (result == abi::nvml_gpu_is_lost) {
    if (!lost_) calls.publish({FindingKind::device, name(), result, "the device fell off the bus"});
    lost_ = true;
    return;
  }
  check("nvmlDeviceGetTotalEccErrors", result, ecc_failures_);
  if (result != abi::nvml_success) return;
  // A counter that fell was reset; only growth since the last look is an error.
  const unsigned long long growth = ecc_seen_ && count > *ecc_seen_ ? count - *ecc_seen_ : 0;
  ecc_seen_ = count;
  if (growth == 0) return;
  calls.publish({FindingKind::uce, name(), 0, std::to_string(growth) + " more uncorrected ECC errors since boot"});
}

void NvmlProbe::poll_events(Calls& calls) {
  for (int heard = 0; heard < events_per_poll_max; ++heard) {
    abi::NvmlEvent event{};
    const abi::Code result = calls.call("nvmlEventSetWait_v2", [&] { return wait_events_(events_, &event, 0); });
    if (result == abi::nvml_timeout) {
      event_failures_ = 0;
      return;
    }
    check("nvmlEventSetWait_v2", result, event_failures_);
    if (result != abi::nvml_success) return;
    if (event.type != abi::nvml_event_xid_critical) continue;
    if (event.data > xid_max) throw Distrust("nvmlEventSetWait_v2 reported XID " + std::to_string(event.data));
    if (const std::optional<FindingKind> kind = classify_xid(event.data)) {
      calls.publish({*kind, name(), static_cast<std::int64_t>(event.data), "XID " + std::to_string(event.data)});
    }
  }
  throw Distrust("nvmlEventSetWait_v2 reported more than 64 events at once");
}

}  // namespace resilient
