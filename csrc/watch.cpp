// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
#include "watch.hpp"

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <ctime>
#include <mutex>
#include <stdexcept>
#include <system_error>
#include <thread>

#include <sys/eventfd.h>
#include <unistd.h>

#include "futex.hpp"
#include "native_thread.hpp"

namespace resilient {
namespace {

constexpr std::size_t watched_max = futex::waitv_entries_max - 1;  // one entry is the control word
enum class LifeState { alive, dead, released };

// Marks the word, so that the kernel will wake us, and says what stands there.
LifeState examine(std::uint32_t& word, std::uint32_t& value) {
  for (;;) {
    value = load(word);
    if ((value & FUTEX_OWNER_DIED) != 0) return LifeState::dead;
    if ((value & FUTEX_TID_MASK) == 0) return LifeState::released;
    if ((value & FUTEX_WAITERS) != 0) return LifeState::alive;
    if (exchange_if(word, value, value | FUTEX_WAITERS)) {
      value |= FUTEX_WAITERS;
      return LifeState::alive;
    }
  }
}

}  // namespace

bool death_watch_supported() {
  static const bool supported = futex::wait_any_supported();
  return supported;
}

struct DeathWatch::State {
  explicit State(std::shared_ptr<Board> shared_board) : board(std::move(shared_board)) {}
  ~State() {
    if (event_fd >= 0) ::close(event_fd);
  }

  void run();
  void collect(std::vector<futex::WaitEntry>& entries);
  void announce();
  void poke() {
    increment(control);
    futex::wake_all(&control);
  }

  const std::shared_ptr<Board> board;
  const pid_t owner_pid = ::getpid();
  int event_fd = -1;
  std::thread thread;
  std::mutex mutex;  // over the three below
  std::vector<std::uint32_t> watched;
  std::vector<Death> deaths;
  bool closing = false;
  std::uint32_t control = 0;  // futex word: the list changed
};

void DeathWatch::State::announce() {
  const std::uint64_t one = 1;
  const ssize_t written = ::write(event_fd, &one, sizeof(one));
  (void)written;  // a full counter is readable all the same
}

// Takes the dead and the released from the list and writes an entry for each of the living. Mutex held.
void DeathWatch::State::collect(std::vector<futex::WaitEntry>& entries) {
  std::vector<std::uint32_t> living;
  bool died = false;
  for (const std::uint32_t rank : watched) {
    std::uint32_t& word = board->record(rank).life.word;
    std::uint32_t value = 0;
    switch (examine(word, value)) {
      case LifeState::alive:
        living.push_back(rank);
        entries.push_back({value, reinterpret_cast<std::uintptr_t>(&word), futex::waitv_size_32, 0});
        break;
      case LifeState::dead:
        deaths.emplace_back(rank, realtime_ns());
        died = true;
        break;
      case LifeState::released:
        break;
    }
  }
  watched.swap(living);
  if (died) announce();
}

void DeathWatch::State::run() {
  std::vector<futex::WaitEntry> entries;
  for (;;) {
    entries.clear();
    {
      const std::lock_guard lock(mutex);
      if (closing) return;
      const std::uint32_t seen = load(control);
      entries.push_back({seen, reinterpret_cast<std::uintptr_t>(&control), futex::waitv_size_32, 0});
      collect(entries);
    }
    assert(entries.size() <= futex::waitv_entries_max);
    const int error = futex::wait_any(entries.data(), static_cast<unsigned>(entries.size()));
    if (error != 0 && error != EAGAIN && error != EINTR) {
      // Out of kernel memory at worst: look again soon rather than burn the core or go blind.
      const timespec pause{0, 5'000'000};
      ::nanosleep(&pause, nullptr);
    }
  }
}

DeathWatch::DeathWatch(std::shared_ptr<Board> board) : state_(std::make_shared<State>(std::move(board))) {
  state_->event_fd = ::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (state_->event_fd < 0) throw std::system_error(errno, std::generic_category(), "eventfd of the death watch");
  if (!death_watch_supported()) return;
  // A plain pointer: the thread is joined before the state goes, and in a forked child there is no thread.
  state_->thread = start_native_thread("rt-deathwatch", [state = state_.get()] { state->run(); });
}

DeathWatch::~DeathWatch() { close(); }

bool DeathWatch::foreign() const { return state_ == nullptr || state_->owner_pid != ::getpid(); }

int DeathWatch::fd() const {
  if (state_ == nullptr) throw std::invalid_argument("the death watch is closed");
  return state_->event_fd;
}

bool DeathWatch::add(std::uint32_t rank) {
  if (state_ == nullptr) throw std::invalid_argument("the death watch is closed");
  const std::uint32_t& word = state_->board->record(rank).life.word;
  if (foreign() || !death_watch_supported() || load(word) == 0) return false;
  {
    const std::lock_guard lock(state_->mutex);
    std::vector<std::uint32_t>& watched = state_->watched;
    const bool known = std::find(watched.begin(), watched.end(), rank) != watched.end();
    if (!known && watched.size() == watched_max) return false;
    if (!known) watched.push_back(rank);
  }
  state_->poke();
  return true;
}

void DeathWatch::remove(std::uint32_t rank) {
  if (state_ == nullptr) throw std::invalid_argument("the death watch is closed");
  std::uint32_t& word = state_->board->record(rank).life.word;
  if (foreign()) return;
  {
    const std::lock_guard lock(state_->mutex);
    std::erase(state_->watched, rank);
    // A death not yet taken is of an incarnation that the agent has given up: it must not be laid at its successor.
    std::erase_if(state_->deaths, [rank](const Death& death) { return death.first == rank; });
    const std::uint32_t value = load(word);
    // Only a dead word is cleared, and only if no successor has written his own meanwhile.
    if ((value & FUTEX_OWNER_DIED) != 0) (void)exchange_if(word, value, 0);
  }
  state_->poke();
}

std::vector<DeathWatch::Death> DeathWatch::take() {
  if (state_ == nullptr) throw std::invalid_argument("the death watch is closed");
  std::vector<Death> taken;
  if (foreign()) return taken;
  const std::lock_guard lock(state_->mutex);
  std::uint64_t count = 0;
  const ssize_t bytes = ::read(state_->event_fd, &count, sizeof(count));
  (void)bytes;
  taken.swap(state_->deaths);
  return taken;
}

void DeathWatch::close() {
  if (state_ == nullptr) return;
  if (foreign()) {
    // In a forked child the mutex may be held by a thread that does not exist here: leak it all.
    new std::shared_ptr<State>(std::move(state_));
    state_ = nullptr;
    return;
  }
  if (state_->thread.joinable()) {
    {
      const std::lock_guard lock(state_->mutex);
      state_->closing = true;
    }
    state_->poke();
    state_->thread.join();
  }
  state_ = nullptr;
}

}  // namespace resilient
