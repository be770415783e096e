#pragma once

// Worlds of ranks, and what takes tokens to their experts and back: EPAll2AllLayer. The same on the
// CPU in one process, and what bounds it.

#include "waybill/core/error.h"
#include "waybill/core/host_tensor.h"
#include "waybill/core/small_floats.h"
#include "waybill/core/topology.h"
#include "waybill/experts/copy_store.h"
#include "waybill/experts/dispatch_combine_context.h"
#include "waybill/experts/ep_all2all_layer.h"
#include "waybill/moe/ep_config.h"
#include "waybill/moe/expert_routing.h"
#include "waybill/moe/payload_format.h"
#include "waybill/moe/simulate.h"
#include "waybill/planner/expert_balance.h"
#include "waybill/report/expert_copies.h"
#include "waybill/report/expert_summary.h"
#include "waybill/runtime/world.h"
#include "waybill/transport/bootstrap.h"
#include "waybill/version.h"

#if __has_include("waybill/cuda/gpu_world.h")
#include "waybill/cuda/gpu_world.h"  // only where Waybill was built with CUDA
#endif
