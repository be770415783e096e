#pragma once

// From documents to plans: routing, layouts, the planner, the cost model, the simulation on the
// CPU, checks, JSON and reports. Needs no ranks and no GPU.

#include "waybill/core/error.h"
#include "waybill/core/host_tensor.h"
#include "waybill/core/index_array.h"
#include "waybill/core/small_floats.h"
#include "waybill/core/topology.h"
#include "waybill/cost_model/predict_step.h"
#include "waybill/json/file.h"
#include "waybill/json/length_distribution_json.h"
#include "waybill/json/plan_json.h"
#include "waybill/planner/planner.h"
#include "waybill/planner/static_plans.h"
#include "waybill/planner/varlen_relay.h"
#include "waybill/report/html_report.h"
#include "waybill/report/plan_summary.h"
#include "waybill/routing/compute_metadata.h"
#include "waybill/routing/generators.h"
#include "waybill/routing/index_ops.h"
#include "waybill/routing/metadata.h"
#include "waybill/routing/qkv_plan.h"
#include "waybill/routing/qkv_routing.h"
#include "waybill/routing/validate.h"
#include "waybill/simulate/check.h"
#include "waybill/simulate/orchestrate.h"
#include "waybill/version.h"
