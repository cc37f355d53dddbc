// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
//
// Between the module*.cpp, the only files that see Python.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <utility>

#include <nanobind/nanobind.h>

#include "record.hpp"

namespace resilient {

constexpr std::int64_t ns_per_ms = 1'000'000;
// A signal that comes just before the sleep does not end it, so a wait comes up for the handlers this often.
constexpr std::int64_t slice_ns = 50 * ns_per_ms;
constexpr std::int64_t timeout_ms_max = 1'000'000'000;

// Runs wait(slice) without the GIL until done(result) or the time is over, and Python's signal handlers in between.
template <typename Wait, typename Done>
auto wait_in_slices(std::int64_t timeout_ms, Wait&& wait, Done&& done) {
  if (timeout_ms < 0 || timeout_ms > timeout_ms_max) throw std::invalid_argument("timeout_ms must be 0..1000000000");
  const std::int64_t end_ns = monotonic_ns() + timeout_ms * ns_per_ms;
  std::int64_t left_ns = timeout_ms * ns_per_ms;
  for (;;) {
    auto result = [&] {
      const nanobind::gil_scoped_release unlocked;
      return wait(std::min(left_ns, slice_ns));
    }();
    if (done(result)) return result;
    if (PyErr_CheckSignals() != 0) throw nanobind::python_error();
    left_ns = end_ns - monotonic_ns();
    if (left_ns <= 0) return result;
  }
}

class PyBoard {
 public:
  explicit PyBoard(std::shared_ptr<Board> board) : board_(std::move(board)) {}

  // A copy, so that the memory outlives a close() by another thread while this call runs.
  std::shared_ptr<Board> use() const {
    if (board_ == nullptr) throw std::invalid_argument("the board is closed");
    return board_;
  }
  RankRecord& record(std::uint32_t rank) const { return use()->record(rank); }
  void close() { board_ = nullptr; }

 private:
  std::shared_ptr<Board> board_;
};

void bind_foreign_threads(nanobind::module_& module);
void bind_frames(nanobind::module_& module);
void bind_objects(nanobind::module_& module);
void bind_page(nanobind::module_& module);
void bind_snapshot(nanobind::module_& module);

}  // namespace resilient
