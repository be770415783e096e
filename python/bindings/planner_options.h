#pragma once

#include <nanobind/nanobind.h>

#include "waybill/planner/planner_options.h"

namespace waybill::python {

/// The options by name, as the package has them; all must be there.
[[nodiscard]] PlannerOptions planner_options_from(const nanobind::dict& given);

}  // namespace waybill::python
