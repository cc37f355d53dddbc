// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
#include "probes/bounded.hpp"

#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <exception>
#include <memory>
#include <stdexcept>
#include <system_error>

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "futex.hpp"
#include "native_thread.hpp"
#include "record.hpp"

namespace resilient {
namespace {

constexpr std::int64_t ns_per_ms = 1'000'000;
constexpr std::int64_t limit_ms_max = 3'600'000;
constexpr long syscall_close_range = 436;  // the same number on every architecture
constexpr int look_interval_ms = 5;

struct Errand {
  explicit Errand(std::function<std::int64_t()> its_body) : body(std::move(its_body)) {}
  void run() {
    try {
      result = body();
    } catch (...) {
      error = std::current_exception();
    }
    store(done, 1);
    futex::wake_all(&done);
  }

  const std::function<std::int64_t()> body;
  std::int64_t result = 0;
  std::exception_ptr error;
  std::uint32_t done = 0;  // futex word; the two above are read after it is set
};

[[noreturn]] void run_child(const std::function<void()>& body, int report_fd) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
  ::prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);  // a crash here is an answer, no reason for a core file
  for (const int number : {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT}) ::signal(number, SIG_DFL);
  // The parent's sockets and files are not ours to keep open; 0 to 2 stay as they are.
  const int kept_fd = ::dup2(report_fd, 3) == 3 ? 3 : report_fd;
  if (kept_fd == 3) ::syscall(syscall_close_range, 4U, ~0U, 0U);
  try {
    body();
  } catch (...) {  // whoever distrusts the answer will do so in the parent, too
  }
  const ssize_t written = ::write(kept_fd, "k", 1);
  ::_exit(written == 1 ? 0 : 1);
}

// Whether the child said that body returned.
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

std::string await_child(pid_t child, int report_fd, std::int64_t limit_ns, const std::function<bool()>& unwanted) {
  const std::int64_t end_ns = monotonic_ns() + limit_ns;
  for (;;) {
    // Not the end of file, which another thread's fork may hold back, nor the status alone, which the program's own
    // SIGCHLD handler may have taken.
    if (has_reported(report_fd, look_interval_ms)) {
      end_child(child);
      return "";
    }
    int status = 0;
    const pid_t ended = ::waitpid(child, &status, WNOHANG);
    if (ended != 0) {
      if (has_reported(report_fd, 0)) return "";
      return ended == child ? describe_end(status) : "the trial call ended the process";
    }
    if (unwanted() || monotonic_ns() > end_ns) {
      end_child(child);
      return "the trial call did not return";
    }
  }
}

}  // namespace

std::int64_t run_bounded(std::int64_t limit_ms, std::function<std::int64_t()> body) {
  if (limit_ms < 0 || limit_ms > limit_ms_max) throw std::invalid_argument("limit_ms must be 0..3600000");
  if (limit_ms == 0) return body();
  const auto errand = std::make_shared<Errand>(std::move(body));
  start_native_thread("rt-errand", [errand] { errand->run(); }).detach();
  const std::int64_t end_ns = monotonic_ns() + limit_ms * ns_per_ms;
  while (load(errand->done) == 0) {
    const std::int64_t left_ns = end_ns - monotonic_ns();
    if (left_ns <= 0) throw std::system_error(ETIMEDOUT, std::generic_category(), "call into a device library");
    futex::wait(&errand->done, 0, left_ns);
  }
  if (errand->error) std::rethrow_exception(errand->error);
  return errand->result;
}

std::string try_in_child(const std::function<void()>& body, std::int64_t limit_ns,
                         const std::function<bool()>& unwanted) {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) return "";  // no trial, then: that says nothing against the library
  const pid_t child = ::fork();
  if (child == 0) run_child(body, ends[1]);
  ::close(ends[1]);
  const std::string outcome = child < 0 ? "" : await_child(child, ends[0], limit_ns, unwanted);
  ::close(ends[0]);
  return outcome;
}

}  // namespace resilient
