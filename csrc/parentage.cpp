// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
#include "parentage.hpp"

#include <cerrno>
#include <system_error>

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

namespace resilient {
namespace {

[[noreturn]] void fail(int number, const char* what) { throw std::system_error(number, std::generic_category(), what); }

// In a new fork: its session, and a word that it has it. Whoever knows its pid may then signal its group.
void begin_session(const int (&ends)[2]) {
  ::setsid();
  [[maybe_unused]] const ssize_t told = ::write(ends[1], "", 1);
  ::close(ends[0]);
  ::close(ends[1]);
}

}  // namespace

void die_with_parent(int signal_number) {
  if (::prctl(PR_SET_PDEATHSIG, static_cast<unsigned long>(signal_number), 0, 0, 0) != 0) {
    fail(errno, "prctl(PR_SET_PDEATHSIG)");
  }
}

void adopt_orphans() {
  if (::prctl(PR_SET_CHILD_SUBREAPER, 1UL, 0, 0, 0) != 0) fail(errno, "prctl(PR_SET_CHILD_SUBREAPER)");
}

// The process between us and the fork ends at once, so it needs no memory of its own: it runs in ours while we are
// held up (vfork). To copy the page tables of all that was imported, twice for each rank, took as long as the fork
// itself. The fork has a copy of this stack, so it may return, which the process between must not.
pid_t fork_orphan() {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) fail(errno, "pipe2");
  volatile pid_t born = -1;
  volatile int failed = 0;
  const pid_t between = ::vfork();
  if (between == 0) {
    const pid_t pid = ::fork();
    if (pid == 0) {
      begin_session(ends);
      return 0;
    }
    born = pid;
    failed = pid < 0 ? errno : 0;
    ::_exit(0);
  }
  if (between < 0) failed = errno;
  ::close(ends[1]);
  // Behind this the fork is nobody's child but its new parent's.
  while (between > 0 && ::waitpid(between, nullptr, 0) < 0 && errno == EINTR) {
  }
  char byte;
  while (born > 0 && ::read(ends[0], &byte, 1) < 0 && errno == EINTR) {
  }
  ::close(ends[0]);
  if (failed != 0) fail(failed, "fork");
  return born;
}

}  // namespace resilient
