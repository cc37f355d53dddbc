// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <csignal>
#include <thread>
#include <utility>

#include <pthread.h>

namespace resilient {

// A thread that takes no signal: a handler of the user's must never run on a thread that Python does not know.
// The mask is set before the thread exists, so there is no moment at which it could take one.
template <typename Body>
std::thread start_native_thread(const char* name, Body&& body) {
  sigset_t all{};
  sigset_t before{};
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread thread;
  try {
    thread = std::thread(std::forward<Body>(body));
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_setname_np(thread.native_handle(), name);
  return thread;
}

}  // namespace resilient
