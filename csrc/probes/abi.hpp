// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
//
// Our own declarations of what we call in the vendors' libraries. Only the shape of the calls stands here; where the
// torch_npu wheel is installed, csrc/tests/abi_test.cpp compares it with the headers inside.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace resilient::abi {

using Code = std::int32_t;  // every result type of the four libraries is an int or an enum of its size
using Comm = void*;

// HCCL
constexpr Code hccl_success = 0;
constexpr Code hccl_again = 20;
constexpr Code hccl_suspending = 22;
constexpr Code hccl_retry_failed = 23;

using HcclGetCommAsyncError = Code(Comm comm, Code* error);
using HcclGetErrorString = const char*(Code code);
using HcclCommSuspend = Code(Comm comm);
using HcclCommResume = Code(Comm comm);
using HcclCommDestroy = Code(Comm comm);

// ACL runtime
constexpr Code acl_success = 0;
constexpr Code acl_task_abort = 107022;
constexpr Code acl_not_supported = 207000;
constexpr Code acl_device_error_first = 507000;  // the runtime's block of device errors
constexpr Code acl_device_error_last = 507999;
constexpr Code acl_memory_error = 507053;
constexpr Code acl_hbm_multi_bit_ecc = 507054;
constexpr Code acl_suspect_memory = 507055;
constexpr Code acl_link_error = 507056;
constexpr Code acl_suspect_remote = 507057;
constexpr Code acl_comm_retry_failed = 507904;
constexpr std::int32_t acl_thread_level = 0;
constexpr std::size_t acl_ranges_max = 128;
constexpr std::size_t acl_verbose_ranges_max = 20;
constexpr std::int32_t acl_error_memory = 1;

struct MemUceInfo {
  void* address;
  std::size_t bytes;
  std::size_t reserved[14];
};

struct ErrorInfo {
  std::uint8_t try_repair;
  std::uint8_t has_detail;
  std::uint8_t reserved[2];
  std::int32_t type;
  std::size_t range_count;  // a union begins here; the ranges are its largest member
  MemUceInfo ranges[acl_verbose_ranges_max];
};

static_assert(sizeof(MemUceInfo) == 128 && offsetof(MemUceInfo, bytes) == 8);
static_assert(offsetof(ErrorInfo, type) == 4 && offsetof(ErrorInfo, range_count) == 8);
static_assert(offsetof(ErrorInfo, ranges) == 16 && sizeof(ErrorInfo) == 16 + 20 * 128);

using aclrtPeekAtLastError = Code(std::int32_t level);
using aclrtGetMemUceInfo = Code(std::int32_t device, MemUceInfo* ranges, std::size_t size, std::size_t* count);
using aclrtMemUceRepair = Code(std::int32_t device, MemUceInfo* ranges, std::size_t size);
using aclrtGetErrorVerbose = Code(std::int32_t device, ErrorInfo* info);

// NCCL
constexpr Code nccl_success = 0;
constexpr Code nccl_in_progress = 7;

using ncclCommGetAsyncError = Code(Comm comm, Code* error);
using ncclGetErrorString = const char*(Code code);
using ncclCommAbort = Code(Comm comm);

// NVML
constexpr Code nvml_success = 0;
constexpr Code nvml_not_supported = 3;
constexpr Code nvml_timeout = 10;
constexpr Code nvml_gpu_is_lost = 15;
constexpr std::int32_t nvml_uncorrected = 1;
constexpr std::int32_t nvml_volatile = 0;
constexpr unsigned long long nvml_event_xid_critical = 8;

using NvmlDevice = void*;
using NvmlEventSet = void*;

struct NvmlEvent {
  NvmlDevice device;
  unsigned long long type;
  unsigned long long data;  // of an XID event: its number
  std::uint32_t gpu_instance;
  std::uint32_t compute_instance;
};
static_assert(sizeof(NvmlEvent) == 32 && offsetof(NvmlEvent, data) == 16);

using nvmlInit_v2 = Code();
using nvmlDeviceGetHandleByIndex_v2 = Code(std::uint32_t index, NvmlDevice* device);
using nvmlDeviceGetHandleByUUID = Code(const char* uuid, NvmlDevice* device);
using nvmlDeviceGetTotalEccErrors = Code(NvmlDevice device, std::int32_t type, std::int32_t counter,
                                         unsigned long long* count);
using nvmlEventSetCreate = Code(NvmlEventSet* set);
using nvmlDeviceRegisterEvents = Code(NvmlDevice device, unsigned long long types, NvmlEventSet set);
using nvmlEventSetWait_v2 = Code(NvmlEventSet set, NvmlEvent* event, std::uint32_t timeout_ms);

}  // namespace resilient::abi
