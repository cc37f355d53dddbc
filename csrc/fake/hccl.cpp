// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
#include "fake/control.hpp"
#include "probes/abi.hpp"
#include "record.hpp"

using resilient::abi::Code;
using resilient::abi::Comm;
using namespace resilient::fake;

namespace {

bool is_hit(Comm comm) {
  const std::uint64_t target = resilient::load(control()->comm);
  return target == 0 || target == number_of(static_cast<char*>(comm));
}

}  // namespace

RESILIENT_FAKE_EXPORT Code HcclGetCommAsyncError(Comm comm, Code* error) {
  Code result = 0;
  const Mode mode = enter(Function::HcclGetCommAsyncError, result, {number_of(static_cast<char*>(comm))});
  *error = 0;
  if (result != 0 || control() == nullptr) return result;
  if (mode == Mode::garbage) {
    *error = -559'038'737;
  } else if (is_hit(comm)) {
    *error = resilient::load(control()->comm_error);
  }
  return result;
}

RESILIENT_FAKE_EXPORT const char* HcclGetErrorString(Code code) {
  Code result = 0;
  const Mode mode = enter(Function::HcclGetErrorString, result, {static_cast<std::uint64_t>(code)});
  if (mode == Mode::garbage) return result == 0 ? nullptr : endless_text();
  return code == 0 ? "no error" : "collective \x01 error";
}

RESILIENT_FAKE_EXPORT Code HcclCommSuspend(Comm comm) {
  Code result = 0;
  (void)enter(Function::HcclCommSuspend, result, {number_of(static_cast<char*>(comm))});
  if (result == 0 && control() != nullptr) resilient::store(control()->comm_error, resilient::abi::hccl_suspending);
  return result;
}

RESILIENT_FAKE_EXPORT Code HcclCommResume(Comm comm) {
  Code result = 0;
  (void)enter(Function::HcclCommResume, result, {number_of(static_cast<char*>(comm))});
  if (result == 0 && control() != nullptr) resilient::store(control()->comm_error, resilient::abi::hccl_success);
  return result;
}

RESILIENT_FAKE_EXPORT Code HcclCommDestroy(Comm comm) {
  Code result = 0;
  (void)enter(Function::HcclCommDestroy, result, {number_of(static_cast<char*>(comm))});
  return result;
}

RESILIENT_FAKE_TYPE(HcclGetCommAsyncError);
RESILIENT_FAKE_TYPE(HcclGetErrorString);
RESILIENT_FAKE_TYPE(HcclCommSuspend);
RESILIENT_FAKE_TYPE(HcclCommResume);
RESILIENT_FAKE_TYPE(HcclCommDestroy);
