#pragma once

namespace waybill {

/// Speeds of a rank's links, one direction, in bytes per second. The defaults are those of all that
/// plans, predicts and chooses a way; `waybill calibrate` measures those of a machine. All ranks of
/// a plan or a world have the same ones, as other speeds may make other plans.
struct LinkSpeeds {
  /// Inside a node. Measured on 8 x H200 (NVLink 4 through an NVSwitch, multicast off), 2026-11-20:
  /// every GPU pushes to all its peers at once.
  double nvlink_bytes_per_second = 345e9;
  /// Between nodes. Nominal: one network card of 400 Gbit/s per rank.
  double network_bytes_per_second = 50e9;
  /// That one multiprocessor stores, wherever to; measured as above. About nvlink / block of them
  /// fill the links.
  double block_bytes_per_second = 45e9;

  /// Speeds that make sense: what is computed from others may be no number.
  static constexpr double least = 1;
  static constexpr double most = 1e18;
  [[nodiscard]] static constexpr bool makes_sense(double speed) {
    return least <= speed && speed <= most;
  }

  /// @throws InvalidArgument unless all make sense; `who` begins the text
  void check(const char* who) const;

  friend bool operator==(const LinkSpeeds&, const LinkSpeeds&) = default;
};

}  // namespace waybill
