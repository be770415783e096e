#pragma once

#include "waybill/cost_model/predict_step.h"

namespace waybill::test {

/// Speeds at which times can be worked out by hand: rows of 20 B (Q) and 8 B (K and V), 10 bytes a
/// second over NVLink (pulls 5) and 2 over the network, 3 and 5 seconds a peer, 7 a phase, pieces
/// of 100 bytes, 50 pairs a second forward and 20 backward; two ranks per node.
inline StepOptions round_options() {
  StepOptions options;
  options.model = {.q_hidden = 10, .kv_hidden = 2};
  options.hardware = {.nvlink_bytes_per_second = 10,
                      .network_bytes_per_second = 2,
                      .ranks_per_node = 2,
                      .message_seconds = 3};
  options.costs = {.phase_seconds = 7,
                   .pull_share = 0.5,
                   .forward_share = 1,
                   .network_message_seconds = 5,
                   .forward_chunk_bytes = 100,
                   .forward_flops_per_second = 50 * 40,
                   .backward_flops_per_second = 20 * 100};
  return options;
}

}  // namespace waybill::test
