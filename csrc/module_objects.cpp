// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
//
// Looks at thousands of Python objects, in every step: the entries of modules' dictionaries, a few attributes of
// tensors. The step between two looks has pushed all of them out of the caches, so a loop waits for memory, one object
// after the other. Here those that come next are fetched while one is looked at, and none is looked at twice.
#include <cstddef>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>

#include "module.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace resilient {

namespace {

constexpr Py_ssize_t ahead = 12;
constexpr std::ptrdiff_t line_bytes = 64;

// A list or a tuple as it is, and anything else as a list.
class Items {
 public:
  explicit Items(nb::handle sequence)
      : fast_(nb::steal(PySequence_Fast(sequence.ptr(), "a sequence of objects is wanted"))) {
    if (!fast_.is_valid()) throw nb::python_error();
  }
  Py_ssize_t size() const { return PySequence_Fast_GET_SIZE(fast_.ptr()); }
  PyObject* operator[](Py_ssize_t index) const { return PySequence_Fast_GET_ITEM(fast_.ptr(), index); }
  PyObject** begin() const { return PySequence_Fast_ITEMS(fast_.ptr()); }

 private:
  nb::object fast_;
};

// The first lines of a dictionary's table are asked for when the dictionary itself has come.
void fetch(const Items& dicts, Py_ssize_t index) {
  if (index + 2 * ahead < dicts.size()) __builtin_prefetch(dicts[index + 2 * ahead]);
  if (index + ahead >= dicts.size() || !PyDict_Check(dicts[index + ahead])) return;
  const void* keys = reinterpret_cast<PyDictObject*>(dicts[index + ahead])->ma_keys;
  for (int line = 0; line < 3; ++line) __builtin_prefetch(static_cast<const char*>(keys) + line * line_bytes);
}

// What stands there, borrowed; null for nothing.
PyObject* entry(PyObject* dict, PyObject* name) {
  if (!PyDict_Check(dict)) throw nb::type_error("dictionaries are wanted");
  PyObject* found = PyDict_GetItemWithError(dict, name);
  if (found == nullptr && PyErr_Occurred() != nullptr) throw nb::python_error();
  return found;
}

bool same_objects(nb::handle one, nb::handle other) {
  const Items first(one);
  const Items second(other);
  return first.size() == second.size() && std::equal(first.begin(), first.begin() + first.size(), second.begin());
}

nb::list entries(nb::handle dicts, nb::handle names, nb::handle missing) {
  const Items where(dicts);
  const Items called(names);
  nb::list found;
  for (Py_ssize_t index = 0; index < where.size() && index < called.size(); ++index) {
    fetch(where, index);
    PyObject* there = entry(where[index], called[index]);
    found.append(nb::handle(there == nullptr ? missing.ptr() : there));
  }
  return found;
}

bool entries_are(nb::handle dicts, nb::handle names, nb::handle known, nb::handle missing) {
  const Items where(dicts);
  const Items called(names);
  const Items wanted(known);
  if (where.size() != called.size() || where.size() != wanted.size()) return false;
  for (Py_ssize_t index = 0; index < where.size(); ++index) {
    fetch(where, index);
    PyObject* there = entry(where[index], called[index]);
    if ((there == nullptr ? missing.ptr() : there) != wanted[index]) return false;
  }
  return true;
}

// Each getter is the name of an attribute, or is called with the object.
nb::list columns(nb::handle objects, nb::tuple getters) {
  const Items looked_at(objects);
  std::vector<std::pair<PyObject*, nb::list>> wanted;
  for (const nb::handle getter : getters) wanted.emplace_back(getter.ptr(), nb::list());
  for (Py_ssize_t index = 0; index < looked_at.size(); ++index) {
    if (index + ahead < looked_at.size()) __builtin_prefetch(looked_at[index + ahead]);
    const nb::object each = nb::borrow(looked_at[index]);
    for (auto& [getter, column] : wanted) {
      PyObject* value =
          PyUnicode_Check(getter) ? PyObject_GetAttr(each.ptr(), getter) : PyObject_CallOneArg(getter, each.ptr());
      if (value == nullptr) throw nb::python_error();
      column.append(nb::steal(value));
    }
  }
  nb::list found;
  for (const auto& [getter, column] : wanted) found.append(column);
  return found;
}

}  // namespace

void bind_objects(nb::module_& module) {
  module.def("same_objects", &same_objects, "one"_a, "other"_a);
  module.def("entries", &entries, "dicts"_a, "names"_a, "missing"_a.none());
  module.def("entries_are", &entries_are, "dicts"_a, "names"_a, "known"_a, "missing"_a.none());
  module.def("columns", &columns, "objects"_a, "getters"_a);
}

}  // namespace resilient
