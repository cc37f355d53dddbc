// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

namespace resilient {

// A vendor's library, loaded by name and never unloaded: it may have threads of its own by then.
class Library {
 public:
  explicit Library(std::string name) : name_(std::move(name)) {}

  const std::string& name() const { return name_; }
  // By somebody else, or by an earlier open.
  bool is_loaded() const;
  // Empty, or the reason.
  std::string open();
  template <typename Function>
  Function* find(const char* symbol) {
    return reinterpret_cast<Function*>(find_address(symbol));
  }
  // Symbols that were looked for in vain.
  const std::vector<std::string>& missing() const { return missing_; }
  std::string lacks(const char* symbol) const;

 private:
  void* find_address(const char* symbol);

  const std::string name_;
  void* handle_ = nullptr;
  std::string reason_;
  std::vector<std::string> missing_;
};

// Copies a text that a library points to, without trusting the pointer. False if it is null, cannot be read, or does
// not end within 256 bytes. What is not printable ASCII is replaced.
bool read_text(const char* text, std::string& copy);

}  // namespace resilient
