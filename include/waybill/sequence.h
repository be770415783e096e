#pragma once

// Worlds of ranks, and what moves shards of Q, K and V between them: SequenceDispatcher.

#include "waybill/core/error.h"
#include "waybill/core/host_tensor.h"
#include "waybill/core/small_floats.h"
#include "waybill/core/topology.h"
#include "waybill/routing/qkv_routing.h"
#include "waybill/runtime/sequence_dispatcher.h"
#include "waybill/runtime/world.h"
#include "waybill/transport/bootstrap.h"
#include "waybill/version.h"

#if __has_include("waybill/cuda/gpu_world.h")  // only where Waybill was built with CUDA
#include "waybill/cuda/gpu_world.h"
#endif
