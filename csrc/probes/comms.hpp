// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "probes/abi.hpp"

namespace resilient {

// The communicators that a probe looks at. One that is to be destroyed must be taken out first, and no call with it
// may be under way then.
class CommTable {
 public:
  using Handle = std::uint64_t;

  void add(Handle handle);
  // False: the probe is inside a call with it and does not come back. It must not be destroyed then.
  bool remove(Handle handle, std::int64_t limit_ms);
  std::vector<Handle> list() const;

  // One communicator, held while a call with it runs.
  class Hold {
   public:
    Hold(CommTable& table, Handle handle) : table_(table), held_(table.take(handle)) {}
    ~Hold() {
      if (held_) table_.give_back();
    }
    Hold(const Hold&) = delete;
    Hold& operator=(const Hold&) = delete;
    explicit operator bool() const { return held_; }

   private:
    CommTable& table_;
    const bool held_;
  };

 private:
  bool take(Handle handle);
  void give_back();

  mutable std::mutex mutex_;  // over the two below
  std::vector<Handle> handles_;
  Handle held_ = 0;
  std::uint32_t given_back_ = 0;  // futex word, counts
};

inline abi::Comm as_comm(CommTable::Handle handle) {
  return reinterpret_cast<abi::Comm>(static_cast<std::uintptr_t>(handle));
}

}  // namespace resilient
