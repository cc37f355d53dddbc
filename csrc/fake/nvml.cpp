// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
#include <atomic>

#include <unistd.h>

#include "fake/control.hpp"
#include "probes/abi.hpp"
#include "record.hpp"

using resilient::abi::Code;
using resilient::abi::NvmlDevice;
using resilient::abi::NvmlEvent;
using resilient::abi::NvmlEventSet;
using namespace resilient::fake;

namespace {

char device_memory = 0;
char event_set_memory = 0;

}  // namespace

RESILIENT_FAKE_EXPORT Code nvmlInit_v2() {
  Code result = 0;
  (void)enter(Function::nvmlInit_v2, result);
  return result;
}

RESILIENT_FAKE_EXPORT Code nvmlDeviceGetHandleByIndex_v2(std::uint32_t index, NvmlDevice* device) {
  Code result = 0;
  (void)enter(Function::nvmlDeviceGetHandleByIndex_v2, result, {index});
  *device = &device_memory;
  return result;
}

RESILIENT_FAKE_EXPORT Code nvmlDeviceGetHandleByUUID(const char* uuid, NvmlDevice* device) {
  Code result = 0;
  (void)enter(Function::nvmlDeviceGetHandleByUUID, result, {number_of(uuid)});
  *device = &device_memory;
  return result;
}

RESILIENT_FAKE_EXPORT Code nvmlDeviceGetTotalEccErrors(NvmlDevice, std::int32_t type, std::int32_t counter,
                                                       unsigned long long* count) {
  Code result = 0;
  (void)enter(Function::nvmlDeviceGetTotalEccErrors, result,
              {static_cast<std::uint64_t>(type), static_cast<std::uint64_t>(counter)});
  *count = control() == nullptr ? 0 : resilient::load(control()->ecc_errors);
  return result;
}

RESILIENT_FAKE_EXPORT Code nvmlEventSetCreate(NvmlEventSet* set) {
  Code result = 0;
  (void)enter(Function::nvmlEventSetCreate, result);
  *set = &event_set_memory;
  return result;
}

RESILIENT_FAKE_EXPORT Code nvmlDeviceRegisterEvents(NvmlDevice, unsigned long long types, NvmlEventSet) {
  Code result = 0;
  (void)enter(Function::nvmlDeviceRegisterEvents, result, {types});
  return result;
}

RESILIENT_FAKE_EXPORT Code nvmlEventSetWait_v2(NvmlEventSet, NvmlEvent* event, std::uint32_t timeout_ms) {
  Code result = 0;
  const Mode mode = enter(Function::nvmlEventSetWait_v2, result, {timeout_ms});
  *event = {};
  if (result != 0) return result;
  std::uint64_t xid = 0;
  if (control() != nullptr) xid = std::atomic_ref(control()->xid).exchange(0);
  if (mode == Mode::garbage) xid = ~std::uint64_t{0};
  if (xid == 0) return resilient::abi::nvml_timeout;
  event->device = &device_memory;
  event->type = resilient::abi::nvml_event_xid_critical;
  event->data = xid;
  return result;
}

RESILIENT_FAKE_TYPE(nvmlInit_v2);
RESILIENT_FAKE_TYPE(nvmlDeviceGetHandleByIndex_v2);
RESILIENT_FAKE_TYPE(nvmlDeviceGetHandleByUUID);
RESILIENT_FAKE_TYPE(nvmlDeviceGetTotalEccErrors);
RESILIENT_FAKE_TYPE(nvmlEventSetCreate);
RESILIENT_FAKE_TYPE(nvmlDeviceRegisterEvents);
RESILIENT_FAKE_TYPE(nvmlEventSetWait_v2);
