// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
#include "terminate.hpp"

#include <atomic>
#include <cerrno>
#include <csignal>
#include <system_error>
#include <utility>

#include <unistd.h>

namespace resilient {
namespace {

constexpr int heard[] = {SIGTERM, SIGUSR1};
std::atomic<std::uint32_t*> asked_word{nullptr};
std::atomic<pid_t> owner{0};
struct sigaction before_shield{};
// Keeps the word mapped; only the thread that holds the GIL touches it. Never destroyed: a signal may come behind the
// destructors of this module, while exit() runs those of others.
std::shared_ptr<Board>& held = *new std::shared_ptr<Board>;
static_assert(std::atomic<std::uint32_t*>::is_always_lock_free && std::atomic<pid_t>::is_always_lock_free);

// The signal is blocked until its handler returns; then what is set here acts on it.
void hand_on(int number, const struct sigaction& action) {
  const int kept = errno;
  sigaction(number, &action, nullptr);
  raise(number);
  errno = kept;
}

void on_terminate(int number) {
  std::uint32_t* word = asked_word.load();
  const bool is_rank = word != nullptr && getpid() == owner.load();
  if (is_rank && exchange_if(*word, 0, static_cast<std::uint32_t>(number))) return;
  if (word != nullptr && number != SIGTERM) return;
  struct sigaction system_own{};
  system_own.sa_handler = SIG_DFL;
  hand_on(number, system_own);
}

void on_worker_terminate(int number, siginfo_t* info, void* context) {
  if (info->si_pid != getppid()) return;
  // torch's handler asks who has sent the signal, so it is called, not raised again.
  if ((before_shield.sa_flags & SA_SIGINFO) != 0) {
    before_shield.sa_sigaction(number, info, context);
  } else {
    hand_on(number, before_shield);
  }
}

struct sigaction current(int number) {
  struct sigaction action{};
  if (sigaction(number, nullptr, &action) != 0) throw std::system_error(errno, std::generic_category(), "sigaction");
  return action;
}

void set(int number, void (*handler)(int)) {
  struct sigaction action{};
  action.sa_handler = handler;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  if (sigaction(number, &action, nullptr) != 0) throw std::system_error(errno, std::generic_category(), "sigaction");
}

}  // namespace

bool hear_terminate(std::shared_ptr<Board> board, std::uint32_t rank) {
  asked_word.store(&board->record(rank).asked);
  owner.store(getpid());
  held = std::move(board);
  for (const int number : heard) {
    if (current(number).sa_handler == SIG_DFL) set(number, on_terminate);
  }
  return current(SIGTERM).sa_handler == on_terminate;
}

void shield_worker() {
  if (asked_word.load() == nullptr || owner.load() != getppid()) return;
  before_shield = current(SIGTERM);
  struct sigaction action{};
  action.sa_sigaction = on_worker_terminate;
  action.sa_flags = SA_RESTART | SA_SIGINFO;
  sigemptyset(&action.sa_mask);
  if (sigaction(SIGTERM, &action, nullptr) != 0) {
    throw std::system_error(errno, std::generic_category(), "sigaction");
  }
}

void leave_terminate() {
  if (held == nullptr) return;
  for (const int number : heard) {
    if (current(number).sa_handler == on_terminate) set(number, SIG_DFL);
  }
  asked_word.store(nullptr);
  held.reset();
}

}  // namespace resilient
