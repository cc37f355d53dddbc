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

#if PY_VERSION_HEX >= 0x030C0000
// From Python 3.12 on, a thread that deletes a state, whosever it is, no longer knows its own: the next
// `PyGILState_Ensure` would make a second one, and wait for ever for the GIL that the first one holds. So a state made
// for the while takes the thread meanwhile. Ours is pushed aside when that one comes, and is found again when it
// returns to a thread that has none (`tstate_activate` of Python/pystate.c).
class StateForTheWhile {
 public:
  StateForTheWhile() : ours_(PyThreadState_Get()), other_(PyThreadState_New(PyThreadState_GetInterpreter(ours_))) {
    if (other_ != nullptr) PyThreadState_Swap(other_);
  }
  ~StateForTheWhile() {
    if (other_ == nullptr) return;
    PyThreadState_Clear(other_);
    PyThreadState_DeleteCurrent();  // which lets go of the GIL
    PyEval_RestoreThread(ours_);
  }
  StateForTheWhile(const StateForTheWhile&) = delete;
  StateForTheWhile& operator=(const StateForTheWhile&) = delete;
  bool is_there() const { return other_ != nullptr; }

 private:
  PyThreadState* ours_;
  PyThreadState* other_;
};
#else
struct StateForTheWhile {
  bool is_there() const { return true; }
};
#endif

void free_ended() {
  if (ended.load(std::memory_order_relaxed) == nullptr) return;
  const StateForTheWhile for_the_while;
  if (!for_the_while.is_there()) return;  // no memory: the next one tries
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
