#pragma once

#include <nanobind/nanobind.h>

#include <string_view>
#include <utility>

#include "interrupts.h"
#include "waybill/json/file.h"

namespace waybill::python {

/// Runs `work` without the interpreter's lock; it must touch no Python object. Loops over it end on
/// Ctrl-C.
/// @throws as check_asked_to_end
template <class Work>
auto unlocked(Work&& work) {
  check_asked_to_end();
  const InterpreterUnlocked without_lock;
  return std::forward<Work>(work)();
}

/// An argument of `def`: the function runs without the interpreter's lock and touches no Python
/// object. Its arguments and its result are converted with the lock.
inline constexpr nanobind::call_guard<InterpreterUnlocked> without_lock;

struct PureCall {
  PureCall() { check_asked_to_end(); }

 private:
  InterpreterUnlocked without_lock_;
};

/// As without_lock, for functions that no other rank hears of: loops over them end on Ctrl-C.
inline constexpr nanobind::call_guard<PureCall> pure_call;

[[nodiscard]] inline JsonStyle json_style(bool compact) {
  return compact ? JsonStyle::compact : JsonStyle::readable;
}

/// Names, for Python's checks of arguments.
template <class Names>
nanobind::tuple tuple_of(const Names& names) {
  nanobind::list list;
  for (const std::string_view name : names) list.append(nanobind::str(name.data(), name.size()));
  return nanobind::tuple(list);
}

void bind_errors(nanobind::module_& m);
void bind_interrupts(nanobind::module_& m);
void bind_metadata(nanobind::module_& m);
void bind_routing(nanobind::module_& m);
void bind_simulate(nanobind::module_& m);
void bind_plan(nanobind::module_& m);
void bind_planner(nanobind::module_& m);
void bind_world(nanobind::module_& m);
void bind_dispatcher(nanobind::module_& m);
void bind_moe(nanobind::module_& m);
void bind_experts(nanobind::module_& m);

/// Last of all: arguments that fit no signature become errors of ours, in all functions and
/// methods.
void guard_functions(nanobind::module_& m);

}  // namespace waybill::python
