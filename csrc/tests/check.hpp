// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdio>
#include <cstdlib>
#include <functional>

#include <unistd.h>

#include "record.hpp"

#define CHECK(condition)                                                                 \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      std::fprintf(stderr, "%s:%d: CHECK(%s) failed\n", __FILE__, __LINE__, #condition); \
      std::_Exit(1);                                                                     \
    }                                                                                    \
  } while (false)

inline bool eventually(const std::function<bool()>& condition) {
  const std::int64_t end_ns = resilient::monotonic_ns() + 10'000'000'000;
  while (!condition()) {
    if (resilient::monotonic_ns() > end_ns) return false;
    ::usleep(200);
  }
  return true;
}

template <typename Error, typename Body>
void check_throws(Body&& body) {
  bool thrown = false;
  try {
    body();
  } catch (const Error&) {
    thrown = true;
  }
  CHECK(thrown);
}
