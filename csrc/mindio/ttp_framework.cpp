// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
#include "mindio/ttp.hpp"

#include <mutex>
#include <shared_mutex>

namespace {

std::shared_mutex gate;  // shared while a call is under way
resilient::ttp::Mark to_updating = nullptr;
resilient::ttp::Mark to_finished = nullptr;

int call(const resilient::ttp::Mark& mark, std::int64_t step) {
  const std::shared_lock lock(gate);
  return mark == nullptr ? resilient::ttp::nobody : mark(step);
}

}  // namespace

int resilient_ttp_updating(std::int64_t backup_step) { return call(to_updating, backup_step); }

int resilient_ttp_finished(std::int64_t step) { return call(to_finished, step); }

void resilient_ttp_connect(resilient::ttp::Mark updating, resilient::ttp::Mark finished) {
  const std::unique_lock lock(gate);
  to_updating = updating;
  to_finished = finished;
}
