#pragma once

namespace waybill {

/// Speeds of a rank's links, one direction, in bytes per second, as measured. The
/// defaults are those of all that plans, predicts and chooses a way.
struct LinkSpeeds {
  /// Inside a node. Measured on 8 x H200 (NVLink 4 through an NVSwitch, multicast off), 2026-11-20:
  /// every GPU pushes to all its peers at once.
  double nvlink_bytes_per_second = 345e9;
  /// Between nodes. Nominal: one network card of 400 Gbit/s per rank.
  double network_bytes_per_second = 50e9;
};

}  // namespace waybill
