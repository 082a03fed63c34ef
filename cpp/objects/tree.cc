// What an update asks about its arguments: they are hundreds of weights at every step.
#include "objects/tree.h"

#include <algorithm>
#include <vector>

namespace nb = nanobind;

namespace {

using Kinds = std::vector<PyTypeObject*>;

// One step further down; an object that holds itself comes to an end by Python's limit.
class Deeper {
 public:
  Deeper() {
    if (Py_EnterRecursiveCall(" where an argument's arrays are sought") != 0)
      nb::raise_python_error();
  }
  ~Deeper() { Py_LeaveRecursiveCall(); }
  Deeper(const Deeper&) = delete;
  Deeper& operator=(const Deeper&) = delete;
};

// Adds the classes of what an object holds. No Python code runs, so nobody changes it meanwhile.
void AddKinds(PyObject* object, Kinds* kinds) {
  PyTypeObject* kind = Py_TYPE(object);
  if (kind != &PyDict_Type && kind != &PyList_Type && kind != &PyTuple_Type) {
    if (std::find(kinds->begin(), kinds->end(), kind) == kinds->end()) kinds->push_back(kind);
    return;
  }
  const Deeper deeper;
  if (kind == &PyDict_Type) {
    Py_ssize_t at = 0;
    PyObject *key, *value;
    while (PyDict_Next(object, &at, &key, &value) != 0) AddKinds(value, kinds);
  } else if (kind == &PyList_Type) {
    for (Py_ssize_t i = 0; i < PyList_Size(object); ++i) AddKinds(PyList_GetItem(object, i), kinds);
  } else {
    for (Py_ssize_t i = 0; i < PyTuple_Size(object); ++i)
      AddKinds(PyTuple_GetItem(object, i), kinds);
  }
}

nb::set KindsIn(nb::handle tree) {
  Kinds kinds;
  AddKinds(tree.ptr(), &kinds);
  nb::set found;
  for (PyTypeObject* kind : kinds) found.add(nb::handle(reinterpret_cast<PyObject*>(kind)));
  return found;
}

}  // namespace

void RegisterTree(nb::module_& m) {
  m.def("kinds_in", &KindsIn, nb::arg("tree").none(),
        nb::sig("def kinds_in(tree: object) -> set[type]"),
        "The classes of what dicts, lists and tuples hold, but for these three themselves.");
}
