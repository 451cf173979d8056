// What keywords mean that calls repeat, without Python: compare a call's keywords and options with those whose meaning is known,
// and put its tensors in their places. Knows no keyword: runtime/call/foreign_keywords.py finds the meanings.
#pragma once
#include "native_launcher.h"

namespace {
constexpr const char* kKeywordsName = "gdn_codegen keywords";

// Whether two values are the same option: 1 equals True, but is another one.
bool SameValue(PyObject* a, PyObject* b) {
  if (a == b) return true;
  if (Py_TYPE(a) != Py_TYPE(b)) return false;
  const int equal = PyObject_RichCompareBool(a, b, Py_EQ);
  if (equal < 0) PyErr_Clear();
  return equal > 0;
}

bool IsTensor(PyObject* x) {
  return Py_TYPE(x) == reinterpret_cast<PyTypeObject*>(THPVariableClass) ||
         Py_TYPE(x) == reinterpret_cast<PyTypeObject*>(ParameterClass);
}

struct Keywords {
  py::object about, options;                // what else the call says, and the options that it has in our words
  std::vector<py::object> said, names;      // options as given, and the keywords
  std::vector<bool> given;                  // which tensors are given
  std::vector<std::string> sorts;           // of the keywords' values: "tensor", "equal" to that of `values`, or "any"
  std::vector<py::object> values;
  std::vector<int64_t> places;              // of each tensor, among those given and the keywords' values; -1 for None
  std::vector<std::pair<int64_t, std::vector<int64_t>>> shapes;  // that tensors must have, by the same numbers

  explicit Keywords(const py::dict& d)
      : about(d["about"]), options(d["options"]), said(d["said"].cast<std::vector<py::object>>()),
        names(d["names"].cast<std::vector<py::object>>()), given(d["given"].cast<std::vector<bool>>()),
        sorts(d["sorts"].cast<std::vector<std::string>>()), values(d["values"].cast<std::vector<py::object>>()),
        places(d["places"].cast<std::vector<int64_t>>()), shapes(d["shapes"].cast<decltype(shapes)>()) {}

  // (tensors, options), or null where the call says something else.
  PyObject* operator()(PyObject* t, PyObject* x, PyObject* others, PyObject* more) const {
    if (!PyTuple_Check(t) || !PyTuple_Check(x) || !PyDict_CheckExact(others)) return nullptr;
    const auto count = [](const auto& y) { return static_cast<Py_ssize_t>(y.size()); };
    if (PyTuple_GET_SIZE(t) != count(given) || PyTuple_GET_SIZE(x) != count(said) || PyDict_Size(others) != count(names))
      return nullptr;
    std::vector<PyObject*> found;
    for (Py_ssize_t i = 0; i < count(given); ++i) {
      found.push_back(PyTuple_GET_ITEM(t, i));
      if ((found.back() != Py_None) != given[i]) return nullptr;
    }
    PyObject *name, *y;
    for (Py_ssize_t i = 0, at = 0; PyDict_Next(others, &at, &name, &y); ++i) {
      if (!SameValue(name, names[i].ptr())) return nullptr;
      const bool fits = sorts[i] == "tensor" ? IsTensor(y) : sorts[i] == "any" || SameValue(y, values[i].ptr());
      if (!fits) return nullptr;
      found.push_back(y);
    }
    for (Py_ssize_t i = 0; i < count(said); ++i)
      if (!SameValue(PyTuple_GET_ITEM(x, i), said[i].ptr())) return nullptr;
    if (!SameValue(more, about.ptr())) return nullptr;
    for (const auto& [i, shape] : shapes)
      if (!IsTensor(found[i]) || THPVariable_Unpack(found[i]).sizes() != at::IntArrayRef(shape)) return nullptr;
    PyObject* tensors = PyTuple_New(count(places));
    for (Py_ssize_t i = 0; tensors && i < count(places); ++i)
      PyTuple_SET_ITEM(tensors, i, Py_NewRef(places[i] < 0 ? Py_None : found[places[i]]));
    PyObject* both = tensors ? PyTuple_Pack(2, tensors, options.ptr()) : nullptr;
    Py_XDECREF(tensors);
    return both;
  }
};

PyObject* Translate(PyObject* self, PyObject* const* args, Py_ssize_t n) {
  const auto* known = static_cast<Keywords*>(PyCapsule_GetPointer(self, kKeywordsName));
  PyObject* both = n == 4 ? (*known)(args[0], args[1], args[2], args[3]) : nullptr;
  if (both || PyErr_Occurred()) return both;
  Py_RETURN_NONE;
}

PyMethodDef kTranslate{"keywords", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(Translate)), METH_FASTCALL,
                       "(tensors, options, keywords, about) -> (tensors, options) in our words, or None"};

py::object MakeKeywords(const py::dict& d) {
  py::capsule self(new Keywords(d), kKeywordsName,
                   [](PyObject* c) { delete static_cast<Keywords*>(PyCapsule_GetPointer(c, kKeywordsName)); });
  return py::reinterpret_steal<py::object>(PyCFunction_New(&kTranslate, self.ptr()));
}
}  // namespace
