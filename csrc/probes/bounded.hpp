// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
//
// Calls that may never return, or may crash.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace resilient {

// Runs body on a thread of its own and waits for it; throws ETIMEDOUT as std::system_error when it takes longer. The
// thread then stays where it is, with what body captured. With limit_ms 0 body runs in the calling thread.
std::int64_t run_bounded(std::int64_t limit_ms, std::function<std::int64_t()> body);

// Runs body in a forked child first. Empty if it returned there; else how it ended. A child that takes too long, or is
// no longer wanted, is killed.
std::string try_in_child(const std::function<void()>& body, std::int64_t limit_ns,
                         const std::function<bool()>& unwanted);

}  // namespace resilient
