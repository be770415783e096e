#pragma once

namespace waybill {

/// A queue of device work: a cudaStream_t in GPU worlds (null: the default stream). Worlds in host
/// memory have none.
struct Stream {
  void* handle = nullptr;
};

}  // namespace waybill
