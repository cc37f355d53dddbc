// Copyright 2026 The resilient_train authors. SPDX-License-Identifier: Apache-2.0
//
// The variables of a function that runs, read so that it does not notice. `frame.f_locals` of Python before 3.13 writes
// the one dictionary that `locals()` gives, which the function may have kept, or have put a value of its own into; and
// which holds on to all of them until the function returns.
#include <nanobind/nanobind.h>

#include "module.hpp"

#if PY_VERSION_HEX < 0x030C0000
#include <internal/pycore_code.h>
#include <internal/pycore_frame.h>
#endif

namespace nb = nanobind;
using namespace nb::literals;

namespace resilient {

namespace {

void put(nb::dict& found, PyObject* name, PyObject* value) {
  if (PyDict_SetItem(found.ptr(), name, value) != 0) throw nb::python_error();
}

#if PY_VERSION_HEX < 0x030C0000
// As Objects/frameobject.c of 3.11 writes that dictionary. Whoever calls us from a frame has made its cells.
void read(nb::dict& found, PyFrameObject* frame, PyCodeObject* code) {
  const char* kinds = PyBytes_AS_STRING(code->co_localspluskinds);
  for (int each = 0; each < code->co_nlocalsplus; ++each) {
    PyObject* value = frame->f_frame->localsplus[each];
    const bool is_cell = (kinds[each] & (CO_FAST_CELL | CO_FAST_FREE)) != 0;
    if (value != nullptr && is_cell && PyCell_Check(value)) value = PyCell_GET(value);
    if (value != nullptr) put(found, PyTuple_GET_ITEM(code->co_localsplusnames, each), value);
  }
}
#else
void read(nb::dict& found, PyFrameObject* frame, PyCodeObject* code) {
  for (PyObject* names : {PyCode_GetVarnames(code), PyCode_GetCellvars(code), PyCode_GetFreevars(code)}) {
    const nb::object kept = nb::steal(names);
    if (!kept.is_valid()) throw nb::python_error();
    for (Py_ssize_t each = 0; each < PyTuple_GET_SIZE(names); ++each) {
      PyObject* name = PyTuple_GET_ITEM(names, each);
      const nb::object value = nb::steal(PyFrame_GetVar(frame, name));
      if (value.is_valid()) {
        put(found, name, value.ptr());
      } else if (PyErr_ExceptionMatches(PyExc_NameError) != 0) {
        PyErr_Clear();  // nothing is in it
      } else {
        throw nb::python_error();
      }
    }
  }
}
#endif

nb::dict variables_of(nb::handle frame) {
  if (!PyFrame_Check(frame.ptr())) throw nb::type_error("a frame is wanted");
  auto* running = reinterpret_cast<PyFrameObject*>(frame.ptr());
  const nb::object code = nb::steal(reinterpret_cast<PyObject*>(PyFrame_GetCode(running)));
  nb::dict found;
  read(found, running, reinterpret_cast<PyCodeObject*>(code.ptr()));
  return found;
}

}  // namespace

void bind_frames(nb::module_& module) {
  module.def("function_variables", &variables_of, "frame"_a,
             "Of a function that runs: what its names hold now, those of functions around it as well.");
}

}  // namespace resilient
