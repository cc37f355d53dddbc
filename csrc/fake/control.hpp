// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
//
// The memory through which a test tells the look-alike libraries what to answer. It is a file, named by
// RESILIENT_FAKE_DEVICE, and must be there before the first call; without it the device is healthy. The layout is
// also written down in src/resilient_train/testing/fake_device.py: a change needs a new version in both.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace resilient::fake {

constexpr std::uint64_t magic = 0x3130'4B41'4645'5452;  // "RTEFAK01", little endian
constexpr std::uint32_t version = 1;
constexpr std::size_t functions_max = 32;
constexpr std::size_t ranges_max = 128;
constexpr std::size_t calls_max = 256;
constexpr std::size_t arguments_max = 4;

enum class Mode : std::uint32_t {
  normal = 0,
  hang = 1,     // until the mode is another one
  garbage = 2,  // impossible numbers, null pointers, texts without an end
  crash = 3,
  overrun = 4,  // writes behind what it was given
};

// The number of a function is its place in this list.
enum class Function : std::uint32_t {
  HcclGetCommAsyncError = 0,
  HcclGetErrorString = 1,
  HcclCommSuspend = 2,
  HcclCommResume = 3,
  HcclCommDestroy = 4,
  aclrtPeekAtLastError = 5,
  aclrtGetMemUceInfo = 6,
  aclrtMemUceRepair = 7,
  aclrtGetErrorVerbose = 8,
  ncclCommGetAsyncError = 9,
  ncclGetErrorString = 10,
  ncclCommAbort = 11,
  nvmlInit_v2 = 12,
  nvmlDeviceGetHandleByIndex_v2 = 13,
  nvmlDeviceGetHandleByUUID = 14,
  nvmlDeviceGetTotalEccErrors = 15,
  nvmlEventSetCreate = 16,
  nvmlDeviceRegisterEvents = 17,
  nvmlEventSetWait_v2 = 18,
};

struct Behaviour {
  std::uint32_t mode;
  std::int32_t result;  // returned instead of success, with nothing done
  std::uint32_t latency_us;
  std::uint32_t reserved;
  std::uint64_t count;  // of calls, by all processes
};

struct Range {
  std::uint64_t address;
  std::uint64_t bytes;
};

struct Call {
  std::uint64_t number;  // from 1; written last, so that a half-written entry has an old one
  std::uint32_t function;
  std::uint32_t pid;
  std::array<std::uint64_t, arguments_max> arguments;
};

struct Control {
  std::uint64_t magic;
  std::uint32_t version;
  std::uint32_t bytes;

  // Of the one device.
  std::int32_t last_error;       // aclrtPeekAtLastError
  std::uint32_t last_error_tid;  // seen by this thread only; 0: by all
  std::int32_t error_type;       // aclrtGetErrorVerbose
  std::uint32_t error_repairable;
  std::uint32_t range_count;
  std::uint32_t range_pid;        // the process whose memory is poisoned
  std::uint32_t poison_pending;   // the ranges are to be overwritten at that process's next look at the device
  std::uint32_t poison_finished;  // how often that was done

  std::int32_t comm_error;  // HCCL and NCCL
  std::int32_t reserved;
  std::uint64_t comm;  // the one that has it; 0: all

  std::uint64_t ecc_errors;
  std::uint64_t xid;  // the next event; 0: none

  std::uint64_t next_call;
  std::array<Behaviour, functions_max> behaviours;
  std::array<Range, ranges_max> ranges;
  std::array<Call, calls_max> calls;
};

static_assert(sizeof(Behaviour) == 24 && sizeof(Range) == 16 && sizeof(Call) == 48);
static_assert(offsetof(Control, last_error) == 16 && offsetof(Control, range_count) == 32);
static_assert(offsetof(Control, comm_error) == 48 && offsetof(Control, comm) == 56);
static_assert(offsetof(Control, ecc_errors) == 64 && offsetof(Control, next_call) == 80);
static_assert(offsetof(Control, behaviours) == 88 && offsetof(Control, ranges) == 856);
static_assert(offsetof(Control, calls) == 2904 && sizeof(Control) == 15'192);
static_assert(std::is_trivial_v<Control>);

// The mapped file, or null.
Control* control();

// Writes the call down, waits, hangs or crashes as told. The mode, and in result what to return; 0 is to do the work.
Mode enter(Function function, std::int32_t& result, const std::array<std::uint64_t, arguments_max>& arguments = {});

// Overwrites the poisoned ranges, if this is their process and it was not done yet.
void poison();

// A readable page without a single zero, followed by one that cannot be read.
const char* endless_text();

template <typename Pointer>
std::uint64_t number_of(Pointer* pointer) {
  return static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(pointer));
}

}  // namespace resilient::fake

#define RESILIENT_FAKE_EXPORT extern "C" __attribute__((visibility("default")))
// The definition has the type that our probes call it by.
#define RESILIENT_FAKE_TYPE(function) static_assert(std::is_same_v<decltype(::function), resilient::abi::function>)
