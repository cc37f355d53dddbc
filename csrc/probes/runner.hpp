// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
//
// Polls each probe on a native thread of its own, without the GIL, and watches the calls: a library that hangs, lies
// or crashes loses its probe, never the job.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "probes/probe.hpp"

namespace resilient {

struct RunnerOptions {
  std::int64_t poll_ms = 50;
  std::int64_t call_limit_ms = 2'000;
  std::int64_t open_limit_ms = 30'000;  // of loading the library, of its first calls, and of the trial
  // The program that makes a library's first calls before it is trusted, where nobody has loaded it yet; the probe's
  // name and the library's follow. Empty: no trial.
  std::vector<std::string> trial;
};

struct ProbeStatus {
  std::string name;
  std::string state;  // waiting, opening, polling, absent, disabled, stopped
  std::string reason;
  std::vector<std::string> missing;  // what the library cannot do
  std::uint64_t polls = 0;
};

class ProbeRunner {
 public:
  ProbeRunner(std::vector<std::shared_ptr<Probe>> probes, RunnerOptions options);
  ~ProbeRunner();
  ProbeRunner(const ProbeRunner&) = delete;
  ProbeRunner& operator=(const ProbeRunner&) = delete;

  // Before start. Called on the probes' threads for every finding; must neither block nor throw.
  void set_listener(std::function<void(const Finding&)> listener);
  void start();
  // Within call_limit_ms. Names the probes whose thread is inside a call that does not return; it is left there.
  std::vector<std::string> stop();
  int fd() const;
  std::vector<Finding> take();
  // After a recovery: what is still wrong then is news again.
  void rearm();
  std::vector<ProbeStatus> status() const;

 private:
  struct Shared;
  class Worker;
  bool foreign() const;

  const RunnerOptions options_;
  // Held by the threads too: one that never comes back must not find its memory gone.
  std::shared_ptr<Shared> shared_;
};

}  // namespace resilient
