// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>

#include "record.hpp"

namespace resilient {

// A first SIGTERM or SIGUSR1 to this process is written into the rank's record and does nothing else; the agent reads
// it there. A second SIGTERM ends the process, as does one that comes after the agent has written the word itself.
// A SIGTERM ends a forked child (but see shield_worker); a SIGUSR1, by which it would end, does nothing there: it was
// sent to all processes, and meant the rank. A signal with another handler than the system's own keeps it; false if
// SIGTERM has one.
//
// Written in C because the main thread may not run Python for minutes: it waits in a collective or in a driver.
bool hear_terminate(std::shared_ptr<Board> board, std::uint32_t rank);

// Back to the system's own. Does nothing if hear_terminate has not been called, or somebody else has the signal now.
void leave_terminate();

// In a child that such a rank has forked and needs (a data loader's worker): a SIGTERM that does not come from the rank
// itself does nothing, and one that does finds the handler that stood before. Does nothing in any other process.
void shield_worker();

}  // namespace resilient
