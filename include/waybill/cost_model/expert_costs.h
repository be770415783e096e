#pragma once

#include <cstdint>
#include <string_view>

#include "waybill/core/link_speeds.h"
#include "waybill/cost_model/step_options.h"

namespace waybill {

/// How rows of experts cross a network.
enum class ExpertPath : std::uint8_t {
  waiting,  ///< as of 22 November 2026: a put is awaited before its block posts the next; a node's
            ///< rows are forwarded when all of them have come, its sums leave when all are made
  pipelined,  ///< many puts in flight; rows are forwarded, and sums leave, piece by piece
};

[[nodiscard]] std::string_view to_string(ExpertPath path);

/// What a call of experts costs beside bytes over links ("measured" and "nominal" as in
/// HardwareFacts; docs/functions/predict_experts.md says from which runs).
struct ExpertCosts {
  std::int32_t num_sms = 32;  ///< multiprocessors of the call; a quarter of them, 1 to 8, puts
  ExpertPath path = ExpertPath::pipelined;
  /// Counting and placing. Measured, 4 x H200: what few tokens take, and what one multiprocessor
  /// takes for a token.
  double count_seconds = 14e-6;
  double count_token_seconds = 50e-9;
  /// Sums of a token's rows on one rank, read and written, all of the device. Measured, 4 x H200.
  double sum_bytes_per_second = 3.0e12;
  /// Copies on one rank, read and written, all of the device. Measured, 4 and 8 x H200.
  double copy_bytes_per_second = 4.1e12;
  /// A kernel that a call over several nodes has in addition. Fits calls of 128 tokens, 2 logical
  /// nodes.
  double kernel_seconds = 4e-6;
  /// What follows the last row of a low latency dispatch: fence, signal, copy. Measured, 4 x H200.
  double last_row_seconds = 8e-6;
  /// What a put takes of its block, beside its bytes, where it is awaited. Fits 4096 tokens, 2
  /// logical nodes.
  double put_seconds = 4e-6;
  /// 0: a network card reads rows from memory. Above: the nodes are parts of one host, rows to
  /// others are copied by blocks, each at this speed (measured, 2 x H200: 33e9), over NVLink.
  double path_bytes_per_second = 0;

  /// @throws InvalidArgument "who: field = got, expected ..."
  void check(const char* who) const;

  friend bool operator==(const ExpertCosts&, const ExpertCosts&) = default;
};

/// What predict_experts is asked.
struct ExpertCostOptions {
  LinkSpeeds links = {};  ///< measured by `waybill calibrate`, or the defaults
  double message_seconds = HardwareFacts{}.message_seconds;
  StepCosts step = {};  ///< phases, pulls and messages between nodes
  ExpertCosts costs = {};
  /// One node: combines push, see EPLayerOptions. Derived from bytes and the speeds above, not yet
  /// compared with runs over links.
  bool push_combine = false;

  /// @throws InvalidArgument "who: field = got, expected ..."
  void check(const char* who) const;

  friend bool operator==(const ExpertCostOptions&, const ExpertCostOptions&) = default;
};

}  // namespace waybill
