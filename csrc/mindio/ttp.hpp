// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
//
// The two libraries that MindSpore's C++ code opens beside the Python package mindio_ttp, and no header of MindIO's.
//
// libttp_c_api.so exports the two functions with MindIO's names. libttp_framework.so, which MindSpore opens before it,
// holds where they lead: to functions that Python hands in (integrations/mindio/c_api.py). So the one exports nothing
// but the contract, and ctypes is the whole binding: its callbacks take the GIL in any thread, and nest where the
// caller has it. An extension module would do the same by hand, and could be found by no dlopen of a path.
//
// All may be called in any thread, at any time. Nobody is called from the moment on in which `resilient_ttp_connect`
// with null has returned: that is before Python's interpreter ends, when to ask it for the GIL would end the thread.
#pragma once

#include <cstdint>

#define RESILIENT_TTP_EXPORT extern "C" __attribute__((visibility("default")))

namespace resilient::ttp {

using Mark = int (*)(std::int64_t step);

// What a mark returns, besides what Python's functions do: 0 (done) or 1 (not done, and logged).
constexpr int nobody = 2;  // no processor in this process, or not any more

}  // namespace resilient::ttp

RESILIENT_TTP_EXPORT int MindioTtpSetOptimStatusUpdating(std::int64_t backup_step);
RESILIENT_TTP_EXPORT int MindioTtpSetOptimStatusFinished(std::int64_t step);

RESILIENT_TTP_EXPORT int resilient_ttp_updating(std::int64_t backup_step);
RESILIENT_TTP_EXPORT int resilient_ttp_finished(std::int64_t step);

// Both, or null for both. Returns when no call of before is under way: not to be called with the GIL, which it needs.
RESILIENT_TTP_EXPORT void resilient_ttp_connect(resilient::ttp::Mark updating, resilient::ttp::Mark finished);
