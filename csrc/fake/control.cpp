// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
#include "fake/control.hpp"

#include <cstdlib>
#include <cstring>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "record.hpp"

namespace resilient::fake {
namespace {

constexpr useconds_t look_interval_us = 200;
constexpr std::uint8_t poison_pattern = 0xA5;

Control* attach() {
  const char* const path = std::getenv("RESILIENT_FAKE_DEVICE");
  if (path == nullptr) return nullptr;
  const int fd = ::open(path, O_RDWR | O_CLOEXEC);
  struct stat status{};
  void* memory = MAP_FAILED;
  if (fd >= 0 && ::fstat(fd, &status) == 0 && status.st_size == sizeof(Control)) {
    memory = ::mmap(nullptr, sizeof(Control), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  }
  if (fd >= 0) ::close(fd);
  auto* const control = memory == MAP_FAILED ? nullptr : static_cast<Control*>(memory);
  // A test that believes it injects faults must not pass against a healthy device.
  if (control == nullptr || control->magic != magic || control->version != version ||
      control->bytes != sizeof(Control)) {
    std::abort();
  }
  return control;
}

void write_down(Control& shared, Function function, const std::array<std::uint64_t, arguments_max>& arguments) {
  const std::uint64_t index = std::atomic_ref(shared.next_call).fetch_add(1);
  Call& call = shared.calls[index % calls_max];
  call.function = static_cast<std::uint32_t>(function);
  call.pid = static_cast<std::uint32_t>(::getpid());
  call.arguments = arguments;
  store(call.number, index + 1);
}

// A true one: a signal that is only sent would wait for ever in a thread that takes none.
void crash() {
  volatile std::uintptr_t nowhere = 8;
  *reinterpret_cast<volatile char*>(nowhere) = 0;
}

}  // namespace

Control* control() {
  static Control* const shared = attach();
  return shared;
}

Mode enter(Function function, std::int32_t& result, const std::array<std::uint64_t, arguments_max>& arguments) {
  result = 0;
  Control* const shared = control();
  if (shared == nullptr) return Mode::normal;
  Behaviour& behaviour = shared->behaviours[static_cast<std::size_t>(function)];
  increment(behaviour.count);
  write_down(*shared, function, arguments);
  if (const std::uint32_t latency_us = load(behaviour.latency_us)) ::usleep(latency_us);
  const auto mode = static_cast<Mode>(load(behaviour.mode));
  if (mode == Mode::crash) crash();
  while (static_cast<Mode>(load(behaviour.mode)) == Mode::hang) ::usleep(look_interval_us);
  result = load(behaviour.result);
  return mode == Mode::hang ? Mode::normal : mode;
}

void poison() {
  Control* const shared = control();
  if (shared == nullptr || load(shared->range_pid) != static_cast<std::uint32_t>(::getpid())) return;
  if (!exchange_if(shared->poison_pending, 1, 0)) return;
  for (std::uint32_t index = 0; index < shared->range_count; ++index) {
    auto* const bytes = reinterpret_cast<volatile std::uint8_t*>(shared->ranges[index].address);
    // Never the byte that was there.
    for (std::uint64_t at = 0; at < shared->ranges[index].bytes; ++at) bytes[at] = bytes[at] ^ poison_pattern;
  }
  increment(shared->poison_finished);
}

const char* endless_text() {
  static const char* const text = [] {
    const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
    void* const memory = ::mmap(nullptr, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) std::abort();
    std::memset(memory, 'x', page);
    ::mprotect(static_cast<char*>(memory) + page, page, PROT_NONE);
    return static_cast<const char*>(memory) + page - 100;
  }();
  return text;
}

}  // namespace resilient::fake
