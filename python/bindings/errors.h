#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <string>
#include <utility>

#include "waybill/core/error.h"

// Errors on their way between C++ and Python. C++ checks values and says "function: argument = got,
// expected ..."; waybill/_errors.py says the same of arguments that fit no signature, and puts the
// caller's words for function and arguments in place of the library's.

namespace waybill::python {

/// An error that Python code raised, on its way through C++: `Base` is Interrupted for what a
/// signal handler raised on the main thread, else Error.
template <class Base>
class RaisedInPython : public Base {
 public:
  RaisedInPython(const std::string& text, nanobind::python_error raised)
      : Base(text), raised_(std::make_shared<nanobind::python_error>(std::move(raised))) {}

  /// Raises it again. With the interpreter's lock.
  void restore() const noexcept {
    const nanobind::handle value = raised_->value();
    PyErr_SetObject(value.type().ptr(), value.ptr());
  }

 private:
  std::shared_ptr<nanobind::python_error> raised_;
};

using PythonInterrupt = RaisedInPython<Interrupted>;
using PythonRaised = RaisedInPython<Error>;

/// With the interpreter's lock. A signal handler raised it.
[[noreturn]] void throw_interrupt(nanobind::python_error raised);

/// With the interpreter's lock. A function of the caller's raised it.
/// @throws Timeout, PeerFailed and TransportError for the package's own, PythonInterrupt for
///   KeyboardInterrupt, else PythonRaised
[[noreturn]] void throw_raised(nanobind::python_error raised);

}  // namespace waybill::python
