#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "waybill/core/wait.h"

namespace waybill::python {

/// Whether this thread has the interpreter's lock.
[[nodiscard]] bool holds_interpreter() noexcept;

/// Lets go of the interpreter's lock while it lives. A thread that wants it back when the
/// interpreter is about to end waits for that for good: Python would end the thread in the middle
/// of C++, and with it the program.
class InterpreterUnlocked {
 public:
  InterpreterUnlocked() noexcept;
  InterpreterUnlocked(const InterpreterUnlocked&) = delete;
  InterpreterUnlocked& operator=(const InterpreterUnlocked&) = delete;
  ~InterpreterUnlocked();

 private:
  PyThreadState* state_;
};

/// An object as Python holds it. Not nanobind's own shared_ptr: threads end with one, which would
/// then ask for the interpreter, perhaps after its end.
template <class Object>
struct Held {
  std::shared_ptr<Object> object;
};

using ScopeHandle = Held<FailureScope>;

/// Before a call of this thread begins: what the user has asked for since the thread last asked. A
/// thread that never asked, or asked long ago, is not ended by what came before: it was for others.
/// A load while nobody has asked; with or without the interpreter's lock.
/// @throws Interrupted, PythonInterrupt
void check_asked_to_end();

/// Where worlds are made: notes when SIGINT comes, for threads on which Python handles no signals.
/// What Python does with it stays as it is.
void note_sigint_from_now_on() noexcept;

}  // namespace waybill::python
