#include <nanobind/stl/string.h>

#include <cstdint>
#include <exception>
#include <string>
#include <typeinfo>
#include <utility>

#include "bindings.h"
#include "waybill/core/error.h"
#include "waybill/cuda/gpu_world.h"

namespace waybill::python {
namespace {

namespace nb = nanobind;
using namespace nb::literals;

/// Python's classes by the names of the library's; they live as long as the interpreter.
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

void translate(const std::exception_ptr& thrown, void* /*payload*/) {
  try {
    std::rethrow_exception(thrown);
  } catch (const Disagreement& e) {
    raise("Disagreement", e.what());
  } catch (const InvalidArgument& e) {
    raise("InvalidArgument", e.what());
  } catch (const Unsupported& e) {
    raise("Unsupported", e.what());
  } catch (const IoError& e) {
    raise("IoError", e.what());
  } catch (const Timeout& e) {
    raise_timeout(e);
  } catch (const PeerFailed& e) {
    raise("PeerFailed", e.what());
  } catch (const PythonInterrupt& e) {
    e.restore();
  } catch (const Interrupted& e) {
    raise("Interrupted", e.what());
  } catch (const PythonRaised& e) {
    e.restore();
  } catch (const TransportError& e) {
    raise("TransportError", e.what());
  } catch (const CudaError& e) {
    raise("CudaError", e.what());
  } catch (const InternalError& e) {
    raise("InternalError", e.what());
  } catch (const Error& e) {
    raise("Error", e.what());
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

}  // namespace

void throw_raised(nb::python_error raised) {
  if (raised.matches(PyExc_KeyboardInterrupt)) throw PythonInterrupt(std::move(raised));
  const auto text = [&] { return std::string(nb::str(raised.value()).c_str()); };
  if (is_a(raised, "Timeout") && !raised.value().attr("operation").is_none()) {
    throw timeout_of(raised.value());
  }
  if (is_a(raised, "PeerFailed")) throw PeerFailed(text());
  if (is_a(raised, "TransportError")) throw TransportError(text());
  throw PythonRaised(std::move(raised));
}

void bind_errors(nb::module_& m) {
  m.def(
      "set_error_types",
      [](const nb::list& types) {
        for (const nb::handle type : types) error_types()[type.attr("__name__")] = type;
      },
      "types"_a);
  nb::register_exception_translator(translate);
}

}  // namespace waybill::python
