// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
//
// The native parts without Python, so that the sanitizers see nothing but our code.
#include <array>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.hpp"
#include "process_copy.hpp"
#include "record.hpp"
#include "watch.hpp"
#include "watchdog.hpp"

using namespace resilient;

namespace {

constexpr std::int64_t second_ns = 1'000'000'000;
constexpr WatchdogOptions options{10, 2, SIGUSR1};

// A child that runs body and exits 0; it dies with us.
pid_t spawn(const std::function<void()>& body) {
  const pid_t pid = ::fork();
  CHECK(pid >= 0);
  if (pid != 0) return pid;
  ::prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
  body();
  std::_Exit(0);
}

int reap(pid_t pid) {
  int status = 0;
  CHECK(::waitpid(pid, &status, 0) == pid);
  return status;
}

void test_hostile_files() {
  check_throws<std::invalid_argument>([] { (void)Board::create(0); });
  check_throws<std::system_error>([] { (void)Board::attach(-1); });
  const int fd = ::memfd_create("hostile", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  CHECK(::ftruncate(fd, 2 * page_bytes) == 0);
  check_throws<std::invalid_argument>([fd] { (void)Board::attach(fd); });  // not sealed
  CHECK(::fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK) == 0);
  check_throws<std::invalid_argument>([fd] { (void)Board::attach(fd); });  // no magic
  ::close(fd);
  const auto board = Board::create(2);
  store(board->header().world_size, 3);
  check_throws<std::invalid_argument>([&] { (void)Board::attach(board->fd()); });
  check_throws<std::out_of_range>([&] { (void)board->record(2); });
}

void run_barrier(Board& board, std::uint32_t rank, std::uint64_t rounds) {
  for (std::uint64_t round = 1; round <= rounds; ++round) {
    if (board.arrive(rank, round, 1, round)) continue;
    CHECK(board.wait_all(make_standing(round, 1), 0, 20 * second_ns) == WaitResult::passed);
    for (std::uint32_t other = 0; other < board.world_size(); ++other) {
      CHECK(load(board.record(other).standing) >= make_standing(round, 1));
    }
  }
}

void test_barrier_processes() {
  const auto board = Board::create(3);
  std::vector<pid_t> children;
  for (std::uint32_t rank = 1; rank < 3; ++rank) {
    children.push_back(spawn([&] { run_barrier(*Board::attach(board->fd()), rank, 500); }));
  }
  run_barrier(*board, 0, 500);
  for (const pid_t child : children) CHECK(reap(child) == 0);
}

void test_barrier_threads() {
  const auto board = Board::create(4);
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < 4; ++rank) threads.emplace_back([&, rank] { run_barrier(*board, rank, 500); });
  for (std::thread& thread : threads) thread.join();
}

void test_stop_wakes_waiters() {
  const auto board = Board::create(2);
  CHECK(board->wait_all(make_standing(1, 0), 0, 1'000'000) == WaitResult::timeout);
  std::thread barrier([&] { CHECK(board->wait_all(make_standing(1, 0), 0, 10 * second_ns) == WaitResult::stopped); });
  std::thread stop([&] { CHECK(board->wait_stop(0, 10 * second_ns)); });
  board->raise_stop(1);
  barrier.join();
  stop.join();
  check_throws<std::invalid_argument>([&] { board->raise_stop(1); });
  board->arrive(0, 1, 0, 1);
  CHECK(board->arrive(1, 1, 0, 1));
  CHECK(board->wait_all(make_standing(1, 0), 0, 0) == WaitResult::passed);  // passed wins over stopped
}

void wait_alive(const Board& board, std::uint32_t rank) {
  CHECK(eventually([&] { return (load(board.record(rank).life.word) & FUTEX_TID_MASK) != 0; }));
}

void test_death_and_release() {
  const auto board = Board::create(2);
  for (int round = 0; round < 10; ++round) {
    const bool clean = round % 2 == 1;
    const pid_t child = spawn([&] {
      Watchdog watchdog(Board::attach(board->fd()), 1, options);
      watchdog.start(0);
      if (!clean) ::pause();
      CHECK(eventually([&] { return load(board->record(1).step) == 1; }));
      watchdog.stop();
    });
    wait_alive(*board, 1);
    DeathWatch watch(board);
    CHECK(!watch.add(0));
    CHECK(watch.add(1));
    if (clean) {
      store(board->record(1).step, 1);
      CHECK(reap(child) == 0);
      CHECK(watch.take().empty());
      store(board->record(1).step, 0);
      continue;
    }
    CHECK(::kill(child, SIGKILL) == 0);
    pollfd readable{watch.fd(), POLLIN, 0};
    CHECK(::poll(&readable, 1, 10'000) == 1);
    const auto deaths = watch.take();
    CHECK(deaths.size() == 1 && deaths[0].first == 1 && deaths[0].second > 0);
    watch.remove(1);
    CHECK(load(board->record(1).life.word) == 0);
    reap(child);
  }
}

std::uint64_t inode_of(int fd) {
  struct stat status{};
  CHECK(::fstat(fd, &status) == 0);
  return status.st_ino;
}

bool is_shut(int fd) {
  char byte = 0;
  return ::recv(fd, &byte, 1, MSG_DONTWAIT) == 0;
}

void test_sockets() {
  const auto board = Board::create(1);
  std::array<int, 2> pair{};
  std::array<int, 2> spared{};
  CHECK(::socketpair(AF_UNIX, SOCK_STREAM, 0, pair.data()) == 0);
  CHECK(::socketpair(AF_UNIX, SOCK_STREAM, 0, spared.data()) == 0);
  const int listener = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  CHECK(::bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0);
  CHECK(::listen(listener, 1) == 0);
  Watchdog watchdog(board, 0, options);
  watchdog.start(0);
  watchdog.guard_sockets({{pair[0], inode_of(pair[0])},
                          {spared[0], inode_of(spared[0]) + 1'000'000},
                          {listener, inode_of(listener)},
                          {0, inode_of(0)},
                          {9999, 1}});
  board->raise_stop(1);
  CHECK(eventually([&] { return load(board->record(0).stopped_generation) == 1; }));
  CHECK(is_shut(pair[0]));
  CHECK(!is_shut(spared[0]));
  pollfd hung_up{listener, POLLIN, 0};
  CHECK(::poll(&hung_up, 1, 0) == 0);
  watchdog.stop();
  for (const int fd : {pair[0], pair[1], spared[0], spared[1], listener}) ::close(fd);
}

std::atomic<int> signals = 0;

void test_signals() {
  struct sigaction action{};
  action.sa_handler = [](int) { signals.fetch_add(1); };
  CHECK(::sigaction(SIGUSR1, &action, nullptr) == 0);
  const auto board = Board::create(1);
  Watchdog watchdog(board, 0, options);
  watchdog.start(0);
  board->raise_stop(1);
  CHECK(eventually([&] { return load(board->record(0).stopped_generation) == 1; }));
  const std::uint64_t beats = load(board->record(0).beats);
  CHECK(eventually([&] { return load(board->record(0).beats) >= beats + 3; }));
  CHECK(signals.load() == 0);  // a stop, but not armed
  watchdog.arm(1);
  CHECK(eventually([&] { return load(board->record(0).beats) >= beats + 6; }));
  CHECK(signals.load() == 0);  // armed, but for newer stops
  watchdog.arm(0);
  CHECK(eventually([] { return signals.load() >= 2; }));
  watchdog.acknowledge(1);
  const int before = signals.load();
  const std::uint64_t later = load(board->record(0).beats);
  CHECK(eventually([&] { return load(board->record(0).beats) >= later + 3; }));
  CHECK(signals.load() == before);
  const pid_t child = spawn([&] { watchdog.stop(); });
  CHECK(reap(child) == 0);
  watchdog.stop();
  watchdog.stop();
  watchdog.start(1);
  watchdog.stop();
}

void test_process_copy() {
  std::vector<std::uint8_t> source(3'000'000, 7);
  std::array<int, 2> hold{};
  CHECK(::pipe(hold.data()) == 0);
  const pid_t child = spawn([&] {
    std::fill(source.begin(), source.end(), std::uint8_t{9});
    char byte = 1;
    CHECK(::write(hold[1], &byte, 1) == 1);
    ::pause();
  });
  char byte = 0;
  CHECK(::read(hold[0], &byte, 1) == 1);
  std::vector<std::uint8_t> target(source.size(), 0);
  std::vector<Span> spans;
  for (std::size_t at = 0; at < source.size(); at += 1000) {
    spans.push_back({reinterpret_cast<std::uintptr_t>(source.data() + at),
                     reinterpret_cast<std::uintptr_t>(target.data() + at), 1000});
  }
  spans.push_back({1, 1, 0});
  read_process_memory(child, spans);
  CHECK(target == std::vector<std::uint8_t>(source.size(), 9));
  check_throws<std::system_error>(
      [&] { read_process_memory(child, {{8, reinterpret_cast<std::uintptr_t>(target.data()), 8}}); });
  CHECK(::kill(child, SIGKILL) == 0);
  reap(child);
}

// A reader that is slower than the writer misses windows, and never gets one that is half of another.
void test_computed() {
  constexpr std::uint64_t windows = 200'000;
  const auto board = Board::create(1);
  check_throws<std::invalid_argument>([&] { board->set_computed(0, Computed{0, 1, 1}); });
  std::thread writer([&] {
    for (std::uint64_t commits = 1; commits <= windows; ++commits) {
      board->set_computed(0, Computed{commits, commits + 1, commits * 3});
      board->set_standing(0, commits, 0, commits);
    }
  });
  std::uint64_t last = 0;
  while (last < windows) {
    for (const Computed& each : board->computed(0, last)) {
      CHECK(each.commits > last && each.step == each.commits + 1 && each.ns == each.commits * 3);
      last = each.commits;
    }
  }
  writer.join();
  CHECK(board->computed(0, windows).empty() && board->computed(0, 0).size() == computed_max);
}

// Two that begin different calls at one place, at the same moment: one at least sees the other's, and never half of it.
void test_calls() {
  constexpr std::uint64_t places = 100'000;
  const auto board = Board::create(2);
  check_throws<std::invalid_argument>([&] { board->set_call(0, Call{0, 1}); });
  check_throws<std::invalid_argument>([&] { board->set_call(0, Call{1, 0}); });
  std::vector<std::uint64_t> seen(places + 1);
  std::atomic<std::uint64_t> here = 0;
  const auto word_of = [](std::uint64_t rank, std::uint64_t tag) { return tag << 1 | rank; };
  std::thread second([&] {
    for (std::uint64_t tag = 1; tag <= places; ++tag) {
      while (here.load() < tag) {
      }
      board->set_call(1, Call{tag, word_of(1, tag)});
      seen[tag] = board->call(0, tag);
      here.store(tag | std::uint64_t{1} << 63);
      while (here.load() >> 63 != 0) {
      }
    }
  });
  for (std::uint64_t tag = 1; tag <= places; ++tag) {
    here.store(tag);
    board->set_call(0, Call{tag, word_of(0, tag)});
    const std::uint64_t theirs = board->call(1, tag);
    while (here.load() >> 63 == 0) {
    }
    CHECK(theirs == 0 || theirs == word_of(1, tag));
    CHECK(seen[tag] == 0 || seen[tag] == word_of(0, tag));
    CHECK(theirs != 0 || seen[tag] != 0);
    here.store(0);
  }
  second.join();
  CHECK(board->call(0, places) != 0 && board->call(0, places - calls_max) == 0);
}

}  // namespace

int main() {
  // Forks first: a sanitizer is happiest with a fork of a process that never had threads.
  test_hostile_files();
  test_process_copy();
  test_barrier_processes();
  test_barrier_threads();
  test_computed();
  test_calls();
  test_stop_wakes_waiters();
  test_death_and_release();
  test_sockets();
  test_signals();
  std::puts("native_test: all passed");
  return 0;
}
