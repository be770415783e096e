#include "errors.h"

#include <Python.h>
#include <nanobind/stl/string.h>
#include <structmember.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <string>
#include <string_view>
#include <typeinfo>
#include <utility>

#include "bindings.h"
#include "waybill/cuda/gpu_world.h"

namespace waybill::python {
namespace {

namespace nb = nanobind;
using namespace nb::literals;

/// Python's classes by the names of the library's, and "wrong_call", which makes an error from
/// nanobind's text, the arguments and those by name. They live as long as the interpreter.
nb::dict& error_types() {
  static auto* types = new nb::dict;  // never destroyed: the interpreter may be gone by then
  return *types;
}

void raise(const char* name, const char* text) {
  PyErr_SetString(nb::object(error_types()[name]).ptr(), text);
}

/// With what was missed as attributes.
void raise_timeout(const Timeout& error) {
  const TimeoutInfo& missed = error.missed();
  const nb::object made = nb::object(error_types()["Timeout"])(nb::str(error.what()));
  made.attr("operation") = missed.operation;
  made.attr("what") = missed.what;
  made.attr("rank") = missed.rank;
  made.attr("peer") = missed.peer;
  made.attr("wanted") = missed.wanted;
  made.attr("seen") = missed.seen;
  made.attr("seconds") = missed.seconds;
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(made.ptr())), made.ptr());
}

/// Raises as `name` if that is the error's type.
template <class Type>
bool raise_if(const std::exception& error, const char* name) {
  if (dynamic_cast<const Type*>(&error) == nullptr) return false;
  raise(name, error.what());
  return true;
}

/// Derived types come before their bases.
void translate(const std::exception_ptr& thrown, void* /*payload*/) {
  try {
    std::rethrow_exception(thrown);
  } catch (const PythonInterrupt& e) {
    e.restore();
  } catch (const PythonRaised& e) {
    e.restore();
  } catch (const Timeout& e) {
    raise_timeout(e);
  } catch (const Error& e) {
    (void)(raise_if<Disagreement>(e, "Disagreement") ||
           raise_if<InvalidArgument>(e, "InvalidArgument") ||
           raise_if<Unsupported>(e, "Unsupported") || raise_if<IoError>(e, "IoError") ||
           raise_if<PeerFailed>(e, "PeerFailed") || raise_if<Interrupted>(e, "Interrupted") ||
           raise_if<TransportError>(e, "TransportError") || raise_if<CudaError>(e, "CudaError") ||
           raise_if<InternalError>(e, "InternalError") || raise_if<Error>(e, "Error"));
  } catch (const std::bad_cast&) {  // nanobind's, for a value inside a list or a dict
    raise("WrongType", "a value among the arguments has another type or size than expected");
  }
}

bool is_a(const nb::python_error& raised, const char* name) {
  return error_types().contains(name) && raised.matches(nb::object(error_types()[name]));
}

/// The package's Timeouts have what was missed; others may be without.
Timeout timeout_of(const nb::handle& error) {
  return Timeout({.operation = nb::cast<std::string>(error.attr("operation")),
                  .what = nb::cast<std::string>(error.attr("what")),
                  .rank = nb::cast<std::int32_t>(error.attr("rank")),
                  .peer = nb::cast<std::int32_t>(error.attr("peer")),
                  .wanted = nb::cast<std::uint64_t>(error.attr("wanted")),
                  .seen = nb::cast<std::uint64_t>(error.attr("seen")),
                  .seconds = nb::cast<double>(error.attr("seconds"))});
}

// A function of the compiled part, with one thing more: an error of ours takes the place of what
// nanobind says of arguments that fit no signature. A call that goes well costs a few nanoseconds
// more. All calls of Python are of its limited API of 3.12, so that one wheel serves all later
// versions.
struct Guarded {
  PyObject_HEAD vectorcallfunc call;
  PyObject* function;  ///< one of nanobind's
};

Guarded* guarded(PyObject* self) { return reinterpret_cast<Guarded*>(self); }

/// The error that is set becomes ours where it says that arguments fit no signature.
void explain(PyObject* function, PyObject* const* arguments, std::size_t count, PyObject* names) {
  nb::python_error error;
  const nb::str text(error.value());
  const bool fits_none =
      std::string_view(text.c_str()).find("(): incompatible function arguments.") !=
      std::string_view::npos;
  if (!fits_none || !error_types().contains("wrong_call")) {
    error.restore();
    return;
  }
  nb::list given;
  for (std::size_t i = 0; i < count; ++i) given.append(nb::handle(arguments[i]));
  nb::dict by_name;
  const std::size_t num_names = names == nullptr ? 0 : nb::len(nb::handle(names));
  for (std::size_t i = 0; i < num_names; ++i)
    by_name[nb::handle(names)[i]] = nb::handle(arguments[count + i]);
  const nb::object made = nb::object(error_types()["wrong_call"])(text, given, by_name);
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

/// Name, signature and text are those of the function, which is `__wrapped__`.
PyObject* attribute(PyObject* self, PyObject* name) {
  if (PyUnicode_CompareWithASCIIString(name, "__wrapped__") == 0)
    return Py_NewRef(guarded(self)->function);
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

void throw_interrupt(nb::python_error raised) {
  const std::string text = concat("interrupted by ", nb::type_name(raised.type()).c_str());
  throw PythonInterrupt(text, std::move(raised));
}

void throw_raised(nb::python_error raised) {
  if (raised.matches(PyExc_KeyboardInterrupt)) throw_interrupt(std::move(raised));
  const std::string text = nb::str(raised.value()).c_str();
  if (is_a(raised, "Timeout") && !raised.value().attr("operation").is_none()) {
    throw timeout_of(raised.value());
  }
  if (is_a(raised, "PeerFailed")) throw PeerFailed(text);
  if (is_a(raised, "TransportError")) throw TransportError(text);
  const std::string type = nb::type_name(raised.type()).c_str();
  throw PythonRaised(concat(type, ": ", text), std::move(raised));
}

void bind_errors(nb::module_& m) {
  m.def(
      "set_error_types", [](const nb::dict& types) { error_types().update(types); }, "types"_a);
  nb::register_exception_translator(translate);
}

void guard_functions(nb::module_& m) {
  guard_members(m);
  for (const auto item : nb::list(nb::object(m.attr("__dict__")).attr("items")())) {
    if (nb::isinstance<nb::type_object>(item[1])) guard_members(item[1]);
  }
}

}  // namespace waybill::python
