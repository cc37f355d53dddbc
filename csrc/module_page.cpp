// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
//
// A rank's own page of the board, as its training thread writes it in every step. Python that runs once a step finds
// nothing of itself in the caches: there a call costs microseconds, and a store natively beside another nothing.
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>

#include "module.hpp"
#include "record.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using namespace resilient;

class Page {
 public:
  Page(const PyBoard& board, std::uint32_t rank) : board_(board.use()), rank_(rank), record_(board_->record(rank)) {}

  void write(std::uint64_t commits, std::uint32_t phase, std::uint64_t step) {
    board_->set_standing(rank_, commits, phase, step);
  }

  void begin(std::uint64_t commits, std::uint32_t phase, std::uint64_t step) {
    tell_computed(commits, step);
    restart();
    write(commits, phase, step);
  }

  void restart() {
    store(record_.collectives, 0);
    computed_ns_ = update_since_ns_ = 0;
    unusual_ = false;
  }

  void add_computed(std::int64_t duration_ns) { computed_ns_ += duration_ns; }
  void excuse() { unusual_ = true; }
  void enter() { increment(record_.collectives); }

  // Who of the two has begun another collective at that place, and its word; nobody, as far as they have come there.
  std::optional<std::pair<std::uint32_t, std::uint64_t>> begin_call(std::uint64_t tag, std::uint64_t word,
                                                                    std::uint32_t one, std::uint32_t other) {
    board_->set_call(rank_, Call{tag, word});
    for (const std::uint32_t rank : {one, other}) {
      const std::uint64_t theirs = board_->call(rank, tag);
      if (theirs != 0 && theirs != word) return std::make_pair(rank, theirs);
    }
    return std::nullopt;
  }

  void take_back_call(std::uint64_t tag, bool counted) {
    board_->forget_call(rank_, tag);
    if (counted) decrement(record_.collectives);
  }

  void set_activity(std::uint32_t activity) { store(record_.activity, activity); }
  std::uint32_t order() const { return load(record_.order); }
  bool stop_raised(std::uint32_t generation) const { return load(board_->header().stop_generation) > generation; }

  bool pause_due(std::uint64_t step) const {
    const std::uint64_t from = load(board_->header().pause);
    return from != 0 && step + 1 >= from;
  }

  bool arrive(std::uint64_t commits, std::uint32_t phase, std::uint64_t step) {
    return board_->arrive(rank_, commits, phase, step);
  }

  // True: passed, and `following` is written. False: a stop is raised. It waits for ever.
  bool cross(std::uint64_t commits, std::uint32_t phase, std::uint32_t following, std::uint64_t step,
             std::uint32_t generation) {
    const std::uint64_t target = make_standing(commits, phase);
    const auto look = [&](std::int64_t slice) { return board_->wait_all(target, generation, slice); };
    const auto over = [](WaitResult each) { return each != WaitResult::timeout; };
    WaitResult result{};
    do {
      result = wait_in_slices(timeout_ms_max, look, over);
    } while (!over(result));
    if (result == WaitResult::stopped) return false;
    write(commits, following, step);
    update_since_ns_ = monotonic_ns();
    return true;
  }

 private:
  // The bodies of the window, and its update: a window that was cut, or was finished in a recovery, lacks one of them.
  void tell_computed(std::uint64_t commits, std::uint64_t step) {
    if (commits == 0) return;
    const bool usual = computed_ns_ > 0 && update_since_ns_ > 0 && !unusual_;
    const std::int64_t duration_ns = usual ? computed_ns_ + monotonic_ns() - update_since_ns_ : 0;
    board_->set_computed(rank_, Computed{commits, step, static_cast<std::uint64_t>(duration_ns)});
  }

  std::shared_ptr<Board> board_;
  std::uint32_t rank_;
  RankRecord& record_;
  std::int64_t computed_ns_ = 0;      // by the bodies of this window
  std::int64_t update_since_ns_ = 0;  // 0: it has not begun
  bool unusual_ = false;
};

}  // namespace

namespace resilient {

void bind_page(nb::module_& module) {
  nb::class_<Page>(module, "Page")
      .def(nb::init<const PyBoard&, std::uint32_t>(), "board"_a, "rank"_a)
      .def("write", &Page::write, "commits"_a, "phase"_a, "step"_a)
      .def("begin", &Page::begin, "commits"_a, "phase"_a, "step"_a)
      .def("restart", &Page::restart)
      .def("enter", &Page::enter)
      .def("begin_call", &Page::begin_call, "tag"_a, "word"_a, "one"_a, "other"_a)
      .def("take_back_call", &Page::take_back_call, "tag"_a, nb::kw_only(), "counted"_a)
      .def("add_computed", &Page::add_computed, "duration_ns"_a)
      .def("excuse", &Page::excuse)
      .def("set_activity", &Page::set_activity, "activity"_a)
      .def("order", &Page::order)
      .def("stop_raised", &Page::stop_raised, "generation"_a)
      .def("pause_due", &Page::pause_due, "step"_a)
      .def("arrive", &Page::arrive, "commits"_a, "phase"_a, "step"_a)
      .def("cross", &Page::cross, "commits"_a, "phase"_a, "following"_a, "step"_a, "generation"_a);
}

}  // namespace resilient
