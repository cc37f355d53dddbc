// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
#include "probes/library.hpp"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace resilient {
namespace {

constexpr std::size_t text_bytes_max = 256;
constexpr std::uintptr_t page_bytes_min = 4096;

// The kernel reads for us: where we would get SIGSEGV, it says EFAULT. Not through libc, whose wrapper a sanitizer
// replaces by one that looks at the bytes itself.
std::size_t copy_through_pipe(const char* from, char* to, std::size_t bytes) {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC | O_NONBLOCK) != 0) return 0;
  const long written = ::syscall(SYS_write, ends[1], from, bytes);
  const long copied = written > 0 ? ::read(ends[0], to, static_cast<std::size_t>(written)) : 0;
  ::close(ends[0]);
  ::close(ends[1]);
  return copied > 0 ? static_cast<std::size_t>(copied) : 0;
}

}  // namespace

bool Library::is_loaded() const {
  void* const handle = ::dlopen(name_.c_str(), RTLD_NOW | RTLD_NOLOAD);
  if (handle == nullptr) return false;
  ::dlclose(handle);  // only the count goes down
  return true;
}

std::string Library::open() {
  // RTLD_NOW: a library that lacks something of its own must fail here, with a reason, and not in a call.
  handle_ = ::dlopen(name_.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle_ == nullptr) {
    const char* const why = ::dlerror();
    reason_ = why != nullptr ? why : name_ + " cannot be loaded";
  }
  return reason_;
}

std::string Library::lacks(const char* symbol) const {
  return handle_ == nullptr ? reason_ : name_ + " has no " + symbol;
}

void* Library::find_address(const char* symbol) {
  void* const address = ::dlsym(handle_, symbol);
  if (address == nullptr) missing_.emplace_back(symbol);
  return address;
}

bool read_text(const char* text, std::string& copy) {
  copy.clear();
  if (text == nullptr) return false;
  std::array<char, page_bytes_min> buffer{};
  while (copy.size() < text_bytes_max) {
    const char* const from = text + copy.size();
    // Never across a page: the next one may not be there, and the text may well end before it.
    const std::size_t page_left = page_bytes_min - reinterpret_cast<std::uintptr_t>(from) % page_bytes_min;
    const std::size_t bytes = std::min(page_left, text_bytes_max - copy.size());
    if (copy_through_pipe(from, buffer.data(), bytes) != bytes) return false;
    const std::size_t length = ::strnlen(buffer.data(), bytes);
    copy.append(buffer.data(), length);
    if (length < bytes) {
      std::replace_if(copy.begin(), copy.end(), [](char each) { return each < ' ' || each > '~'; }, '?');
      return true;
    }
  }
  return false;
}

}  // namespace resilient
