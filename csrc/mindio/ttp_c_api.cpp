// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
#include "mindio/ttp.hpp"

int MindioTtpSetOptimStatusUpdating(std::int64_t backup_step) { return resilient_ttp_updating(backup_step); }

int MindioTtpSetOptimStatusFinished(std::int64_t step) { return resilient_ttp_finished(step); }
