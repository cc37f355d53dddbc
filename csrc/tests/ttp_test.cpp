// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
//
// Marks of many threads, while who takes them comes and goes.
#include <atomic>
#include <thread>
#include <vector>

#include "check.hpp"
#include "mindio/ttp.hpp"

namespace {

using resilient::ttp::nobody;

std::atomic<bool> listening = false;
std::atomic<int> inside = 0;
std::atomic<std::int64_t> taken = 0;

int take(std::int64_t step) {
  inside.fetch_add(1);
  CHECK(listening);
  taken.fetch_add(1);
  inside.fetch_sub(1);
  return step < 0 ? 0 : 1;
}

void connect(bool on) {
  if (on) listening = true;
  resilient_ttp_connect(on ? take : nullptr, on ? take : nullptr);
  if (on) return;
  CHECK(inside == 0);  // no call of before is under way
  listening = false;
}

void nobody_is_there() {
  CHECK(MindioTtpSetOptimStatusUpdating(-1) == nobody);
  CHECK(MindioTtpSetOptimStatusFinished(1) == nobody);
}

void answers_are_handed_on() {
  connect(true);
  CHECK(MindioTtpSetOptimStatusUpdating(-1) == 0);
  CHECK(MindioTtpSetOptimStatusFinished(7) == 1);
  connect(false);
  nobody_is_there();
}

void who_takes_them_comes_and_goes() {
  std::atomic<bool> done = false;
  std::vector<std::thread> threads;
  for (int each = 0; each < 4; ++each) {
    threads.emplace_back([&done] {
      while (!done) {
        const int first = MindioTtpSetOptimStatusUpdating(-1);
        CHECK(first == 0 || first == nobody);
        const int second = MindioTtpSetOptimStatusFinished(1);
        CHECK(second == 1 || second == nobody);
        std::this_thread::yield();  // or who connects would wait for ever: readers come first
      }
    });
  }
  for (int round = 0; round < 2000; ++round) {
    const std::int64_t before = taken;
    connect(true);
    CHECK(eventually([before] { return taken > before; }));
    connect(false);
  }
  done = true;
  for (std::thread& each : threads) each.join();
}

}  // namespace

int main() {
  nobody_is_there();
  answers_are_handed_on();
  who_takes_them_comes_and_goes();
  std::puts("ttp_test: all passed");
  return 0;
}
