// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
#include "probes/comm_probe.hpp"

namespace resilient {
namespace {

constexpr int failures_max = 3;

}  // namespace

void CommProbe::resolve() {
  get_error_ = library_.find<abi::HcclGetCommAsyncError>(names_.get_error);
  get_text_ = library_.find<abi::HcclGetErrorString>(names_.get_text);
}

void CommProbe::poll(Calls& calls) {
  for (const CommTable::Handle comm : comms_.list()) {
    const CommTable::Hold hold(comms_, comm);
    if (hold) look(calls, comm);
  }
}

bool CommProbe::is_news(CommTable::Handle comm, abi::Code error) {
  abi::Code& last = published_[comm];
  const bool news = last != error && error != 0;
  last = error;
  return news;
}

void CommProbe::look(Calls& calls, CommTable::Handle comm) {
  abi::Code error = 0;
  const abi::Code result = calls.call(names_.get_error, [&] { return get_error_(as_comm(comm), &error); });
  if (result != 0) {
    if (++failures_ < failures_max) return;
    throw Distrust(std::string(names_.get_error) + " failed " + std::to_string(failures_) +
                   " times in a row, last with " + std::to_string(result));
  }
  failures_ = 0;
  if (error < 0 || error > names_.code_max) {
    throw Distrust(std::string(names_.get_error) + " reported " + std::to_string(error));
  }
  if (is_pending(error) || !is_news(comm, error)) return;
  std::string text;
  const bool has_text =
      get_text_ == nullptr || read_text(calls.call(names_.get_text, [&] { return get_text_(error); }), text);
  if (text.empty() || !has_text) text = std::string(names_.code_type) + " " + std::to_string(error);
  // First what it saw, which is the better news, then no more of it.
  calls.publish({classify(error), name(), error, std::move(text), {}, comm});
  if (!has_text) throw Distrust(std::string(names_.get_text) + " gave no readable text");
}

}  // namespace resilient
