#include "interrupts.h"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <ctime>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "bindings.h"
#include "errors.h"

namespace waybill::python {

namespace nb = nanobind;
using namespace nb::literals;

namespace {

constexpr std::int64_t second_ns = 1'000'000'000;

std::int64_t now_ns() noexcept {
  timespec now{};
  (void)clock_gettime(CLOCK_MONOTONIC, &now);  // allowed in a signal handler
  return now.tv_sec * second_ns + now.tv_nsec;
}

/// When the user last asked for an end; 0: never.
std::atomic<std::int64_t> sigint_ns = 0;   ///< the signal came; Python's handler decides
std::atomic<std::int64_t> ended_ns = 0;    ///< the handler raised, or end_waits() was called
std::atomic<std::uint64_t> num_asked = 0;  ///< raised after each of the two
static_assert(std::atomic<std::int64_t>::is_always_lock_free);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

/// When the main thread, where the user's signals are handled, last began a call after one.
std::atomic<std::int64_t> went_on_ns = 0;

constexpr std::uint64_t never = ~std::uint64_t{0};
thread_local std::uint64_t asked_before = never;  ///< num_asked as this thread last saw it

unsigned long main_thread = 0;  // Python handles signals there alone

// A handler before Python's, that notes the time and calls it. Whoever sets another one later takes
// it away: it is put there again by the next wait. What was there before may be in use on another
// thread at any time: it keeps its place.
constexpr int max_handlers_before = 16;
std::array<struct sigaction, max_handlers_before> handlers_before;
std::atomic<int> num_handlers_before = 0;
std::atomic_flag noting;

void note_sigint(int signal, siginfo_t* info, void* context) {
  sigint_ns = now_ns();
  ++num_asked;
  if (noting.test_and_set()) return;  // another one's handler calls this one, which calls it
  const struct sigaction& before =
      handlers_before[static_cast<std::size_t>(num_handlers_before.load() - 1)];
  if ((before.sa_flags & SA_SIGINFO) != 0) {
    before.sa_sigaction(signal, info, context);
  } else {
    before.sa_handler(signal);
  }
  noting.clear();
}

/// Python's getsignal and default_int_handler; made once and never destroyed.
const std::pair<nb::object, nb::object>* signals = nullptr;

// The interpreter's end, which daemon threads outlive.
std::atomic<bool> ending = false;
std::atomic<unsigned long> ending_thread = 0;
std::atomic<int> num_returning = 0;

bool is_ending_elsewhere() noexcept {
  return ending && ending_thread != PyThread_get_thread_ident();
}

/// Whether KeyboardInterrupt is what the user's signal means. Asks functions written in C, which do
/// not let go of the interpreter's lock: its end waits for this.
bool sigint_ends_programs() {
  ++num_returning;
  bool result = false;
  if (!is_ending_elsewhere()) {
    const nb::gil_scoped_acquire acquire;
    result = signals->first(SIGINT).is(signals->second);
  }
  --num_returning;
  return result;
}

/// On all threads but the main one.
void end_all_waits() noexcept {
  ended_ns = now_ns();
  ++num_asked;
}

void check_main_thread() {
  const nb::gil_scoped_acquire acquire;
  if (PyErr_CheckSignals() == 0) return;
  end_all_waits();
  throw_interrupt(nb::python_error());
}

/// When this thread's wait began: an earlier interrupt was not meant for it. A wait that is no
/// PollingWait asks several times per second.
std::int64_t wait_began_ns() {
  thread_local std::int64_t asked_ns = 0;
  const std::int64_t now = now_ns();
  const std::int64_t before = std::exchange(asked_ns, now);
  if (const auto began = PollingWait::began()) {
    return std::chrono::nanoseconds(began->time_since_epoch())
        .count();  // CLOCK_MONOTONIC counts them
  }
  return now - before < second_ns ? before : now - second_ns / 10;
}

/// @param began what came before is not meant for this thread
void check_other_thread(std::int64_t began) {
  if (ended_ns <= began) {
    if (sigint_ns <= began || !sigint_ends_programs()) return;
  }
  throw Interrupted("interrupted by SIGINT");
}

/// Waits of the library ask this.
void check() {
  if (is_ending_elsewhere()) throw Interrupted("the interpreter ends");
  if (Py_IsInitialized() == 0) return;
  if (PyThread_get_thread_ident() == main_thread) {
    check_main_thread();
  } else {
    note_sigint_from_now_on();
    check_other_thread(wait_began_ns());
  }
}

/// The user has asked for an end since this thread last looked.
void check_what_was_asked(std::uint64_t before) {
  if (is_ending_elsewhere()) throw Interrupted("the interpreter ends");
  if (Py_IsInitialized() == 0) return;
  if (PyThread_get_thread_ident() == main_thread) {
    check_main_thread();
    went_on_ns = now_ns();
  } else if (before != never) {
    check_other_thread(std::max(went_on_ns.load(), now_ns() - second_ns));
  }
}

/// At exit: waits of daemon threads end. Those that are on their way back into the interpreter are
/// let in first; later ones stay outside.
void end_with_interpreter() {
  ending_thread = PyThread_get_thread_ident();
  ending = true;
  const nb::gil_scoped_release release;
  PollingWait wait(1.0);
  while (num_returning > 0 && wait.pause()) {
  }
}

/// Scopes that Python's rank threads have entered, innermost last.
thread_local std::vector<std::unique_ptr<EnteredWaitScope>> entered_scopes;

}  // namespace

void check_asked_to_end() {
  const std::uint64_t asked = num_asked.load(std::memory_order_relaxed);
  if (asked == asked_before) return;
  check_what_was_asked(std::exchange(asked_before, asked));
}

bool holds_interpreter() noexcept {
#ifdef Py_LIMITED_API
  return PyThreadState_GetDict() != nullptr;  // from 3.12 on the current state is this thread's own
#else
  return PyGILState_Check() != 0;
#endif
}

InterpreterUnlocked::InterpreterUnlocked() noexcept : state_(PyEval_SaveThread()) {}

InterpreterUnlocked::~InterpreterUnlocked() {
  ++num_returning;
  if (is_ending_elsewhere()) {
    --num_returning;
    for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
  }
  PyEval_RestoreThread(state_);
  --num_returning;
}

void note_sigint_from_now_on() noexcept {
  struct sigaction current = {};
  if (sigaction(SIGINT, nullptr, &current) != 0) return;
  const bool with_info = (current.sa_flags & SA_SIGINFO) != 0;
  if (with_info && current.sa_sigaction == note_sigint) return;
  if (!with_info && (current.sa_handler == SIG_DFL || current.sa_handler == SIG_IGN)) return;
  static std::atomic_flag busy;
  if (busy.test_and_set()) return;
  const int count = num_handlers_before;
  if (count < max_handlers_before) {
    handlers_before[static_cast<std::size_t>(count)] = current;
    num_handlers_before = count + 1;
    struct sigaction mine = current;
    mine.sa_sigaction = note_sigint;
    mine.sa_flags = current.sa_flags | SA_SIGINFO;
    (void)sigaction(SIGINT, &mine, nullptr);
  }
  busy.clear();
}

void bind_interrupts(nb::module_& m) {
  main_thread = nb::cast<unsigned long>(
      nb::module_::import_("threading").attr("main_thread")().attr("ident"));
  const nb::module_ module = nb::module_::import_("_signal");
  signals = new std::pair<nb::object, nb::object>(module.attr("getsignal"),
                                                  module.attr("default_int_handler"));
  (void)set_interrupt_check(check);
  nb::module_::import_("atexit").attr("register")(nb::cpp_function(end_with_interpreter));
  m.attr("max_timeout_s") = max_timeout_s;
  m.def("check_interrupt", check_interrupt, without_lock);
  m.def("end_waits", end_all_waits);
  m.def("interrupt_thread", [](unsigned long ident) {
    (void)PyThreadState_SetAsyncExc(ident, PyExc_KeyboardInterrupt);
  });
  nb::class_<ScopeHandle>(m, "FailureScope")
      .def("fail", [](const ScopeHandle& h, const std::string& why) { h.object->fail(why); })
      .def("interrupt",
           [](const ScopeHandle& h, const std::string& why) { h.object->interrupt(why); });
  m.def("enter_scope", [](const ScopeHandle& h) {
    entered_scopes.push_back(std::make_unique<EnteredWaitScope>(h.object));
  });
  m.def("leave_scope", [] { entered_scopes.pop_back(); });
}

}  // namespace waybill::python
