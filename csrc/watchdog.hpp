// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
//
// The rank's native thread: it beats, hears the stop word, breaks blocked collectives by shutting their sockets, and
// then interrupts the training thread. It never takes the GIL, which a hung rank may hold for ever.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "record.hpp"

namespace resilient {

struct WatchdogOptions {
  std::int64_t beat_ms;
  std::int64_t grace_ms;
  int signal_number;
};

using Socket = std::pair<int, std::uint64_t>;  // descriptor, inode: a number alone may have been reused

class Watchdog {
 public:
  // The calling thread is the one that will be interrupted.
  Watchdog(std::shared_ptr<Board> board, std::uint32_t rank, WatchdogOptions options);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  void start(std::uint32_t generation);
  void stop();
  void guard_sockets(std::vector<Socket> sockets);
  void arm(std::uint32_t generation);
  void disarm();
  bool armed() const;
  void acknowledge(std::uint32_t generation);

 private:
  struct State;
  // In a forked child there is no thread, and the mutex may be held for ever: nothing there may be touched.
  bool foreign() const;

  State* state_;
};

}  // namespace resilient
