// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
// Whose child a process is, and whose it becomes.
#pragma once

#include <sys/types.h>

namespace resilient {

void die_with_parent(int signal_number);

// From here on this process is the parent of descendants whose own parent has ended, and has to reap them.
void adopt_orphans();

// A fork of this process, in a session of its own, whose parent is whoever adopts this process's orphans. Returns as
// fork does; what throws std::system_error has made no process.
pid_t fork_orphan();

}  // namespace resilient
