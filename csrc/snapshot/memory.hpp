// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

namespace resilient {

// Has the kernel back every page of a writable mapping now, so that no later store waits for it; what is there stays.
// `memory` is a multiple of the page size. Throws std::system_error where the kernel has no page to give.
void populate(std::byte* memory, std::size_t bytes);
// What `populate` does on kernels before Linux 5.14: a store to each page.
void touch_pages(std::byte* memory, std::size_t bytes);

}  // namespace resilient
