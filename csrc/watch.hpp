// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
//
// The agent's side of the life words: one native thread sleeps on all of them and notes who died.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "record.hpp"

namespace resilient {

bool death_watch_supported();

class DeathWatch {
 public:
  using Death = std::pair<std::uint32_t, std::uint64_t>;  // rank, time_ns

  explicit DeathWatch(std::shared_ptr<Board> board);
  ~DeathWatch();
  DeathWatch(const DeathWatch&) = delete;
  DeathWatch& operator=(const DeathWatch&) = delete;

  int fd() const;
  bool add(std::uint32_t rank);
  void remove(std::uint32_t rank);
  std::vector<Death> take();
  void close();

 private:
  struct State;
  bool foreign() const;

  // Held by the thread too, and left alone in a forked child, where the thread does not exist.
  std::shared_ptr<State> state_;
};

}  // namespace resilient
