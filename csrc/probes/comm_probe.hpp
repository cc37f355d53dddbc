// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <string>

#include "probes/comms.hpp"
#include "probes/probe.hpp"

namespace resilient {

// What HCCL and NCCL have in common: asynchronous errors of communicators, asked for by the same two calls.
class CommProbe : public Probe {
 public:
  void poll(Calls& calls) override;
  void forget() override { published_.clear(); }
  CommTable& comms() { return comms_; }

 protected:
  struct Names {
    const char* get_error;
    const char* get_text;
    const char* code_type;
    abi::Code code_max;  // generous: later versions may add to it
  };

  CommProbe(const char* name, std::string library, Names names) : Probe(name, std::move(library)), names_(names) {}
  virtual bool is_pending(abi::Code code) const = 0;
  virtual FindingKind classify(abi::Code code) const = 0;
  void resolve() override;
  bool can_see() const override { return get_error_ != nullptr; }

 private:
  void look(Calls& calls, CommTable::Handle comm);
  bool is_news(CommTable::Handle comm, abi::Code error);

  const Names names_;
  CommTable comms_;
  std::map<CommTable::Handle, abi::Code> published_;
  int failures_ = 0;
  abi::HcclGetCommAsyncError* get_error_ = nullptr;
  abi::HcclGetErrorString* get_text_ = nullptr;
};
static_assert(std::is_same_v<abi::HcclGetCommAsyncError, abi::ncclCommGetAsyncError>);
static_assert(std::is_same_v<abi::HcclGetErrorString, abi::ncclGetErrorString>);

}  // namespace resilient
