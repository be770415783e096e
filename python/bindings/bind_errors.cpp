#include <exception>
#include <utility>

#include "bindings.h"
#include "waybill/core/error.h"

namespace waybill::python {
namespace {

namespace nb = nanobind;
using namespace nb::literals;

/// Python's classes for the library's errors; they live as long as the interpreter.
struct ErrorTypes {
  nb::object error;
  nb::object invalid_argument;
  nb::object unsupported;
  nb::object io_error;
  nb::object internal_error;
};

ErrorTypes& error_types() {
  static auto* types = new ErrorTypes;  // never destroyed: the interpreter may be gone by then
  return *types;
}

void translate(const std::exception_ptr& thrown, void* /*payload*/) {
  const ErrorTypes& types = error_types();
  try {
    std::rethrow_exception(thrown);
  } catch (const InvalidArgument& e) {
    PyErr_SetString(types.invalid_argument.ptr(), e.what());
  } catch (const Unsupported& e) {
    PyErr_SetString(types.unsupported.ptr(), e.what());
  } catch (const IoError& e) {
    PyErr_SetString(types.io_error.ptr(), e.what());
  } catch (const InternalError& e) {
    PyErr_SetString(types.internal_error.ptr(), e.what());
  } catch (const Error& e) {
    PyErr_SetString(types.error.ptr(), e.what());
  }
}

}  // namespace

void bind_errors(nb::module_& m) {
  m.def(
      "set_error_types",
      [](nb::object error, nb::object invalid_argument, nb::object unsupported, nb::object io_error,
         nb::object internal_error) {
        error_types() = {std::move(error), std::move(invalid_argument), std::move(unsupported),
                         std::move(io_error), std::move(internal_error)};
      },
      "error"_a, "invalid_argument"_a, "unsupported"_a, "io_error"_a, "internal_error"_a);
  nb::register_exception_translator(translate);
}

}  // namespace waybill::python
