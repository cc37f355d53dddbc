// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
#include "fake/control.hpp"
#include "probes/abi.hpp"
#include "record.hpp"

using resilient::abi::Code;
using resilient::abi::Comm;
using namespace resilient::fake;

RESILIENT_FAKE_EXPORT Code ncclCommGetAsyncError(Comm comm, Code* error) {
  Code result = 0;
  const std::uint64_t handle = number_of(static_cast<char*>(comm));
  const Mode mode = enter(Function::ncclCommGetAsyncError, result, {handle});
  *error = 0;
  if (result != 0 || control() == nullptr) return result;
  const std::uint64_t target = resilient::load(control()->comm);
  if (mode == Mode::garbage) {
    *error = 0x7777'7777;
  } else if (target == 0 || target == handle) {
    *error = resilient::load(control()->comm_error);
  }
  return result;
}

RESILIENT_FAKE_EXPORT const char* ncclGetErrorString(Code code) {
  Code result = 0;
  const Mode mode = enter(Function::ncclGetErrorString, result, {static_cast<std::uint64_t>(code)});
  if (mode == Mode::garbage) return reinterpret_cast<const char*>(8);
  return code == 0 ? "no error" : "unhandled error";
}

RESILIENT_FAKE_EXPORT Code ncclCommAbort(Comm comm) {
  Code result = 0;
  (void)enter(Function::ncclCommAbort, result, {number_of(static_cast<char*>(comm))});
  return result;
}

RESILIENT_FAKE_TYPE(ncclCommGetAsyncError);
RESILIENT_FAKE_TYPE(ncclGetErrorString);
RESILIENT_FAKE_TYPE(ncclCommAbort);
