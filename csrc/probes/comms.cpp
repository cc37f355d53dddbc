// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
#include "probes/comms.hpp"

#include <algorithm>
#include <stdexcept>

#include "futex.hpp"
#include "record.hpp"

namespace resilient {

void CommTable::add(Handle handle) {
  if (handle == 0) throw std::invalid_argument("a communicator's handle is not 0");
  const std::lock_guard lock(mutex_);
  if (std::find(handles_.begin(), handles_.end(), handle) == handles_.end()) handles_.push_back(handle);
}

bool CommTable::remove(Handle handle, std::int64_t limit_ms) {
  const std::int64_t end_ns = monotonic_ns() + limit_ms * 1'000'000;
  for (;;) {
    std::uint32_t seen = 0;
    {
      const std::lock_guard lock(mutex_);
      std::erase(handles_, handle);
      if (handle == 0 || held_ != handle) return true;
      seen = load(given_back_);
    }
    const std::int64_t left_ns = end_ns - monotonic_ns();
    if (left_ns <= 0) return false;
    futex::wait(&given_back_, seen, left_ns);
  }
}

std::vector<CommTable::Handle> CommTable::list() const {
  const std::lock_guard lock(mutex_);
  return handles_;
}

bool CommTable::take(Handle handle) {
  const std::lock_guard lock(mutex_);
  if (std::find(handles_.begin(), handles_.end(), handle) == handles_.end()) return false;
  held_ = handle;
  return true;
}

void CommTable::give_back() {
  {
    const std::lock_guard lock(mutex_);
    held_ = 0;
    increment(given_back_);
  }
  futex::wake_all(&given_back_);
}

}  // namespace resilient
