// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
//
// Threads that C++ has made and that call Python again and again, as gloo's do at the end of each collective. Whoever
// takes the GIL there makes a thread state and throws it away behind the call, with the pages of its stack: 100 to
// 200 us of CPU time a call, ten times what the call does. So the state stays until the thread ends.
#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <memory>

#include <nanobind/nanobind.h>

#include "module.hpp"

namespace nb = nanobind;

namespace {

struct Kept {
  PyThreadState* state;
  pid_t pid;
  Kept* next;
};

// Of threads that have ended. A stack without a lock, so that a fork can't leave one locked.
std::atomic<Kept*> ended{nullptr};

// A thread that ends can't take the GIL (the interpreter may be ending, too): it leaves its state to the next one.
struct AtThreadEnd {
  Kept* kept = nullptr;
  bool looked = false;

  ~AtThreadEnd() {
    if (kept == nullptr) return;
    kept->next = ended.load(std::memory_order_relaxed);
    while (!ended.compare_exchange_weak(kept->next, kept, std::memory_order_release, std::memory_order_relaxed)) {
    }
  }
};

thread_local AtThreadEnd at_thread_end;

void free_ended() {
  Kept* next = ended.exchange(nullptr, std::memory_order_acquire);
  while (next != nullptr) {
    const std::unique_ptr<Kept> each(next);
    next = each->next;
    if (each->pid != getpid()) continue;  // a fork's child frees the states of all threads that it has not
    PyThreadState_Clear(each->state);
    PyThreadState_Delete(each->state);
  }
}

// Whether the Python function that calls this was called by no other: then Python has not made this thread.
bool is_foreign() {
  PyFrameObject* const caller = PyEval_GetFrame();
  if (caller == nullptr) return true;
  const auto beneath = nb::steal(reinterpret_cast<PyObject*>(PyFrame_GetBack(caller)));
  return !beneath.is_valid();
}

void keep_thread_state() {
  if (at_thread_end.looked) return;
  at_thread_end.looked = true;
  if (!is_foreign()) return;
  free_ended();
  at_thread_end.kept = new Kept{PyThreadState_Get(), getpid(), nullptr};
  PyGILState_Ensure();  // never released: the state counts its users, and has one more now
}

}  // namespace

namespace resilient {

void bind_foreign_threads(nb::module_& module) { module.def("keep_thread_state", &keep_thread_state); }

}  // namespace resilient
