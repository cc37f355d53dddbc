// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
#include "probes/acl.hpp"

#include <array>
#include <cstring>
#include <stdexcept>

#include "probes/ascend_errors.hpp"

namespace resilient {
namespace {

constexpr int failures_max = 3;
constexpr std::uint64_t range_bytes_max = std::uint64_t{1} << 40;  // more memory than any device has
constexpr std::size_t guard_entries = 8;
constexpr unsigned char guard_byte = 0x5A;

// What we lend to the library, and behind it what it must leave alone.
struct LentRanges {
  LentRanges() { std::memset(guard.data(), guard_byte, sizeof(guard)); }
  bool is_overrun() const {
    const auto* const bytes = reinterpret_cast<const unsigned char*>(guard.data());
    for (std::size_t at = 0; at < sizeof(guard); ++at) {
      if (bytes[at] != guard_byte) return true;
    }
    return false;
  }

  std::array<abi::MemUceInfo, abi::acl_ranges_max> entries{};
  std::array<abi::MemUceInfo, guard_entries> guard;
};

std::vector<Range> copy_checked(const abi::MemUceInfo* entries, std::size_t count) {
  std::vector<Range> ranges;
  for (std::size_t index = 0; index < count; ++index) {
    const auto address = static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(entries[index].address));
    const std::uint64_t bytes = entries[index].bytes;
    if (address == 0 || bytes == 0 || bytes > range_bytes_max || address + bytes < address) {
      throw Distrust("range " + std::to_string(index) + " of the device's memory errors is impossible: address " +
                     std::to_string(address) + ", " + std::to_string(bytes) + " bytes");
    }
    ranges.emplace_back(address, bytes);
  }
  return ranges;
}

const char* meaning(abi::Code code) {
  const AscendError* const found = find_error(acl_errors, code);
  return found == nullptr ? "device error" : found->meaning;
}

}  // namespace

void AclProbe::resolve() {
  peek_ = library_.find<abi::aclrtPeekAtLastError>("aclrtPeekAtLastError");
  get_ranges_ = library_.find<abi::aclrtGetMemUceInfo>("aclrtGetMemUceInfo");
  repair_memory_ = library_.find<abi::aclrtMemUceRepair>("aclrtMemUceRepair");
  get_verbose_ = library_.find<abi::aclrtGetErrorVerbose>("aclrtGetErrorVerbose");
}

void AclProbe::forget() {
  published_code_ = abi::acl_success;
  published_ranges_.clear();
}

void AclProbe::poll(Calls& calls) {
  abi::Code code = abi::acl_success;
  if (peek_ != nullptr) code = calls.call("aclrtPeekAtLastError", [this] { return peek_(abi::acl_thread_level); });
  if (code < 0) throw Distrust("aclrtPeekAtLastError gave " + std::to_string(code));
  std::vector<Range> ranges = read_ranges(calls, code);
  if (!ranges.empty() && classify_acl(code) != FindingKind::uce) code = abi::acl_memory_error;
  const bool news = code != published_code_ || (!ranges.empty() && ranges != published_ranges_);
  published_code_ = code;
  published_ranges_ = ranges;
  const std::optional<FindingKind> kind = classify_acl(code);
  if (!news || !kind) return;
  std::string text = describe(calls, code, ranges);
  calls.publish({*kind, name(), code, std::move(text), std::move(ranges)});
}

// The error that this call itself answers counts as the device's, if there is no other.
std::vector<Range> AclProbe::read_ranges(Calls& calls, abi::Code& code) {
  if (get_ranges_ == nullptr) return {};
  LentRanges lent;
  std::size_t count = 0;
  const abi::Code result = calls.call(
      "aclrtGetMemUceInfo", [&] { return get_ranges_(device_, lent.entries.data(), lent.entries.size(), &count); });
  if (lent.is_overrun()) throw Distrust("aclrtGetMemUceInfo wrote behind the memory that it was given");
  if (result == abi::acl_not_supported) {
    calls.lack("aclrtGetMemUceInfo (not supported by this device)");
    get_ranges_ = nullptr;
    return {};
  }
  if (result != abi::acl_success && !classify_acl(result)) {
    if (++failures_ < failures_max) return {};
    throw Distrust("aclrtGetMemUceInfo failed " + std::to_string(failures_) + " times in a row, last with " +
                   std::to_string(result));
  }
  failures_ = 0;
  if (result != abi::acl_success) {
    if (code == abi::acl_success) code = result;
    return {};
  }
  if (count > lent.entries.size()) throw Distrust("aclrtGetMemUceInfo reported " + std::to_string(count) + " ranges");
  return copy_checked(lent.entries.data(), count);
}

// Words for people; and ranges, where only the detailed report has them.
std::string AclProbe::describe(Calls& calls, abi::Code code, std::vector<Range>& ranges) {
  std::string text = meaning(code);
  if (get_verbose_ != nullptr) {
    abi::ErrorInfo info{};
    const abi::Code result = calls.call("aclrtGetErrorVerbose", [&] { return get_verbose_(device_, &info); });
    if (result == abi::acl_success && info.type != 0) {
      text += ", error type " + std::to_string(info.type) + (info.try_repair != 0 ? ", may be repaired" : "");
      const bool has_ranges = info.type == abi::acl_error_memory && info.has_detail != 0;
      if (has_ranges && info.range_count > abi::acl_verbose_ranges_max) {
        throw Distrust("aclrtGetErrorVerbose reported " + std::to_string(info.range_count) + " ranges");
      }
      if (has_ranges && ranges.empty()) ranges = copy_checked(info.ranges, info.range_count);
    }
  }
  return text;
}

abi::Code AclProbe::repair_memory(const std::vector<Range>& ranges) {
  if (ranges.empty() || ranges.size() > abi::acl_ranges_max) throw std::invalid_argument("ranges must be 1..128");
  const auto repair = need(repair_memory_, "aclrtMemUceRepair");
  std::vector<abi::MemUceInfo> entries(ranges.size());
  for (std::size_t index = 0; index < ranges.size(); ++index) {
    entries[index].address = reinterpret_cast<void*>(static_cast<std::uintptr_t>(ranges[index].first));
    entries[index].bytes = ranges[index].second;
  }
  return repair(device_, entries.data(), entries.size());
}

}  // namespace resilient
