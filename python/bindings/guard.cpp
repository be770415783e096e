#include <Python.h>
#include <structmember.h>

#include <cstddef>
#include <exception>
#include <string_view>

#include "bindings.h"

// A function of the compiled part, with one thing more: what nanobind says of arguments that fit no
// signature becomes an error of ours. A call that goes well costs a few nanoseconds more. All calls
// of Python are of its limited API of 3.12, so that one wheel serves all later versions.

namespace waybill::python {
namespace {

namespace nb = nanobind;

struct Guarded {
  PyObject_HEAD vectorcallfunc call;
  PyObject* function;  ///< of nanobind
};

Guarded* guarded(PyObject* self) { return reinterpret_cast<Guarded*>(self); }

/// Makes the error from (function, text, positional arguments, arguments by name); lives as long as
/// the interpreter.
nb::object& error_maker() {
  static auto* maker = new nb::object;  // never destroyed: the interpreter may be gone by then
  return *maker;
}

/// The error that is set becomes ours where it says that arguments fit no signature.
void explain(PyObject* function, PyObject* const* arguments, std::size_t count, PyObject* names) {
  nb::python_error error;
  const nb::str text(error.value());
  const bool fits_none =
      std::string_view(text.c_str()).find("(): incompatible function arguments.") !=
      std::string_view::npos;
  if (!fits_none || !error_maker().is_valid()) {
    error.restore();
    return;
  }
  nb::list given;
  for (std::size_t i = 0; i < count; ++i) given.append(nb::handle(arguments[i]));
  nb::dict by_name;
  const std::size_t num_names = names == nullptr ? 0 : nb::len(nb::handle(names));
  for (std::size_t i = 0; i < num_names; ++i)
    by_name[nb::handle(names)[i]] = nb::handle(arguments[count + i]);
  const nb::object made = error_maker()(nb::handle(function), text, given, by_name);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(made.ptr())), made.ptr());
}

PyObject* call(PyObject* self, PyObject* const* arguments, std::size_t flags, PyObject* names) {
  PyObject* const function = guarded(self)->function;
  PyObject* const result = PyObject_Vectorcall(function, arguments, flags, names);
  if (result != nullptr || PyErr_ExceptionMatches(PyExc_TypeError) == 0) return result;
  try {
    explain(function, arguments, static_cast<std::size_t>(PyVectorcall_NARGS(flags)), names);
  } catch (nb::python_error& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_SystemError, error.what());
  }
  return nullptr;
}

PyObject* bind(PyObject* self, PyObject* instance, PyObject* /*type*/) {
  if (instance == nullptr || instance == Py_None) return Py_NewRef(self);
  // Calls of methods do not come here: they know the type for one of method descriptors.
  PyObject* const types = PyImport_ImportModule("types");
  if (types == nullptr) return nullptr;
  PyObject* const made = PyObject_CallMethod(types, "MethodType", "OO", self, instance);
  Py_DECREF(types);
  return made;
}

/// Name, signature and text are those of the function.
PyObject* attribute(PyObject* self, PyObject* name) {
  return PyObject_GetAttr(guarded(self)->function, name);
}

PyObject* represent(PyObject* self) { return PyObject_Repr(guarded(self)->function); }

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(guarded(self)->function);
  Py_VISIT(Py_TYPE(self));
  return 0;
}

int clear(PyObject* self) {
  Py_CLEAR(guarded(self)->function);
  return 0;
}

void deallocate(PyObject* self) {
  PyObject_GC_UnTrack(self);
  PyTypeObject* const type = Py_TYPE(self);
  clear(self);
  PyObject_GC_Del(self);
  Py_DECREF(type);
}

PyTypeObject* guarded_type() {
  static PyMemberDef members[] = {
      {"__vectorcalloffset__", T_PYSSIZET, offsetof(Guarded, call), READONLY, nullptr},
      {nullptr, 0, 0, 0, nullptr}};
  static PyType_Slot slots[] = {{Py_tp_members, members},
                                {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
                                {Py_tp_descr_get, reinterpret_cast<void*>(bind)},
                                {Py_tp_getattro, reinterpret_cast<void*>(attribute)},
                                {Py_tp_repr, reinterpret_cast<void*>(represent)},
                                {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
                                {Py_tp_clear, reinterpret_cast<void*>(clear)},
                                {Py_tp_dealloc, reinterpret_cast<void*>(deallocate)},
                                {0, nullptr}};
  static PyType_Spec spec = {"waybill._core.Function", sizeof(Guarded), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL |
                                 Py_TPFLAGS_METHOD_DESCRIPTOR | Py_TPFLAGS_HAVE_GC |
                                 Py_TPFLAGS_DISALLOW_INSTANTIATION,
                             slots};
  static auto* const type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  if (type == nullptr) throw nb::python_error();
  return type;
}

nb::object guard(nb::handle function) {
  PyTypeObject* const type = guarded_type();
  PyObject* const made = PyType_GenericAlloc(type, 0);
  if (made == nullptr) throw nb::python_error();
  guarded(made)->call = call;
  guarded(made)->function = function.inc_ref().ptr();
  return nb::steal(made);
}

/// Operators (`__eq__` and its kind) answer arguments of other types by themselves.
bool is_plain_function(nb::handle name, nb::handle value) {
  const nb::str type_name(value.type().attr("__name__"));
  const std::string_view type = type_name.c_str();
  const nb::str name_text(name);
  const std::string_view text = name_text.c_str();
  return (type == "nb_func" || type == "nb_method") && !text.starts_with("__");
}

void guard_members(nb::handle owner) {
  for (const auto item : nb::list(nb::object(owner.attr("__dict__")).attr("items")())) {
    const nb::handle name = item[0];
    const nb::handle value = item[1];
    if (is_plain_function(name, value)) nb::setattr(owner, name, guard(value));
  }
}

}  // namespace

void guard_functions(nb::module_& m) {
  m.def("set_error_maker", [](const nb::object& maker) { error_maker() = maker; });
  guard_members(m);
  for (const auto item : nb::list(nb::object(m.attr("__dict__")).attr("items")())) {
    if (nb::isinstance<nb::type_object>(item[1])) guard_members(item[1]);
  }
}

}  // namespace waybill::python
