// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
#include "probes/bounded.hpp"

#include <cerrno>
#include <exception>
#include <memory>
#include <stdexcept>
#include <system_error>

#include "futex.hpp"
#include "native_thread.hpp"
#include "record.hpp"

namespace resilient {
namespace {

constexpr std::int64_t ns_per_ms = 1'000'000;
constexpr std::int64_t limit_ms_max = 3'600'000;

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

}  // namespace resilient
