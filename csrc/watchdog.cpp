// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
#include "watchdog.hpp"

#include <algorithm>
#include <atomic>
#include <cassert>
#include <cerrno>
#include <csignal>
#include <mutex>
#include <stdexcept>
#include <system_error>
#include <thread>

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "futex.hpp"
#include "native_thread.hpp"

namespace resilient {
namespace {

constexpr std::int64_t ns_per_ms = 1'000'000;
constexpr std::int64_t interrupt_interval_max_ns = 200 * ns_per_ms;

pid_t current_tid() { return static_cast<pid_t>(::syscall(SYS_gettid)); }

// A connected socket with the inode that we were told of; never a listening one: gloo's listener thread calls
// std::terminate when its accept fails.
bool is_guarded_socket(int fd, std::uint64_t inode) {
  struct stat status{};
  if (::fstat(fd, &status) != 0 || !S_ISSOCK(status.st_mode) || status.st_ino != inode) return false;
  int listening = 0;
  socklen_t length = sizeof(listening);
  if (::getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listening, &length) != 0) return false;
  return listening == 0;
}

void shut(const Socket& socket) {
  // Checked and shut through a duplicate: the owner may close the number, and another thread reuse it, in between.
  const int duplicate = ::fcntl(socket.first, F_DUPFD_CLOEXEC, 3);
  const int fd = duplicate >= 0 ? duplicate : socket.first;  // out of descriptors: a small risk beats a hang
  // Not SHUT_RDWR: a write that gloo's event loop then tries fails with EPIPE in a place where gloo forgets the waiting
  // buffer, and a collective sleeps for its whole time-out. End of file, on the other hand, reaches every waiter.
  if (is_guarded_socket(fd, socket.second)) (void)::shutdown(fd, SHUT_RD);
  if (duplicate >= 0) ::close(duplicate);
}

// Puts the life word on this thread's own robust list, and takes it off again. glibc's list (for robust mutexes
// that this thread never uses) is put back at the end.
class LifeHold {
 public:
  explicit LifeHold(Life& life) : life_(life) {
    ::syscall(SYS_get_robust_list, 0, &previous_, &previous_bytes_);
    head_.list.next = &life.node;
    head_.futex_offset = offsetof(Life, word) - offsetof(Life, node);
    head_.list_op_pending = nullptr;
    life.node.next = &head_.list;
    const long result = ::syscall(SYS_set_robust_list, &head_, sizeof(head_));
    assert(result == 0);
    (void)result;
    // After the list is in force: a word that names us is a word that will be marked when we die.
    store(life.word, static_cast<std::uint32_t>(current_tid()));
  }
  ~LifeHold() {
    // Released before the list goes: to die in between must not look like a death, the rank has said goodbye.
    const std::uint32_t mine = static_cast<std::uint32_t>(current_tid());
    const std::uint32_t value = load(life_.word);
    if ((value & FUTEX_TID_MASK) == mine) release(mine);
    head_.list.next = &head_.list;
    ::syscall(SYS_set_robust_list, previous_, previous_bytes_);
    futex::wake_all(&life_.word);
  }
  LifeHold(const LifeHold&) = delete;
  LifeHold& operator=(const LifeHold&) = delete;

 private:
  // The watcher may set its bit at any time; a successor's word must stay.
  void release(std::uint32_t mine) {
    if (exchange_if(life_.word, mine, 0)) return;
    (void)exchange_if(life_.word, mine | FUTEX_WAITERS, 0);
  }

  Life& life_;
  robust_list_head head_{};
  robust_list_head* previous_ = nullptr;
  std::size_t previous_bytes_ = sizeof(robust_list_head);
};

}  // namespace

struct Watchdog::State {
  State(std::shared_ptr<Board> shared_board, std::uint32_t its_rank, WatchdogOptions its_options)
      : board(std::move(shared_board)), record(board->record(its_rank)), options(its_options) {}

  void run();
  void handle_stop(std::uint32_t generation);
  std::int64_t interrupt(std::int64_t now_ns);
  void wake() { futex::wake_all(&board->header().stop_generation); }

  const std::shared_ptr<Board> board;
  RankRecord& record;
  const WatchdogOptions options;
  const pid_t owner_pid = ::getpid();
  const pid_t main_tid = current_tid();

  std::thread thread;
  std::atomic<bool> stopping = false;
  std::uint32_t started = 0;   // futex words of this process: the thread has taken the life word,
  std::uint32_t finished = 0;  // and has given it back

  std::mutex mutex;  // over all below
  std::vector<Socket> sockets;
  bool armed = false;
  std::uint32_t armed_generation = 0;
  std::uint32_t acknowledged_generation = 0;
  std::uint32_t handled_generation = 0;
  std::int64_t next_interrupt_ns = 0;
  std::int64_t interrupt_interval_ns = 0;
};

void Watchdog::State::handle_stop(std::uint32_t generation) {
  const std::lock_guard lock(mutex);
  assert(generation > handled_generation);
  for (const Socket& socket : sockets) shut(socket);
  sockets.clear();
  handled_generation = generation;
  store(record.stopped_generation, generation);
  futex::wake_all(&record.stopped_generation);
  interrupt_interval_ns = options.grace_ms * ns_per_ms;
  next_interrupt_ns = monotonic_ns() + interrupt_interval_ns;
}

// Interrupts the main thread when it is due. Returns how long until the next look is needed. The signal is sent
// under the mutex: once disarm() has returned, none is sent.
std::int64_t Watchdog::State::interrupt(std::int64_t now_ns) {
  constexpr std::int64_t never_ns = INT64_MAX;
  const std::lock_guard lock(mutex);
  if (!armed || handled_generation <= std::max(acknowledged_generation, armed_generation)) return never_ns;
  if (now_ns >= next_interrupt_ns) {
    (void)::syscall(SYS_tgkill, owner_pid, main_tid, options.signal_number);
    const std::int64_t longer_ns = std::max(interrupt_interval_ns * 3 / 2, ns_per_ms);
    interrupt_interval_ns = std::min(longer_ns, interrupt_interval_max_ns);
    next_interrupt_ns = now_ns + interrupt_interval_ns;
  }
  return next_interrupt_ns - now_ns;
}

void Watchdog::State::run() {
  {
    const LifeHold hold(record.life);
    store(started, 1);
    futex::wake_all(&started);
    const std::int64_t beat_ns = options.beat_ms * ns_per_ms;
    std::int64_t next_beat_ns = monotonic_ns();
    const std::uint32_t& stop_word = board->header().stop_generation;
    std::uint32_t handled = handled_generation;  // only this thread changes it while it runs
    while (!stopping.load()) {
      const std::int64_t now_ns = monotonic_ns();
      if (now_ns >= next_beat_ns) {
        increment(record.beats);
        next_beat_ns = now_ns + beat_ns;
      }
      const std::uint32_t seen = load(stop_word);
      if (seen > handled) {
        handle_stop(seen);
        handled = seen;
        continue;
      }
      const std::int64_t interrupt_ns = interrupt(now_ns);
      futex::wait(&stop_word, seen, std::min(next_beat_ns - now_ns, interrupt_ns));
    }
  }
  store(finished, 1);
  futex::wake_all(&finished);
}

Watchdog::Watchdog(std::shared_ptr<Board> board, std::uint32_t rank, WatchdogOptions options) : state_(nullptr) {
  if (options.beat_ms < 1 || options.beat_ms > 60'000) throw std::invalid_argument("beat_ms must be 1..60000");
  if (options.grace_ms < 0 || options.grace_ms > 60'000) throw std::invalid_argument("grace_ms must be 0..60000");
  if (options.signal_number < 1 || options.signal_number > SIGRTMAX) {
    throw std::invalid_argument("signal_number is not a signal");
  }
  state_ = new State(std::move(board), rank, options);
}

Watchdog::~Watchdog() {
  if (foreign()) return;  // leaked in the child
  stop();
  delete state_;
}

bool Watchdog::foreign() const { return state_->owner_pid != ::getpid(); }

void Watchdog::start(std::uint32_t generation) {
  if (foreign()) throw std::logic_error("a watchdog belongs to the process that made it; this is a forked child");
  if (state_->thread.joinable()) throw std::logic_error("the watchdog runs already");
  {
    const std::lock_guard lock(state_->mutex);
    state_->handled_generation = generation;
  }
  state_->stopping.store(false);
  store(state_->started, 0);
  store(state_->finished, 0);
  state_->thread = start_native_thread("rt-watchdog", [state = state_] { state->run(); });
  // The caller may now tell the agent to watch the life word, so it must be there.
  while (load(state_->started) == 0) futex::wait(&state_->started, 0, 10 * ns_per_ms);
}

void Watchdog::stop() {
  if (foreign() || !state_->thread.joinable()) return;
  state_->stopping.store(true);
  // Again and again: one wake could fall between the thread's look at `stopping` and its sleep.
  while (load(state_->finished) == 0) {
    state_->wake();
    futex::wait(&state_->finished, 0, ns_per_ms);
  }
  state_->thread.join();
}

void Watchdog::guard_sockets(std::vector<Socket> sockets) {
  if (foreign()) return;
  const std::lock_guard lock(state_->mutex);
  state_->sockets = std::move(sockets);
}

void Watchdog::arm(std::uint32_t generation) {
  if (foreign()) return;
  bool pending = false;
  {
    const std::lock_guard lock(state_->mutex);
    state_->armed = true;
    state_->armed_generation = generation;
    pending = state_->handled_generation > std::max(generation, state_->acknowledged_generation);
  }
  if (pending) state_->wake();
}

void Watchdog::disarm() {
  if (foreign()) return;
  const std::lock_guard lock(state_->mutex);
  state_->armed = false;
}

bool Watchdog::armed() const {
  if (foreign()) return false;
  const std::lock_guard lock(state_->mutex);
  return state_->armed;
}

void Watchdog::acknowledge(std::uint32_t generation) {
  if (foreign()) return;
  const std::lock_guard lock(state_->mutex);
  state_->acknowledged_generation = std::max(state_->acknowledged_generation, generation);
}

}  // namespace resilient
