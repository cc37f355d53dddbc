// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "probes/finding.hpp"
#include "probes/library.hpp"

namespace resilient {

// The library's answer cannot be true, or it keeps failing: the probe is switched off, with this reason.
struct Distrust : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// There is nothing to look at on this machine: no driver, say. No fault.
struct Absent : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// What a probe may do while it polls. Every call into a vendor's library goes through call(), so that a watch runs.
class Calls {
 public:
  virtual ~Calls() = default;
  template <typename Body>
  auto call(const char* name, Body&& body) {
    begin(name);
    auto result = std::forward<Body>(body)();
    end();
    return result;
  }
  virtual void publish(Finding finding) = 0;
  // An ability that turned out not to be there; for status(), no fault.
  virtual void lack(std::string ability) = 0;

 protected:
  virtual void begin(const char* name) = 0;
  virtual void end() = 0;
};

class Probe {
 public:
  Probe(const char* name, std::string library) : name_(name), library_(std::move(library)) {}
  virtual ~Probe() = default;
  Probe(const Probe&) = delete;
  Probe& operator=(const Probe&) = delete;

  const char* name() const { return name_; }
  const Library& library() const { return library_; }
  // Loads the library and looks up its symbols, once. Empty, or the reason why this probe can see nothing.
  const std::string& open() {
    std::call_once(opened_, [this] { load(); });
    return reason_;
  }
  // Once, before the first poll, under the longer limit.
  virtual void prepare(Calls& calls) { (void)calls; }
  virtual void poll(Calls& calls) = 0;
  // What was published may be published again, if it is still there.
  virtual void forget() {}

 protected:
  virtual void resolve() = 0;
  virtual bool can_see() const = 0;

  // For what a caller asked for by name.
  template <typename Function>
  Function* need(Function* const& function, const char* symbol) {
    (void)open();
    if (function == nullptr) throw std::runtime_error(library_.lacks(symbol));
    return function;
  }

 private:
  void load() {
    reason_ = library_.open();
    if (!reason_.empty()) return;
    resolve();
    if (!can_see()) reason_ = library_.name() + " has none of the symbols that could show a fault";
  }

  const char* const name_;

 protected:
  Library library_;

 private:
  std::once_flag opened_;
  std::string reason_;
};

}  // namespace resilient
