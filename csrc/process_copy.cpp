// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
#include "process_copy.hpp"

#include <algorithm>
#include <atomic>
#include <cassert>
#include <cerrno>
#include <climits>
#include <exception>
#include <system_error>
#include <thread>
#include <utility>

#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>

#include "native_thread.hpp"

namespace resilient {
namespace {

constexpr std::size_t batch_spans_max = IOV_MAX;
constexpr std::uint64_t batch_bytes = std::uint64_t{8} << 20;  // large enough to forget the call, small enough to share
constexpr unsigned readers_max = 4;                            // they saturate the memory of one socket
constexpr std::uintptr_t huge_page_bytes = std::uintptr_t{2} << 20;

using Batch = std::vector<Span>;

iovec make_iovec(std::uint64_t address, std::uint64_t bytes) {
  return {reinterpret_cast<void*>(static_cast<std::uintptr_t>(address)), static_cast<std::size_t>(bytes)};
}

std::vector<Batch> batches_of(const std::vector<Span>& spans) {
  std::vector<Batch> batches;
  std::uint64_t room_bytes = 0;
  for (const Span& span : spans) {
    for (std::uint64_t done_bytes = 0; done_bytes < span.bytes;) {
      if (room_bytes == 0 || batches.back().size() == batch_spans_max) {
        batches.emplace_back();
        room_bytes = batch_bytes;
      }
      const std::uint64_t bytes = std::min(span.bytes - done_bytes, room_bytes);
      batches.back().push_back({span.remote_address + done_bytes, span.local_address + done_bytes, bytes});
      done_bytes += bytes;
      room_bytes -= bytes;
    }
  }
  return batches;
}

// Takes what the kernel has copied off the front of the batch.
void advance(Batch& batch, std::uint64_t copied_bytes) {
  std::size_t whole = 0;
  while (whole < batch.size() && batch[whole].bytes <= copied_bytes) copied_bytes -= batch[whole++].bytes;
  batch.erase(batch.begin(), batch.begin() + static_cast<std::ptrdiff_t>(whole));
  assert(copied_bytes == 0 || !batch.empty());
  if (copied_bytes == 0) return;
  batch.front().remote_address += copied_bytes;
  batch.front().local_address += copied_bytes;
  batch.front().bytes -= copied_bytes;
}

void read_batch(pid_t pid, Batch& batch) {
  std::vector<iovec> local;
  std::vector<iovec> remote;
  while (!batch.empty()) {
    local.clear();
    remote.clear();
    for (const Span& span : batch) {
      local.push_back(make_iovec(span.local_address, span.bytes));
      remote.push_back(make_iovec(span.remote_address, span.bytes));
    }
    const ssize_t copied = ::process_vm_readv(pid, local.data(), local.size(), remote.data(), remote.size(), 0);
    if (copied < 0) throw std::system_error(errno, std::generic_category(), "process_vm_readv");
    if (copied == 0) throw std::system_error(EFAULT, std::generic_category(), "process_vm_readv");
    advance(batch, static_cast<std::uint64_t>(copied));  // it may stop short, at a bad page: that one fails by itself
  }
}

// The batches that are left, read by several threads; the first error ends them all.
class Reading {
 public:
  Reading(pid_t pid, std::vector<Batch> batches) : pid_(pid), batches_(std::move(batches)) {}

  void run() {
    const unsigned cores = std::max(1U, std::thread::hardware_concurrency());
    const std::size_t readers = std::min<std::size_t>({batches_.size(), cores, readers_max});
    std::vector<std::thread> others;
    try {
      while (others.size() + 1 < readers) others.push_back(start_native_thread("rt-read-state", [this] { work(); }));
    } catch (const std::system_error&) {
      // No more threads to be had: those that there are do it all.
    }
    work();
    for (std::thread& each : others) each.join();
    if (error_) std::rethrow_exception(error_);
  }

 private:
  void work() {
    try {
      for (std::size_t index = next_++; index < batches_.size() && !failed_; index = next_++) {
        read_batch(pid_, batches_[index]);
      }
    } catch (...) {
      if (!failed_.exchange(true)) error_ = std::current_exception();
    }
  }

  const pid_t pid_;
  std::vector<Batch> batches_;
  std::atomic<std::size_t> next_{0};
  std::atomic<bool> failed_{false};
  std::exception_ptr error_;
};

}  // namespace

void read_process_memory(pid_t pid, const std::vector<Span>& spans) { Reading(pid, batches_of(spans)).run(); }

void prefer_huge_pages(std::uint64_t address, std::uint64_t bytes) {
  if (bytes < huge_page_bytes) return;
  const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  const std::uintptr_t begin = (static_cast<std::uintptr_t>(address) + page - 1) / page * page;
  const std::uintptr_t end = (static_cast<std::uintptr_t>(address) + bytes) / page * page;
  // EINVAL: a kernel without them; ENOMEM: not all of it is mapped memory of this kind. It is advice, no more.
  if (::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE) != 0 && errno != EINVAL &&
      errno != ENOMEM) {
    throw std::system_error(errno, std::generic_category(), "madvise(MADV_HUGEPAGE)");
  }
}

void allow_readers() {
  // EINVAL: the kernel has no Yama, so there is nothing to allow.
  if (::prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0) != 0 && errno != EINVAL) {
    throw std::system_error(errno, std::generic_category(), "prctl(PR_SET_PTRACER)");
  }
}

}  // namespace resilient
