// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
//
// With the other module*.cpp the only file that sees Python. It converts, lets go of the GIL around everything that may
// block, and turns errno into OSError; what things mean stands in the other files and in _native.pyi.
#include <algorithm>
#include <cerrno>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <tuple>
#include <utility>
#include <vector>

#include <dlfcn.h>

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "memory_spans.hpp"
#include "module.hpp"
#include "parentage.hpp"
#include "probes/alarm.hpp"
#include "probes/ascend_errors.hpp"
#include "probes/probes.hpp"
#include "probes/trial.hpp"
#include "process_copy.hpp"
#include "record.hpp"
#include "terminate.hpp"
#include "watch.hpp"
#include "watchdog.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using namespace resilient;

bool wait_stop(const PyBoard& self, std::uint32_t generation, std::int64_t timeout_ms) {
  const std::shared_ptr<Board> board = self.use();
  return wait_in_slices(
      timeout_ms, [&](std::int64_t slice) { return board->wait_stop(generation, slice); },
      [](bool stopped) { return stopped; });
}

void set_identity(const PyBoard& self, std::uint32_t rank, std::uint32_t generation, std::uint32_t incarnation,
                  std::uint32_t pid) {
  RankRecord& record = self.record(rank);
  store(record.generation, generation);
  store(record.incarnation, incarnation);
  store(record.pid, pid);
}

void bind_record(nb::class_<PyBoard>& board) {
  using Self = const PyBoard&;
  board
      .def(
          "standing",
          [](Self self, std::uint32_t rank) {
            const std::uint64_t standing = load(self.record(rank).standing);
            return std::make_pair(standing >> 8, static_cast<std::uint32_t>(standing & phase_max));
          },
          "rank"_a)
      .def(
          "step", [](Self self, std::uint32_t rank) { return load(self.record(rank).step); }, "rank"_a)
      .def("set_identity", &set_identity, "rank"_a, "generation"_a, "incarnation"_a, "pid"_a)
      .def(
          "identity",
          [](Self self, std::uint32_t rank) {
            const RankRecord& record = self.record(rank);
            return std::make_tuple(load(record.generation), load(record.incarnation), load(record.pid));
          },
          "rank"_a)
      .def(
          "set_tail",
          [](Self self, std::uint32_t rank, std::uint64_t entered, std::uint64_t completed) {
            RankRecord& record = self.record(rank);
            store(record.tail_entered, entered);
            store(record.tail_completed, completed);
          },
          "rank"_a, "entered"_a, "completed"_a)
      .def(
          "tail",
          [](Self self, std::uint32_t rank) {
            const RankRecord& record = self.record(rank);
            return std::make_pair(load(record.tail_entered), load(record.tail_completed));
          },
          "rank"_a)
      .def(
          "progress",
          [](Self self, std::uint32_t rank) {
            const RankRecord& record = self.record(rank);
            const std::uint64_t standing = load(record.standing);
            return std::make_tuple(standing >> 8, static_cast<std::uint32_t>(standing & phase_max),
                                   load(record.collectives), load(record.activity));
          },
          "rank"_a)
      .def(
          "alarms", [](Self self, std::uint32_t rank) { return read_alarms(load(self.record(rank).alarms)); }, "rank"_a)
      .def(
          "clear_alarms", [](Self self, std::uint32_t rank) { store(self.record(rank).alarms, 0); }, "rank"_a)
      .def(
          "order", [](Self self, std::uint32_t rank) { return load(self.record(rank).order); }, "rank"_a)
      .def(
          "set_order",
          [](Self self, std::uint32_t rank, std::uint32_t order) { store(self.record(rank).order, order); }, "rank"_a,
          "order"_a)
      .def(
          "exchange_order",
          [](Self self, std::uint32_t rank, std::uint32_t expected, std::uint32_t desired) {
            return exchange_if(self.record(rank).order, expected, desired);
          },
          "rank"_a, "expected"_a, "desired"_a)
      .def(
          "asked", [](Self self, std::uint32_t rank) { return load(self.record(rank).asked); }, "rank"_a)
      .def(
          "set_asked",
          [](Self self, std::uint32_t rank, std::uint32_t number) { store(self.record(rank).asked, number); }, "rank"_a,
          "number"_a)
      .def(
          "kept",
          [](Self self, std::uint32_t rank) {
            const RankRecord& record = self.record(rank);
            return std::make_pair(load(record.kept[0]), load(record.kept[1]));
          },
          "rank"_a)
      .def(
          "set_kept",
          [](Self self, std::uint32_t rank, std::uint64_t first, std::uint64_t second) {
            RankRecord& record = self.record(rank);
            store(record.kept[0], first);
            store(record.kept[1], second);
          },
          "rank"_a, "first"_a, "second"_a)
      .def(
          "fingerprint",
          [](Self self, std::uint32_t rank, std::uint64_t commits) { return self.use()->fingerprint(rank, commits); },
          "rank"_a, "commits"_a)
      .def(
          "set_fingerprint",
          [](Self self, std::uint32_t rank, std::uint64_t commits, std::uint64_t value) {
            self.use()->set_fingerprint(rank, commits, value);
          },
          "rank"_a, "commits"_a, "value"_a)
      .def(
          "reported", [](Self self, std::uint32_t rank) { return load(self.record(rank).reported); }, "rank"_a)
      .def(
          "set_reported",
          [](Self self, std::uint32_t rank, std::uint32_t number) { store(self.record(rank).reported, number); },
          "rank"_a, "number"_a)
      .def(
          "computed",
          [](Self self, std::uint32_t rank, std::uint64_t after) {
            std::vector<std::tuple<std::uint64_t, std::uint64_t, std::uint64_t>> found;
            for (const Computed& each : self.use()->computed(rank, after)) {
              found.emplace_back(each.commits, each.step, each.ns);
            }
            return found;
          },
          "rank"_a, "after"_a)
      .def(
          "stopped_generation",
          [](Self self, std::uint32_t rank) { return load(self.record(rank).stopped_generation); }, "rank"_a)
      .def("beats", [](Self self, std::uint32_t rank) { return load(self.record(rank).beats); }, "rank"_a);
}

void bind_board(nb::module_& module) {
  nb::class_<PyBoard> board(module, "Board");
  board
      .def_static(
          "create", [](std::uint32_t world_size) { return PyBoard(Board::create(world_size)); }, "world_size"_a)
      .def_static(
          "attach", [](int fd) { return PyBoard(Board::attach(fd)); }, "fd"_a)
      .def_prop_ro("fd", [](const PyBoard& self) { return self.use()->fd(); })
      .def_prop_ro("world_size", [](const PyBoard& self) { return self.use()->world_size(); })
      .def_prop_ro("stop_generation", [](const PyBoard& self) { return load(self.use()->header().stop_generation); })
      .def("close", &PyBoard::close)
      .def(
          "announce",
          [](const PyBoard& self, std::uint64_t commits, std::uint32_t what) { self.use()->announce(commits, what); },
          "commits"_a, "what"_a)
      .def(
          "announced", [](const PyBoard& self, std::uint64_t commits) { return self.use()->announced(commits); },
          "commits"_a)
      .def(
          "settle", [](const PyBoard& self, std::uint64_t commits) { store(self.use()->header().settled, commits); },
          "commits"_a)
      .def_prop_ro("settled", [](const PyBoard& self) { return load(self.use()->header().settled); })
      .def(
          "set_pause", [](const PyBoard& self, std::uint64_t word) { store(self.use()->header().pause, word); },
          "word"_a)
      .def("ask_report", [](const PyBoard& self) { increment(self.use()->header().report_asked); })
      .def_prop_ro("report_asked", [](const PyBoard& self) { return load(self.use()->header().report_asked); })
      .def(
          "raise_stop", [](const PyBoard& self, std::uint32_t generation) { self.use()->raise_stop(generation); },
          "generation"_a)
      .def("wait_stop", &wait_stop, "generation"_a, "timeout_ms"_a);
  bind_record(board);
}

void bind_threads(nb::module_& module) {
  using Unlocked = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<DeathWatch>(module, "DeathWatch")
      .def(
          "__init__", [](DeathWatch* self, const PyBoard& board) { new (self) DeathWatch(board.use()); }, "board"_a)
      .def_prop_ro("fd", &DeathWatch::fd)
      .def_prop_ro_static("supported", [](nb::handle) { return death_watch_supported(); })
      .def("add", &DeathWatch::add, "rank"_a)
      .def("remove", &DeathWatch::remove, "rank"_a)
      .def("take", &DeathWatch::take)
      .def("close", &DeathWatch::close);
  module.def("death_watch_supported", &death_watch_supported);
  module.def(
      "hear_terminate", [](const PyBoard& board, std::uint32_t rank) { return hear_terminate(board.use(), rank); },
      "board"_a, "rank"_a);
  module.def("leave_terminate", &leave_terminate);
  module.def("shield_worker", &shield_worker);

  nb::class_<Watchdog>(module, "Watchdog")
      .def(
          "__init__",
          [](Watchdog* self, const PyBoard& board, std::uint32_t rank, std::int64_t beat_ms, std::int64_t grace_ms,
             int signal_number) {
            new (self) Watchdog(board.use(), rank, WatchdogOptions{beat_ms, grace_ms, signal_number});
          },
          "board"_a, "rank"_a, nb::kw_only(), "beat_ms"_a = 50, "grace_ms"_a = 20, "signal_number"_a)
      .def("start", &Watchdog::start, "generation"_a, Unlocked())
      .def("stop", &Watchdog::stop, Unlocked())
      .def("guard_sockets", &Watchdog::guard_sockets, "sockets"_a)
      .def("arm", &Watchdog::arm, "generation"_a)
      .def("disarm", &Watchdog::disarm)
      .def_prop_ro("armed", &Watchdog::armed)
      .def("acknowledge", &Watchdog::acknowledge, "generation"_a);
}

// Our own program with this very module: what runs here runs there.
std::vector<std::string> trial_command(std::uint32_t device, const std::string& uuid) {
  const nb::module_ sys = nb::module_::import_("sys");
  const nb::object executable = sys.attr("executable");
  // Python is part of another program: that one is not to be started a second time.
  if (nb::hasattr(sys, "frozen") || !nb::isinstance<nb::str>(executable) || nb::len(executable) == 0) return {};
  Dl_info where{};
  if (::dladdr(reinterpret_cast<const void*>(&trial_command), &where) == 0) return {};
  constexpr const char* program =
      "import importlib.util as u, sys\n"
      "spec = u.spec_from_file_location('_native', sys.argv[1])\n"
      "module = u.module_from_spec(spec)\n"
      "spec.loader.exec_module(module)\n"
      "module.try_probe(int(sys.argv[2]), *sys.argv[3:])";
  // Isolated, without site-packages: no code of the user's runs.
  return {nb::cast<std::string>(executable), "-IS", "-c", program, where.dli_fname, std::to_string(device), uuid};
}

void try_probe(std::uint32_t device, const std::string& uuid, const std::string& name, const std::string& library) {
  run_trial(*make_probe(name, library, device, uuid));
}

void make_probes(Probes* self, const std::string& hccl, const std::string& acl, const std::string& nccl,
                 const std::string& nvml, std::uint32_t device, const std::string& uuid, std::int64_t poll_ms,
                 std::int64_t call_limit_ms, std::int64_t open_limit_ms, bool trial) {
  const std::vector<std::string> command = trial ? trial_command(device, uuid) : std::vector<std::string>{};
  new (self) Probes({hccl, acl, nccl, nvml, device, uuid, {poll_ms, call_limit_ms, open_limit_ms, command}});
}

void alarm_into(Probes& self, const PyBoard& py_board, std::uint32_t rank) {
  const std::shared_ptr<Board> board = py_board.use();
  RankRecord& record = board->record(rank);
  store(record.alarms, 0);
  self.runner().set_listener([board, &record](const Finding& finding) {
    std::atomic_ref(record.alarms).fetch_or(alarm_bit(finding), std::memory_order_seq_cst);
  });
}

void bind_findings(nb::module_& module) {
  nb::class_<Finding>(module, "Finding")
      .def_prop_ro("kind", [](const Finding& self) { return name_of(self.kind); })
      .def_ro("probe", &Finding::probe)
      .def_ro("code", &Finding::code)
      .def_ro("text", &Finding::text)
      .def_ro("ranges", &Finding::ranges)
      .def_ro("comm", &Finding::comm)
      .def_ro("time_ns", &Finding::time_ns);
  nb::class_<ProbeStatus>(module, "ProbeStatus")
      .def_ro("name", &ProbeStatus::name)
      .def_ro("state", &ProbeStatus::state)
      .def_ro("reason", &ProbeStatus::reason)
      .def_ro("missing", &ProbeStatus::missing)
      .def_ro("polls", &ProbeStatus::polls);
}

// "acl" or "hccl"; empty: the program's own error.
std::string kind_of_code(const std::string& library, std::int64_t code) {
  if (code < INT32_MIN || code > INT32_MAX) return "";
  const auto kind =
      library == "hccl" ? classify_hccl(static_cast<abi::Code>(code)) : classify_acl(static_cast<abi::Code>(code));
  return kind ? name_of(*kind) : "";
}

void bind_ascend_errors(nb::module_& module) {
  std::vector<std::pair<std::string, std::string>> words;
  for (const AscendError& row : acl_errors) {
    for (const char* const each : row.words) {
      if (each != nullptr) words.emplace_back(each, name_of(row.kind));
    }
  }
  module.attr("ASCEND_WORDS") = nb::tuple(nb::cast(words));
  module.def("ascend_kind", &kind_of_code, "library"_a, "code"_a);
}

void bind_probes(nb::module_& module) {
  using Unlocked = nb::call_guard<nb::gil_scoped_release>;
  const auto limit = [] { return "limit_ms"_a = 5'000; };
  module.def("try_probe", &try_probe, "device"_a, "uuid"_a, "name"_a, "library"_a);
  nb::class_<Probes>(module, "Probes")
      .def("__init__", &make_probes, nb::kw_only(), "hccl"_a = "libhccl.so", "acl"_a = "libascendcl.so",
           "nccl"_a = "libnccl.so.2", "nvml"_a = "libnvidia-ml.so.1", "device"_a = 0, "uuid"_a = "", "poll_ms"_a = 50,
           "call_limit_ms"_a = 2'000, "open_limit_ms"_a = 30'000, "trial"_a = true)
      .def("alarm", &alarm_into, "board"_a, "rank"_a)
      .def("start", [](Probes& self) { self.runner().start(); })
      .def(
          "stop", [](Probes& self) { return self.runner().stop(); }, Unlocked())
      .def_prop_ro("fd", [](Probes& self) { return self.runner().fd(); })
      .def("take", [](Probes& self) { return self.runner().take(); })
      .def("rearm", [](Probes& self) { self.runner().rearm(); })
      .def("status", [](Probes& self) { return self.runner().status(); })
      .def("add_comm", &Probes::add_comm, "library"_a, "comm"_a)
      .def("remove_comm", &Probes::remove_comm, "library"_a, "comm"_a, limit(), Unlocked())
      .def("suspend_comm", &Probes::suspend_comm, "comm"_a, limit(), Unlocked())
      .def("resume_comm", &Probes::resume_comm, "comm"_a, limit(), Unlocked())
      .def("destroy_comm", &Probes::destroy_comm, "comm"_a, limit(), Unlocked())
      .def("abort_comm", &Probes::abort_comm, "comm"_a, limit(), Unlocked())
      .def("repair_memory", &Probes::repair_memory, "ranges"_a, limit(), Unlocked());
}

void copy_spans(int pid, const std::vector<std::tuple<std::uint64_t, std::uint64_t, std::uint64_t>>& spans) {
  std::vector<Span> copies;
  copies.reserve(spans.size());
  for (const auto& [remote_address, local_address, bytes] : spans) {
    copies.push_back({remote_address, local_address, bytes});
  }
  const nb::gil_scoped_release unlocked;
  read_process_memory(pid, copies);
}

// What Python itself does around a fork of its own.
pid_t fork_python() {
  PyOS_BeforeFork();
  pid_t pid = -1;
  try {
    pid = fork_orphan();
  } catch (...) {
    PyOS_AfterFork_Parent();
    throw;
  }
  if (pid == 0) {
    PyOS_AfterFork_Child();
  } else {
    PyOS_AfterFork_Parent();
  }
  return pid;
}

void translate_errno(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const std::system_error& error) {
    errno = error.code().value();
    PyErr_SetFromErrno(PyExc_OSError);
  }
}

}  // namespace

NB_MODULE(_native, module) {
  // A rank that exits with a watchdog alive is ordinary; nanobind would print a report on its standard error.
  nb::set_leak_warnings(false);
  nb::register_exception_translator(translate_errno);
  bind_board(module);
  bind_foreign_threads(module);
  bind_page(module);
  bind_threads(module);
  bind_findings(module);
  bind_ascend_errors(module);
  bind_probes(module);
  nb::class_<Glance>(module, "Glance")
      .def(nb::init<const std::vector<std::pair<std::uint64_t, std::uint64_t>>&>(), "spans"_a)
      .def("changed", &Glance::changed)
      .def("seen", [](const Glance& self) {
        nb::list contents;
        for (const Glance::Seen& each : self.seen()) contents.append(nb::bytes(each.held.data(), each.held.size()));
        return contents;
      });
  bind_frames(module);
  bind_objects(module);
  bind_snapshot(module);
  module.def("read_process_memory", &copy_spans, "pid"_a, "spans"_a);
  module.def("prefer_huge_pages", &prefer_huge_pages, "address"_a, "size"_a);
  module.def("allow_readers", &allow_readers);
  module.def("die_with_parent", &die_with_parent, "signal_number"_a);
  module.def("adopt_orphans", &adopt_orphans);
  module.def("fork_orphan", &fork_python);
  module.attr("BOARD_VERSION") = nb::int_(board_version);
}
