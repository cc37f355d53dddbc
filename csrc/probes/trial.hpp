// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
//
// A library's first calls, in a process of their own: a crash there is an answer.
//
// A new program, no fork of this process: of a process with threads only the fork's own thread goes on in the child,
// and what another one had locked stays locked there. With glibc 2.36 a dlopen in the child waits for ever if any
// thread was loading a library at that moment: the probe beside this one, or an import. The fork also had to copy the
// page tables, and took a driver's mappings along.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "probes/probe.hpp"

namespace resilient {

// Runs a program that is to call run_trial. Empty if the calls came back; else how it ended. A program that takes too
// long, or is no longer wanted, is killed; one that can't be started says nothing against the library.
std::string try_in_process(const std::vector<std::string>& command, std::int64_t limit_ns,
                           const std::function<bool()>& unwanted);

// Never returns: opens the library, makes the probe's first calls, and reports to the process that started this one,
// with which it ends.
[[noreturn]] void run_trial(Probe& probe);

}  // namespace resilient
