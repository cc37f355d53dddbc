// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
#include "process_copy.hpp"

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <climits>
#include <system_error>

#include <sys/prctl.h>
#include <sys/uio.h>

namespace resilient {
namespace {

constexpr std::size_t batch_spans_max = IOV_MAX;

iovec make_iovec(std::uint64_t address, std::uint64_t bytes) {
  return {reinterpret_cast<void*>(static_cast<std::uintptr_t>(address)), static_cast<std::size_t>(bytes)};
}

}  // namespace

void read_process_memory(pid_t pid, const std::vector<Span>& spans) {
  std::size_t index = 0;         // first span that is not complete
  std::uint64_t done_bytes = 0;  // of that span
  std::vector<iovec> local;
  std::vector<iovec> remote;
  while (index < spans.size()) {
    local.clear();
    remote.clear();
    for (std::size_t next = index; next < spans.size() && local.size() < batch_spans_max; ++next) {
      const std::uint64_t skip_bytes = next == index ? done_bytes : 0;
      const Span& span = spans[next];
      local.push_back(make_iovec(span.local_address + skip_bytes, span.bytes - skip_bytes));
      remote.push_back(make_iovec(span.remote_address + skip_bytes, span.bytes - skip_bytes));
    }
    std::uint64_t wanted_bytes = 0;
    for (const iovec& part : local) wanted_bytes += part.iov_len;
    ssize_t copied = 0;
    if (wanted_bytes > 0) {
      copied = ::process_vm_readv(pid, local.data(), local.size(), remote.data(), remote.size(), 0);
      if (copied < 0) throw std::system_error(errno, std::generic_category(), "process_vm_readv");
      if (copied == 0) throw std::system_error(EFAULT, std::generic_category(), "process_vm_readv");
    }
    // The kernel may stop short (2 GiB a call, or at a bad page): go on from there; a bad page then fails by itself.
    auto rest_bytes = static_cast<std::uint64_t>(copied);
    const std::size_t batch_end = index + local.size();
    while (index < batch_end) {
      const std::uint64_t missing_bytes = spans[index].bytes - done_bytes;
      if (rest_bytes < missing_bytes) {
        done_bytes += rest_bytes;
        break;
      }
      rest_bytes -= missing_bytes;
      done_bytes = 0;
      ++index;
    }
  }
  assert(done_bytes == 0);
}

void allow_readers() {
  // EINVAL: the kernel has no Yama, so there is nothing to allow.
  if (::prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0) != 0 && errno != EINVAL) {
    throw std::system_error(errno, std::generic_category(), "prctl(PR_SET_PTRACER)");
  }
}

void die_with_parent(int signal_number) {
  if (::prctl(PR_SET_PDEATHSIG, static_cast<unsigned long>(signal_number), 0, 0, 0) != 0) {
    throw std::system_error(errno, std::generic_category(), "prctl(PR_SET_PDEATHSIG)");
  }
}

void adopt_orphans() {
  if (::prctl(PR_SET_CHILD_SUBREAPER, 1UL, 0, 0, 0) != 0) {
    throw std::system_error(errno, std::generic_category(), "prctl(PR_SET_CHILD_SUBREAPER)");
  }
}

}  // namespace resilient
