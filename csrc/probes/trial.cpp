// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
#include "probes/trial.hpp"

#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "record.hpp"

extern char** environ;

namespace resilient {
namespace {

constexpr long syscall_close_range = 436;  // the same number on every architecture
constexpr int report_fd = 3;
constexpr int look_interval_ms = 5;

// Nobody listens, and nobody watches but the other process's clock.
class TrialCalls final : public Calls {
 public:
  void publish(Finding) override {}
  void lack(std::string) override {}

 private:
  void begin(const char*) override {}
  void end() override {}
};

// The program, with the descriptor as number 3. Negative: it can't be started.
pid_t start(const std::vector<std::string>& command, int fd) {
  std::vector<char*> arguments;
  for (const std::string& each : command) arguments.push_back(const_cast<char*>(each.c_str()));
  arguments.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  if (::posix_spawn_file_actions_init(&actions) != 0) return -1;
  pid_t child = -1;
  // One that is number 3 already loses its close-on-exec by this, too.
  const bool is_prepared = ::posix_spawn_file_actions_adddup2(&actions, fd, report_fd) == 0;
  if (!is_prepared || ::posix_spawn(&child, arguments[0], &actions, nullptr, arguments.data(), environ) != 0)
    child = -1;
  ::posix_spawn_file_actions_destroy(&actions);
  return child;
}

// Whether the child said that it came through.
bool has_reported(int fd, int wait_ms) {
  pollfd readable{fd, POLLIN, 0};
  char byte = 0;
  return ::poll(&readable, 1, wait_ms) == 1 && ::read(fd, &byte, 1) == 1 && byte == 'k';
}

std::string describe_end(int status) {
  if (WIFSIGNALED(status)) return std::string("the trial call ended with ") + ::strsignal(WTERMSIG(status));
  return "the trial call ended the process";
}

// Not for ever: a child inside a driver may not even hear SIGKILL. It then stays behind.
void end_child(pid_t child) {
  ::kill(child, SIGKILL);
  for (int look = 0; look < 200; ++look) {
    if (::waitpid(child, nullptr, WNOHANG) != 0) return;
    ::poll(nullptr, 0, look_interval_ms);
  }
}

std::string await_child(pid_t child, int fd, std::int64_t limit_ns, const std::function<bool()>& unwanted) {
  const std::int64_t end_ns = monotonic_ns() + limit_ns;
  for (;;) {
    // Not the end of file, which another thread's fork may hold back, nor the status alone, which the program's own
    // SIGCHLD handler may have taken.
    if (has_reported(fd, look_interval_ms)) {
      end_child(child);
      return "";
    }
    int status = 0;
    const pid_t ended = ::waitpid(child, &status, WNOHANG);
    if (ended != 0) {
      if (has_reported(fd, 0)) return "";
      return ended == child ? describe_end(status) : "the trial call ended the process";
    }
    if (unwanted() || monotonic_ns() > end_ns) {
      end_child(child);
      return "the trial call did not return";
    }
  }
}

}  // namespace

std::string try_in_process(const std::vector<std::string>& command, std::int64_t limit_ns,
                           const std::function<bool()>& unwanted) {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) return "";
  const pid_t child = start(command, ends[1]);
  ::close(ends[1]);
  const std::string outcome = child < 0 ? "" : await_child(child, ends[0], limit_ns, unwanted);
  ::close(ends[0]);
  return outcome;
}

void run_trial(Probe& probe) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
  // Whoever started us may be gone already: no signal comes for that, and nobody would end a call that hangs.
  pollfd report{report_fd, 0, 0};
  if (::poll(&report, 1, 0) != 0) ::_exit(1);
  ::prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);  // no core file
  for (const int number : {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT}) ::signal(number, SIG_DFL);
  // A driver's descriptors may have come along. 0 to 2 stay as they are.
  ::syscall(syscall_close_range, static_cast<unsigned>(report_fd + 1), ~0U, 0U);
  try {
    TrialCalls calls;
    if (probe.open().empty()) {
      probe.prepare(calls);
      probe.poll(calls);
    }
  } catch (...) {  // whoever distrusts the answer will do so where it counts, too
  }
  const ssize_t written = ::write(report_fd, "k", 1);
  ::_exit(written == 1 ? 0 : 1);
}

}  // namespace resilient
