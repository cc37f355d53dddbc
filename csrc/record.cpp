// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
#include "record.hpp"

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <ctime>
#include <stdexcept>
#include <string>
#include <system_error>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "futex.hpp"

namespace resilient {
namespace {

constexpr std::int64_t spin_min_ns = 500;
constexpr std::int64_t spin_max_ns = 8'000;  // more would take the core that the last arriver needs

[[noreturn]] void fail(int error, const char* what) { throw std::system_error(error, std::generic_category(), what); }

void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

std::size_t board_bytes(std::uint32_t world_size) { return (std::size_t{world_size} + 1) * page_bytes; }

std::byte* map(int fd, std::size_t bytes, int flags) {
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | flags, fd, 0);
  return memory == MAP_FAILED ? nullptr : static_cast<std::byte*>(memory);
}

std::int64_t clock_ns(clockid_t clock) {
  timespec now{};
  const int result = ::clock_gettime(clock, &now);
  assert(result == 0);
  (void)result;
  return std::int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

// Returns the world size that the size of the file implies.
std::uint32_t check_file(int fd) {
  struct stat status{};
  if (::fstat(fd, &status) != 0) fail(errno, "fstat of the board");
  // Without the seal, whoever holds the file could shrink it and kill every rank by SIGBUS.
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
    throw std::invalid_argument("not a board: the descriptor is not a memfd sealed against shrinking");
  }
  const auto bytes = static_cast<std::uint64_t>(status.st_size);
  if (bytes < 2 * page_bytes || bytes % page_bytes != 0 || bytes > board_bytes(world_size_max)) {
    throw std::invalid_argument("not a board: a file of " + std::to_string(bytes) + " bytes");
  }
  return static_cast<std::uint32_t>(bytes / page_bytes - 1);
}

void check_header(const Header& header, std::uint32_t world_size) {
  if (load(header.magic) != board_magic) throw std::invalid_argument("not a board: wrong magic number");
  if (load(header.version) != board_version) {
    throw std::invalid_argument("the board has version " + std::to_string(load(header.version)) +
                                ", this library speaks version " + std::to_string(board_version) +
                                ": agent and rank must run the same resilient_train");
  }
  if (load(header.world_size) != world_size) {
    throw std::invalid_argument("not a board: the header says " + std::to_string(load(header.world_size)) +
                                " ranks, the file has room for " + std::to_string(world_size));
  }
}

}  // namespace

std::uint64_t realtime_ns() { return static_cast<std::uint64_t>(clock_ns(CLOCK_REALTIME)); }
std::int64_t monotonic_ns() { return clock_ns(CLOCK_MONOTONIC); }

std::uint64_t make_standing(std::uint64_t commits, std::uint32_t phase) {
  if (commits > commits_max) throw std::invalid_argument("commits must be below 2**56");
  if (phase > phase_max) throw std::invalid_argument("phase must be 0..255, not " + std::to_string(phase));
  return commits << 8 | phase;
}

Board::Board(int fd, std::byte* memory, std::uint32_t world_size)
    : fd_(fd), memory_(memory), world_size_(world_size), spin_ns_(spin_max_ns / 2) {
  assert(fd >= 0);
  assert(memory != nullptr);
  assert(world_size >= 1);
}

Board::~Board() {
  ::munmap(memory_, board_bytes(world_size_));
  ::close(fd_);
}

std::shared_ptr<Board> Board::create(std::uint32_t world_size) {
  if (world_size < 1 || world_size > world_size_max) {
    throw std::invalid_argument("world_size must be 1.." + std::to_string(world_size_max) + ", not " +
                                std::to_string(world_size));
  }
  const std::size_t bytes = board_bytes(world_size);
  const int fd = ::memfd_create("resilient-board", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) fail(errno, "memfd_create of the board");
  const int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  std::byte* memory = nullptr;
  if (::ftruncate(fd, static_cast<off_t>(bytes)) != 0 || ::fcntl(fd, F_ADD_SEALS, seals) != 0 ||
      (memory = map(fd, bytes, MAP_POPULATE)) == nullptr) {
    const int error = errno;
    ::close(fd);
    fail(error, "allocation of the board");
  }
  std::shared_ptr<Board> board(new Board(fd, memory, world_size));
  store(board->header().version, board_version);
  store(board->header().world_size, world_size);
  store(board->header().magic, board_magic);  // last: nobody may take a half-written header for a board
  return board;
}

std::shared_ptr<Board> Board::attach(int foreign_fd) {
  const std::uint32_t world_size = check_file(foreign_fd);
  const int fd = ::fcntl(foreign_fd, F_DUPFD_CLOEXEC, 3);
  if (fd < 0) fail(errno, "dup of the board");
  std::byte* memory = map(fd, board_bytes(world_size), MAP_POPULATE);
  if (memory == nullptr) {
    const int error = errno;
    ::close(fd);
    fail(error, "mapping of the board");
  }
  std::shared_ptr<Board> board(new Board(fd, memory, world_size));
  check_header(board->header(), world_size);
  return board;
}

RankRecord& Board::record(std::uint32_t rank) const {
  if (rank >= world_size_) {
    throw std::out_of_range("rank " + std::to_string(rank) + " of a board of " + std::to_string(world_size_));
  }
  return *reinterpret_cast<RankRecord*>(memory_ + (std::size_t{rank} + 1) * page_bytes);
}

void Board::raise_stop(std::uint32_t generation) {
  std::uint32_t& word = header().stop_generation;
  for (;;) {
    const std::uint32_t current = load(word);
    if (generation <= current) {
      throw std::invalid_argument("the stop generation only grows: it is " + std::to_string(current) + ", not below " +
                                  std::to_string(generation));
    }
    if (exchange_if(word, current, generation)) break;
  }
  futex::wake_all(&word);
  increment(header().bell);
  futex::wake_all(&header().bell);
}

void Board::set_standing(std::uint32_t rank, std::uint64_t commits, std::uint32_t phase, std::uint64_t step) {
  RankRecord& mine = record(rank);
  const std::uint64_t standing = make_standing(commits, phase);
  store(mine.step, step);
  store(mine.standing, standing);
}

void Board::announce(std::uint64_t commits, std::uint32_t what) {
  if (commits > commits_max) throw std::invalid_argument("commits must be below 2**56");
  if (what > announced_max) throw std::invalid_argument("0..3 can be announced, not " + std::to_string(what));
  store(header().saves[commits % 2], commits << 2 | what);
}

std::uint32_t Board::announced(std::uint64_t commits) const {
  const std::uint64_t word = load(header().saves[commits % 2]);
  return word >> 2 == commits ? static_cast<std::uint32_t>(word & announced_max) : 0;
}

void Board::set_fingerprint(std::uint32_t rank, std::uint64_t commits, std::uint64_t value) {
  if (commits > commits_max) throw std::invalid_argument("commits must be below 2**56");
  Fingerprint& mine = record(rank).replica[commits % 2];
  store(mine.update, 0);  // nobody may take the value of one update for that of another
  store(mine.value, value);
  store(mine.update, value == 0 ? 0 : commits + 1);
}

std::uint64_t Board::fingerprint(std::uint32_t rank, std::uint64_t commits) const {
  const Fingerprint& theirs = record(rank).replica[commits % 2];
  const bool before = load(theirs.update) == commits + 1;
  const std::uint64_t value = load(theirs.value);
  return before && load(theirs.update) == commits + 1 ? value : 0;
}

void Board::set_call(std::uint32_t rank, const Call& call) {
  if (call.tag == 0 || call.word == 0) throw std::invalid_argument("a call has a tag and a word");
  Call& mine = record(rank).calls[call.tag % calls_max];
  store(mine.tag, 0);  // nobody may take the word of one call for that of another
  store(mine.word, call.word);
  store(mine.tag, call.tag);
}

void Board::forget_call(std::uint32_t rank, std::uint64_t tag) { store(record(rank).calls[tag % calls_max].tag, 0); }

std::uint64_t Board::call(std::uint32_t rank, std::uint64_t tag) const {
  const Call& theirs = record(rank).calls[tag % calls_max];
  const bool before = load(theirs.tag) == tag;
  const std::uint64_t word = load(theirs.word);
  return before && load(theirs.tag) == tag ? word : 0;
}

void Board::set_computed(std::uint32_t rank, const Computed& window) {
  if (window.commits == 0 || window.commits > commits_max) throw std::invalid_argument("commits must be 1..2**56 - 1");
  Computed& mine = record(rank).computed[window.commits % computed_max];
  store(mine.commits, 0);  // as with a fingerprint
  store(mine.step, window.step);
  store(mine.ns, window.ns);
  store(mine.commits, window.commits);
}

std::vector<Computed> Board::computed(std::uint32_t rank, std::uint64_t after) const {
  const RankRecord& theirs = record(rank);
  const std::uint64_t until = load(theirs.standing) >> 8;
  std::vector<Computed> found;
  if (until <= after) return found;
  for (std::uint64_t commits = until - std::min(until - after, computed_max) + 1; commits <= until; ++commits) {
    const Computed& window = theirs.computed[commits % computed_max];
    const bool before = load(window.commits) == commits;
    const Computed copy{commits, load(window.step), load(window.ns)};
    if (before && load(window.commits) == commits) found.push_back(copy);
  }
  return found;
}

bool Board::all_reached(std::uint64_t target) const {
  for (std::uint32_t rank = 0; rank < world_size_; ++rank) {
    if (load(record(rank).standing) < target) return false;
  }
  return true;
}

// Standings only grow between two recoveries. Stores and scans are in one total order, so whoever stores last sees
// all the others: at least one arriver rings, and nobody rings before all are there.
bool Board::arrive(std::uint32_t rank, std::uint64_t commits, std::uint32_t phase, std::uint64_t step) {
  set_standing(rank, commits, phase, step);
  if (!all_reached(make_standing(commits, phase))) return false;
  increment(header().bell);
  futex::wake_all(&header().bell);
  return true;
}

WaitResult Board::wait_all(std::uint64_t target, std::uint32_t generation, std::int64_t timeout_ns) {
  const std::int64_t start_ns = monotonic_ns();
  const std::int64_t spin_ns = std::min(spin_ns_.load(std::memory_order_relaxed), timeout_ns);
  bool slept = false;
  for (;;) {
    // The bell is read before the standings: a ring between the look and the sleep makes the sleep return.
    const std::uint32_t bell = load(header().bell);
    const bool passed = all_reached(target);
    const std::int64_t elapsed_ns = monotonic_ns() - start_ns;
    if (passed) {
      const std::int64_t next_ns = slept ? spin_ns / 2 : spin_ns * 2;
      spin_ns_.store(std::clamp(next_ns, spin_min_ns, spin_max_ns), std::memory_order_relaxed);
      return WaitResult::passed;
    }
    if (load(header().stop_generation) > generation) return WaitResult::stopped;
    if (elapsed_ns >= timeout_ns) return WaitResult::timeout;
    if (elapsed_ns < spin_ns) {
      pause_cpu();
      continue;
    }
    slept = true;
    if (futex::wait(&header().bell, bell, timeout_ns - elapsed_ns) == EINTR) {
      if (all_reached(target)) return WaitResult::passed;
      return load(header().stop_generation) > generation ? WaitResult::stopped : WaitResult::timeout;
    }
  }
}

bool Board::wait_stop(std::uint32_t generation, std::int64_t timeout_ns) const {
  const std::int64_t start_ns = monotonic_ns();
  for (;;) {
    const std::uint32_t seen = load(header().stop_generation);
    if (seen > generation) return true;
    const std::int64_t elapsed_ns = monotonic_ns() - start_ns;
    if (elapsed_ns >= timeout_ns) return false;
    if (futex::wait(&header().stop_generation, seen, timeout_ns - elapsed_ns) == EINTR) {
      return load(header().stop_generation) > generation;
    }
  }
}

}  // namespace resilient
