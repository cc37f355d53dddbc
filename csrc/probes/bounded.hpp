// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
//
// Calls that may never return.
#pragma once

#include <cstdint>
#include <functional>

namespace resilient {

// Runs body on a thread of its own and waits for it; throws ETIMEDOUT as std::system_error when it takes longer. The
// thread then stays where it is, with what body captured. With limit_ms 0 body runs in the calling thread.
std::int64_t run_bounded(std::int64_t limit_ms, std::function<std::int64_t()> body);

}  // namespace resilient
