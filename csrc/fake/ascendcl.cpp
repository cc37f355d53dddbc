// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
//
// With RESILIENT_FAKE_OLD it is a runtime from before memory errors could be asked for.
#include <algorithm>
#include <cstring>

#include <sys/syscall.h>
#include <unistd.h>

#include "fake/control.hpp"
#include "probes/abi.hpp"
#include "record.hpp"

using resilient::abi::Code;
using resilient::abi::ErrorInfo;
using resilient::abi::MemUceInfo;
using namespace resilient::fake;

RESILIENT_FAKE_EXPORT Code aclrtPeekAtLastError(std::int32_t level) {
  Code result = 0;
  const Mode mode = enter(Function::aclrtPeekAtLastError, result, {static_cast<std::uint64_t>(level)});
  if (mode == Mode::garbage) return -1;
  if (result != 0 || control() == nullptr) return result;
  poison();
  const std::uint32_t tid = resilient::load(control()->last_error_tid);
  const bool is_mine = tid == 0 || tid == static_cast<std::uint32_t>(::syscall(SYS_gettid));
  return is_mine ? resilient::load(control()->last_error) : 0;
}

RESILIENT_FAKE_TYPE(aclrtPeekAtLastError);

#ifndef RESILIENT_FAKE_OLD

namespace {

constexpr Code wrong_argument = 107'000;

void fill(MemUceInfo& entry, const Range& range) {
  entry.address = reinterpret_cast<void*>(static_cast<std::uintptr_t>(range.address));
  entry.bytes = range.bytes;
}

// Takes one range off the device's list.
bool clear(const MemUceInfo& entry) {
  Control& shared = *control();
  Range* const begin = shared.ranges.data();
  Range* const end = begin + shared.range_count;
  const std::uint64_t address = number_of(static_cast<char*>(entry.address));
  Range* const found = std::find_if(
      begin, end, [&](const Range& range) { return range.address == address && range.bytes == entry.bytes; });
  if (found == end) return false;
  std::copy(found + 1, end, found);
  resilient::store(shared.range_count, shared.range_count - 1);
  return true;
}

void clear_error() {
  resilient::store(control()->last_error, 0);
  resilient::store(control()->error_type, 0);
}

}  // namespace

RESILIENT_FAKE_EXPORT Code aclrtGetMemUceInfo(std::int32_t device, MemUceInfo* ranges, std::size_t size,
                                              std::size_t* count) {
  Code result = 0;
  const Mode mode = enter(Function::aclrtGetMemUceInfo, result, {static_cast<std::uint64_t>(device), size});
  *count = 0;
  if (mode == Mode::garbage) *count = 1'000'000'007;
  if (mode == Mode::overrun) std::memset(static_cast<void*>(ranges + size), 0, sizeof(MemUceInfo));
  if (mode != Mode::normal || result != 0 || control() == nullptr) return result;
  poison();
  *count = std::min<std::size_t>(resilient::load(control()->range_count), size);
  for (std::size_t index = 0; index < *count; ++index) fill(ranges[index], control()->ranges[index]);
  return result;
}

RESILIENT_FAKE_EXPORT Code aclrtMemUceRepair(std::int32_t device, MemUceInfo* ranges, std::size_t size) {
  Code result = 0;
  const std::uint64_t first = size > 0 ? number_of(static_cast<char*>(ranges[0].address)) : 0;
  (void)enter(Function::aclrtMemUceRepair, result, {static_cast<std::uint64_t>(device), size, first});
  if (result != 0 || control() == nullptr) return result;
  for (std::size_t index = 0; index < size; ++index) {
    if (!clear(ranges[index])) return wrong_argument;
  }
  if (resilient::load(control()->range_count) == 0) clear_error();
  return result;
}

RESILIENT_FAKE_EXPORT Code aclrtGetErrorVerbose(std::int32_t device, ErrorInfo* info) {
  Code result = 0;
  const Mode mode = enter(Function::aclrtGetErrorVerbose, result, {static_cast<std::uint64_t>(device)});
  *info = {};
  if (result != 0 || control() == nullptr) return result;
  info->type = resilient::load(control()->error_type);
  info->try_repair = resilient::load(control()->error_repairable) != 0 ? 1 : 0;
  if (info->type != resilient::abi::acl_error_memory) return result;
  info->has_detail = 1;
  info->range_count = std::min<std::size_t>(control()->range_count, resilient::abi::acl_verbose_ranges_max);
  for (std::size_t index = 0; index < info->range_count; ++index) fill(info->ranges[index], control()->ranges[index]);
  if (mode == Mode::garbage) info->range_count = 1'000;
  return result;
}

RESILIENT_FAKE_TYPE(aclrtGetMemUceInfo);
RESILIENT_FAKE_TYPE(aclrtMemUceRepair);
RESILIENT_FAKE_TYPE(aclrtGetErrorVerbose);

#endif
