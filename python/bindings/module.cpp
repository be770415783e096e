#include <nanobind/nanobind.h>

#include "bindings.h"
#include "core/number.h"
#include "core/test_hooks.h"

NB_MODULE(_core, m) {
  m.doc() = "The compiled part of waybill. Arrays in, arrays out; the package gives them names.";
  // A tensor that remembers its graph may hold a dispatcher when a program ends: no mistake.
  nanobind::set_leak_warnings(false);
  m.attr("version") = WAYBILL_VERSION;
#ifdef WAYBILL_PYTHON_CUDA
  m.attr("cuda_version") = WAYBILL_PYTHON_CUDA;
#else
  m.attr("cuda_version") = nanobind::none();
#endif
  m.attr("dtype_names") = waybill::python::tuple_of(waybill::detail::dtype_names());
  m.attr("short_dtype_names") = waybill::python::tuple_of(waybill::detail::short_dtype_names());
  m.attr("max_file_bytes") = waybill::max_file_bytes;
  m.attr("max_stream_bytes") = waybill::max_stream_bytes;
  waybill::python::bind_errors(m);
  m.def("late_streams", [] { return waybill::detail::test_hooks().late_streams; });
  waybill::python::bind_interrupts(m);
  waybill::python::bind_metadata(m);
  waybill::python::bind_routing(m);
  waybill::python::bind_simulate(m);
  waybill::python::bind_plan(m);
  waybill::python::bind_planner(m);
  waybill::python::bind_world(m);
  waybill::python::bind_dispatcher(m);
  waybill::python::bind_moe(m);
  waybill::python::bind_experts(m);
  waybill::python::guard_functions(m);
}
